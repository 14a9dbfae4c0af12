"""The Flower engine: on a Grid made up here, where clients can be made to fail, and on its simulation."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from rich.console import Console

from conftest import Command, same_weights

pytest.importorskip("flwr")

from fedseal import api
from fedseal.config import load_config
from fedseal.core import Engine, Packet
from fedseal.engines import flower_client
from fedseal.engines.flower import FlowerEngine, Roll, job_of, one_line, pack, unpack
from fedseal.errors import UserError
from fedseal.observers import read_events
from fedseal.sites import Sites

# isort: split
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

Behaviour = Callable[[Message, Message], Message | None]  # of a request and the honest reply


@dataclass
class MadeUpGrid(Grid):
    """A Grid whose clients answer at once, each in its own way."""

    images: dict[str, Path]
    memory: Path
    ways: dict[str, Behaviour] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
    starts: dict[str, int] = field(default_factory=dict)
    replies: dict[str, Message] = field(default_factory=dict)
    requests: list[tuple[str, Packet]] = field(default_factory=list)

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
        message.metadata.__dict__["_message_id"] = str(uuid4())
        about: Any = {"images": str(self.images[name]), "memory": str(self.memory / name), "client": name}
        context = Context(1, number(name), about, RecordDict(), {})
        honest = flower_client.app(message, context)
        if "packet" in message.content.array_records:
            self.requests.append((name, Packet.from_bytes(unpack(message.content))))
        answer = self.ways.get(name, lambda _, reply: reply)(message, honest)
        if answer is not None:
            self.replies[message.metadata.message_id] = answer
        return message.metadata.message_id

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self.replies.pop(name) for name in message_ids if name in self.replies]

    def get_node_ids(self) -> list[int]:
        raise NotImplementedError

    create_message = send_and_receive = set_run = run = get_node_ids  # type: ignore[assignment]


def number(name: str) -> int:
    return 1 + sum(name.encode())


@pytest.fixture
def grid(shapes: Path, tmp_path: Path) -> MadeUpGrid:
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    return MadeUpGrid({n: shapes / "clients" / n for n in ("north", "south")}, tmp_path / "memory")


@pytest.fixture
def run(grid: MadeUpGrid, own: dict[str, Any], tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Trains on the made-up Grid; gives the events."""
    own |= {"data.path": str(own["data.path"]), "engine.deadline": 2.5}

    def start(sites: Sites, memories: object) -> Engine:
        keys = {name.encode(): name for name in grid.images}
        job = job_of(sites, "a" * 32, data=False)
        deadline = sites.config.engine.deadline
        return FlowerEngine(
            grid, Roll(grid, grid.images, keys), sites.federation.names, job, deadline=deadline
        )

    def train(resume: bool = False, **more: Any) -> list[dict[str, Any]]:
        config = load_config("folders", own | {k.replace("__", "."): v for k, v in more.items()})
        api.run(config, tmp_path / "run", resume=resume, console=Console(quiet=True), start_engine=start)
        return read_events(tmp_path / "run" / "events.jsonl")

    return train


def test_it_equals_the_local_engine(
    grid: MadeUpGrid, own: dict[str, Any], run: Callable[..., Any], tmp_path: Path
) -> None:
    run()
    api.train("folders", out=tmp_path / "local", set=own)
    assert same_weights(tmp_path / "run", tmp_path / "local")


def test_no_image_and_no_score_is_in_a_packet(grid: MadeUpGrid, run: Callable[..., Any]) -> None:
    """Requests and replies hold the model, thresholds, and counts; nothing has a row for each image."""
    replies = []
    grid.ways["north"] = lambda _, reply: replies.append(Packet.from_bytes(unpack(reply.content))) or reply
    run()
    packets = [packet for _, packet in grid.requests] + replies
    assert {group for packet in packets for group in packet.tensors} == {"model", "thresholds"}
    assert {key for packet in replies for key in packet.scalars} == {"t", "positive", "negative"}
    images = 18
    assert all(v.shape[:1] != (images,) for p in packets for g in p.tensors.values() for v in g.values())


def lied(change: Callable[[dict[str, torch.Tensor]], None]) -> Behaviour:
    """A reply whose model is changed."""

    def way(request: Message, reply: Message) -> Message:
        packet = Packet.from_bytes(unpack(reply.content))
        change(packet.tensors["model"])
        return Message(pack(packet.to_bytes()), reply_to=request)

    return way


