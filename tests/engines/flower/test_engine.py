"""The Flower engine: on a fake Grid, whose clients can be made to fail, and on Flower's simulation."""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from pydantic import ValidationError
from rich.console import Console

from conftest import Command, same_weights, settings

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Context, Error, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.task_identity import TaskIdentity

from fedseal.config.load import load_config
from fedseal.core import Engine, Packet
from fedseal.data.federation import load_federation
from fedseal.engines.flower import client_app
from fedseal.engines.flower import engine as engine_module
from fedseal.engines.flower.engine import ClientRegistry, FlowerEngine, one_line
from fedseal.engines.flower.task import LABEL_COUNTS, ClientTask, make_task, pack, unpack, unpack_task
from fedseal.errors import UserError
from fedseal.run_setup import RunSetup
from fedseal.storage.events_file import read_events
from fedseal.training.train import run_training, train

Behaviour = Callable[[Message, Message], Message | None]  # from a request and the correct reply


@dataclass
class FakeGrid(Grid):
    """A Grid whose clients answer at once, each with its own behaviour."""

    images: dict[str, Path]
    memory: Path
    behaviours: dict[str, Behaviour] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
    starts: dict[str, int] = field(default_factory=dict)
    replies: dict[str, Message] = field(default_factory=dict)
    requests: list[tuple[str, Packet]] = field(default_factory=list)
    abandoned: list[str] = field(default_factory=list)
    hasty: list[str] = field(default_factory=list)  # whose next request is not accepted

    def get_nodes(self) -> list[NodeInfo]:
        names = [name for name in self.images if name not in self.absent]
        return [
            NodeInfo(
                node_id=number(name), public_key=name.encode(), last_activated_at=str(self.starts.get(name))
            )
            for name in names
        ]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return [self.deliver(message) for message in messages]

    def deliver(self, message: Message) -> str:
        name = next(n for n in self.images if number(n) == message.metadata.dst_node_id)
        if name in self.hasty:
            self.hasty.remove(name)
            return ""
        message.metadata.__dict__["_message_id"] = str(uuid4())
        node: Any = {"images": str(self.images[name]), "memory": str(self.memory / name), "client": name}
        correct = client_app.app(message, Context(1, number(name), node, RecordDict(), {}))
        if "packet" in message.content.array_records:
            self.requests.append((name, Packet.from_bytes(unpack(message.content))))
        answer = self.behaviours.get(name, lambda _, reply: reply)(message, correct)
        if answer is not None:
            self.replies[message.metadata.message_id] = answer
        return message.metadata.message_id

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self.replies.pop(name) for name in message_ids if name in self.replies]

    def abandon(self, message_ids: Iterable[str]) -> None:
        self.abandoned += message_ids

    def get_node_ids(self) -> list[int]:
        raise NotImplementedError

    create_message = send_and_receive = set_run = run = get_node_ids  # type: ignore[assignment]


def number(name: str) -> int:
    return 1 + sum(name.encode())


@pytest.fixture
def grid(shapes: Path, tmp_path: Path) -> FakeGrid:
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    return FakeGrid({n: shapes / "clients" / n for n in ("north", "south")}, tmp_path / "memory")


