"""The local engine: clients in worker processes on this machine."""

import multiprocessing
import signal
import sys
import traceback
import types
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from fedseal.core import Packet, Reply
from fedseal.machine import cores, threads
from fedseal.models import Network
from fedseal.sites import Diagnosis, Sites

DIED = "its worker process died twice (out of memory?)"
TRIES = 2  # a worker that dies is replaced, and its client tried once more

Done = tuple[bytes, bytes, dict[str, int]]  # reply, memory, counts of right labels


class Desk:
    """Serves any client of a federation, one after another, with one model."""

    def __init__(self, sites: Sites) -> None:
        self.sites = sites
        self.model: Network = sites.network()
        self.method = sites.config.chosen()

    def serve(self, k: int, request: Packet, memory: bytes) -> Done:
        """One client's part of a round. Depends on nothing but its arguments."""
        diagnosis = Diagnosis()
        client = self.sites.client(k, self.model, diagnosis.note)
        known = Packet.from_bytes(memory) if memory else Packet()
        reply, remembered = self.method.client_round(request, known, client)
        counts = diagnosis.judged(self.sites.truth(k))
        return reply.to_bytes(), remembered.to_bytes(), counts


class LocalEngine:
    """Engine on this machine. The number of workers changes the speed and nothing else."""

    def __init__(self, sites: Sites, memories: Mapping[str, bytes] | None = None) -> None:
        self.clients = range(len(sites.federation.clients))
        self._sites = sites
        self._memories = {int(k): memory for k, memory in (memories or {}).items()}
        self._count = sites.config.engine.workers or (cores() if sites.device.type == "cpu" else 1)
        self._workers: list[_Worker] = []
        self._desk: Desk | None = None

    def exchange(self, requests: Mapping[int, Packet]) -> Iterator[Reply]:
        """Yields replies as they come; the memories change only when a client's reply is there."""
        wires: dict[int, bytes] = {}  # clients mostly get the very same packet: it is packed once
        for packet in requests.values():
            if id(packet) not in wires:
                wires[id(packet)] = packet.to_bytes()
        # The longest work first, so that no worker is left with it at the end.
        order = sorted(requests, key=lambda k: not requests[k].scalars.get("train", True))
        served = self._served_here if self._count == 1 else self._served_by_workers
        for k, done in served(order, {k: (id(p), wires[id(p)]) for k, p in requests.items()}):
            down = len(wires[id(requests[k])])
            if isinstance(done, str):
                yield Reply(k, Packet(), down=down, problem=done)
                continue
            reply, memory, diagnosis = done
            self._memories[k] = memory
            yield Reply(k, Packet.from_bytes(reply), down, len(reply), diagnosis)

    def memories(self) -> dict[str, bytes]:
        return {str(k): memory for k, memory in self._memories.items()}

    def close(self) -> None:
        for worker in self._workers:
            worker.pipe.close()
        for worker in self._workers:
            worker.process.kill()  # it holds nothing that is not here, too
            worker.process.join()
        self._workers = []

    def _served_here(
        self, order: list[int], wires: Mapping[int, tuple[int, bytes]]
    ) -> Iterator[tuple[int, Done | str]]:
        self._desk = self._desk or Desk(self._sites)
        packets: dict[int, Packet] = {}
        for k in order:
            number, wire = wires[k]
            if number not in packets:
                packets[number] = Packet.from_bytes(wire)
            with threads(self._sites.config.client.threads):
                done = self._desk.serve(k, packets[number], self._memories.get(k, b""))
            yield k, done

    def _served_by_workers(
        self, order: list[int], wires: Mapping[int, tuple[int, bytes]]
    ) -> Iterator[tuple[int, Done | str]]:
        while len(self._workers) < min(self._count, len(order)):
            self._workers.append(_Worker(self._sites))
        for worker in self._workers:
            worker.seen.clear()
        queue, tries = deque(order), dict.fromkeys(order, 0)
        idle, busy = list(self._workers), dict[Connection, tuple[_Worker, int]]()
        while queue or busy:
            while queue and idle:
                worker, k = idle.pop(), queue.popleft()
                worker.ask(k, *wires[k], self._memories.get(k, b""))
                busy[worker.pipe] = worker, k
            for pipe in wait(list(busy)):
                assert isinstance(pipe, Connection)
                worker, k = busy.pop(pipe)
                try:
                    done = pipe.recv()
                except (EOFError, OSError):  # died, maybe amidst its answer
                    self._workers.remove(worker)
                    worker = _Worker(self._sites)
                    self._workers.append(worker)
                    tries[k] += 1
                    if tries[k] < TRIES:
                        queue.append(k)
                    else:
                        yield k, DIED
                else:
                    if isinstance(done, _Failure):
                        raise RuntimeError(f"client {k} failed in its worker:\n{done.text}")
                    yield k, done
                idle.append(worker)


class _Failure:
    def __init__(self, text: str) -> None:
        self.text = text


class _Worker:
    def __init__(self, sites: Sites) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.seen: set[int] = set()  # packets of this round that the worker has by now
        self.process = context.Process(target=_work, args=(other, sites), daemon=True)
        with _no_main(), _no_interrupt():
            self.process.start()
        other.close()

    def ask(self, k: int, number: int, wire: bytes, memory: bytes) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # dead: seen when its answer is read
            self.pipe.send((k, not self.seen, number, b"" if number in self.seen else wire, memory))
        self.seen.add(number)


def _work(pipe: Connection, sites: Sites) -> None:
    """The life of a worker: it ends when the other end of the pipe does."""
    torch.set_num_threads(sites.config.client.threads)
    desk, packets = Desk(sites), dict[int, Packet]()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            k, first, number, wire, memory = pipe.recv()
            if first:  # of a round
                packets.clear()
            if wire:
                packets[number] = Packet.from_bytes(wire)
            answer: Any
            try:
                answer = desk.serve(k, packets[number], memory)
            except Exception:
                answer = _Failure(traceback.format_exc())
            pipe.send(answer)


@contextmanager
def _no_interrupt() -> Iterator[None]:
    """Ctrl-C is for the run, which ends its workers: a new process has it blocked from the start.

    Here it is held back meanwhile, not lost.
    """
    resource_tracker.ensure_running()  # which would unblock it again if it were started with the first worker
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _no_main() -> Iterator[None]:
    """Keeps a new process from importing the user's script again, which would start the run once more."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