def counted(**scalars: int) -> Behaviour:
    """A reply that counts more than it should."""

    def way(request: Message, reply: Message) -> Message:
        packet = Packet.from_bytes(unpack(reply.content))
        wire = Packet(packet.tensors, {**packet.scalars, **scalars}).to_bytes()
        return Message(pack(wire), reply_to=request)

    return way


def boasted(request: Message, reply: Message) -> Message:
    """A reply that says how many of its labels are right, which only a simulation knows."""
    record = pack(unpack(reply.content))
    record["diagnosis"] = ConfigRecord({"positive_known": 1, "positive_right": "9" * 400})
    return Message(record, reply_to=request)


def test_what_a_client_says_of_its_own_labels_is_not_believed(
    grid: MadeUpGrid, run: Callable[..., list[dict[str, Any]]]
) -> None:
    grid.ways["north"] = boasted
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
    "wrong shape": (lied(put("mean", torch.zeros(7))), "other names, shapes or types"),
    "wrong type": (lied(put("mean", torch.zeros(1, 3, 1, 1).double())), "other names, shapes or types"),
    "wrong keys": (lied(put("more", torch.zeros(1))), "other names, shapes or types"),
    "NaN": (lied(lambda model: model["mean"].fill_(torch.nan)), "NaN or infinite"),
    "huge": (lied(put("mean", torch.zeros(500_000))), "far too large"),
    "diverged": (lied(lambda model: model["body.fc3.bias"].fill_(1e30)), "times as large"),
    "other normalisation": (lied(put("std", torch.full((1, 3, 1, 1), -9.0))), "normalises images otherwise"),
    "garbage": (sent(b"garbage"), "cannot be read"),
    "nothing": (sent(b""), "cannot be read"),
    "no record": (lambda request, _: Message(RecordDict(), reply_to=request), "cannot be read"),
    "no model": (sent(Packet(scalars={"t": 1}).to_bytes()), "no model"),
    "odd scalars": (sent(Packet(scalars={"t": [1]}).to_bytes()), "cannot be read"),  # type: ignore[dict-item]
    "forged accuracy": (counted(test_accuracy=1), "counts 'test_accuracy'"),
    "escapes": (counted(**{"\x1b[2J": 1}), "name is none"),
    "many counts": (counted(**{f"n{i}": 1 for i in range(30)}), "more than 20"),
    "huge count": (counted(positive=10**400), "'positive' is no number of images"),
    "failure": (failed(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "a\nb\x1b[2J"), "it failed: a b [2J"),
    "gone": (failed(ErrorCode.NODE_UNAVAILABLE, "offline"), "no reply within 2.5 seconds"),
    "slow": (lambda request, reply: None, "no reply within 2.5 seconds"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_round_goes_on_without_a_faulty_client(
    fault: str, grid: MadeUpGrid, run: Callable[..., list[dict[str, Any]]]
) -> None:
    way, reason = FAULTS[fault]

    def in_round_one(request: Message, reply: Message) -> Message | None:
        return way(request, reply) if len(grid.requests) <= 2 else reply

    grid.ways["north"] = in_round_one
    events = run()
    left_out = [event for event in events if event["event"] == "left-out"]
    assert [(event["t"], event["client"]) for event in left_out] == [(1, "north")]
    assert reason in left_out[0]["reason"]
    assert [event["left_out"] for event in events if event["event"] == "round"] == [["north"], []]


def test_a_client_that_is_not_connected_is_not_waited_for(
    grid: MadeUpGrid, run: Callable[..., list[dict[str, Any]]]
) -> None:
    grid.absent.add("south")
    events = run(engine__deadline=600)
    assert [e["reason"] for e in events if e["event"] == "left-out"] == ["it is not connected"] * 2


def test_a_client_that_comes_back_in_time_is_asked_again(
    grid: MadeUpGrid, run: Callable[..., list[dict[str, Any]]]
) -> None:
    def dies_once(request: Message, reply: Message) -> Message | None:
        if "north" in grid.starts:
            return reply
        grid.starts["north"] = 1
        return None

    grid.ways["north"] = dies_once
    events = run(engine__deadline=60)
    assert [event["event"] for event in events] == ["round", "round"]
    asked = [(name, packet.scalars["t"]) for name, packet in grid.requests]
    assert asked.count(("north", 1)) == 2
    memory = next((grid.memory / "north").iterdir())
    images = Packet.from_bytes(memory.read_bytes()).tensors["images"]
    assert images["count"].tolist() == [2] * 18  # twice asked in round 1, once counted


def test_too_few_replies_end_the_run_which_can_be_resumed(
    grid: MadeUpGrid, own: dict[str, Any], run: Callable[..., Any], tmp_path: Path
) -> None:
    def fails_in_round_two(request: Message, reply: Message) -> Message | None:
        return reply if len(grid.requests) <= 2 else None

    grid.ways["north"] = fails_in_round_two
    with pytest.raises(UserError, match=r"Round 2: 1 of 2 clients .*min_replies \(2\)"):
        run(engine__min_replies=2)
    grid.ways.clear()
    run(resume=True, engine__min_replies=2)
    api.train("folders", out=tmp_path / "local", set=own)
    assert same_weights(tmp_path / "run", tmp_path / "local")


def test_images_that_come_between_two_deliveries_of_a_round_wait_for_the_next(
    grid: MadeUpGrid, shapes: Path, run: Callable[..., Any]
) -> None:
    new = shapes / "clients" / "north" / "new.png"

    def dies_once(request: Message, reply: Message) -> Message | None:
        if new.exists():
            return reply
        new.write_bytes((shapes / "test" / "circle" / "0.png").read_bytes())
        grid.starts["north"] = 1
        return None

    grid.ways["north"] = dies_once
    run(engine__deadline=60)
    images = Packet.from_bytes(next((grid.memory / "north").iterdir()).read_bytes()).tensors["images"]
    assert sorted(images["count"].tolist()) == [1] + [2] * 18


def test_a_client_refuses_another_version_and_an_odd_run(grid: MadeUpGrid, own: dict[str, Any]) -> None:
    config = load_config("folders", own | {"data.path": str(own["data.path"])})
    job = job_of(Sites(config, api.deal(config.data, 0)), "a" * 32, data=False)
    for change, reason in (({"version": "9"}, "install the same one"), ({"run": "../x"}, "no proper name")):
        with pytest.raises(flower_client.Refusal, match=reason):
            flower_client.own(job.model_copy(update=change), Packet(), grid.images["north"], grid.memory)
    assert not grid.memory.exists()


def test_too_few_clients_are_an_error_that_names_those_who_came(grid: MadeUpGrid) -> None:
    told: list[int] = []
    with pytest.raises(UserError, match=r"Only 2 of 3 clients came within 0\.2 seconds \(north, south\)"):
        Roll(grid, ("north", "south", "west")).wait(
            3, 0.2, told.append
        )  # without keys it asks for their names
    assert told[-1] == 2


def test_who_was_not_asked_for_is_named_and_does_not_count(
    grid: MadeUpGrid, caplog: pytest.LogCaptureFixture
) -> None:
    assert Roll(grid, ("north", "nroth")).wait(1, 5) == {"north"}
    assert "'south' is there, which nobody asked for" in caplog.text


def test_text_from_elsewhere_is_tamed() -> None:
    assert one_line("a\x1b[31m\n b" + "c" * 999) == ("a [31m b" + "c" * 999)[:300]


def test_the_simulation_equals_the_local_engine(
    own: dict[str, Any], fedseal: Command, tmp_path: Path
) -> None:
    """One round on Flower's simulation, the next after a resume; and the other way round."""
    own |= {"data.path": str(own["data.path"]), "server.threads": 1}
    words = ("train", "folders", "--quiet", "--out", tmp_path / "run")
    flower = ("--resume", "--engine", "flower", "--workers", 2)
    assert fedseal(*words, set=own | {"rounds": 1}).code == 0
    assert fedseal(*words, *flower, set=own | {"rounds": 3}).code == 0
    assert fedseal(*words, "--resume", set=own | {"rounds": 4}).code == 0
    api.train("folders", out=tmp_path / "local", set=own | {"rounds": 4})
    assert same_weights(tmp_path / "run", tmp_path / "local")


def test_an_unknown_engine_is_named(fedseal: Command) -> None:
    fedseal("train", "demo", "--engine", "flour").refuses("engine.name", "flour")
