"""Builds the server and the clients of a federation: who has which images, and which labels."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedseal.config import Config
from fedseal.core import Diagnose, Images, Learning, Site, derive_seed, no_diagnosis
from fedseal.data.pool import Federation, Ints
from fedseal.machine import find_device
from fedseal.models import Network, build


@dataclass(frozen=True)
class Sites:
    """All that it takes to build any site. It can be sent to another process."""

    config: Config
    federation: Federation

    @cached_property
    def device(self) -> torch.device:
        return find_device(self.config.engine.device)

    def network(self) -> Network:
        """The freshly initialised network, normalised by the labelled images' mean and deviation."""
        pool = self.federation.pool
        labelled = pool.pixels[self.federation.labelled].astype(np.float64)
        channels, size = pool.pixels.shape[1], pool.pixels.shape[2]
        network = build(
            self.config.model,
            channels=channels,
            size=size,
            classes=len(pool.classes),
            mean=labelled.mean(axis=(0, 2, 3)).tolist(),
            std=np.maximum(labelled.std(axis=(0, 2, 3)), 1.0).tolist(),
            seed=derive_seed(self.config.seed, "initial weights"),
        )
        return network.to(self.device)

    def server(self) -> Site:
        """The server: labelled and validation images with their labels."""
        federation = self.federation
        return self._site(
            "server",
            self.network(),
            self.images(federation.labelled, labels=True),
            self.config.server,
            validation=self.images(federation.validation, labels=True),
        )

    def client(self, k: int, model: Network, diagnose: Diagnose = no_diagnosis) -> Site:
        """A client: images alone, unless the method is the one that may know their labels."""
        rows = self.federation.clients[k]
        labels = self.config.chosen().needs_client_labels
        return self._site(
            self.federation.names[k],
            model,
            self.images(rows, labels=labels),
            self.config.client,
            diagnose=diagnose,
        )

    def _site(
        self,
        name: str,
        model: Network,
        images: Images,
        learning: Learning,
        validation: Images | None = None,
        diagnose: Diagnose = no_diagnosis,
    ) -> Site:
        augment = self.config.augment
        if augment.flip is None:
            augment = augment.model_copy(update={"flip": self.federation.pool.flips})
        return Site(
            name=name,
            model=model,
            data=images,
            learning=learning,
            augment=augment,
            seed=self.config.seed,
            device=self.device,
            classes=len(self.federation.pool.classes),
            validation=validation,
            diagnose=diagnose,
        )

    def truth(self, k: int) -> Ints:
        """The true labels of a client's images, −1 where nobody knows them: for a simulation's counts."""
        return self.federation.pool.labels[self.federation.clients[k]]

    def images(self, rows: Ints, *, labels: bool = False) -> Images:
        """A copy of some images of the pool."""
        pool = self.federation.pool
        pixels = torch.from_numpy(np.ascontiguousarray(pool.pixels[rows]))
        return Images(pixels, torch.from_numpy(pool.labels[rows]) if labels else None)


def images_are_elsewhere(config: Config) -> bool:
    """True of a run that was served: only the labels are on this machine."""
    return config.data.source == "folders" and not (Path(config.data.path) / "server").is_dir()


class Diagnosis:
    """The labels that a method gives to a client's images: noted while it works, judged when it is done.

    So a simulation counts right labels, and nothing that a method can get hold of knows the truth.
    """

    def __init__(self) -> None:
        self.given: list[tuple[str, Tensor, Tensor]] = []

    def note(self, name: str, rows: Tensor, labels: Tensor) -> None:
        """What a client's site calls."""
        self.given.append((name, rows, labels))

    def judged(self, truth: Ints) -> dict[str, int]:
        """Negative labels are right where the image is *not* of that class; unknown truth does not count."""
        counts: Counter[str] = Counter()
        for name, rows, labels in self.given:
            true = torch.from_numpy(np.asarray(truth))[rows]
            known = true >= 0
            right = (true != labels) if name == "negative" else (true == labels)
            counts[f"{name}_known"] += int(known.sum())
            counts[f"{name}_right"] += int((right & known).sum())
        return dict(counts)
