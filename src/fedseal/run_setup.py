"""A configuration and its data: builds the network, the server and every client."""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedseal import weights
from fedseal.aggregate import Aggregation
from fedseal.config.config import Config
from fedseal.core import (
    Augment,
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
from fedseal.errors import UserError
from fedseal.features import Extractor, Features, FeatureViews, extract
from fedseal.frozen import Head, make_backbone
from fedseal.learn import train_supervised
from fedseal.models import MODELS, PRETRAINED, Network, build_network
from fedseal.privacy import make_aggregation
from fedseal.system.machine import find_device
from fedseal.system.own_code import source_hash
from fedseal.weights import Tensors

# Mean and deviation of the pixels of ImageNet by number of channels.
IMAGENET = {
    1: ([116.3], [57.1]),
    3: ([123.7, 116.3, 103.5], [58.4, 57.1, 57.4]),
}
MIN_DEVIATION = 1e-3  # of a feature; some are constant on few images


@dataclass(frozen=True)
class RunSetup:
    """Who has which images and labels. It can be sent to another process."""

    config: Config
    federation: Federation
    features: Features | None = None  # with `model.freeze`: of all images of the federation

    @cached_property
    def device(self) -> torch.device:
        return find_device(self.config.engine.device)

    @cached_property
    def augmenter(self) -> Augmenter:
        flip = self.config.augment.flip
        return Augmenter(self.config.augment, self.federation.pool.flips if flip is None else flip)

    def aggregation(self) -> Aggregation:
        """What clients upload, and what the server makes of it."""
        return make_aggregation(self.config.privacy, self.config.aggregate)

    def with_features(self, *, progress: bool = False) -> "RunSetup":
        """With `model.freeze`, the same setup with the features of all images: from the disk, or computed."""
        if not self.config.model.freeze:
            return self
        split = self.federation
        used = [split.labelled, split.validation, *split.clients, *split.tests.values()]
        rows = np.unique(np.concatenate(used))
        found = extract(self.extractor(), self.config.model.views, split.pool.pixels, rows, progress=progress)
        return replace(self, features=found)

    def extractor(self) -> Extractor:
        """The frozen part of the network, and the augmentation of the images that it sees."""
        settings = self.config.model
        if settings.name in MODELS and settings.name not in PRETRAINED and not settings.weights:
            raise UserError(
                f"model.freeze keeps the first weights of {settings.name}, but these are random: set"
                f" model.weights, or model.name to {', '.join(PRETRAINED)}."
            )
        backbone = self._image_network(self._seed)
        make_backbone(backbone)
        return Extractor(backbone, self.augmenter, self.device, source_hash(settings.name))

    def network(self, seed: int | None = None) -> Network:
        """The initial network, or with `model.freeze` its last layer. Another seed gives another one.

        It normalises images, or features, by the mean and the deviation of those with labels.
        """
        seed = self._seed if seed is None else seed
        if self.features is None:
            return self._image_network(seed)
        labelled = self.features[self.federation.labelled][:, 0].double()
        mean, std = labelled.mean(dim=0), labelled.std(dim=0, correction=0).clamp(min=MIN_DEVIATION)
        head = Head(len(self.federation.pool.classes), mean.tolist(), std.tolist(), seed)
        head.loaded = self.features.loaded
        return head.to(self.device)

    @property
    def _seed(self) -> int:
        return derive_seed(self.config.seed, "initial weights")

    def _image_network(self, seed: int) -> Network:
        pool, settings = self.federation.pool, self.config.model
        channels, size = pool.pixels.shape[1], pool.pixels.shape[2]
        mean, std = IMAGENET[channels]  # of a pretrained network that does not say what it was trained with
        if not settings.freeze:
            mean, std = pool.channel_statistics(self.federation.labelled)
            std = [max(value, 1.0) for value in std]
        network = build_network(
            settings,
            channels=channels,
            size=size,
            classes=len(pool.classes),
            mean=mean,
            std=std,
            seed=seed,
        )
        return network.to(self.device)

    def whole_model(self, values: Tensors) -> Tensors:
        """The weights of a model that takes images: with `model.freeze`, those of backbone and head."""
        if self.features is None:
            return values
        backbone = weights.get_weights(self.extractor().backbone)
        return {f"backbone.{name}": value for name, value in backbone.items()} | {
            f"head.{name}": value for name, value in values.items()
        }

    def server(self) -> Server:
        """The server with its labelled images and its validation images."""
        server = Server(
            name="server",
            model=self.network(),
            new_network=self.network,
            data=self.labelled_images(self.federation.labelled),
            validation=self.labelled_images(self.federation.validation),
            training=self.config.server,
            bootstrap=self.config.bootstrap,
            **self._common(),
        )
        if self.config.selected_method().uploads == "model" and self.config.server.epochs:
            root = partial(train_supervised, server, stream="root")
            server = replace(server, aggregation=replace(server.aggregation, root=root))
        return server

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
        augment: Augment = FeatureViews(self.config.model.views) if self.features else self.augmenter
        return {
            "augment": augment,
            "seed": self.config.seed,
            "device": self.device,
            "classes": len(self.federation.pool.classes),
            "aggregation": self.aggregation(),
        }

    def true_labels(self, k: int) -> Ints:
        """The true labels of client k's images, −1 if unknown: for the statistics of a simulation."""
        return self.federation.pool.labels[self.federation.clients[k]]

    def images(self, rows: Ints) -> Images:
        """A copy of some images of the pool, or of their features."""
        if self.features is not None:
            return Images(self.features[rows])
        return Images(torch.from_numpy(np.ascontiguousarray(self.federation.pool.pixels[rows])))

    def labelled_images(self, rows: Ints) -> LabelledImages:
        """A copy of some images of the pool with their labels."""
        return LabelledImages(self.images(rows).pixels, torch.from_numpy(self.federation.pool.labels[rows]))


def images_are_elsewhere(config: Config) -> bool:
    """True for a deployed run, where this machine holds the labelled images only."""
    return config.data.source == "folders" and not (Path(config.data.path) / "server").is_dir()
