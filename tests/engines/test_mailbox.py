"""What the SuperLink hands over is fetched so that no client holds up or breaks the rest."""

import time
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedseal.engines import flower  # silences Flower

# isort: split
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ObjectTree, PullObjectRequest, PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedseal.engines.flower_program import LARGEST, Guard
from fedseal.engines.mailbox import Mailbox


class Link:
    """A SuperLink's part that hands replies over: real messages, of which some objects never come."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.waiting: list[tuple[Any, ObjectTree]] = []

    def reply(self, request: Message, content: bytes, *, whole: bool = True) -> None:
        record = RecordDict({"packet": flower.pack(content)["packet"], "more": ConfigRecord({"a": 1})})
        reply = Message(record, reply_to=request)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        parts = {name: part.deflate() for name, part in get_all_nested_objects(reply).items()}
        self.objects |= parts if whole else {}
        self.waiting.append((message_to_proto(reply), get_object_tree(reply)))

    def PullMessages(self, request: Any) -> PullAppMessagesResponse:
        messages, self.waiting = self.waiting, []
        protos, trees = zip(*messages, strict=True) if messages else ((), ())
        return PullAppMessagesResponse(messages_list=protos, message_object_trees=trees)

    def PullObject(self, request: PullObjectRequest) -> PullObjectResponse:
        content = self.objects.get(request.object_id)
        return PullObjectResponse(
            object_found=True, object_available=content is not None, object_content=content or b""
        )

    def ConfirmMessageReceived(self, request: Any) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def box() -> Mailbox:
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    box = Mailbox("127.0.0.1:1", True, token="a")
    box._run, box._client = Run.create_empty(1), Link()  # type: ignore[assignment]
    return box


def asked(box: Mailbox, name: str) -> Message:
    message = Message(flower.pack(b"12345"), 7, MessageType.TRAIN)
    message.metadata.__dict__["_message_id"] = name
    box._limits[name] = flower.largest(5)
    return message


def test_one_that_is_still_being_sent_does_not_hold_up_the_others(box: Mailbox) -> None:
    link: Any = box._client
    link.reply(asked(box, "stalls"), b"first", whole=False)
    link.reply(asked(box, "is whole"), b"second")
    link.reply(asked(box, "too large"), bytes(1_000_100))
    asked(box, "comes later")
    began, got = time.monotonic(), []
    while len(got) < 2:
        got += box.pull_messages(["stalls", "is whole", "too large", "comes later"])
    assert time.monotonic() - began < 30
    found = {message.metadata.reply_to_message_id: message for message in got}
    assert found.keys() == {"is whole", "too large"}
    assert flower.unpack(found["is whole"].content) == b"second"
    assert "far too large: more than 1.0 MB" in found["too large"].error.reason
    [fetching] = box._fetched.values()
    box.close()
    fetching.result(timeout=30)  # it gives up


def test_what_answers_nothing_that_was_asked_is_dropped(box: Mailbox) -> None:
    link: Any = box._client
    stranger = asked(box, "never sent")
    del box._limits["never sent"]
    link.reply(stranger, b"forged")
    assert box.pull_messages(["never sent"]) == []
    link.reply(asked(box, "mine"), b"right")
    link.reply(stranger, b"forged again")
    link.waiting[-1][0].metadata.reply_to_message_id = "mine"
    [reply] = box.pull_messages(["mine"])
    assert flower.unpack(reply.content) == b"right"
    box.close()


def judged(path: str, host: str, **headers: str) -> int:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"path": path, "headers": raw, "client": (host, 9), "server": ("10.0.0.1", 8000)}
    return Guard(None).judge(scope)  # type: ignore[arg-type]


def test_the_guard_lets_in_whom_it_should(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSEAL_GUARD", str(tmp_path / "guard.json"))
    assert judged("/v1/fleet/x", "10.0.0.2") == 503  # not ready yet
    (tmp_path / "guard.json").write_text('["a key"]')
    assert judged("/v1/fleet/x", "10.0.0.2", flwr_public_key="a key") == 200
    assert judged("/v1/fleet/x", "10.0.0.2", flwr_public_key="another") == 403
    large = str(LARGEST + 1)
    assert judged("/v1/fleet/x", "10.0.0.2", flwr_public_key="a key", content_length=large) == 413
    assert judged("/v1/fleet/x", "10.0.0.2", flwr_public_key="a key", transfer_encoding="chunked") == 413
    for host in ("127.0.0.1", "::1", "10.0.0.1"):
        assert judged("/v1/control/register-node", host) == 200
    assert judged("/v1/control/register-node", "10.0.0.2", x_forwarded_for="127.0.0.1") == 404
