"""Replies are fetched from the SuperLink such that one client neither blocks nor breaks the others."""

from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import (
    ObjectTree,
    PullObjectRequest,
    PullObjectResponse,
    PushObjectRequest,
    PushObjectResponse,
)
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.runtime_pb2 import (
    PullAppMessagesResponse,
    PushAppMessagesRequest,
    PushAppMessagesResponse,
)
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.object_store.object_store import NoObjectInStoreError
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedseal.config.load import load_config
from fedseal.deploy import grid as grid_module
from fedseal.deploy import superlink
from fedseal.deploy.grid import THREADS, SafeGrid
from fedseal.engines.flower.engine import size_limit
from fedseal.engines.flower.task import pack, unpack


class FakeSuperLink:
    """Hands over real messages, whose objects may arrive later."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.replies: list[tuple[Any, ObjectTree]] = []
        self.confirmed: list[str] = []
        self.store = InMemoryObjectStore()  # of requests
        self.hasty: set[int] = set()  # nodes that confirm their next request before it is complete

    def PushMessages(self, request: PushAppMessagesRequest) -> PushAppMessagesResponse:
        [message], [tree] = request.messages_list, request.message_object_trees
        missing = self.store.preregister(1, tree)
        if message.metadata.dst_node_id in self.hasty:
            self.hasty.remove(message.metadata.dst_node_id)
            self.store.delete(tree.object_id)
        return PushAppMessagesResponse(message_ids=[tree.object_id], objects_to_push=missing)

    def PushObject(self, request: PushObjectRequest) -> PushObjectResponse:
        try:
            self.store.put(request.object_id, request.object_content)
        except NoObjectInStoreError:
            return PushObjectResponse(stored=False)
        return PushObjectResponse(stored=True)

    def reply(self, request: Message, content: bytes) -> dict[str, bytes]:
        """Announces a reply, and returns the objects that make it complete."""
        record = RecordDict({"packet": pack(content)["packet"], "more": ConfigRecord({"a": 1})})
        reply = Message(record, reply_to=request)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        self.replies.append((message_to_proto(reply), get_object_tree(reply)))
        return {name: part.deflate() for name, part in get_all_nested_objects(reply).items()}

    def complete_reply(self, request: Message, content: bytes) -> None:
        self.objects |= self.reply(request, content)

    def PullMessages(self, request: Any) -> PullAppMessagesResponse:
        replies, self.replies = self.replies, []
        protos, trees = zip(*replies, strict=True) if replies else ((), ())
        return PullAppMessagesResponse(messages_list=protos, message_object_trees=trees)

    def PullObject(self, request: PullObjectRequest) -> PullObjectResponse:
        content = self.objects.get(request.object_id)
        return PullObjectResponse(
            object_found=True, object_available=content is not None, object_content=content or b""
        )

    def ConfirmMessageReceived(self, request: Any) -> None:
        self.confirmed.append(request.message_object_id)

    def close(self) -> None: ...


@pytest.fixture
def link() -> FakeSuperLink:
    return FakeSuperLink()


@pytest.fixture
def grid(link: FakeSuperLink) -> Iterator[SafeGrid]:
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    grid = SafeGrid("127.0.0.1:1", True, token="a")
    grid._run, grid._client = Run.create_empty(1), link  # type: ignore[assignment]
    yield grid
    grid.close()  # otherwise its threads would keep this process alive


def send(grid: SafeGrid, name: str, node: int = 7) -> Message:
    message = Message(pack(b"12345"), node, MessageType.TRAIN)
    message.metadata.__dict__["_message_id"] = name
    grid._limits[name] = size_limit(5)
    return message


def pull(grid: SafeGrid, number: int, *names: str) -> dict[str, Message]:
    """The next replies, by the message that they answer."""
    replies: list[Message] = []
    while len(replies) < number:
        replies += grid.pull_messages(names)
    return {reply.metadata.reply_to_message_id: reply for reply in replies}


def test_an_incomplete_reply_does_not_hold_up_the_others(grid: SafeGrid, link: FakeSuperLink) -> None:
    missing = link.reply(send(grid, "incomplete"), b"first")
    link.complete_reply(send(grid, "complete", 8), b"second")
    link.complete_reply(send(grid, "too large", 9), bytes(1_000_100))
    send(grid, "unanswered")
    names = ("incomplete", "complete", "too large", "unanswered")
    replies = pull(grid, 2, *names)
    assert replies.keys() == {"complete", "too large"}
    assert unpack(replies["complete"].content) == b"second"
    assert "too large: more than 1.0 MB" in replies["too large"].error.reason

    link.objects |= missing
    replies = pull(grid, 1, *names)
    assert unpack(replies["incomplete"].content) == b"first"
    grid.close()


def test_only_replies_to_the_named_messages_are_handed_over(grid: SafeGrid, link: FakeSuperLink) -> None:
    """Otherwise whoever asks for a client's name would get, and lose, a reply that trains."""
    question, request = send(grid, "question"), send(grid, "request", 8)
    parts = link.reply(request, b"request")
    assert list(grid.pull_messages([request.metadata.message_id])) == []
    link.objects |= parts
    wait(grid._fetched.values())
    assert list(grid.pull_messages([question.metadata.message_id])) == []
    [reply] = grid.pull_messages([request.metadata.message_id])
    assert unpack(reply.content) == b"request"


