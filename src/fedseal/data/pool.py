"""All images of a data source in one array, and their split between a server and its clients."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]

BLOCK = 128  # images that are copied at once where all are looked at


class SegmentedPixels:
    """Images in several memory-mapped arrays (segments), used like one array [N, C, H, W]."""

    def __init__(self, segments: Sequence[Pixels], places: Ints) -> None:
        self.segments, self.places = segments, places  # [N, 2]: the segment and the row of each image
        self.shape = (len(places), *segments[0].shape[1:])

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, rows: int | slice | list[int] | Ints) -> Pixels:
        """A copy of some images."""
        places = self.places[rows]
        if places.ndim == 1:
            segment, row = places
            return np.array(self.segments[segment][row])
        result = np.empty((len(places), *self.shape[1:]), np.uint8)
        for number, segment in enumerate(self.segments):
            here = places[:, 0] == number
            result[here] = segment[places[here, 1]]
        return result

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.asarray(self[:], dtype)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"segments": [_name_of(segment) for segment in self.segments]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"segments": [_map_again(segment) for segment in state["segments"]]})


PoolPixels = Pixels | SegmentedPixels


def _name_of(pixels: Any) -> Any:
    """A memory-mapped array as the name of its file, so that other processes map it too."""
    return (pixels.filename, pixels.offset, pixels.shape) if isinstance(pixels, np.memmap) else pixels


def _map_again(named: Any) -> Any:
    if not isinstance(named, tuple):
        return named
    filename, offset, shape = named
    return np.memmap(filename, np.uint8, "r", offset, shape)


@dataclass(frozen=True)
class Pool:
    """All images of a data source, in a read-only (memory-mapped) array."""

    name: str
    pixels: PoolPixels  # [N, C, H, W]
    labels: Ints  # [N]; -1 if unknown
    classes: tuple[str, ...]
    parts: Mapping[str, range]  # "train", "test"; from folders: "server", "clients/<name>", "test"
    flips: bool  # whether mirroring an image keeps its class
    skipped: Mapping[str, str] = field(default_factory=dict)  # files that are not used -> reason

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"pixels": _name_of(self.pixels)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"pixels": _map_again(state["pixels"])})

    def channel_statistics(self, rows: Ints) -> tuple[list[float], list[float]]:
        """Mean and standard deviation of some images' channels, from exact sums over small blocks."""
        sums, squares = np.zeros((2, self.pixels.shape[1]), np.int64)
        for start in range(0, len(rows), BLOCK):
            block = self.pixels[rows[start : start + BLOCK]].astype(np.int32)
            sums += block.sum(axis=(0, 2, 3), dtype=np.int64)
            squares += (block * block).sum(axis=(0, 2, 3), dtype=np.int64)
        count = len(rows) * math.prod(self.pixels.shape[2:])
        mean = [total / count for total in sums.tolist()]
        both = zip(sums.tolist(), squares.tolist(), strict=True)
        return mean, [math.sqrt((count * square - total * total) / count**2) for total, square in both]


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
