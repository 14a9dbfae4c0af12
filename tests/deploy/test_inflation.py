"""A small message that would become a large one is refused before it fills the memory."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ConfigRecord, Message, MessageType, RecordDict
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ObjectTree, PullObjectResponse
from flwr.supercore.inflatable.inflatable_object import (
    add_header_to_object_body,
    get_all_nested_objects,
    get_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedseal.deploy.connection import Connection, RequestRefusedError
from fedseal.deploy.grid import SafeGrid
from fedseal.deploy.inflation import GROWTH, inflated_size
from fedseal.engines.flower.consent import Consent, Limits
from fedseal.engines.flower.task import pack, unpack

REPEATS = 20


@pytest.fixture
def message() -> Message:
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    return Message(pack(bytes(100_000)), 7, MessageType.TRAIN)


@pytest.fixture
def objects(message: Message, monkeypatch: pytest.MonkeyPatch) -> tuple[ObjectTree, dict[str, bytes]]:
    """A message of 0.1 MB that becomes one of 2 MB."""

    def deflate(array: Array) -> bytes:
        about = {"dtype": "uint8", "shape": [1], "stype": "packet", "arraychunk_ids": [0] * REPEATS}
        return add_header_to_object_body(json.dumps(about).encode(), array)

    with monkeypatch.context() as patch:
        patch.setattr(Array, "deflate", deflate)
        parts = {name: part.deflate() for name, part in get_all_nested_objects(message).items()}
        return get_object_tree(message), parts


def test_the_size_is_that_of_the_arrays(objects: tuple[ObjectTree, dict[str, bytes]]) -> None:
    tree, parts = objects
    size = inflated_size(parts)
    message: Any = inflate_object_from_contents(tree.object_id, parts)
    assert len(unpack(message.content)) == REPEATS * 100_000 <= size < REPEATS * 103_000


def test_numbers_and_texts_become_larger() -> None:
    """80 kB of numbers need more than 2 MB."""
    record = RecordDict({"c": ConfigRecord({f"{i:x}": i for i in range(6_000)})})
    parts = {name: part.deflate() for name, part in get_all_nested_objects(record).items()}
    assert sum(map(len, parts.values())) < 100_000 < 2_000_000 < inflated_size(parts)


def test_an_array_in_an_array_is_refused() -> None:
    parts = {"a": b"ArrayChunk  9\x00123456789", "b": b'Array a 24\x00{"arraychunk_ids":[0,0]}'}
    assert inflated_size(parts) == 2 * len(parts["a"]) + GROWTH * len(parts["b"])
    with pytest.raises(TypeError, match="an array in an array"):
        inflated_size(parts | {"c": b'Array b 24\x00{"arraychunk_ids":[0,0]}'})


def test_the_server_refuses_such_a_reply(
    message: Message, objects: tuple[ObjectTree, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, parts = objects
    monkeypatch.setattr(SafeGrid, "_pull_parts", lambda *arguments: parts)
    monkeypatch.setattr(SafeGrid, "_forget", lambda *arguments: None)
    grid = SafeGrid("127.0.0.1:1", True, token="a")
    grid._run = Run.create_empty(1)
    proto = message_to_proto(message)
    proto.metadata.message_id = tree.object_id
    assert "too large: more than 1.5 MB" in grid._fetch(proto, tree, 1_500_000).error.reason
    assert not grid._fetch(proto, tree, 2_500_000).has_error()


def test_a_client_refuses_such_a_request(objects: tuple[ObjectTree, dict[str, bytes]]) -> None:
    tree, parts = objects

    def pull(request: Any) -> PullObjectResponse:
        content = parts[request.object_id]
        return PullObjectResponse(object_found=True, object_available=True, object_content=content)

    fleet: Any = SimpleNamespace(PullObject=pull, ConfirmMessageReceived=lambda request: None)
    connection = Connection("server:1", None, 60, print, Consent(limits=Limits(request=1)))
    connection._fleet = fleet
    with pytest.raises(RequestRefusedError, match="at most 1 MB"):
        connection._fetch(connection._node, 1, tree)
    connection.consent = Consent(limits=Limits(request=3))
    assert connection._fetch(connection._node, 1, tree).has_content()
