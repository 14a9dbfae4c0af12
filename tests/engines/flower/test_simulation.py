"""Memories in Flower's simulation: only those of the requested clients become files, and a client that sends
no reply keeps the one it had."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from conftest import settings

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


def family(pid: int) -> list[int]:
    """A process and all of its descendants."""
    listings = Path(f"/proc/{pid}/task").glob("*/children")  # Ray is started by a thread
    children = [int(child) for listing in listings for child in listing.read_text().split()]
    return [pid, *(number for child in children for number in family(child))]


def listening_addresses(processes: list[int]) -> set[str]:
    """The addresses on which processes listen, in hexadecimal digits as the kernel writes them."""
    sockets = set()
    for number in processes:
        with suppress(OSError):  # it may have ended
            sockets |= {path.readlink().name for path in Path(f"/proc/{number}/fd").iterdir()}
    rows = [
        row.split()
        for name in ("tcp", "tcp6")
        for row in Path("/proc/net", name).read_text().splitlines()[1:]
    ]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def test_ray_listens_on_loopback_only_and_its_folder_is_private(own: dict[str, Any], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedseal", "train", "folders", "--quiet", "--out", str(tmp_path / "run")]
    command += ["--engine", "flower", "--workers", "1", *settings(own | {"rounds": 100_000})]
    with TemporaryDirectory(dir="/tmp") as temporary:  # its path is short enough for Ray
        watch_simulation(command, tmp_path / "run" / "events.jsonl", Path(temporary))
        assert not list(Path(temporary).iterdir())


def watch_simulation(command: list[str], events: Path, temporary: Path) -> None:
    """Looks at the sockets and at the temporary folder of a simulation in its first rounds."""
    process = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(temporary)})
    try:
        end = time.monotonic() + 120
        while not (events.exists() and events.stat().st_size) and time.monotonic() < end:
            assert process.poll() is None
            time.sleep(0.1)
        members = family(process.pid)
        assert len(members) > 3  # Ray's servers and workers
        addresses = listening_addresses(members)
        assert addresses and addresses <= LOOPBACK
        [folder] = temporary.glob("fs-*")
        assert folder.stat().st_mode & 0o777 == 0o700 and any(folder.glob("r/session_*"))
    finally:
        process.terminate()
        process.wait(60)