def test_a_reply_that_is_being_fetched_does_not_keep_the_process_alive(
    grid: SafeGrid, link: FakeSuperLink
) -> None:
    link.reply(send(grid, "incomplete"), b"first")
    assert grid.pull_messages(["incomplete"]) == []
    [fetching] = grid._fetched.values()
    grid.close()
    assert fetching.result(timeout=30).has_error()


def test_incomplete_replies_do_not_occupy_all_threads(
    grid: SafeGrid, link: FakeSuperLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid_module, "MAX_RETRY_SECONDS", 0.1)
    names = [f"incomplete {i}" for i in range(2 * THREADS)]
    for name in names:  # of one client: its last two are fetched
        link.reply(send(grid, name), name.encode())
    for node in range(100, 98 + THREADS):  # of other clients, in an earlier round
        names.append(f"incomplete at {node}")
        link.reply(send(grid, names[-1], node), b"%d" % node)
    announced = [tree.object_id for _, tree in link.replies]
    assert grid.pull_messages(names) == []
    assert len(grid._fetched) == THREADS
    grid.abandon(names)
    late = send(grid, "late")
    grid.abandon(["late"])

    link.complete_reply(late, b"late")
    announced.append(link.replies[-1][1].object_id)
    link.complete_reply(send(grid, "complete"), b"reply")
    assert unpack(pull(grid, 1, "complete")["complete"].content) == b"reply"
    grid._threads.shutdown(wait=True)
    assert set(announced) <= set(link.confirmed), "the SuperLink keeps a reply that nobody wants"
    assert not grid._abandoned and not grid._unwanted and not grid._senders
    grid.close()


def test_a_damaged_reply_is_its_senders_error(grid: SafeGrid, link: FakeSuperLink) -> None:
    parts = link.reply(send(grid, "damaged"), b"first")
    link.objects |= {name: content[:-4] + b"!!!!" for name, content in parts.items()}
    error = pull(grid, 1, "damaged")["damaged"].error
    assert error.code == ErrorCode.UNKNOWN and "its reply cannot be read" in error.reason
    grid.close()


@pytest.mark.parametrize("error", [httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError])
def test_a_lost_superlink_is_not_the_error_of_a_client(
    grid: SafeGrid, link: FakeSuperLink, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """It was killed after it had announced a reply, before the reply was fetched."""

    def fail(request: PullObjectRequest) -> PullObjectResponse:
        raise error("killed")

    monkeypatch.setattr(link, "PullObject", fail)
    request = send(grid, "announced")
    link.complete_reply(request, b"first")
    with pytest.raises(error, match="killed"):
        pull(grid, 1, "announced")
    grid.close()


def test_a_reply_to_a_message_that_was_never_sent_is_dropped(grid: SafeGrid, link: FakeSuperLink) -> None:
    stranger = send(grid, "never sent")
    del grid._limits["never sent"]
    link.complete_reply(stranger, b"forged")
    assert grid.pull_messages(["never sent"]) == []
    link.complete_reply(send(grid, "sent"), b"right")
    link.complete_reply(stranger, b"forged again")
    link.replies[-1][0].metadata.reply_to_message_id = "sent"
    assert unpack(pull(grid, 1, "sent")["sent"].content) == b"right"
    grid.close()


def test_a_request_that_is_confirmed_too_early_does_not_stop_the_others(
    grid: SafeGrid, link: FakeSuperLink
) -> None:
    link.hasty.add(7)
    first, second = (Message(pack(b"12345"), node, MessageType.TRAIN) for node in (7, 8))
    assert grid.push_messages([first, second]) == ["", second.metadata.message_id]
    assert grid._limits.keys() == {second.metadata.message_id}
    grid.close()


def test_the_end_is_announced_again_to_a_client_that_confirmed_too_early(
    grid: SafeGrid, link: FakeSuperLink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(superlink, "END_SECONDS", 30.0)
    link.hasty.add(7)
    usual, told = SafeGrid._push, []

    def push(grid: SafeGrid, message: Message) -> str:
        if name := usual(grid, message):
            link.complete_reply(message, b"")
        told.append((message.content.object_id, bool(name)))
        return name

    monkeypatch.setattr(SafeGrid, "_push", push)
    connected = {"north": NodeInfo(node_id=7, last_activated_at="1")}
    registry = SimpleNamespace(seen={"north"}, revoked=set(), connected=lambda: connected)
    engine: Any = SimpleNamespace(registry=registry, grid=grid)
    monkeypatch.setattr(superlink, "find_finished", lambda folder, config: True)
    (tmp_path / "model.safetensors").write_bytes(b"model")
    superlink.announce_end(engine, tmp_path, load_config("folders"), lambda status: pytest.fail(status))
    assert [accepted for _, accepted in told] == [False, True]
    assert told[0][0] != told[1][0], "other clients can predict the name of this record"
    grid.close()
