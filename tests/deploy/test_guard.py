"""The guard in front of the SuperLink."""

import asyncio
import base64
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.proto.fleet_pb2 import PullMessagesResponse, PushMessagesRequest
from flwr.proto.message_pb2 import Message, Metadata, ObjectTree
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes, sign_message

from fedseal.deploy.guard import (
    ANNOUNCE,
    FETCH,
    GUARD_FILE,
    MAX_OBJECT_BYTES,
    MAX_URL_BYTES,
    Guard,
    admit_clients,
    refused_file,
)
from fedseal.system.version import fedseal_version


def check(path: str, sender: str, **headers: str) -> int:
    headers = {"fedseal_version": fedseal_version()} | headers
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"path": path, "raw_path": path.encode(), "headers": raw}
    scope |= {"client": (sender, 9), "server": ("10.0.0.1", 8000)}
    return Guard(None).check(scope)  # type: ignore[arg-type]


@pytest.fixture
def guard_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(GUARD_FILE, str(tmp_path / "guard.json"))
    return tmp_path / "guard.json"


def test_clients_need_a_registered_key(guard_file: Path) -> None:
    assert check("/v1/fleet/x", "10.0.0.2") == 503  # not ready yet
    admit_clients(guard_file, {b"key": "north"}, 1000)
    assert check("/v1/fleet/x", "10.0.0.2", flwr_public_key="a2V5") == 200  # base64
    assert check("/v1/fleet/x", "10.0.0.2", flwr_public_key="b3RoZXI=") == 403
    assert check("/v1/fleet/x", "10.0.0.2") == 403
    admit_clients(guard_file, None, 1000)
    assert check("/v1/fleet/x", "10.0.0.2") == 200


def test_a_request_with_two_keys_is_refused(guard_file: Path) -> None:
    admit_clients(guard_file, {b"key": "north"}, 1000)
    version = (b"fedseal-version", fedseal_version().encode())
    keys = [(b"flwr-public-key", b"b3RoZXI="), (b"flwr-public-key", b"a2V5")]
    for headers, status in ((keys, 400), (keys[:1], 403), (keys[1:], 200)):
        scope = {"path": "/v1/fleet/x", "raw_path": b"", "headers": [version, *headers]}
        assert Guard(None).check(scope) == status  # type: ignore[arg-type]


def test_large_requests_are_refused(guard_file: Path) -> None:
    admit_clients(guard_file, {b"key": "north"}, 1000)
    for path, size, status in (
        ("push-object", MAX_OBJECT_BYTES, 200),
        ("push-object", MAX_OBJECT_BYTES + 1, 413),
        ("push-messages", MAX_OBJECT_BYTES, 413),
    ):
        given = {"flwr_public_key": "a2V5", "content_length": str(size)}
        assert check(f"/v1/fleet/{path}", "10.0.0.2", **given) == status
    assert check("/v1/fleet/x", "10.0.0.2", flwr_public_key="a2V5", transfer_encoding="chunked") == 413


def test_long_urls_are_refused() -> None:
    assert check("/health".ljust(MAX_URL_BYTES, "x"), "127.0.0.1") == 200
    assert check("/health".ljust(MAX_URL_BYTES + 1, "x"), "127.0.0.1") == 414


def test_other_versions_are_refused_and_named_once(guard_file: Path) -> None:
    major, minor, *_ = fedseal_version().split(".")
    admit_clients(guard_file, {b"key": "north"}, 1000)
    guard = Guard(None)  # type: ignore[arg-type]
    for version, status in (
        (f"{major}.{minor}.99", 200),
        (f"{major}.{minor}9.0", 426),
        (f"{major}.{minor}9.0", 426),
        (f"9{major}.{minor}.0", 426),
        ("", 426),
        ("1.0\nforged line", 426),
    ):
        assert guard.check_client("a2V5", version) == status
    assert guard.check_client("b3RoZXI=", "9.9.9") == 403  # strangers are not named
    assert refused_file(guard_file).read_text("utf-8").splitlines() == [
        f"north has fedseal {major}.{minor}9.0",
        f"north has fedseal 9{major}.{minor}.0",
        "north has fedseal of an unknown version",
    ]


def test_operators_must_be_on_the_same_machine() -> None:
    for sender in ("127.0.0.1", "::1", "10.0.0.1"):
        assert check("/v1/control/register-node", sender) == 200
    assert check("/v1/control/register-node", "10.0.0.2", x_forwarded_for="127.0.0.1") == 404


