"""A client's connection to the SuperLink: lost connections, restarted servers, incomplete requests."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from conftest import draw

pytest.importorskip("flwr")

from deployment import wait_until
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeResponse,
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesResponse,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatResponse
from flwr.proto.message_pb2 import ObjectTree, PullObjectResponse, PushObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from fedseal.core import Packet
from fedseal.deploy import client
from fedseal.deploy import connection as module
from fedseal.deploy.bounded_answers import BadAnswerError
from fedseal.deploy.connection import Connection
from fedseal.engines.flower.consent import Consent, Limits
from fedseal.engines.flower.task import END_OF_RUN, ClientTask, pack, unpack
from fedseal.errors import UserError
from fedseal.system.version import fedseal_version

REFUSAL = (
    "this client accepts requests of at most 1 MB, but the server's is larger: join with --limit request=MB"
    " to accept it"
)
LOST = httpx.ReadError("lost")


def status(code: int) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "http://server")
    return httpx.HTTPStatusError("refused", request=request, response=httpx.Response(code, request=request))


class FakeSuperLink:
    """A SuperLink with one client. `fails` names the next errors of a call."""

    def __init__(self) -> None:
        self.fails: dict[str, list[Exception]] = {}
        self.calls: list[str] = []
        self.node, self.online = 100, False
        self.requests: list[Message] = []
        self.missing: list[str] = []  # parts of a request that arrive one attempt later
        self.objects: dict[str, bytes] = {}
        self.received: dict[str, bytes] = {}  # parts of a reply
        self.expected: list[str] = []
        self.session = "session"  # in which the parts of a reply are accepted
        self.forgets = False  # announcements, as when the server has taken them

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if not name[0].isupper():
            return value

        def call(request: Any) -> Any:
            self.calls.append(name)
            if self.fails.get(name):
                raise self.fails[name].pop(0)
            return value(request)

        return call

    def restart(self) -> None:
        """Forgets the client, which gets another number when it connects again."""
        self.node, self.online = self.node + 1, False

    def check(self, node_id: int) -> None:
        if node_id != self.node:
            raise status(401)

    def send(self, content: bytes) -> None:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
        self.requests.append(Message(pack(content), self.node, MessageType.TRAIN))

    def ActivateNode(self, request: Any) -> ActivateNodeResponse:
        if self.online:
            raise status(412)
        self.online = True
        return ActivateNodeResponse(node_id=self.node)

    def RegisterNode(self, request: Any) -> None: ...

    def UnregisterNode(self, request: Any) -> None: ...

    def DeactivateNode(self, request: Any) -> None:
        self.check(request.node_id)
        self.online = False

    def SendNodeHeartbeat(self, request: Any) -> SendNodeHeartbeatResponse:
        self.check(request.node.node_id)
        return SendNodeHeartbeatResponse(success=True)

    def PullMessages(self, request: Any) -> PullMessagesResponse:
        self.check(request.node.node_id)
        if not self.requests:
            return PullMessagesResponse()
        message = self.requests.pop(0)
        self.objects = {name: part.deflate() for name, part in get_all_nested_objects(message).items()}
        return PullMessagesResponse(
            messages_list=[message_to_proto(message)], message_object_trees=[get_object_tree(message)]
        )

    def PullObject(self, request: Any) -> PullObjectResponse:
        if request.object_id not in self.objects:
            return PullObjectResponse()
        if request.object_id in self.missing:
            self.missing.remove(request.object_id)
            return PullObjectResponse(object_found=True)
        content = self.objects[request.object_id]
        return PullObjectResponse(object_found=True, object_available=True, object_content=content)

    def ConfirmMessageReceived(self, request: Any) -> None:
        self.objects.clear()

    def PushMessages(self, request: Any) -> PushMessagesResponse:
        self.check(request.node.node_id)
        names = [part.object_id for part in iterate_object_tree(request.message_object_trees[0])]
        known, self.expected = self.expected, [name for name in names if name not in self.received]
        listed = [] if self.forgets and known else self.expected
        return PushMessagesResponse(objects_to_push=listed, session_id="session")

    def PushObject(self, request: Any) -> PushObjectResponse:
        if request.object_id not in self.expected or request.session_id not in ("", self.session):
            return PushObjectResponse(stored=False)
        self.received[request.object_id] = request.object_content
        return PushObjectResponse(stored=True)


@pytest.fixture
def link() -> FakeSuperLink:
    return FakeSuperLink()


@pytest.fixture
def messages() -> list[str]:
    """What the user is told."""
    return []


@pytest.fixture
def connection(
    link: FakeSuperLink, messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Connection]:
    for name in ("MIN_POLL", "PART_POLL", "RETRY_SECONDS", "HEARTBEAT_SECONDS"):
        monkeypatch.setattr(module, name, 0.01)
    connection = Connection("server:1", None, 60, messages.append)
    connection._fleet = link  # type: ignore[assignment]
    connection.connect()
    messages.clear()
    yield connection
    assert not connection._heartbeats.is_alive()


def test_a_request_is_complete_even_if_a_part_arrives_later(
    connection: Connection, link: FakeSuperLink
) -> None:
    link.send(b"request")
    message = link.requests[0]
    link.missing = list(get_all_nested_objects(message))
    received = connection.receive()
    assert unpack(received.content) == b"request"
    assert received.metadata.message_id == message.object_id
    assert link.calls[-1] == "ConfirmMessageReceived"


@pytest.mark.parametrize("call", ["PullMessages", "PullObject", "ConfirmMessageReceived"])
def test_a_lost_request_is_asked_for_by_connecting_again(
    call: str, connection: Connection, link: FakeSuperLink, messages: list[str]
) -> None:
    link.fails = {call: [LOST]}
    link.send(b"first")
    link.send(b"repeated")
    assert unpack(connection.receive().content) == (b"first" if call == "PullMessages" else b"repeated")
    assert link.calls.count("ActivateNode") == 2 and link.calls.count("DeactivateNode") == 1
    assert messages == ["the connection is lost: trying again", "joined server:1"]


def test_an_unreadable_request_is_skipped(
    connection: Connection, link: FakeSuperLink, messages: list[str]
) -> None:
    link.send(b"first")
    link.fails = {"PullObject": [LookupError()]}
    link.send(b"second")
    assert unpack(connection.receive().content) == b"second"
    assert messages == ["a request was lost (LookupError)"]


def test_a_request_above_the_clients_limit_is_refused_and_the_server_is_told(
    connection: Connection, link: FakeSuperLink, messages: list[str]
) -> None:
    connection.consent = Consent(limits=Limits(request=1))
    link.send(bytes(1_200_000))
    link.send(b"second")
    assert unpack(connection.receive().content) == b"second"
    assert messages == [f"refused a request: {REFUSAL}"]
    [refusal] = [inflate_object_from_contents(name, dict(link.received)) for name in link.received]
    assert isinstance(refusal, Message) and refusal.error.reason == REFUSAL


@pytest.mark.parametrize(("encoding", "read"), [("identity", 9_000_000), ("gzip", 0)])
def test_an_answer_that_is_too_large_or_compressed_is_refused_while_it_arrives(
    encoding: str, read: int
) -> None:
    sent: list[int] = []
    asked: list[str] = []

    class Large(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            for _ in range(30):
                sent.append(1_000_000)
                yield bytes(1_000_000)

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.headers["accept-encoding"])
        return httpx.Response(200, headers={"content-encoding": encoding}, stream=Large())

    connection = Connection("server:1", None, 0, print)
    connection._http._transport = httpx.MockTransport(answer)
    with pytest.raises(BadAnswerError):
        connection._fetch(Node(), 1, ObjectTree(object_id="a" * 64))
    with pytest.raises(BadAnswerError):
        connection._fleet.PullMessages(PullMessagesRequest())
    assert sum(sent) == 2 * read and asked == ["identity"] * 2
    with pytest.raises(UserError, match="is not a fedseal server"):
        connection.connect()


def test_a_restarted_server_is_joined_again(
    connection: Connection, link: FakeSuperLink, messages: list[str]
) -> None:
    link.restart()
    link.fails = {"PullMessages": [LOST], "ActivateNode": [LOST, status(503)]}
    link.send(b"request")
    assert unpack(connection.receive().content) == b"request"
    assert messages == [
        "the connection is lost: trying again",
        "the server at server:1 does not answer: waiting for it up to 60 seconds",
        "joined server:1",
    ]


def test_heartbeats_join_a_restarted_server_during_training(
    connection: Connection, link: FakeSuperLink
) -> None:
    with connection:
        wait_until(lambda: "SendNodeHeartbeat" in link.calls)
        link.restart()
        wait_until(lambda: link.online)
    assert link.calls.count("ActivateNode") == 2
    assert link.calls[-2:] == ["DeactivateNode", "UnregisterNode"] and not link.online


def test_a_lost_server_is_reported_once_during_training(
    connection: Connection, link: FakeSuperLink, messages: list[str]
) -> None:
    link.fails = {"SendNodeHeartbeat": [LOST, LOST]}
    with connection:
        wait_until(lambda: not link.fails["SendNodeHeartbeat"])
        link.restart()
        wait_until(lambda: link.online)
        assert messages == ["the server at server:1 does not answer: waiting for it up to 60 seconds"]
        wait_until(lambda: not connection._told)
        link.fails = {"SendNodeHeartbeat": [LOST]}
        wait_until(lambda: len(messages) == 2)  # another interruption


def test_a_client_joins_again_after_a_long_interruption(connection: Connection, link: FakeSuperLink) -> None:
    """The server may have withdrawn its request, and repeats it to a client that joins again."""
    connection._alive -= 60
    with connection:
        wait_until(lambda: link.calls.count("ActivateNode") == 2 and "SendNodeHeartbeat" in link.calls)
    assert link.calls.count("ActivateNode") == 2


def reply_to(link: FakeSuperLink, connection: Connection) -> Message:
    link.send(b"request")
    record = RecordDict({"packet": pack(b"reply")["packet"], "more": ConfigRecord({"a": 1})})
    return Message(record, reply_to=connection.receive())


def test_a_reply_is_delivered_when_the_server_is_back(
    connection: Connection, link: FakeSuperLink, messages: list[str]
) -> None:
    reply = reply_to(link, connection)
    link.fails = {"PushMessages": [LOST, status(503)], "PushObject": [LOST]}
    connection.send(reply)
    received = inflate_object_from_contents(reply.object_id, dict(link.received))
    assert isinstance(received, Message) and unpack(received.content) == b"reply"
    assert received.metadata.reply_to_message_id == reply.metadata.reply_to_message_id
    assert link.calls.count("ActivateNode") == 1  # a new connection would make the server repeat its request
    assert messages == ["the server at server:1 does not answer: waiting for it up to 60 seconds"]


def test_a_reply_is_completed_although_the_server_has_taken_its_announcement(
    connection: Connection, link: FakeSuperLink, messages: list[str]
) -> None:
    """Otherwise the server would wait three minutes for the rest, and then ask for all of it again."""
    reply = reply_to(link, connection)
    link.forgets, link.fails = True, {"PushObject": [LOST]}
    connection.send(reply)
    received = inflate_object_from_contents(reply.object_id, dict(link.received))
    assert isinstance(received, Message) and unpack(received.content) == b"reply"
    assert messages == ["the server at server:1 does not answer: waiting for it up to 60 seconds"]


def test_a_reply_that_is_not_expected_any_more_is_dropped(
    connection: Connection, link: FakeSuperLink, messages: list[str]
) -> None:
    reply = reply_to(link, connection)
    link.restart()
    connection.send(reply)
    link.node = connection._node.node_id
    link.PushObject = lambda request: PushObjectResponse(stored=False)  # type: ignore[method-assign]
    connection.send(reply)
    assert messages == ["the server no longer expects this reply"] * 2 and not link.received


def test_a_reply_is_completed_although_its_announcement_was_delivered_twice(
    connection: Connection, link: FakeSuperLink, messages: list[str]
) -> None:
    """The client got the first answer, but the server has opened another session since."""
    reply = reply_to(link, connection)
    link.session = "another"
    connection.send(reply)
    assert isinstance(inflate_object_from_contents(reply.object_id, dict(link.received)), Message)
    assert not messages


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (403, "the server no longer expects this reply"),
        (413, "the server refuses this reply, because it is too large"),  # with all broken attempts
    ],
)
def test_a_reply_that_may_be_lost_makes_the_client_connect_again(
    connection: Connection, link: FakeSuperLink, messages: list[str], code: int, said: str
) -> None:
    """The server may still wait for it, and repeats its request to a client that connects again."""
    reply = reply_to(link, connection)
    link.fails = {"PushMessages": [LOST, status(code)]}
    connection.send(reply)
    assert messages[1:] == [said, "joined server:1"]
    assert link.calls.count("ActivateNode") == 2


def test_a_client_gives_up_if_the_server_does_not_come_back(
    connection: Connection, link: FakeSuperLink
) -> None:
    reply = reply_to(link, connection)
    connection.wait = 0
    link.fails = {"PushMessages": [LOST]}
    with pytest.raises(UserError, match=r"server:1 has not answered for 0 seconds: its run may have ended"):
        connection.send(reply)


def test_a_client_says_that_the_server_has_started_another_run(
    connection: Connection,
    link: FakeSuperLink,
    messages: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    about = {"client": "north", "version": fedseal_version(), "classes": 2, "channels": 3, "size": 8}
    for run in ("a" * 32, "a" * 32, "b" * 32):
        task = ClientTask(run=run, config={"method": "none", "model": {}}, arithmetic="portable", **about)
        link.requests.append(Message(pack(Packet().to_bytes(), task), link.node, MessageType.TRAIN))
    unreadable = pack(b"")
    unreadable["task"] = ConfigRecord({"task": "{}"})
    link.requests.append(Message(unreadable, link.node, MessageType.TRAIN))
    end = RecordDict({END_OF_RUN: ConfigRecord({})})
    link.requests.append(Message(end, link.node, MessageType.QUERY))
    draw(tmp_path / "images" / "a.png", "circle", np.random.default_rng(0))
    monkeypatch.setattr(client, "Connection", lambda *arguments: connection)
    client.Client("server:1", tmp_path / "images", tmp_path / "memory", "north", None).join(
        60, messages.append
    )
    failed = "failed: the server uses the method none: join with --method and a copy of that file"
    other = "the server has started another run: the former one has ended or was given up"
    assert messages == ["joined server:1", other, "the run has ended"]
    assert caplog.messages[:3] == [failed] * 3 and "validation error" in caplog.messages[3]
    assert {record.levelname for record in caplog.records} == {"WARNING"} and len(caplog.records) == 4
    assert link.online and link.calls[-1] != "UnregisterNode"  # otherwise its last reply would be lost


def test_no_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    assert not Connection("server:1", None, 0, print)._http._mounts
