"""The limit: how fast LeNet can train on this machine, written from scratch without fedseal.

It has its own LeNet and its own loop. It tries memory layouts, the order of ReLU and pooling, and optimisers,
and takes the fastest combination. Its batches are normalised floats that are ready in memory. It does not
augment, label, send or save anything. `bench/round.py` and `bench/peers` compare with it.

    python -m bench.limit
"""

import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import cycle, product
from multiprocessing import get_context

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, max_pool2d, relu

LAYOUTS = {"contiguous": torch.contiguous_format, "channels-last": torch.channels_last}
LARGEST_BATCH, BATCHES, INFERENCE_BATCH = 64, 40, 500
TRIAL_STEPS, TRIALS = 60, 5


@dataclass(frozen=True)
class Variant:
    """One way to run the same training."""

    layout: str
    pool_first: bool  # ReLU after the pooling does a quarter of the work
    optimizer: str  # fused, foreach or for-loop implementation of SGD


class LeNet(nn.Module):
    """Two 5×5 convolutions with 6 and 16 channels, then 120, 84 and 10 units, for 28×28 images."""

    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.pool_first = variant.pool_first
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        for convolution in (self.conv1, self.conv2):
            x = convolution(x)
            x = relu(max_pool2d(x, 2)) if self.pool_first else max_pool2d(relu(x), 2)
        x = relu(self.fc2(relu(self.fc1(x.flatten(1)))))
        logits: Tensor = self.fc3(x)
        return logits


class BareLoop:
    """A LeNet with prepared batches."""

    def __init__(self, variant: Variant, momentum: float = 0.9) -> None:
        torch.manual_seed(0)
        layout = LAYOUTS[variant.layout]
        self.model = LeNet(variant).to(memory_format=layout)
        images = torch.randn(BATCHES, LARGEST_BATCH, 1, 28, 28)
        labels = torch.randint(10, (BATCHES, LARGEST_BATCH))
        self.batches = list(zip((x.to(memory_format=layout) for x in images), labels, strict=True))
        self.images = torch.randn(INFERENCE_BATCH, 1, 28, 28).to(memory_format=layout)
        self.settings = {"lr": 0.001, "momentum": momentum, variant.optimizer: True}

    def train(self, sizes: Sequence[int]) -> None:
        """Training steps on batches of these sizes."""
        self.model.train()
        optimizer = torch.optim.SGD(self.model.parameters(), **self.settings)
        for size, (images, labels) in zip(sizes, cycle(self.batches), strict=False):
            optimizer.zero_grad()
            cross_entropy(self.model(images[:size]), labels[:size]).backward()
            optimizer.step()

    @torch.inference_mode()
    def predict(self, number: int) -> None:
        """Logits of this many images."""
        self.model.eval()
        for start in range(0, number, INFERENCE_BATCH):
            self.model(self.images[: min(INFERENCE_BATCH, number - start)])


def variants() -> list[Variant]:
    """All combinations."""
    return [Variant(*choice) for choice in product(LAYOUTS, (True, False), ("fused", "foreach"))]


def measure_variants() -> dict[Variant, float]:
    """Training images per second on one core: the best of several trials, in which variants take turns."""
    loops = {variant: BareLoop(variant) for variant in variants()}
    best = dict.fromkeys(loops, float("inf"))
    for _ in range(TRIALS):
        for variant, loop in loops.items():
            start = time.perf_counter()
            loop.train([32] * TRIAL_STEPS)
            best[variant] = min(best[variant], time.perf_counter() - start)
    return {variant: 32 * TRIAL_STEPS / seconds for variant, seconds in best.items()}


def fastest_variant() -> Variant:
    """The fastest combination on this machine, measured in a new process with one thread."""
    with ProcessPoolExecutor(1, get_context("spawn"), _use_one_thread) as process:
        measured = process.submit(measure_variants).result()
    return max(measured, key=lambda variant: measured[variant])


class LimitRound:
    """A round's training steps and predictions, with nothing around them: clients in parallel processes."""

    def __init__(self, variant: Variant, workers: int, momentum: float = 0.9) -> None:
        self.parent = BareLoop(variant, momentum)
        self.pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (variant, momentum))

    def __enter__(self) -> "LimitRound":
        return self

    def __exit__(self, *exception: object) -> None:
        self.pool.shutdown()

    def clients(self, work: Sequence[tuple[int, Sequence[int]]]) -> None:
        """For each client: the number of images to predict, and the sizes of its training batches."""
        for _ in self.pool.map(_run_client, work):
            pass


_worker: BareLoop


def _use_one_thread() -> None:
    torch.set_num_threads(1)


def _start_worker(variant: Variant, momentum: float) -> None:
    global _worker
    torch.set_num_threads(1)
    _worker = BareLoop(variant, momentum)


def _run_client(work: tuple[int, Sequence[int]]) -> None:
    predictions, sizes = work
    _worker.predict(predictions)
    _worker.train(sizes)


def fedavg_round_seconds(rounds: int = 3, clients: int = 10, images: int = 1200, epochs: int = 5) -> float:
    """Median seconds of a FedAvg round with plain SGD on all cores."""
    sizes = epochs * ([32] * (images // 32) + [images % 32] * (images % 32 > 0))
    seconds = []
    with LimitRound(fastest_variant(), os.cpu_count() or 1, momentum=0.0) as limit:
        limit.clients([(0, [32] * 10)] * clients)  # starts the processes
        for _ in range(rounds):
            start = time.perf_counter()
            limit.clients([(0, sizes)] * clients)
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for variant, images in sorted(measure_variants().items(), key=lambda item: -item[1]):
        order = "pool, ReLU" if variant.pool_first else "ReLU, pool"
        print(f"{variant.layout:14} {order:11} {variant.optimizer:8} {images:8,.0f} images/s on one core")
    print(f"FedAvg round, 10 clients of 1,200 images, 5 epochs: {fedavg_round_seconds():.2f} s")
