"""The cost of many clients: 10,000 clients of 49 images compared with 100, of which 10 are sampled per round.

Both federations read the same memory-mapped file, have the same server and do the same work in a round, with
a checkpoint after each round. There are two comparisons: at the start of a run, when no client has been
sampled yet, and late in a run, when every client has a memory p̄ to keep and save. Every case runs in a new
process, and the cases take turns.

Memory is the sum of the highest resident sizes (VmHWM) of the parent and its workers, without pages of files
(RssFile). Those are libraries and images, which the processes share and the kernel can drop. Without them
less memory is independent of the number of clients, so the ratio is stricter.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import torch

from fedseal.config.config import parse
from fedseal.core import Packet
from fedseal.data.pool import Federation, Pool
from fedseal.data.sources import get_published
from fedseal.engines.local import LocalEngine
from fedseal.rounds import RoundDone, rounds
from fedseal.run_setup import RunSetup
from fedseal.system.environment import set_up_process
from fedseal.system.machine import threads
from fedseal.training.evaluate import Evaluator
from fedseal.training.observers import Checkpoints, EventLog, Observer

FEW, MANY, EACH = 100, 10_000, 49
LABELLED, VALIDATION, TEST = 500, 200, 1000
WARM_UP, ROUNDS = 3, 12
PROCESSES = 2  # per case

Measured = dict[str, float]


def run() -> list[tuple[str, float, str]]:
    """Rows of name, measured ratio and target."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make_images(Path(folder))
        for late in (False, True):
            cases: dict[int, list[Measured]] = {FEW: [], MANY: []}
            for clients in (FEW, MANY) * PROCESSES:
                cases[clients].append(in_new_process(Path(folder), clients, late))
            when = "every client has been sampled" if late else "start of a run"
            few, many = (median(measured) for measured in cases.values())
            for key in few:
                print(f"{when}, {key}: {FEW} clients {few[key]:.2f}, {MANY:,} clients {many[key]:.2f}")
            for key, what in (("seconds", "seconds per round"), ("megabytes", "peak memory")):
                rows.append((f"{MANY:,} / {FEW} clients, {what}, {when}", many[key] / few[key], "<= 1.2"))
    return rows


def median(measured: list[Measured]) -> Measured:
    return {key: statistics.median(one[key] for one in measured) for key in measured[0]}


def make_images(folder: Path) -> None:
    """Enough images for all clients: Fashion-MNIST repeatedly, shifted by one more pixel each time."""
    source = get_published("fashion-mnist", progress=False)
    number, each = LABELLED + VALIDATION + TEST + MANY * EACH, len(source.pixels)
    shape = (number, *source.pixels.shape[1:])
    pixels = np.lib.format.open_memmap(folder / "pixels.npy", "w+", np.uint8, shape)
    for turn, start in enumerate(range(0, number, each)):
        pixels[start : start + each] = np.roll(source.pixels, turn, axis=3)[: number - start]
    pixels.flush()
    np.save(folder / "labels.npy", np.resize(source.labels, number))


def in_new_process(folder: Path, clients: int, late: bool) -> Measured:
    command = [sys.executable, "-m", "bench.fleet", "--images", str(folder), "--case", str(clients)]
    done = subprocess.run([*command, *["--late"] * late], check=True, stdout=subprocess.PIPE)
    measured: Measured = json.loads(done.stdout)
    return measured


def case(folder: Path, clients: int, late: bool) -> Measured:
    """Median seconds of a round, and megabytes of all processes together."""
    set_up_process()
    setup = federate(folder, clients)
    engine = LocalEngine(setup, memories(clients) if late else None)
    with tempfile.TemporaryDirectory() as out, threads(setup.config.server.threads):
        observers: list[Observer] = [
            EventLog(Path(out) / "events.jsonl", 0),
            Checkpoints(Path(out) / "state.safetensors", engine, "", 1, WARM_UP + ROUNDS, time.perf_counter),
        ]
        server, names = setup.server(), setup.federation.names
        seconds, start = [], time.perf_counter()
        for event in rounds(setup.config, server, engine, names, Evaluator(setup, server)):
            for observer in observers:
                observer(event)
            if isinstance(event, RoundDone):
                seconds.append(time.perf_counter() - start)
                start = time.perf_counter()
    peaks = [peak(pid) for pid in (os.getpid(), *(worker.pid for worker in active_children()))]
    engine.close()
    resident, files = (sum(column) for column in zip(*peaks, strict=True))
    return {
        "seconds": statistics.median(seconds[WARM_UP:]),
        "megabytes": resident - files,
        "megabytes with files": resident,
    }


def federate(folder: Path, clients: int) -> RunSetup:
    """This number of clients, each with images from all over the file."""
    pixels, labels = (np.load(folder / name, mmap_mode="r") for name in ("pixels.npy", "labels.npy"))
    pool = Pool("fleet", pixels, labels, tuple("0123456789"), {}, flips=True)
    server = LABELLED + VALIDATION + TEST
    labelled, validation, test = np.split(np.arange(server), [LABELLED, LABELLED + VALIDATION])
    split = np.random.default_rng(0).permutation(np.arange(server, len(labels))).reshape(-1, EACH)[:clients]
    rows, names = tuple(np.sort(row) for row in split), tuple(f"client-{k}" for k in range(clients))
    raw = {
        "rounds": WARM_UP + ROUNDS,
        "cohort": 10,
        "server": {"threads": 1},  # as in the presets with LeNet
        "data": {"clients": clients, "images_per_client": EACH},
        "fedseal": {"scope": "sampled", "bootstrap_epochs": 5},
    }
    return RunSetup(parse(raw, "fleet"), Federation(pool, labelled, validation, rows, names, {"test": test}))


def memories(clients: int) -> dict[str, bytes]:
    """The memory of every client after it has been sampled."""
    confidences = torch.randn(EACH, 10, generator=torch.Generator().manual_seed(0)).mul(5).softmax(dim=1)
    images = {"mean": confidences, "count": torch.ones(EACH, dtype=torch.int64)}
    return {str(k): Packet({"images": images}, {"t": 0}).to_bytes() for k in range(clients)}


def peak(pid: int | None) -> tuple[float, float]:
    """Highest resident megabytes of a process so far, and how many of them are files now."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    highest, files = (int(fields[name].split()[0]) / 1024 for name in ("VmHWM", "RssFile"))
    return highest, files


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", type=int)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--late", action="store_true")
    given = parser.parse_args()
    if given.case:
        print(json.dumps(case(given.images, given.case, given.late)))
    else:
        for name, ratio, target in run():
            print(f"{name}: {ratio:.2f} ({target})")
