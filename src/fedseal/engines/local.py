"""The local engine: clients in worker processes on this machine."""

import traceback
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait

import torch

from fedseal.core import Packet, Problem, Reply
from fedseal.engines.client import SimulatedClients
from fedseal.engines.memory_store import MemoryStore
from fedseal.errors import UserError
from fedseal.run_setup import RunSetup
from fedseal.system.crash import NOT_ENOUGH_MEMORY, describe_own_error, is_out_of_memory
from fedseal.system.machine import cores
from fedseal.system.workers import start_worker

ATTEMPTS = 2  # a worker that dies is replaced, and its client is tried once more


@dataclass(frozen=True)
class _Answer:
    """A client's part of a round, as it travels between processes."""

    reply: bytes
    memory: bytes
    label_counts: dict[str, int]


@dataclass(frozen=True)
class _Failure:
    """An error in a worker: its traceback, or a sentence if the cause is known."""

    text: str
    sentence: str


class LocalEngine:
    """Runs clients on this machine. The number of workers affects only the speed."""

    def __init__(self, setup: RunSetup, memories: MemoryStore | None = None) -> None:
        self.clients = range(len(setup.federation.clients))
        self._setup = setup
        self.memories = memories or MemoryStore()
        self._count = setup.config.engine.workers or (cores() if setup.device.type == "cpu" else 1)
        self._workers: list[_Worker] = []
        self._simulated: SimulatedClients | None = None

    def exchange(self, requests: Mapping[int, Packet]) -> Iterator[Reply]:
        """Yields replies as they arrive; a client's memory changes only when its reply is here."""
        wires: dict[int, bytes] = {}  # most clients get the same packet: it is serialised once
        for packet in requests.values():
            if id(packet) not in wires:
                wires[id(packet)] = packet.to_bytes()
        # Long work first, so that no worker is left with it at the end.
        order = sorted(requests, key=lambda k: not requests[k].trains)
        run = self._run_here if self._count == 1 else self._run_in_workers
        for k, answer in run(order, {k: (id(p), wires[id(p)]) for k, p in requests.items()}):
            down = len(wires[id(requests[k])])
            if isinstance(answer, Problem):
                yield Reply(k, Packet(), down=down, problem=answer)
                continue
            self.memories.put(k, answer.memory)
            packet = Packet.from_bytes(answer.reply)
            yield Reply(k, packet, down, len(answer.reply), answer.label_counts)

    def close(self) -> None:
        for worker in self._workers:
            worker.pipe.close()
        for worker in self._workers:
            worker.process.kill()  # it holds nothing that is not also here
            worker.process.join()
        self._workers = []

    def _run_here(
        self, order: list[int], wires: Mapping[int, tuple[int, bytes]]
    ) -> Iterator[tuple[int, _Answer | Problem]]:
        self._simulated = self._simulated or SimulatedClients(self._setup)
        packets: dict[int, Packet] = {}
        for k in order:
            number, wire = wires[k]
            if number not in packets:
                packets[number] = Packet.from_bytes(wire)
            yield k, _answer(self._simulated, k, packets[number], self.memories.get(k))

    def _run_in_workers(
        self, order: list[int], wires: Mapping[int, tuple[int, bytes]]
    ) -> Iterator[tuple[int, _Answer | Problem]]:
        new = [_Worker() for _ in range(len(self._workers), min(self._count, len(order)))]
        for worker in new:
            worker.send(self._setup)
        self._workers += new
        for worker in self._workers:
            worker.seen.clear()
        queue, attempts = deque(order), dict.fromkeys(order, 0)
        idle, busy = list(self._workers), dict[Connection, tuple[_Worker, int]]()
        while queue or busy:
            while queue and idle:
                worker, k = idle.pop(), queue.popleft()
                worker.ask(k, *wires[k], self.memories.get(k))
                busy[worker.pipe] = worker, k
            for pipe in wait(list(busy)):
                assert isinstance(pipe, Connection)
                worker, k = busy.pop(pipe)
                try:
                    answer = pipe.recv()
                except (EOFError, OSError):  # it died, maybe in the middle of its answer
                    self._workers.remove(worker)
                    worker = _Worker()
                    worker.send(self._setup)
                    self._workers.append(worker)
                    attempts[k] += 1
                    if attempts[k] < ATTEMPTS:
                        queue.append(k)
                    else:
                        yield k, Problem("its worker process died twice (out of memory?)", worker_died=True)
                else:
                    if isinstance(answer, _Failure):
                        if answer.sentence:
                            raise UserError(answer.sentence)
                        raise RuntimeError(f"client {k} failed in its worker:\n{answer.text}")
                    yield k, answer
                idle.append(worker)


def _answer(clients: SimulatedClients, k: int, request: Packet, memory: bytes) -> _Answer:
    result = clients.run(k, request, memory)
    return _Answer(result.reply.to_bytes(), result.memory, result.label_counts)


class _Worker:
    """A process that waits for a `RunSetup`, and then for clients' requests."""

    def __init__(self) -> None:
        self.pipe, other = Pipe()
        self.seen: set[int] = set()  # packets of this round that the worker already has
        self.process = start_worker(_work, other)
        other.close()

    def ask(self, k: int, number: int, wire: bytes, memory: bytes) -> None:
        self.send((k, not self.seen, number, b"" if number in self.seen else wire, memory))
        self.seen.add(number)

    def send(self, value: object) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it died: noticed when its answer is read
            self.pipe.send(value)


def _work(pipe: Connection) -> None:
    """The worker process; it ends when the other end of the pipe is closed."""
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        start: SimulatedClients | _Failure
        try:
            setup = pipe.recv()
            torch.set_num_threads(setup.config.client.threads)
            start = SimulatedClients(setup)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:
            start = _failure(error)
        packets = dict[int, Packet]()
        while True:
            k, first, number, wire, memory = pipe.recv()
            if first:  # request of a new round
                packets.clear()
            if wire:
                packets[number] = Packet.from_bytes(wire)
            answer: _Answer | _Failure
            try:
                answer = start if isinstance(start, _Failure) else _answer(start, k, packets[number], memory)
            except Exception as error:
                answer = _failure(error)
            pipe.send(answer)


def _failure(error: Exception) -> _Failure:
    if isinstance(error, UserError):
        return _Failure("", str(error))
    if is_out_of_memory(error):
        return _Failure("", NOT_ENOUGH_MEMORY)
    return _Failure("".join(traceback.format_exception(error)), describe_own_error(error))
