"""The cost of many clients: 1,000,000 clients compared with 100, of which 10 are sampled per round.

Both federations have the same images, the same server and the same work in a round, with a checkpoint after
each round. A client's name and images are computed from its number when they are needed. There are two
comparisons: at the start of a run, when no client has been sampled yet, and late in a run, when every client
has a memory p̄ in the store. Every case runs in a new process, and the cases take turns.

Memory is the sum of the highest resident sizes (VmHWM) of the parent and its workers, without pages of files
(RssFile). Those are libraries and images, which the processes share and the kernel can drop. Without them
less memory is independent of the number of clients, so the ratio is stricter.

The bytes of a checkpoint are all bytes that the process passes to the system's write calls (wchar) while it
saves checkpoints, and when it closes the store, which moves SQLite's log into the file. The time to resume is
that of everything between the imports and the first request to a worker, without the server's training.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from fedseal.config.config import parse
from fedseal.core import Packet, PreparationStep
from fedseal.data.pool import Federation, Ints
from fedseal.data.sources import get_published
from fedseal.engines.local import LocalEngine
from fedseal.engines.memory_store import MemoryStore
from fedseal.rounds import RoundDone, rounds, sample_cohort
from fedseal.run_setup import RunSetup
from fedseal.storage.checkpoint import memories_file, open_checkpoint
from fedseal.system.environment import set_up_process
from fedseal.system.machine import threads
from fedseal.training.evaluate import Evaluator
from fedseal.training.observers import Checkpoints, EventLog

FEW, MANY, EACH = 100, 1_000_000, 20
COHORT = 10
LABELLED, VALIDATION, TEST = 500, 200, 1000
WARM_UP, ROUNDS, RESUMES = 3, 12, 30
PROCESSES = 2  # per case
RATIOS = {
    "seconds": "seconds per round",
    "megabytes": "peak memory",
    "checkpoint kilobytes": "bytes per checkpoint",
    "resume milliseconds": "seconds to resume",
}

Measured = dict[str, float]


def run() -> list[tuple[str, float, str]]:
    """Rows of name, measured ratio and target."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for late in (False, True):
            cases: dict[int, list[Measured]] = {FEW: [], MANY: []}
            for clients in (FEW, MANY) * PROCESSES:
                cases[clients].append(in_new_process(Path(folder), clients, late))
            when = "every client has been sampled" if late else "start of a run"
            few, many = (median(measured) for measured in cases.values())
            for key in few:
                print(f"{when}, {key}: {FEW} clients {few[key]:.2f}, {MANY:,} clients {many[key]:.2f}")
            for key, what in RATIOS.items():
                rows.append((f"{MANY:,} / {FEW} clients, {what}, {when}", many[key] / few[key], "<= 1.2"))
    return rows


def median(measured: list[Measured]) -> Measured:
    return {key: statistics.median(one[key] for one in measured) for key in measured[0]}