KEY, _ = generate_key_pairs()
PUBLIC = public_key_to_bytes(KEY.public_key())


def signature(key: Any) -> list[tuple[bytes, bytes]]:
    """The headers by which a client proves that it has its key; the key is always north's."""
    signed = base64.b64encode(sign_message(key, b"now"))
    public = base64.b64encode(PUBLIC)
    return [(b"flwr-public-key", public), (b"flwr-timestamp", b"now"), (b"flwr-signature", signed)]


def padded(name: str) -> str:
    return name * 64 if len(name) == 1 else name


def fetch_answer(request: str) -> bytes:
    return PullMessagesResponse(
        messages_list=[Message(metadata=Metadata(message_id=request))]
    ).SerializeToString()


def announcement(reply: str, request: str) -> bytes:
    metadata = Metadata(message_id=padded(reply), reply_to_message_id=request)
    return PushMessagesRequest(
        messages_list=[Message(metadata=metadata)], message_object_trees=[ObjectTree(object_id=padded(reply))]
    ).SerializeToString()


class Link:
    """A guard with an application behind it that accepts everything; `ask` returns the status."""

    def __init__(self) -> None:
        self.answer, self.signed_by = b"", KEY
        self.guard = Guard(self.application)

    async def application(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        half = len(self.answer) // 2
        await send({"type": "http.response.body", "body": self.answer[:half], "more_body": True})
        await send({"type": "http.response.body", "body": self.answer[half:]})

    def ask(self, path: str, body: bytes = b"") -> int:
        statuses = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        headers = [(b"fedseal-version", fedseal_version().encode()), *signature(self.signed_by)]
        scope = {"type": "http", "path": path, "raw_path": path.encode(), "headers": headers}
        asyncio.run(self.guard(scope, receive, send))
        return int(statuses[0])


def test_a_late_copy_of_an_earlier_reply_does_not_take_the_place_of_the_next_one(guard_file: Path) -> None:
    admit_clients(guard_file, {PUBLIC: "north"}, 10_000)
    link = Link()
    assert link.ask(ANNOUNCE, announcement("a", "1")) == 409  # nothing was asked
    for request, reply in (("1", "a"), ("2", "b")):
        link.answer = fetch_answer(request)
        assert link.ask(FETCH) == 200
        link.answer = b""
        assert link.ask(FETCH) == 200  # no further request: the allowance stays
        if request == "2":
            assert link.ask(ANNOUNCE, announcement("a", "1")) == 409
        assert link.ask(ANNOUNCE, announcement(reply, request)) == 200
        assert link.ask(ANNOUNCE, announcement(reply, request)) == 200  # delivered twice
        assert link.ask(ANNOUNCE, announcement("c", request)) == 409  # a changed reply


def test_a_stranger_with_a_public_key_cannot_use_up_the_allowance(guard_file: Path) -> None:
    admit_clients(guard_file, {PUBLIC: "north"}, 10_000)
    link = Link()
    link.answer = fetch_answer("1")
    assert link.ask(FETCH) == 200
    link.signed_by, stranger = generate_key_pairs()[0], link.signed_by
    assert link.ask(ANNOUNCE, announcement("b", "1")) == 401
    link.signed_by = stranger
    assert link.ask(ANNOUNCE, announcement("a", "1")) == 200


@pytest.mark.parametrize(
    "tree",
    [
        ("a", ("b", ("c",)), ("b",)),  # Flower would expand 2ⁿ parts if that is nested n times
        ("a", ("a",), ("b",)),  # Flower would never forget b
        ("a", ("no hash",)),  # Flower would keep a part of every attempt
    ],
)
def test_parts_of_a_reply_have_different_names(guard_file: Path, tree: Any) -> None:
    def make(names: Any) -> ObjectTree:
        return ObjectTree(object_id=padded(names[0]), children=[make(child) for child in names[1:]])

    def announce(tree: Any) -> bytes:
        metadata = Metadata(message_id=padded("a"), reply_to_message_id="1")
        request = PushMessagesRequest(
            messages_list=[Message(metadata=metadata)], message_object_trees=[make(tree)]
        )
        return bytes(request.SerializeToString())

    admit_clients(guard_file, {PUBLIC: "north"}, 10_000)
    link = Link()
    link.answer = fetch_answer("1")
    assert link.ask(FETCH) == 200
    assert link.ask(ANNOUNCE, announce(tree)) == 409
    assert link.ask(ANNOUNCE, announce(("a", ("b", ("c",)), ("d",)))) == 200
