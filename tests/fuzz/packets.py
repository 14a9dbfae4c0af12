"""Feeds changed packets and files to everything that reads them, and counts what is not refused clearly.

`make fuzz` runs this file with 10,000 inputs, `make test` a few hundred. They start from the real packets,
messages, checkpoints, memories and models of a tiny federation. `mutations.py` then changes them: flipped
bits, missing ends, headers that lie about types, shapes and lengths, names that come twice, float8, NaN, deep
JSON.

An input is good if it is used, or refused as its reader promises: the server leaves the client out, the
client answers with an error, a command has a `UserError`. It is bad if anything else happens: another
exception, a hang, or more memory than the limit.
"""

import argparse
import json
import logging
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import FrameType

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity
from fuzzing import SECONDS, SMALL, HangError, Inputs, write_counts
from http_messages import Deployment
from mutations import VALUES, change_bytes, change_file, change_json, to_json
from peak_memory import MEMORY, peak, reset_peak

from fedseal.config.config import Config
from fedseal.config.load import load_config
from fedseal.core import Engine, Packet, Reply, Server
from fedseal.data.federation import load_federation
from fedseal.deploy.client import Client, find_run
from fedseal.engines.flower.client_app import run_deployed
from fedseal.engines.flower.engine import read_reply
from fedseal.engines.flower.task import END_OF_RUN, ClientTask, make_task, pack, unpack
from fedseal.engines.memory import MemoryFile
from fedseal.engines.memory_store import MemoryStore
from fedseal.engines.secure_client import KEYS, PHASE, SHARES, UNMASK, UPLOAD, make_keys, put_secrets
from fedseal.engines.secure_engine import SecureEngine
from fedseal.errors import UserError
from fedseal.rounds import LeftOut, Progress, RoundDone, rounds
from fedseal.run_setup import RunSetup
from fedseal.storage.checkpoint import Checkpoint
from fedseal.storage.events_file import format_line
from fedseal.storage.model_file import load
from fedseal.system.checksums import add_checksum
from fedseal.system.environment import set_up_process
from fedseal.weights import all_finite

NAMES = ("north", "south", "west")  # of clients; the third one is only there in secure aggregation
METHODS = ("fedseal", "semifl", "fedshift", "fedmatch")
# Ends of bad inputs begin with these words.
ERROR, HANG = "exception", "hang"


# ------------------------------------------------------------------ what reads them


@dataclass
class Recorded:
    """The packets of one round of a method."""

    config: Config
    server: Server
    progress: Progress
    requests: dict[int, Packet]
    task: ClientTask
    replies: dict[int, bytes]


class ChangedReply:
    """An engine with two clients. The reply of the first one is given; the other one's is correct."""

    clients = range(2)

    def __init__(self, recorded: Recorded, read: Callable[[bytes], Reply]) -> None:
        self.recorded, self.read = recorded, read

    def exchange(self, requests: Mapping[int, Packet]) -> Iterator[Reply]:
        yield self.read(requests[0].to_bytes())
        yield Reply(1, Packet.from_bytes(self.recorded.replies[1]))

    def close(self) -> None: ...


class ChangedPhase:
    """An engine with three clients, of which two suffice. In one phase of secure aggregation the first one's
    request is changed, or its reply."""

    clients = range(3)

    def __init__(self, answers: Sequence[Callable[[bytes], Message]], rng: random.Random) -> None:
        self.answers, self.rng = answers, rng
        self.phase, self.at_client = rng.choice((KEYS, SHARES, UPLOAD, UNMASK)), rng.random() < 0.5

    def exchange(self, requests: Mapping[int, Packet]) -> Iterator[Reply]:
        for k, request in requests.items():
            wire, chosen = request.to_bytes(), k == 0 and request.scalars[PHASE] == self.phase
            answer = self.answers[k](change_file(wire, self.rng) if chosen and self.at_client else wire)
            if chosen and not self.at_client:
                changed = pack(change_file(unpack(answer.content), self.rng))
                answer = Message(changed, dst_node_id=1, message_type=MessageType.TRAIN)
            yield read_reply(answer, k, wire)

    def close(self) -> None: ...