def in_new_process(folder: Path, clients: int, late: bool) -> Measured:
    """Measures a case; late in a run, with a copy of a store that has a memory of every client."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        if late:
            full = folder / f"{clients}.sqlite"
            if not full.exists():
                fill(full, clients)
            shutil.copyfile(full, memories_file(Path(out) / "state.safetensors"))
            os.sync()  # or the disk would still be busy with it
        # The module must have its real name, under which worker processes import it.
        command = [sys.executable, "-c", "from bench import fleet; fleet.main()", "--case", str(clients)]
        done = subprocess.run([*command, "--out", out], check=True, stdout=subprocess.PIPE)
    measured: Measured = json.loads(done.stdout)
    return measured


def fill(path: Path, clients: int) -> None:
    """A store with the memory of every client, after round 0."""
    confidences = torch.randn(EACH, 10, generator=torch.Generator().manual_seed(0)).mul(5).softmax(dim=1)
    images = {"mean": confidences, "count": torch.ones(EACH, dtype=torch.int64)}
    memory = Packet({"images": images}, {"t": 0}).to_bytes()
    with closing(MemoryStore(path)) as store:
        for k in range(clients):
            store.put(k, memory)
        store.commit(0)


def case(out: Path, clients: int) -> Measured:
    """Median seconds of a round, megabytes of all processes together, and the cost of checkpoints."""
    set_up_process()
    setup, state = federate(clients), out / "state.safetensors"
    seconds, written, saved = list[float](), 0, 0
    memories = MemoryStore(memories_file(state))
    engine = LocalEngine(setup, memories)
    with threads(setup.config.server.threads):
        log = EventLog(out / "events.jsonl", 0)
        checkpoints = Checkpoints(state, memories, 1, WARM_UP + ROUNDS, time.perf_counter)
        server, start = setup.server(), time.perf_counter()
        for event in rounds(setup.config, server, engine, setup.federation.names, Evaluator(setup, server)):
            log(event)
            before = written_bytes()
            checkpoints(event)
            written += written_bytes() - before
            saved += isinstance(event, PreparationStep | RoundDone)
            if isinstance(event, RoundDone):
                seconds.append(time.perf_counter() - start)
                start = time.perf_counter()
    peaks = [peak(pid) for pid in (os.getpid(), *(worker.pid for worker in active_children()))]
    engine.close()
    before = written_bytes()
    memories.close()
    written += written_bytes() - before
    resident, files = (sum(column) for column in zip(*peaks, strict=True))
    return {
        "seconds": statistics.median(seconds[WARM_UP:]),
        "megabytes": resident - files,
        "megabytes with files": resident,
        "checkpoint kilobytes": written / saved / 1000,
        **resume(out, clients),
    }


def resume(out: Path, clients: int) -> Measured:
    """Median milliseconds until a run can continue, and how many of them the checkpoint and memories take."""
    total, reading = list[float](), list[float]()
    for t in range(RESUMES):
        start = time.perf_counter()
        setup = federate(clients)
        server = setup.server()
        begin = time.perf_counter()
        checkpoint, memories = open_checkpoint(out / "state.safetensors", "")
        with closing(memories):
            for k in sample_cohort(0, t, range(clients), COHORT):
                memories.get(k)
            reading.append(time.perf_counter() - begin)
            LocalEngine(setup, memories)
            Evaluator(setup, server)
            EventLog(out / "events.jsonl", WARM_UP + ROUNDS)
            total.append(time.perf_counter() - start)
        assert checkpoint is not None and checkpoint.progress.t == WARM_UP + ROUNDS
    return {
        "resume milliseconds": statistics.median(total) * 1000,
        "of them for checkpoint and memories": statistics.median(reading) * 1000,
    }


T = TypeVar("T")


@dataclass(frozen=True)
class Lazy(Sequence[T]):
    """Elements that are computed when they are needed."""

    length: int
    compute: Callable[[int], T]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, k: int) -> T:
        return self.compute(range(self.length)[k])


def images_of(k: int, images: int) -> Ints:
    """Client k's images, from all over those that are not the server's."""
    server = LABELLED + VALIDATION + TEST
    rows = (k * EACH + np.arange(EACH)) * 7919 % (images - server)  # a prime, so that none comes twice
    return np.sort(server + rows)


def name_of(k: int) -> str:
    return f"client-{k}"


def federate(clients: int) -> RunSetup:
    """This number of clients, which share the images of Fashion-MNIST."""
    pool = get_published("fashion-mnist", progress=False)
    server = np.arange(LABELLED + VALIDATION + TEST)
    labelled, validation, test = np.split(server, [LABELLED, LABELLED + VALIDATION])
    rows, names = Lazy(clients, partial(images_of, images=len(pool.labels))), Lazy(clients, name_of)
    raw = {
        "rounds": WARM_UP + ROUNDS,
        "cohort": COHORT,
        "server": {"threads": 1},  # as in the presets with LeNet
        "data": {"clients": clients, "images_per_client": EACH},
        "fedseal": {"scope": "sampled", "bootstrap_epochs": 5},
    }
    return RunSetup(parse(raw, "fleet"), Federation(pool, labelled, validation, rows, names, {"test": test}))


def written_bytes() -> int:
    """Bytes that this process has passed to write calls so far."""
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["wchar"])


def peak(pid: int | None) -> tuple[float, float]:
    """Highest resident megabytes of a process so far, and how many of them are files now."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    highest, files = (int(fields[name].split()[0]) / 1024 for name in ("VmHWM", "RssFile"))
    return highest, files


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", type=int)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.case:
        print(json.dumps(case(given.out, given.case)))
    else:
        for name, ratio, target in run():
            print(f"{name}: {ratio:.2f} ({target})")


if __name__ == "__main__":
    main()
