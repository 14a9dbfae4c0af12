"""Memories in Flower's simulation: only those of the requested clients become files, and a client that sends
no reply keeps the one it had."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedseal.core import Packet, Problem, Reply
from fedseal.engines.flower.simulation import SimulationEngine
from fedseal.engines.memory_store import MemoryStore


class FakeEngine:
    """Its clients add a letter to their memories. Client 2 fails after that."""

    clients = range(9)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: list[dict[str, bytes]] = []

    def exchange(self, requests: Mapping[int, Packet]) -> Iterator[Reply]:
        self.seen.append({file.name: file.read_bytes() for file in self.folder.iterdir()})
        for k in requests:
            file = self.folder / str(k)
            file.write_bytes((file.read_bytes() if file.exists() else b"") + b"x")
            yield Reply(k, Packet(), problem=Problem("it failed") if k == 2 else None)

    def close(self) -> None: ...


def test_memories_travel_as_files_of_the_requested_clients(tmp_path: Path) -> None:
    memories, fake = MemoryStore(), FakeEngine(tmp_path)
    for k in (1, 2, 3):
        memories.put(k, f"client {k}: ".encode())
    inner: Any = fake
    engine = SimulationEngine(inner, memories, tmp_path)
    for requested in ([0, 1, 2], [2, 1]):
        replies = list(engine.exchange(dict.fromkeys(requested, Packet())))
        assert [reply.client for reply in replies] == requested
    assert fake.seen == [
        {"1": b"client 1: ", "2": b"client 2: "},
        {"1": b"client 1: x", "2": b"client 2: "},
    ]
    stored = [memories.get(k) for k in range(5)]
    assert stored == [b"x", b"client 1: xx", b"client 2: ", b"client 3: ", b""]
    assert not list(tmp_path.iterdir())
    memories.close()