@dataclass
class Readers:
    """Everything that reads packets and files, with real ones to start from."""

    root: Path
    recorded: dict[str, Recorded] = field(default_factory=dict)

    def prepare(self) -> None:
        inputs = Inputs(self.root)
        inputs.prepare()
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
        self.run, images = self.root / "run", self.root / "images"
        self.model = (self.run / "model.safetensors").read_bytes()
        self.state = (self.run / "checkpoint" / "state.safetensors").read_bytes()
        self.store = (self.run / "checkpoint" / "memories.sqlite").read_bytes()
        self.fingerprint = str(Packet.from_bytes(self.state).scalars["fingerprint"])
        self.client, *self.others = (
            Client("127.0.0.1:9", images / "clients" / folder, self.root / "memory" / name, name, None)
            for name, folder in zip(NAMES, ("north", "south", "south"), strict=True)
        )
        for name in METHODS:
            changes = SMALL | {"method": name, "data.path": str(images)}
            if name == "fedshift":
                changes |= {"fedshift.teachers": 1, "bootstrap.epochs": 1}
            if name == "fedmatch":
                changes |= {"server.momentum": 0, "client.momentum": 0}
            self.recorded[name] = self._record(load_config("folders", changes))
        self.memories_of = dict[str, tuple[Path, bytes]]()  # files by method
        for name, recorded in self.recorded.items():
            for file in (self.root / "memory" / "north").glob(f"{recorded.task.run}-*"):
                self.memories_of[name] = file, file.read_bytes()

    def _record(self, config: Config) -> Recorded:
        """Runs the first round of a method."""
        setup = RunSetup(config, load_federation(config.data, config.seed))
        server, method = setup.server(), config.selected_method()
        state = method.initial_state(server)
        for step in method.prepare(state, server):
            state = step.state
        sent: dict[int, Packet] = {}
        task = make_task(setup, f"{METHODS.index(config.method):032x}")
        replies: dict[int, bytes] = {}

        class Recorder:
            clients = range(2)

            def exchange(_, requests: Mapping[int, Packet]) -> Iterator[Reply]:
                for k, request in requests.items():
                    name = setup.federation.names[k]
                    folder = self.root / "images" / "clients" / name
                    named = task.model_copy(update={"client": name})
                    sent[k] = request
                    reply = run_deployed(named, request, folder, self.root / "memory" / name)
                    replies[k] = reply.to_bytes()
                    yield Reply(k, reply)

            def close(_) -> None: ...

        progress = Progress(0, state)
        for _ in rounds(config, server, Recorder(), NAMES[:2], lambda state: {}, progress):
            pass
        return Recorded(config, server, progress, sent, task.model_copy(update={"client": "north"}), replies)

    # Each of these gets a seeded generator, makes one changed input, and returns how it ended.

    def replies(self, rng: random.Random) -> str:
        """A client's reply, at the server, to the end of the round."""
        recorded = self.recorded[rng.choice(METHODS)]
        wire = change_file(recorded.replies[0], rng)
        message = Message(pack(wire), dst_node_id=1, message_type=MessageType.TRAIN)
        engine = ChangedReply(recorded, lambda request: read_reply(message, 0, request))
        return self._finish_round(recorded, engine)

    def reply_messages(self, rng: random.Random) -> str:
        """A reply as Flower's message, at the server."""
        recorded = self.recorded[rng.choice(METHODS)]
        message = Message(pack(recorded.replies[0]), dst_node_id=1, message_type=MessageType.TRAIN)
        try:
            changed = change_message(message, rng)
        except Exception:  # as SafeGrid does
            return "not read"
        engine = ChangedReply(recorded, lambda request: read_reply(changed, 0, request))
        return self._finish_round(recorded, engine)

    def secure_phases(self, rng: random.Random) -> str:
        """A phase of secure aggregation, at a client or at the server, to the end of the round."""
        recorded = self.recorded[rng.choice(METHODS)]

        def answers(client: Client) -> Callable[[bytes], Message]:
            task = recorded.task.model_copy(update={"client": client.name})

            def answer(wire: bytes) -> Message:
                request = Message(pack(wire, task), dst_node_id=1, message_type=MessageType.TRAIN)
                return client._reply(request, lambda text: None)

            return answer

        inner = ChangedPhase([answers(client) for client in (self.client, *self.others)], rng)
        engine = SecureEngine(inner, recorded.config.selected_method(), recorded.config.secure)
        try:
            return self._finish_round(recorded, engine)
        except UserError:  # without the changed client, too few are left
            return "round stopped"

    def _finish_round(self, recorded: Recorded, engine: Engine) -> str:
        config, names = recorded.config, NAMES[: len(engine.clients)]
        events = rounds(config, recorded.server, engine, names, lambda state: {}, recorded.progress)
        left_out = False
        for event in events:
            left_out |= isinstance(event, LeftOut)
            if isinstance(event, RoundDone):
                format_line(event.metrics, "")
                json.dumps(event.metrics, allow_nan=False)
                assert all(all_finite(group) for group in event.state.tensors.values()), "NaN in the state"
        return "left out" if left_out else "used"

    def requests(self, rng: random.Random) -> str:
        """The server's request, at a client."""
        recorded = self.recorded[rng.choice(METHODS)]
        wire, task = recorded.requests[0].to_bytes(), recorded.task
        record = pack(wire, task)
        if rng.random() < 0.5:
            record = pack(change_file(wire, rng), task)
        else:
            about = change_json(json.loads(task.model_dump_json()), rng)
            with suppress(KeyError, TypeError):  # work takes as long as the server says
                about["config"]["client"]["epochs"] = 1
            record["task"] = ConfigRecord({"task": to_json(about, rng)})
        message = Message(record, dst_node_id=1, message_type=MessageType.TRAIN)
        return self._answer(message)

    def request_messages(self, rng: random.Random) -> str:
        """A request as Flower's message, at a client."""
        recorded = self.recorded[rng.choice(METHODS)]
        record = pack(recorded.requests[0].to_bytes(), recorded.task)
        try:
            changed = change_message(Message(record, dst_node_id=1, message_type=MessageType.TRAIN), rng)
            if not isinstance(changed, Message) or not changed.has_content():
                raise TypeError
        except Exception:  # as Connection does
            return "not read"
        return self._answer(changed)

    @cached_property
    def deployment(self) -> Deployment:
        recorded = self.recorded["fedseal"]
        return Deployment(recorded.config, recorded.requests[0], self.client, self.root / "deployment")

    def http_requests(self, rng: random.Random) -> str:
        """An HTTP request of a client, at a real SuperLink."""
        return self.deployment.exchange(rng, at_server=True)

    def http_answers(self, rng: random.Random) -> str:
        """The SuperLink's answer, at a client."""
        return self.deployment.exchange(rng, at_server=False)

    def close(self) -> None:
        if "deployment" in self.__dict__:
            self.deployment.close()

    def _answer(self, message: Message) -> str:
        find_run(message)
        answer = self.client._reply(message, lambda text: None)
        return "error to the server" if answer.has_error() else "answered"

    def last_messages(self, rng: random.Random) -> str:
        """The server's last message, with the model, at a client."""
        record = pack(change_file(self.model, rng))
        name = rng.choice((*VALUES, "north"))
        record[END_OF_RUN] = ConfigRecord(
            {"client": name if isinstance(name, str | int | float | bool) else "x"}
        )
        with suppress(OverflowError, ValueError, TypeError):  # no message can hold it
            said: list[str] = []
            self.client._keep_model(
                Message(record, dst_node_id=1, message_type=MessageType.QUERY), said.append
            )
            return "refused" if "not estimated" in said[-1] else "used"
        return "not sent"

    def checkpoints(self, rng: random.Random) -> str:
        """A server's state on disk."""
        path = self.root / "changed.safetensors"
        path.write_bytes(change_file(self.state, rng))
        try:
            Checkpoint.load(path, self.fingerprint)
        except UserError:
            return "refused"
        return "used"

    def memories(self, rng: random.Random) -> str:
        """A client's memory on disk, at times with secrets; the next request reads it."""
        name = rng.choice(sorted(self.memories_of))
        (file, memory), recorded = self.memories_of[name], self.recorded[name]
        request = recorded.requests[0]
        if rng.random() < 0.3:
            memory = add_checksum(put_secrets(memory, make_keys(), KEYS))
            request = Packet(scalars={PHASE: KEYS, "round": 1})
        file.write_bytes(change_file(memory, rng))
        accepted = bool(MemoryFile(file).read())
        record = pack(request.to_bytes(), recorded.task)
        end = self._answer(Message(record, dst_node_id=1, message_type=MessageType.TRAIN))
        return f"{'used' if accepted else 'refused'}, {end}"

    def stores(self, rng: random.Random) -> str:
        """The memories of a simulation on disk."""
        path = self.root / "changed.sqlite"
        path.write_bytes(change_bytes(self.store, rng))
        try:
            with closing(MemoryStore(path, self.fingerprint)) as store:
                for client in range(2):
                    store.put(client, store.get(client) or b"new")
                store.commit(store.t + 1)
        except UserError:
            return "refused"
        finally:
            for suffix in ("", "-wal", "-journal"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
        return "used"

    def models(self, rng: random.Random) -> str:
        """A model file."""
        path = self.root / "model.safetensors"
        path.write_bytes(change_file(self.model, rng))
        try:
            load(path).predict(self.root / "images" / "test", adapt=rng.random() < 0.5)
        except UserError:
            return "refused"
        return "used"


def change_message(message: Message, rng: random.Random) -> Message:
    """A message with other records, or with a change in one of the parts in which Flower sends it."""
    if rng.random() < 0.5:
        parts = {name: part.deflate() for name, part in get_all_nested_objects(message).items()}
        name = rng.choice(sorted(parts))
        parts[name] = change_bytes(parts[name], rng)
        changed: Message = inflate_object_from_contents(message.object_id, parts)  # type: ignore[assignment]
        return changed
    data, records = message.content.array_records["packet"]["packet"].data, message.content
    lying = Array(
        rng.choice(("uint8", "float8", "O", "")),
        rng.choice(((), (1,), (10**12,))),
        rng.choice(("packet", "")),
        data,
    )
    what = rng.choice(("array", "none", "other", "two", "many", "config", "metrics"))
    if what == "array":
        records["packet"] = ArrayRecord({"packet": lying})
    elif what == "none":
        del records["packet"]
    elif what == "other":
        records["packet"] = ArrayRecord({"x": lying})
    elif what == "two":
        records["packet"] = ArrayRecord({"x": lying, "packet": lying})
    elif what == "many":
        records["packet"] = ArrayRecord({str(i): Array("uint8", (0,), "", b"") for i in range(1000)})
    elif what == "config":
        records["packet"] = ConfigRecord({"packet": rng.choice((data, "x", 1.0, [1, 2]))})
    else:
        records["packet"] = MetricRecord({"packet": rng.choice((1, float("nan"), [1.0]))})
    return message


# ------------------------------------------------------------------ all of it

PROPORTIONS = {
    "replies": 10,
    "reply_messages": 4,
    "secure_phases": 4,
    "requests": 8,
    "request_messages": 2,
    "last_messages": 2,
    "checkpoints": 4,
    "memories": 4,
    "stores": 2,
    "models": 4,
    "http_requests": 1,
    "http_answers": 1,
}


@dataclass
class Count:
    """How many inputs ended how, the bad ones, and the most memory that one took."""

    ends: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    memory: int = 0


def fuzz(root: Path, total: int) -> Iterator[tuple[str, Count]]:
    """Feeds all kinds of input to their readers, and yields how they ended."""
    with closing(Readers(root)) as readers:
        readers.prepare()
        for kind, share in PROPORTIONS.items():
            count = Count()
            for number in range(-(-total * share // sum(PROPORTIONS.values()))):
                end, memory = try_input(
                    lambda kind=kind, number=number: getattr(readers, kind)(random.Random(f"{kind}-{number}"))
                )
                count.ends[end] += 1
                count.memory = max(count.memory, memory)
                if end.startswith((ERROR, HANG)) or memory > MEMORY:
                    count.bad.append(f"{kind} {number}: {end}, {memory / 1e6:.0f} MB")
            yield kind, count


def try_input(read: Callable[[], str]) -> tuple[str, int]:
    """How an input ends, and the bytes of memory that it takes."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    start = reset_peak()
    try:
        end = read()
    except HangError:
        end = HANG
    except Exception as error:
        end = f"{ERROR} {type(error).__name__}: {str(error)[:300]}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return end, peak(os.getpid()) - start


def report() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    out = options.out.absolute() if options.out else None
    set_up_process("portable")
    torch.set_num_threads(1)  # the models are tiny
    logging.disable()  # a client warns of each damaged memory
    table, bad, memory = {}, [], 0
    with tempfile.TemporaryDirectory() as folder:
        for kind, count in fuzz(Path(folder), options.inputs):
            table[kind] = dict(sorted(count.ends.items()))
            bad += count.bad
            memory = max(memory, count.memory)
            print(f"{kind}: {table[kind]}, at most {count.memory / 1e6:.0f} MB", flush=True)
            for one in count.bad[:10]:
                print(f"  {one}", flush=True)
        os.chdir("/")
    total = sum(sum(ends.values()) for ends in table.values())
    hangs = sum(ends.get(HANG, 0) for ends in table.values())
    print(f"{total:,} inputs: {len(bad) - hangs} errors, {hangs} hangs, at most {memory / 1e6:.0f} MB")
    if out:
        about = {"inputs": total, "errors": len(bad) - hangs, "hangs": hangs, "memory": memory, "ends": table}
        write_counts(out, about)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(report())
