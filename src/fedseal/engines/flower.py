"""The Flower engine: carries packets over a Flower Grid, to simulated clients or to other machines."""

import os

# Before Flower is there: nothing is reported to anybody, nothing is installed behind one's back.
os.environ |= {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # its workers do the work, and are as dear as any
}

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

from fedseal.config import Config, parse
from fedseal.core import Packet, Reply
from fedseal.errors import UserError
from fedseal.machine import versions
from fedseal.methods import code, section
from fedseal.settings import Settings
from fedseal.sites import Sites

log = logging.getLogger("fedseal")

POLL = 0.1  # seconds between looks for replies
LOOK = 2.0  # seconds between looks for clients that went and came back
BYE = "bye"  # in a message to a client: the run has ended
GONE = (ErrorCode.NODE_UNAVAILABLE, ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)


class Job(Settings):
    """What a client is told besides its packet: all that it takes to build its site anew at any time."""

    run: str  # tells runs apart in a client's memory
    client: str  # its name
    version: str  # of fedseal at the server
    classes: int
    channels: int
    size: int
    config: dict[str, Any]
    code: str = ""  # hash of the file of a method that is not fedseal's
    memory: str = ""  # of simulated clients alone: the folder of their memories

    def settings(self) -> Config:
        return parse(self.config, "the server's configuration")


def job_of(sites: Sites, run: str, *, data: bool) -> Job:
    """The job of any client. What a client has no use for stays at the server; `data`: simulated clients
    deal the data themselves."""
    pool, raw = sites.federation.pool, sites.config.to_dict()
    method = sites.config.method
    kept = ("method", "seed", "model", "augment", "client", section(method))
    config = {key: raw[key] for key in kept}
    config["augment"] = {"flip": pool.flips} | raw["augment"]
    if data:
        config |= {"data": raw["data"], "engine": raw["engine"]}
    else:
        config["method"] = Path(method).name  # where its file lies is the server's own affair
    return Job(
        run=run,
        client="",
        version=versions()["fedseal"],
        classes=len(pool.classes),
        channels=pool.pixels.shape[1],
        size=pool.pixels.shape[2],
        config=config,
        code=code(method),
    )


def pack(wire: bytes, job: Job | None = None) -> RecordDict:
    """A packet's bytes as a Flower record: one array, so that every type of tensor comes through exactly."""
    record = RecordDict({"packet": ArrayRecord({"packet": Array("uint8", (len(wire),), "packet", wire)})})
    if job is not None:
        record["job"] = ConfigRecord({"job": job.model_dump_json()})
    return record


def unpack(record: RecordDict) -> bytes:
    """The inverse of `pack`."""
    return record.array_records["packet"]["packet"].data


class Roll:
    """Which node is which of the clients: by its registered key, or by asking it where nodes have no keys."""

    def __init__(self, grid: Grid, clients: Collection[str], keys: Mapping[bytes, str] | None = None) -> None:
        self.grid, self.clients, self.keys = grid, set(clients), keys
        self.names: dict[int, str] = {}
        self.asked: dict[str, int] = {}

    def present(self) -> dict[str, NodeInfo]:
        """The clients that are connected now. Of two with the same name the later one counts."""
        nodes = sorted(self.grid.get_nodes(), key=lambda node: node.last_activated_at)
        if self.keys is None:
            self._ask([node.node_id for node in nodes])
            named = {self.names[node.node_id]: node for node in nodes if node.node_id in self.names}
            return {name: node for name, node in named.items() if name in self.clients}
        return {self.keys[node.public_key]: node for node in nodes if node.public_key in self.keys}

    def _ask(self, nodes: Collection[int]) -> None:
        for node in set(nodes) - self.names.keys() - set(self.asked.values()):
            question = Message(RecordDict(), node, MessageType.QUERY)
            self.asked |= dict.fromkeys(self.grid.push_messages([question]), node)
        for answer in self.grid.pull_messages(list(self.asked)) if self.asked else ():
            node = self.asked.pop(answer.metadata.reply_to_message_id, 0)
            if node and answer.has_content() and "client" in answer.content.config_records:
                name = one_line(str(answer.content.config_records["client"].get("name", "")))
                self.names[node] = name
                if name not in self.clients:
                    log.warning("a client called '%s' is there, which nobody asked for: it has no part", name)

    def wait(self, number: int, seconds: float, tell: Callable[[int], None] = lambda there: None) -> set[str]:
        """The clients' names, once so many are there; `tell` is told how many there are, when it changes."""
        end, told = time.monotonic() + seconds, -1
        while True:
            with flower_errors():
                there = set(self.present())
            if len(there) != told:
                told = len(there)
                tell(told)
            if told >= number:
                return there
            if time.monotonic() > end:
                names = f" ({', '.join(sorted(there))})" if there else ""
                raise UserError(
                    f"Only {told} of {number} clients came within {seconds:g} seconds{names}: start the"
                    " others with 'fedseal join', or wait longer with --wait."
                )
            time.sleep(POLL)


