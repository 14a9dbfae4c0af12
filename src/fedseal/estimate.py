"""How long a run may take on this machine: the images it learns from, times what one of them takes here.

To know hours from days. How many images a client is sure enough of to learn from is not known before.
"""

import time
from functools import lru_cache

import torch
from torch.nn.functional import cross_entropy

from fedseal.config import Config
from fedseal.data.sources import SOURCES
from fedseal.machine import cores, threads
from fedseal.models import ModelSettings, build

PREDICTION = 1 / 3  # of what learning from an image takes
CLIENT = 1.25  # what a client computes for an image in an epoch: 1 to 4/3, depending on the method's views
BATCH = 32


def seconds(config: Config) -> float:
    """Of a run on a published data set, with all cores."""
    server, clients = images(config)
    one = seconds_per_image(config.model, SOURCES[config.data.source].shape)
    return one * (server / (config.server.threads or cores()) + clients / cores())


def images(config: Config) -> tuple[float, float]:
    """How many images server and clients learn from in all rounds; to predict one counts as a third."""
    data, method = config.data, config.chosen()
    tested = data.held_out_test or sum(SOURCES[data.source].counts["test"])
    tested += data.test_per_client * data.clients
    server = data.labels * config.server.epochs + 2 * PREDICTION * tested / config.evaluate_every  # wᵗ, w̄
    trained, everyones = (n * data.images_per_client for n in (config.cohort or data.clients, data.clients))
    clients = CLIENT * trained * config.client.epochs if method.asks_clients else 0.0
    if getattr(method, "ensemble", False):
        clients += PREDICTION * everyones
    before = data.labels * getattr(method, "bootstrap_epochs", 0)
    return before + config.rounds * server, config.rounds * clients


@lru_cache
def seconds_per_image(settings: ModelSettings, shape: tuple[int, int, int]) -> float:
    """What it takes one core to learn from an image of this shape [C, H, W]: the faster of two batches."""
    channels, size, _ = shape
    zeros, ones = [0.0] * channels, [1.0] * channels
    network = build(settings, channels=channels, size=size, classes=10, mean=zeros, std=ones, seed=0)
    batch, labels = torch.rand(BATCH, *shape), torch.zeros(BATCH, dtype=torch.long)
    times = []
    with threads(1):
        for _ in range(2):
            start = time.perf_counter()
            cross_entropy(network(batch), labels).backward()
            times.append(time.perf_counter() - start)
    return min(times) / BATCH
