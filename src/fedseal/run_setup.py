"""A configuration and its data: builds the network, the server and every client."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedseal.aggregate import Aggregation
from fedseal.config.config import Config
from fedseal.core import (
    Images,
    LabelledImages,
    LabelledParticipant,
    Participant,
    RecordLabels,
    Server,
    derive_seed,
    ignore_labels,
)
from fedseal.data.augment import Augmenter
from fedseal.data.pool import Federation, Ints
from fedseal.models import Network, build_network
from fedseal.system.machine import find_device


@dataclass(frozen=True)
class RunSetup:
    """Who has which images and labels. It can be sent to another process."""

    config: Config
    federation: Federation

    @cached_property
    def device(self) -> torch.device:
        return find_device(self.config.engine.device)

    @cached_property
    def augmenter(self) -> Augmenter:
        flip = self.config.augment.flip
        return Augmenter(self.config.augment, self.federation.pool.flips if flip is None else flip)

    def aggregation(self) -> Aggregation:
        """What clients upload, and what the server makes of it."""
        return Aggregation()

    def network(self) -> Network:
        """The initial network, which normalises images by the labelled images' mean and deviation."""
        pool = self.federation.pool
        labelled = pool.pixels[self.federation.labelled].astype(np.float64)
        channels, size = pool.pixels.shape[1], pool.pixels.shape[2]
        network = build_network(
            self.config.model,
            channels=channels,
            size=size,
            classes=len(pool.classes),
            mean=labelled.mean(axis=(0, 2, 3)).tolist(),
            std=np.maximum(labelled.std(axis=(0, 2, 3)), 1.0).tolist(),
            seed=derive_seed(self.config.seed, "initial weights"),
        )
        return network.to(self.device)

    def server(self) -> Server:
        """The server with its labelled images and its validation images."""
        return Server(
            name="server",
            model=self.network(),
            data=self.labelled_images(self.federation.labelled),
            validation=self.labelled_images(self.federation.validation),
            training=self.config.server,
            bootstrap=self.config.bootstrap,
            **self._common(),
        )

    def client(self, k: int, model: Network, record_labels: RecordLabels = ignore_labels) -> Participant:
        """Client k with its images, and with their labels only if the method may know them."""
        rows = self.federation.clients[k]
        about = self._common() | {
            "name": self.federation.names[k],
            "model": model,
            "training": self.config.client,
            "record_labels": record_labels,
        }
        if self.config.selected_method().needs_client_labels:
            return LabelledParticipant(data=self.labelled_images(rows), **about)
        return Participant(data=self.images(rows), **about)

    def _common(self) -> dict[str, Any]:
        """What the server and all clients share."""
        return {
            "augment": self.augmenter,
            "seed": self.config.seed,
            "device": self.device,
            "classes": len(self.federation.pool.classes),
            "aggregation": self.aggregation(),
        }

    def true_labels(self, k: int) -> Ints:
        """The true labels of client k's images, −1 if unknown: for the statistics of a simulation."""
        return self.federation.pool.labels[self.federation.clients[k]]

    def images(self, rows: Ints) -> Images:
        """A copy of some images of the pool."""
        return Images(torch.from_numpy(np.ascontiguousarray(self.federation.pool.pixels[rows])))

    def labelled_images(self, rows: Ints) -> LabelledImages:
        """A copy of some images of the pool with their labels."""
        return LabelledImages(self.images(rows).pixels, torch.from_numpy(self.federation.pool.labels[rows]))


def images_are_elsewhere(config: Config) -> bool:
    """True for a deployed run, where this machine holds the labelled images only."""
    return config.data.source == "folders" and not (Path(config.data.path) / "server").is_dir()
