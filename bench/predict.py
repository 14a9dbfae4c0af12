"""Speed of LeNet's predictions with `MaxPool`, relative to PyTorch's max-pooling (one thread)."""

import statistics
import time

import torch
from torch import nn

from fedseal.config.load import load_config
from fedseal.data.federation import load_federation
from fedseal.learn import INFERENCE_BATCH
from fedseal.models import MaxPool
from fedseal.run_setup import RunSetup
from fedseal.system.machine import threads

REPEATS = 15


def run() -> list[tuple[str, float, str]]:
    """One row of name, measured ratio of images per second, and target."""
    config = load_config("fmnist-lenet")
    setup = RunSetup(config, load_federation(config.data, config.seed))
    network, images = setup.network(), setup.images(setup.federation.clients[0][:INFERENCE_BATCH]).pixels
    pools: tuple[nn.Module, ...] = (MaxPool(), nn.MaxPool2d(2))
    times: list[list[float]] = [[], []]
    with threads(1), torch.inference_mode():
        for _ in range(REPEATS):
            for pool, taken in zip(pools, times, strict=True):
                network.body.pool = pool
                start = time.process_time()
                network(images)
                taken.append(time.process_time() - start)
    ours, theirs = map(statistics.median, times)
    return [("LeNet predictions, MaxPool / PyTorch's", theirs / ours, ">= 1.2")]


if __name__ == "__main__":
    for name, ratio, target in run():
        print(f"{name}: {ratio:.2f} ({target})")
