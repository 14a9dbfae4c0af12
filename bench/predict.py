"""What LeNet's own max-pool gains where nothing learns, against PyTorch's: Fashion-MNIST, one thread."""

import statistics
import time

import torch
from torch import nn

from fedseal.api import deal
from fedseal.config import load_config
from fedseal.learn import INFERENCE_BATCH
from fedseal.machine import threads
from fedseal.models import Pool
from fedseal.sites import Sites

REPEATS = 15


def run() -> list[tuple[str, float, str]]:
    """Row of name, measured ratio of images per second, and target."""
    config = load_config("fmnist-lenet")
    sites = Sites(config, deal(config.data, config.seed))
    network, images = sites.network(), sites.images(sites.federation.clients[0][:INFERENCE_BATCH]).pixels
    pools: tuple[nn.Module, ...] = (Pool(), nn.MaxPool2d(2))
    times: list[list[float]] = [[], []]
    with threads(1), torch.inference_mode():
        for _ in range(REPEATS):
            for pool, taken in zip(pools, times, strict=True):
                network.body.pool = pool
                start = time.process_time()
                network(images)
                taken.append(time.process_time() - start)
    ours, theirs = map(statistics.median, times)
    return [("LeNet predicting, our pool / PyTorch's", theirs / ours, ">= 1.2")]


if __name__ == "__main__":
    for name, ratio, target in run():
        print(f"{name}: {ratio:.2f} ({target})")
