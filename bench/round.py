"""The overhead of a FedSEAL round: preset `fmnist-lenet` against a bare PyTorch loop.

The bare loop takes the same gradient steps and makes the same inferences as the round just measured, with the
same batch sizes, LeNet, processes and threads. Its batches are normalised floats from the start. It does not
augment, label, send or save anything, and its loss is plain cross-entropy.

The measured round is `fedseal.rounds.rounds` on the local engine, with evaluation, events, TensorBoard and a
checkpoint.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from itertools import cycle
from multiprocessing import active_children, get_context
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from fedseal.config.config import Config
from fedseal.config.load import load_config
from fedseal.core import Packet, Reply
from fedseal.data.federation import load_federation
from fedseal.data.pool import Ints
from fedseal.engines.local import LocalEngine
from fedseal.learn import INFERENCE_BATCH
from fedseal.rounds import Event, RoundDone, rounds
from fedseal.run_setup import RunSetup
from fedseal.system.machine import cores, threads
from fedseal.training.evaluate import Evaluator
from fedseal.training.observers import Checkpoints, EventLog, Observer, TensorBoard

REPEATS = 7
BOOTSTRAP = 100  # epochs: enough for D⁺ and D⁻ of realistic sizes
LARGEST_BATCH = 64

Laps = dict[str, float]


def run(repeats: int = REPEATS, bootstrap: int = BOOTSTRAP) -> list[tuple[str, float, str]]:
    """Row of name, measured ratio of seconds per round, and target."""
    changes = {"rounds": 1 + repeats, "fedseal.bootstrap_epochs": bootstrap}
    config = load_config("fmnist-lenet", changes).with_threads(cores())
    setup = RunSetup(config, load_federation(config.data, config.seed))
    ours, bares = list[Laps](), list[Laps]()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        stack.enter_context(threads(config.server.threads))
        engine = Counting(setup)
        stack.callback(engine.close)
        observers = make_observers(Path(folder), engine, config)
        for observer in observers:
            stack.callback(observer.close)
        server = setup.server()
        evaluate = Evaluator(setup, server)
        events = rounds(config, server, engine, setup.federation.names, evaluate)
        our_round(events, observers)  # also bootstraps and starts the workers
        bare = stack.enter_context(BareRound(setup))
        bare(engine.counts)
        for _ in range(repeats):  # alternating, so that a busy machine slows down both
            ours.append(our_round(events, observers))
            bares.append(bare(engine.counts))
            print(
                f"FedSEAL round {ours[-1]['round']:.2f} s, bare loop {bares[-1]['round']:.2f} s", flush=True
            )
    for name, measured in (("FedSEAL", ours), ("bare loop", bares)):
        medians = {lap: statistics.median(laps.get(lap, 0.0) for laps in measured) for lap in ours[0]}
        print(f"{name}: " + ", ".join(f"{lap} {seconds:.3f} s" for lap, seconds in medians.items()))
    plus, minus = (sum(n) for n in zip(*engine.counts.values(), strict=True))
    print(f"D⁺ {plus:,}, D⁻ {minus:,} in the last round")
    seconds, bare_seconds = (
        statistics.median(laps["round"] for laps in measured) for measured in (ours, bares)
    )
    return [("FedSEAL round / bare PyTorch loop, seconds", seconds / bare_seconds, "<= 1.3")]


def make_observers(folder: Path, engine: LocalEngine, config: Config) -> list[Observer]:
    """The observers of a quiet run."""
    return [
        EventLog(folder / "events.jsonl", 0),
        TensorBoard(folder / "tensorboard", 0),
        Checkpoints(folder / "state.safetensors", engine, "", 1, config.rounds, time.perf_counter),
    ]


def our_round(events: Iterator[Event], observers: list[Observer]) -> Laps:
    """Runs to the end of a round; returns seconds by step and of the whole round."""
    start = time.perf_counter()
    for event in events:
        for observer in observers:
            observer(event)
        if isinstance(event, RoundDone):
            total = time.perf_counter() - start
            laps: Laps = event.metrics["seconds"]
            return laps | {"observers": total - sum(laps.values()), "round": total}
    raise AssertionError("no more rounds")


class Counting(LocalEngine):
    """The local engine; it keeps |D⁺| and |D⁻| of each client for the bare loop."""

    def exchange(self, requests: Mapping[int, Packet]) -> Iterator[Reply]:
        self.counts: dict[int, tuple[int, int]] = {}
        for reply in super().exchange(requests):
            scalars = reply.packet.scalars
            self.counts[reply.client] = int(scalars["positive"]), int(scalars["negative"])
            yield reply


class Bare:
    """A LeNet, ready-made batches, and nothing else."""

    def __init__(self, setup: RunSetup, rows: Ints) -> None:
        network, images = setup.network(), setup.labelled_images(rows)
        self.model, self.settings = network.body, setup.config.client
        self.images = (images.pixels - network.mean) / network.std
        self.batches = list(
            zip(self.images.split(LARGEST_BATCH), images.labels.split(LARGEST_BATCH), strict=True)
        )
        if len(rows) % LARGEST_BATCH:
            self.batches.pop()

    def steps(self, sizes: list[int]) -> None:
        """Gradient steps on batches of these sizes."""
        self.model.train()
        settings = self.settings
        optimizer = torch.optim.SGD(
            self.model.parameters(), lr=settings.lr, momentum=settings.momentum, fused=True
        )
        for size, (images, labels) in zip(sizes, cycle(self.batches), strict=False):
            optimizer.zero_grad()
            cross_entropy(self.model(images[:size]), labels[:size]).backward()
            optimizer.step()

    @torch.inference_mode()
    def infer(self, n: int) -> None:
        """Logits of n images."""
        self.model.eval()
        for images in self.images[:n].split(INFERENCE_BATCH):
            self.model(images)


class BareRound:
    """All steps and inferences of a round, in this process and its workers."""

    def __init__(self, setup: RunSetup) -> None:
        federation, self.config = setup.federation, setup.config
        self.tests = np.unique(np.concatenate(list(federation.tests.values())))
        self.validation, self.images = len(federation.validation), [len(rows) for rows in federation.clients]
        self.server_steps = self.config.server.epochs * chunks(
            len(federation.labelled), self.config.server.batch
        )
        self.parent = Bare(setup, self.tests)
        workers = max(len(active_children()), 1)  # as many as the engine has started
        self.workers = ProcessPoolExecutor(workers, get_context("spawn"), _start, (setup,))

    def __enter__(self) -> "BareRound":
        return self

    def __exit__(self, *_: object) -> None:
        self.workers.shutdown()

    def __call__(self, counts: Mapping[int, tuple[int, int]]) -> Laps:
        """`counts` are |D⁺| and |D⁻| of each client."""
        start = time.perf_counter()
        self.parent.steps(self.server_steps)
        self.parent.infer(self.validation)
        server = time.perf_counter()
        tasks = [(self.images[k], self.client_steps(*counts[k])) for k in sorted(counts)]
        for _ in self.workers.map(_client, tasks):
            pass
        clients = time.perf_counter()
        for _ in ("model", "average"):
            self.parent.infer(len(self.tests))
            self.parent.infer(self.validation)
        end = time.perf_counter()
        return {
            "server": server - start,
            "clients": clients - server,
            "evaluation": end - clients,
            "round": end - start,
        }

    def client_steps(self, plus: int, minus: int) -> list[int]:
        """Sizes of a client's mini-batches, as `FedSEAL.client_batches` makes them."""
        settings, method = self.config.client, self.config.selected_method().model_dump()
        if method["batches"] == "joint":
            return settings.epochs * chunks(plus + minus, settings.batch)
        sets = (plus > 0) + (minus > 0)
        return settings.epochs * [sets * size for size in chunks(max(plus, minus), settings.batch)]


def chunks(n: int, size: int) -> list[int]:
    """Lengths of the batches of n images."""
    return [min(size, n - start) for start in range(0, n, size)]


_worker: Bare


def _start(setup: RunSetup) -> None:
    global _worker
    torch.set_num_threads(setup.config.client.threads)
    _worker = Bare(setup, setup.federation.clients[0])


def _client(task: tuple[int, list[int]]) -> None:
    images, sizes = task
    _worker.infer(images)
    _worker.steps(sizes)


if __name__ == "__main__":
    for name, ratio, target in run():
        print(f"{name}: {ratio:.2f} ({target})")
