"""Features of images: what a frozen network (`model.freeze`) sees in them, computed once and kept on disk.

With `model.freeze`, training takes features in place of images: [views, F] for each image. The first view is
the image itself, the others are augmented copies. The features of an image depend only on its pixels and on
the network, not on other images, so a new image costs the time of one image.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedseal.core import derive_seed
from fedseal.data import cache
from fedseal.data.augment import Augmenter
from fedseal.data.feature_store import (
    FeatureTable,
    Halves,
    add_segment,
    find_images,
    hash_images,
    read_index,
)
from fedseal.data.pool import Ints, PoolPixels
from fedseal.errors import UserError
from fedseal.models import Network
from fedseal.system.environment import used_arithmetic
from fedseal.system.files import cannot_write, lock_folder, make_private
from fedseal.system.machine import cores
from fedseal.system.progress import progress_bar
from fedseal.weights import get_weights

BATCH = 32  # always padded to this size, because the last bit of a feature may depend on it
SEGMENT = 4096  # images; an interruption loses at most this work
PROGRESS_FROM = 200  # images

PLAIN = "plain"


@dataclass(frozen=True)
class FeatureViews:
    """Augmentation with features: picks one of the copies of each image at random, and puts it first.

    A network takes the first view, so that augmented images and others can be mixed.
    """

    views: int

    def weak(self, features: Tensor, generator: torch.Generator) -> Tensor:
        """The features of the image itself or of a weakly augmented copy."""
        return self._pick(features, generator, 0, 1 + self.views)

    def strong(self, features: Tensor, generator: torch.Generator) -> Tensor:
        """The features of a strongly augmented copy; without copies, of the image itself."""
        return self._pick(features, generator, 1 + self.views, self.views) if self.views else features

    def _pick(self, features: Tensor, generator: torch.Generator, first: int, count: int) -> Tensor:
        choice = first + torch.randint(count, (len(features),), generator=generator)
        picked = features.clone()
        picked[:, 0] = features[torch.arange(len(features)), choice]
        return picked


@dataclass(frozen=True)
class Features:
    """The features of all images of a pool."""

    tables: tuple[FeatureTable, ...]  # one for each view
    backbone: str  # a hash of the network's weights
    loaded: str = ""  # what the network has loaded from `model.weights`

    def __getitem__(self, rows: Ints) -> Tensor:
        """A copy of the features of some images, [n, views, F]."""
        return torch.from_numpy(np.stack([table[rows] for table in self.tables], axis=1))


@dataclass(frozen=True)
class Extractor:
    """A frozen network, and how images are augmented for it."""

    backbone: Network
    augmenter: Augmenter
    device: torch.device
    code: str = ""  # a hash of your own network's file

    def hash_weights(self) -> str:
        """A hash of the network's weights."""
        digest = hashlib.sha256()
        for name, value in get_weights(self.backbone).items():
            digest.update(f"{name} {tuple(value.shape)} {value.dtype} ".encode())
            digest.update(value.numpy().tobytes())
        return digest.hexdigest()

    def folder(self, view: str, shape: tuple[int, ...], weights: str) -> Path:
        """Where features are kept. The name depends on everything that they depend on besides the pixels."""
        augment = f"{view} {self.augmenter}" if view != PLAIN else PLAIN
        computed = f"{self.device.type} {used_arithmetic()}"
        about = f"{weights} {self.backbone.resize} {shape} {augment} {computed} {self.code}".rstrip()
        return cache.root() / f"features-{hashlib.sha256(about.encode()).hexdigest()[:24]}"

    def features(self, view: str, pixels: Tensor, hashes: Sequence[bytes]) -> Halves:
        """The features [n, F] of at most BATCH images. An image's copy depends on its hash alone."""
        if view != PLAIN:
            augment: Callable[[Tensor, torch.Generator], Tensor] = getattr(self.augmenter, view.split()[0])
            seeds = [derive_seed(view, digest.hex()) for digest in hashes]
            copies = [
                augment(pixels[i : i + 1], torch.Generator().manual_seed(seed))
                for i, seed in enumerate(seeds)
            ]
            pixels = torch.cat(copies)
        return self._predict(pixels)

    @torch.inference_mode()
    def _predict(self, images: Tensor) -> Halves:
        missing = BATCH - len(images)
        padded = torch.cat([images, images.new_zeros((missing, *images.shape[1:]))])
        found = self.backbone(padded.to(self.device))[: len(images)]
        if found.dim() != 2:
            raise UserError(
                "model.freeze needs a last linear layer that takes one vector per image, but it takes the"
                f" shape {tuple(found.shape[1:])}."
            )
        if not bool((found.abs() < np.finfo(np.float16).max).all()):  # false for NaN, too
            raise UserError("The frozen network's features are not finite: check model.weights.")
        features: Halves = found.cpu().to(torch.float16).numpy()
        return features


def extract(
    extractor: Extractor, views: int, pixels: PoolPixels, rows: Ints, *, progress: bool = False
) -> Features:
    """The features of some images of a pool; those that are not on disk are computed."""
    names = [PLAIN, *(f"{kind} {n}" for kind in ("weak", "strong") for n in range(views))]
    weights, hashes = extractor.hash_weights(), hash_images(pixels, rows)
    tables = []
    for view in names:
        folder = extractor.folder(view, pixels.shape[1:], weights)
        try:
            folder.mkdir(0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(folder, error) from error
        make_private(folder)  # it may be of an older version
        with lock_folder(folder, exclusive=True):  # a second process waits, and finds everything there
            known = read_index(folder)
            images = {d: row for d, row in zip(hashes, rows.tolist(), strict=True) if d not in known}
            _add_missing(extractor, view, folder, pixels, list(images.items()), progress)
            table = find_images(folder, len(pixels), rows, hashes)
        cache.mark_used(folder, table)
        tables.append(table)
    cache.evict()
    return Features(tuple(tables), weights, extractor.backbone.loaded)


def _add_missing(
    extractor: Extractor,
    view: str,
    folder: Path,
    pixels: PoolPixels,
    images: list[tuple[bytes, int]],
    progress: bool,
) -> None:
    show = progress and len(images) >= PROGRESS_FROM
    with progress_bar(f"features, {view}", len(images), show=show) as advance:
        for start in range(0, len(images), SEGMENT):
            part = images[start : start + SEGMENT]
            found = []
            for some in _compute(extractor, view, pixels, part):
                found.append(some)
                advance(len(some))
            add_segment(folder, [digest for digest, _ in part], np.concatenate(found))


def _compute(
    extractor: Extractor, view: str, pixels: PoolPixels, images: list[tuple[bytes, int]]
) -> Iterator[Halves]:
    """The features of images by batches, on all cores. Every batch is computed by one thread."""

    def work(some: list[tuple[bytes, int]]) -> Halves:
        torch.set_num_threads(1)  # of this thread; the last bit of a sum depends on it
        images = torch.from_numpy(np.ascontiguousarray(pixels[[row for _, row in some]]))
        return extractor.features(view, images, [digest for digest, _ in some])

    batches = [images[i : i + BATCH] for i in range(0, len(images), BATCH)]
    with ThreadPoolExecutor(cores()) as pool:
        yield from pool.map(work, batches)
