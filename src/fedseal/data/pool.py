"""All images of a data source in one array, and their split between a server and its clients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Pool:
    """All images of a data source, in a read-only (memory-mapped) array."""

    name: str
    pixels: Pixels  # [N, C, H, W]
    labels: Ints  # [N]; -1 if unknown
    classes: tuple[str, ...]
    parts: Mapping[str, range]  # "train", "test"; from folders: "server", "clients/<name>", "test"
    flips: bool  # whether mirroring an image keeps its class
    skipped: Mapping[str, str] = field(default_factory=dict)  # files that are not used -> reason

    def __getstate__(self) -> dict[str, Any]:
        """Pickles a memory-mapped array as the name of its file, so that other processes map it too."""
        pixels = self.pixels
        if isinstance(pixels, np.memmap):
            return self.__dict__ | {"pixels": (pixels.filename, pixels.offset, pixels.shape)}
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        if isinstance(state["pixels"], tuple):
            filename, offset, shape = state["pixels"]
            state = state | {"pixels": np.memmap(filename, np.uint8, "r", offset, shape)}
        self.__dict__.update(state)


@dataclass(frozen=True)
class PoolPart:
    """The images of one part of a pool, before the parts are joined."""

    pixels: Pixels  # [N, C, size, size]
    labels: Ints  # [N]; -1 if unknown
    classes: tuple[str, ...]  # empty if the images have no labels
    skipped: Mapping[str, str]  # files that are not used -> reason


def join_parts(name: str, read: Mapping[str, PoolPart], classes: Sequence[str]) -> Pool:
    """A pool of the user's own images, part after part. Whether to mirror them is up to `augment.flip`."""
    parts, start = {}, 0
    for part, images in read.items():
        parts[part] = range(start, start + len(images.labels))
        start += len(images.labels)
    pixels = np.concatenate([images.pixels for images in read.values()])
    labels = np.concatenate([images.labels for images in read.values()])
    skipped = {file: reason for images in read.values() for file, reason in images.skipped.items()}
    return Pool(name, pixels, labels, tuple(classes), parts, flips=False, skipped=skipped)


@dataclass(frozen=True)
class Federation:
    """The split of a pool: indices into its arrays. Training uses each image at most once."""

    pool: Pool
    labelled: Ints  # the server's training images, D_s
    validation: Ints  # the server's validation images, D_s^val
    clients: Sequence[Ints]  # D_n of each client; a round reads those of the clients that it asks
    names: Sequence[str]  # of the clients
    tests: Mapping[str, Ints]  # "test" as in the paper; "official" if the data set's own test set differs
    fingerprint: str = ""  # of all of the above, including the pixels
    client_tests: Sequence[Ints] = ()  # the part of "test" in each client's class mix, if there is one