class FlowerEngine:
    """Engine over a Grid. Client k is the k-th of the names; `check` raises if Flower has ended."""

    def __init__(
        self,
        grid: Grid,
        roll: Roll,
        names: Sequence[str],
        job: Job,
        *,
        deadline: float | None,
        check: Callable[[], None] = lambda: None,
        memories: Callable[[], dict[str, bytes]] = dict,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.clients = range(len(names))
        self.grid, self.roll, self.names, self.job = grid, roll, names, job
        self.deadline, self.check, self.memories, self.close = deadline, check, memories, close
        self.t = 0  # the last round that was carried

    def exchange(self, requests: Mapping[int, Packet]) -> Iterator[Reply]:
        """Yields replies as they come, and a problem for every client without one at the deadline.

        A client that went away and came back within the deadline is sent its request again.
        """
        wires = {id(packet): packet.to_bytes() for packet in {id(p): p for p in requests.values()}.values()}
        sizes = {k: len(wires[id(packet)]) for k, packet in requests.items()}
        end = time.monotonic() + self.deadline if self.deadline else float("inf")
        waiting, sent, seen = set(requests), dict[str, int](), dict[int, str]()
        looked = float("-inf")
        while waiting:
            self.check()
            with flower_errors():
                if time.monotonic() > looked + LOOK:
                    present, looked = self.roll.present(), time.monotonic()
                    for k in sorted(waiting):
                        node = present.get(self.names[k])
                        if node is not None and seen.get(k) != node.last_activated_at:
                            seen[k] = node.last_activated_at
                            sent |= dict.fromkeys(self._send(node, k, wires[id(requests[k])]), k)
                replies = list(self.grid.pull_messages(list(sent))) if sent else []
            for k in sorted(waiting - seen.keys()):
                waiting.remove(k)
                yield Reply(k, Packet(), problem="it is not connected")
            for message in replies:
                k = sent.pop(message.metadata.reply_to_message_id, -1)
                if k in waiting and not (message.has_error() and message.error.code in GONE):
                    waiting.remove(k)
                    yield read(message, k, sizes[k], simulated=bool(self.job.memory))
            if time.monotonic() > end:
                break
            time.sleep(POLL if waiting else 0)
        for k in sorted(waiting):
            yield Reply(k, Packet(), sizes[k], problem=f"no reply within {self.deadline:g} seconds")
        self.t = max([self.t, *(int(packet.scalars.get("t", 0)) for packet in requests.values())])

    def _send(self, node: NodeInfo, k: int, wire: bytes) -> list[str]:
        job = self.job.model_copy(update={"client": self.names[k]})
        message = Message(pack(wire, job), node.node_id, MessageType.TRAIN, ttl=self.deadline)
        return [name for name in self.grid.push_messages([message]) if name]


def read(message: Message, k: int, down: int, *, simulated: bool = False) -> Reply:
    """A client's reply, or what is wrong with it. Nothing that a client sends can do more than that; only a
    simulation counts right labels, too."""
    if message.has_error():
        reason = message.error.reason or f"error {message.error.code}"
        return Reply(k, Packet(), down, problem=f"it failed: {one_line(reason)}")
    try:
        wire = unpack(message.content)
        if len(wire) > largest(down):
            size = f"{len(wire) / 1e6:.1f} MB, where {down / 1e6:.1f} MB were sent"
            return Reply(k, Packet(), down, len(wire), problem=f"its reply is far too large: {size}")
        packet = Packet.from_bytes(wire)
        if not all(isinstance(value, bool | int | float | str) for value in packet.scalars.values()):
            raise TypeError("a scalar is none")
        records = message.content.config_records if simulated else {}
        counts = records.get("diagnosis", ConfigRecord())
        return Reply(k, packet, down, len(wire), {name: int(str(n)) for name, n in counts.items()})
    except Exception as error:  # whatever it sent, the round goes on without it
        return Reply(k, Packet(), down, problem=f"its reply cannot be read ({type(error).__name__})")


def largest(sent: int) -> int:
    """Bytes that the reply to so many may have."""
    return 4 * sent + 1_000_000


def one_line(text: str) -> str:
    """Text from elsewhere, fit for a log: one line, not too long, nothing that a terminal obeys."""
    words = "".join(c if c.isprintable() else " " for c in text).split()
    return " ".join(words)[:300]


@contextmanager
def flower_errors() -> Iterator[None]:
    """Trouble between this process and Flower's own becomes one sentence."""
    try:
        yield
    except httpx.HTTPError as error:
        raise UserError(
            f"The connection to Flower's SuperLink broke ({one_line(str(error))}): go on with --resume."
        ) from error
