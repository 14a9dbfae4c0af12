"""A rough estimate of a run's time on this machine.

It is the number of images that all participants train on, times the measured time per image. The number of
images with a pseudo-label is not known in advance, so all client images are counted.
"""

import time
from functools import lru_cache

import torch
from torch.nn.functional import cross_entropy

from fedseal.config.config import Config
from fedseal.config.sections import ModelSettings
from fedseal.data.catalogue import PUBLISHED
from fedseal.frozen import Head
from fedseal.models import Network, build_network
from fedseal.system.machine import cores, threads

PREDICTION = 1 / 3  # time of a prediction, relative to a training step
CLIENT = 1.25  # a client's work per image and epoch: 1 to 4/3, depending on the method's views
BATCH = 32
FEATURES = 1280  # of EfficientNet-Lite0


def seconds(config: Config) -> float:
    """The time of a run on a published data set, with all cores."""
    server, clients = images(config)
    one = seconds_per_image(config.model, PUBLISHED[config.data.source].shape)
    return one * (server / (config.server.threads or cores()) + clients / cores())


def images(config: Config) -> tuple[float, float]:
    """The images that the server and the clients train on in all rounds; a prediction counts as a third."""
    data, method = config.data, config.selected_method()
    tested = data.held_out_test or sum(PUBLISHED[data.source].counts["test"])
    tested += data.test_per_client * data.clients
    server = data.labels * config.server.epochs + 2 * PREDICTION * tested / config.evaluate_every  # w^t and w̄
    cohort, everyone = (n * data.images_per_client for n in (config.cohort or data.clients, data.clients))
    clients = CLIENT * cohort * config.client.epochs if method.uses_clients else 0.0
    if method.predicts_everywhere():
        clients += PREDICTION * everyone
    preparation = data.labels * method.preparation_epochs(config.bootstrap)
    return preparation + config.rounds * server, config.rounds * clients


@lru_cache
def seconds_per_image(settings: ModelSettings, image: tuple[int, int, int]) -> float:
    """The time of a training step on one core per image of shape [C, H, W]: the faster of two batches."""
    channels, size, _ = image
    shape: tuple[int, ...] = image
    network: Network
    mean, std = [0.0] * channels, [1.0] * channels
    if settings.freeze:  # features are computed once for all runs
        shape, network = (FEATURES,), Head(10, [0.0] * FEATURES, [1.0] * FEATURES, seed=0)
    else:
        network = build_network(
            settings, channels=channels, size=size, classes=10, mean=mean, std=std, seed=0
        )
    batch, labels = torch.rand(BATCH, *shape), torch.zeros(BATCH, dtype=torch.long)
    times = []
    with threads(1):
        for _ in range(2):
            start = time.perf_counter()
            cross_entropy(network(batch), labels).backward()
            times.append(time.perf_counter() - start)
    return min(times) / BATCH
