"""All images of one source in one array, and how they are dealt out to a server and its clients."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Pool:
    """Every image of a source, in a read-only (memory-mapped) array."""

    name: str
    pixels: Pixels  # [N, C, H, W]
    labels: Ints  # [N]; -1 where nobody knows
    classes: tuple[str, ...]
    parts: Mapping[str, range]  # "train", "test"; of own folders: "server", "clients/<name>", "test"
    flips: bool  # a mirrored image is still an image of its class
    skipped: tuple[str, ...] = ()  # files that were no images

    def __getstate__(self) -> dict[str, Any]:
        """To another process goes the name of the mapped file, not a copy of its images."""
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
class Federation:
    """A pool dealt out: indices into its arrays, each image used at most once in training."""

    pool: Pool
    labelled: Ints  # the server's training images, D_s
    validation: Ints  # the server's validation images, D_s^val
    clients: tuple[Ints, ...]  # D_n of each client
    names: tuple[str, ...]  # of the clients
    tests: Mapping[str, Ints]  # "test" is the paper's test set; "official" the data set's own, if another
    fingerprint: str = ""  # of all of the above, the pixels included