@pytest.fixture
def run(grid: FakeGrid, own: dict[str, Any], tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Trains on the fake Grid and returns the events."""
    own |= {"data.path": str(own["data.path"]), "engine.deadline": 2.5}

    def start(setup: RunSetup, memories: object) -> Engine:
        keys = {name.encode(): name for name in grid.images}
        registry, task = ClientRegistry(grid, grid.images, keys), make_task(setup, "a" * 32)
        deadline = setup.config.engine.deadline
        return FlowerEngine(grid, registry, setup.federation.names, task, deadline=deadline)

    def run(resume: bool = False, **changes: Any) -> list[dict[str, Any]]:
        config = load_config("folders", own | {k.replace("__", "."): v for k, v in changes.items()})
        folder, console = tmp_path / "run", Console(quiet=True)
        run_training(config, folder, resume=resume, console=console, start_engine=start)
        return read_events(folder / "events.jsonl")

    return run


def test_it_equals_the_local_engine(
    grid: FakeGrid, own: dict[str, Any], run: Callable[..., Any], tmp_path: Path
) -> None:
    run()
    train("folders", out=tmp_path / "local", options=own)
    assert same_weights(tmp_path / "run", tmp_path / "local")


def test_no_image_and_no_score_is_in_a_packet(grid: FakeGrid, run: Callable[..., Any]) -> None:
    """Requests and replies hold the model and thresholds; nothing has one row per image."""
    replies = []
    grid.behaviours["north"] = lambda _, reply: (
        replies.append(Packet.from_bytes(unpack(reply.content))) or reply
    )
    run()
    packets = [packet for _, packet in grid.requests] + replies
    assert {group for packet in packets for group in packet.tensors} == {"model", "thresholds"}
    assert {key for packet in replies for key in packet.scalars} == {"t", "counts"}
    images = 18
    assert all(v.shape[:1] != (images,) for p in packets for g in p.tensors.values() for v in g.values())


def changed_model(change: Callable[[dict[str, torch.Tensor]], None]) -> Behaviour:
    """Changes the model in a reply."""

    def behave(request: Message, reply: Message) -> Message:
        packet = Packet.from_bytes(unpack(reply.content))
        change(packet.tensors["model"])
        return Message(pack(packet.to_bytes()), reply_to=request)

    return behave


def added_groups(number: int) -> Behaviour:
    """Adds empty tensors in another group."""

    def behave(request: Message, reply: Message) -> Message:
        packet = Packet.from_bytes(unpack(reply.content))
        extra = {str(i): torch.zeros(0) for i in range(number)}
        return Message(pack(Packet({**packet.tensors, "extra": extra}).to_bytes()), reply_to=request)

    return behave


def added_counts(**scalars: int) -> Behaviour:
    """Adds counts to a reply."""

    def behave(request: Message, reply: Message) -> Message:
        packet = Packet.from_bytes(unpack(reply.content))
        wire = Packet(packet.tensors, {**packet.scalars, **scalars}).to_bytes()
        return Message(pack(wire), reply_to=request)

    return behave


def added_label_counts(request: Message, reply: Message) -> Message:
    """Claims correct labels in a reply, which only a simulation can count."""
    record = pack(unpack(reply.content))
    record[LABEL_COUNTS] = ConfigRecord({"positive_known": 1, "positive_right": "9" * 400})
    return Message(record, reply_to=request)


def test_label_counts_of_a_deployed_client_are_ignored(
    grid: FakeGrid, run: Callable[..., list[dict[str, Any]]]
) -> None:
    grid.behaviours["north"] = added_label_counts
    events = run()
    assert [event["event"] for event in events] == ["round", "round"]
    assert not any("positive_correct" in event for event in events)


def sent(wire: bytes) -> Behaviour:
    return lambda request, reply: Message(pack(wire), reply_to=request)


def failed(code: int, reason: str) -> Behaviour:
    return lambda request, reply: Message(Error(code, reason), reply_to=request)


def put(name: str, value: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda model: model.update({name: value})


FAULTS: dict[str, tuple[Behaviour, str]] = {
    "wrong shape": (changed_model(put("mean", torch.zeros(7))), "other names, shapes or types"),
    "wrong type": (
        changed_model(put("mean", torch.zeros(1, 3, 1, 1).double())),
        "other names, shapes or types",
    ),
    "wrong keys": (changed_model(put("more", torch.zeros(1))), "other names, shapes or types"),
    "NaN": (changed_model(lambda model: model["mean"].fill_(torch.nan)), "NaN or infinite"),
    "huge": (changed_model(put("mean", torch.zeros(500_000))), "too large"),
    "diverged": (changed_model(lambda model: model["body.fc3.bias"].fill_(1e30)), "grew more than 1000-fold"),
    "other normalisation": (
        changed_model(put("std", torch.full((1, 3, 1, 1), -9.0))),
        "normalises images differently",
    ),
    "more tensors": (added_groups(1), "other groups of tensors than model"),
    "many tensors": (added_groups(9000), "lists many more tensors"),
    "garbage": (sent(b"garbage"), "cannot be read"),
    "nothing": (sent(b""), "cannot be read"),
    "no record": (lambda request, _: Message(RecordDict(), reply_to=request), "cannot be read"),
    "no model": (sent(Packet(scalars={"t": 1}).to_bytes()), "no model"),
    "odd scalars": (sent(Packet(scalars={"t": 1}).to_bytes().replace(b": 1}", b":[]}")), "cannot be read"),
    "forged accuracy": (added_counts(test_accuracy=1), "count named 'test_accuracy'"),
    "escapes": (added_counts(**{"\x1b[2J": 1}), "a count with an invalid name"),
    "many counts": (added_counts(**{f"n{i}": 1 for i in range(30)}), "more than 20"),
    "huge count": (added_counts(positive=10**400), "'positive' is not a number of images"),
    "failure": (failed(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "a\nb\x1b[2J"), "it failed: a b [2J"),
    "slow": (lambda request, reply: None, "no reply within 2.5 seconds"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_round_continues_without_a_faulty_client(
    fault: str, grid: FakeGrid, run: Callable[..., list[dict[str, Any]]]
) -> None:
    behave, reason = FAULTS[fault]

    def in_round_one(request: Message, reply: Message) -> Message | None:
        return behave(request, reply) if len(grid.requests) <= 2 else reply

    grid.behaviours["north"] = in_round_one
    events = run()
    left_out = [event for event in events if event["event"] == "left-out"]
    assert [(event["t"], event["client"]) for event in left_out] == [(1, "north")]
    assert reason in left_out[0]["reason"]
    assert [event["left_out"] for event in events if event["event"] == "round"] == [["north"], []]


def test_a_request_that_did_not_reach_its_client_is_sent_again(
    grid: FakeGrid, run: Callable[..., list[dict[str, Any]]]
) -> None:
    lose = failed(ErrorCode.NODE_UNAVAILABLE, "offline")
    grid.behaviours["north"] = lambda request, reply: (
        lose(request, reply) if len(grid.requests) <= 2 else reply
    )
    events = run()
    assert not [event for event in events if event["event"] == "left-out"]
    assert len(grid.requests) == 5  # two rounds with two clients, and one request twice


@pytest.mark.parametrize(("times", "left_out"), [(2, 0), (11, 1)])
def test_a_request_that_was_not_accepted_is_sent_again(
    times: int,
    left_out: int,
    grid: FakeGrid,
    run: Callable[..., list[dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_module, "NODE_POLL", 0.0)
    grid.hasty = ["north"] * times
    events = run(rounds=1, engine__deadline=600)
    reasons = [event["reason"] for event in events if event["event"] == "left-out"]
    assert reasons == ["its connection broke more than 10 times"] * left_out


def test_a_client_that_loses_its_request_again_and_again_is_left_out(
    grid: FakeGrid, run: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "NODE_POLL", 0.0)
    grid.behaviours["north"] = failed(ErrorCode.NODE_UNAVAILABLE, "offline")
    events = run(rounds=1, engine__deadline=600)
    [reason] = [event["reason"] for event in events if event["event"] == "left-out"]
    assert reason == "its connection broke more than 10 times"
    assert [name for name, _ in grid.requests].count("north") == 11


def test_a_client_that_is_not_connected_is_not_waited_for(
    grid: FakeGrid, run: Callable[..., list[dict[str, Any]]]
) -> None:
    grid.absent.add("south")
    events = run(engine__deadline=600)
    assert [e["reason"] for e in events if e["event"] == "left-out"] == ["it is not connected"] * 2


def test_a_client_whose_connection_breaks_between_two_rounds_is_waited_for(
    grid: FakeGrid, run: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "NODE_POLL", 0.0)

    def breaks(request: Message, reply: Message) -> Message:
        if not grid.starts:
            grid.starts["north"] = 1
            grid.absent.add("north")
            threading.Timer(1, grid.absent.discard, ("north",)).start()
        return reply

    grid.behaviours["north"] = breaks
    events = run(engine__deadline=600)
    assert [event["event"] for event in events] == ["round", "round"]


def test_a_client_is_waited_for_although_it_was_away_at_the_end_of_the_last_round(
    grid: FakeGrid, run: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """North has replied and is away while the server still waits for south."""
    monkeypatch.setattr(engine_module, "NODE_POLL", 0.0)
    looks = 0

    def look(
        self: FakeGrid, usual: Callable[[FakeGrid], list[NodeInfo]] = FakeGrid.get_nodes
    ) -> list[NodeInfo]:
        nonlocal looks
        looks += bool(grid.absent)
        if looks == 4:
            grid.absent.clear()
        return usual(self)

    def fails_once(request: Message, reply: Message) -> Message:
        if looks:
            return reply
        grid.absent.add("north")
        return Message(Error(ErrorCode.NODE_UNAVAILABLE, "offline"), reply_to=request)

    monkeypatch.setattr(FakeGrid, "get_nodes", look)
    grid.behaviours["south"] = fails_once
    events = run(engine__deadline=600)
    assert [event["event"] for event in events] == ["round", "round"] and looks == 4


def test_a_client_that_leaves_for_good_is_not_waited_for_long(
    grid: FakeGrid, run: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "RETURN_SECONDS", 0.5)

    def leaves(request: Message, reply: Message) -> Message:
        grid.absent.add("north")
        return reply

    grid.behaviours["north"] = leaves
    events = run(engine__deadline=600)
    left_out = [(e["t"], e["reason"]) for e in events if e["event"] == "left-out"]
    assert left_out == [(2, "it is not connected")]


def test_a_client_that_reconnects_in_time_gets_its_request_again(
    grid: FakeGrid, run: Callable[..., list[dict[str, Any]]]
) -> None:
    def dies_once(request: Message, reply: Message) -> Message | None:
        if "north" in grid.starts:
            return reply
        grid.starts["north"] = 1
        return None

    grid.behaviours["north"] = dies_once
    events = run(engine__deadline=60)
    assert [event["event"] for event in events] == ["round", "round"]
    asked = [(name, packet.scalars["t"]) for name, packet in grid.requests]
    assert asked.count(("north", 1)) == 2
    memory = next((grid.memory / "north").iterdir())
    images = Packet.from_bytes(memory.read_bytes()).tensors["images"]
    assert images["count"].tolist() == [2] * 18  # asked twice in round 1, counted once


def test_replies_that_are_not_needed_any_more_are_abandoned(
    grid: FakeGrid, run: Callable[..., list[dict[str, Any]]]
) -> None:
    names: dict[str, list[str]] = {"north": [], "south": []}

    def silent_at_first(request: Message, reply: Message) -> Message | None:
        names["north"].append(request.metadata.message_id)
        grid.starts["north"] = 1
        return None if len(names["north"]) == 1 else reply

    def silent(request: Message, reply: Message) -> None:
        names["south"].append(request.metadata.message_id)

    grid.behaviours |= {"north": silent_at_first, "south": silent}
    run(rounds=1, engine__deadline=5)
    assert len(names["north"]) == 2
    assert grid.abandoned == [names["north"][0], *names["south"]]


def test_too_few_replies_stop_the_run_which_can_be_resumed(
    grid: FakeGrid, own: dict[str, Any], run: Callable[..., Any], tmp_path: Path
) -> None:
    def fails_in_round_two(request: Message, reply: Message) -> Message | None:
        return reply if len(grid.requests) <= 2 else None

    grid.behaviours["north"] = fails_in_round_two
    with pytest.raises(UserError, match=r"Round 2: only 1 of 2 clients .* a round needs 2"):
        run(engine__min_replies=2)
    grid.behaviours.clear()
    run(resume=True, engine__min_replies=2)
    train("folders", out=tmp_path / "local", options=own)
    assert same_weights(tmp_path / "run", tmp_path / "local")


def test_images_added_between_two_deliveries_of_a_round_wait_for_the_next_round(
    grid: FakeGrid, shapes: Path, run: Callable[..., Any]
) -> None:
    new = shapes / "clients" / "north" / "new.png"

    def dies_once(request: Message, reply: Message) -> Message | None:
        if new.exists():
            return reply
        new.write_bytes((shapes / "test" / "circle" / "0.png").read_bytes())
        grid.starts["north"] = 1
        return None

    grid.behaviours["north"] = dies_once
    run(engine__deadline=60)
    images = Packet.from_bytes(next((grid.memory / "north").iterdir()).read_bytes()).tensors["images"]
    assert sorted(images["count"].tolist()) == [1] + [2] * 18


def example_task(own: dict[str, Any]) -> ClientTask:
    config = load_config("folders", own | {"data.path": str(own["data.path"])})
    return make_task(RunSetup(config, load_federation(config.data, 0)), "a" * 32)


def test_a_client_refuses_another_version_and_an_invalid_run(grid: FakeGrid, own: dict[str, Any]) -> None:
    task = example_task(own)
    for change, reason in (
        ({"version": "9"}, r"install fedseal 9\.\* at the client"),
        ({"run": "../x"}, "an invalid identifier"),
        ({"config": task.config | {"method": "fedavg-sl"}}, "needs labels of this client's images"),
        ({"config": task.config | {"method": "file.py:Mine"}}, "join with --method"),
        ({"size": 500}, "network is larger than the weights"),
    ):
        changed = task.model_copy(update=change)
        with pytest.raises(client_app.TaskRefusedError, match=reason):
            client_app.run_deployed(changed, Packet(), grid.images["north"], grid.memory)
    assert not grid.memory.exists()


@pytest.mark.parametrize("change", [{"size": 10**6}, {"size": 0}, {"channels": 10**9}, {"classes": 0}])
def test_a_task_with_an_impossible_shape_is_refused(own: dict[str, Any], change: dict[str, int]) -> None:
    record = pack(b"", example_task(own).model_copy(update=change))
    with pytest.raises(ValidationError, match=next(iter(change))):
        unpack_task(record)


def test_device_and_threads_are_the_clients_own_choice(own: dict[str, Any]) -> None:
    task = example_task(own | {"client.threads": 3})
    task = task.model_copy(
        update={"config": task.config | {"engine": {"device": "cuda"}}}
    )  # not the server's
    for threads, used in ((0, 3), (2, 2)):
        config = client_app._with_own_choices(task, "cpu", threads).parse_config()
        assert (config.engine.device, config.client.threads) == ("cpu", used)


def test_a_task_is_read_back_and_keeps_the_servers_settings_private(own: dict[str, Any]) -> None:
    task = example_task(own)
    record = pack(b"packet", task)
    assert unpack_task(record) == task and unpack(record) == b"packet"
    assert task.config.keys() == {"method", "seed", "model", "augment", "client", "fedseal"}


def test_a_client_cannot_spoil_the_request_of_another_whose_name_it_knows(own: dict[str, Any]) -> None:
    """East announces the record that it expects in the request to south, with other parts."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    easts, souths = (example_task(own).model_copy(update={"client": name}) for name in ("east", "south"))
    known = pack(b"packet", easts)
    known["task"] = ConfigRecord(dict(known.config_records["task"]) | {"task": souths.model_dump_json()})
    store = InMemoryObjectStore()
    store.preregister(1, ObjectTree(object_id="0" * 64, children=[ObjectTree(object_id=known.object_id)]))
    request = Message(pack(b"packet", souths), 7, "train")
    store.preregister(1, get_object_tree(request))
    assert store.get_object_tree(request.object_id) == get_object_tree(request)


def test_missing_clients_are_an_error_that_names_the_connected_ones(grid: FakeGrid) -> None:
    numbers: list[int] = []
    registry = ClientRegistry(grid, ("north", "south", "west"))  # without keys it asks for names
    with pytest.raises(
        UserError, match=r"Only 2 of 3 clients connected within 0\.2 seconds \(north, south\)"
    ):
        registry.wait_for_clients(3, 0.2, numbers.append)
    assert numbers[-1] == 2


def test_a_client_that_is_revoked_before_the_first_round_is_not_waited_for(grid: FakeGrid) -> None:
    registry = ClientRegistry(grid, ("north", "west"), {b"north": "north", b"west": "west"})
    registry.replace_keys({b"north": "north"})
    assert registry.wait_for_clients(2, 0.2) == {"north"}
    registry.replace_keys({})
    with pytest.raises(UserError, match="no client is left"):
        registry.wait_for_clients(2, 60)


def test_a_client_whose_question_was_not_accepted_is_asked_again(grid: FakeGrid) -> None:
    grid.hasty = ["north"]
    assert ClientRegistry(grid, ("north",)).wait_for_clients(1, 60) == {"north"}


def test_a_client_that_connects_again_before_it_told_its_name_is_asked_again(grid: FakeGrid) -> None:
    """The question, or the answer to it, may have been lost with the former connection."""
    asked: list[str] = []

    def lose_first(request: Message, reply: Message) -> Message | None:
        asked.append(request.metadata.message_type)
        return reply if len(asked) > 1 else None

    grid.behaviours["north"] = lose_first
    registry = ClientRegistry(grid, ("north",))
    assert not registry.connected() and not registry.connected() and len(asked) == 1
    grid.starts["north"] = 2
    assert set(registry.connected()) == {"north"} and asked == [MessageType.QUERY] * 2


def test_an_unexpected_client_is_reported_and_does_not_count(
    grid: FakeGrid, caplog: pytest.LogCaptureFixture
) -> None:
    assert ClientRegistry(grid, ("north", "nroth")).wait_for_clients(1, 5) == {"north"}
    assert "ignored a client named 'south'" in caplog.text


def test_text_from_another_machine_becomes_one_short_line() -> None:
    assert one_line("a\x1b[31m\n b" + "c" * 999) == ("a [31m b" + "c" * 999)[:300]


def test_the_simulation_equals_the_local_engine(
    own: dict[str, Any], fedseal: Command, tmp_path: Path
) -> None:
    """Round 1 on the local engine, rounds 2 and 3 on Flower's simulation, round 4 on the local engine.

    The server averages by a rule that needs all that a rule can: the uploads, its own labels and the round.
    """
    own |= {"data.path": str(own["data.path"]), "server.threads": 1, "aggregate.rule": "fltrust"}
    command = ("train", "folders", "--quiet", "--out", tmp_path / "run")
    flower = ("--resume", "--engine", "flower", "--workers", 2)
    assert fedseal(*command, *settings(own | {"rounds": 1})).code == 0
    assert fedseal(*command, *flower, *settings(own | {"rounds": 3})).code == 0
    assert fedseal(*command, "--resume", *settings(own | {"rounds": 4})).code == 0
    train("folders", out=tmp_path / "local", options=own | {"rounds": 4})
    assert same_weights(tmp_path / "run", tmp_path / "local")


def test_an_unknown_engine_is_an_error(fedseal: Command) -> None:
    fedseal("train", "demo", "--engine", "flour").refuses("engine.name", "flour")
