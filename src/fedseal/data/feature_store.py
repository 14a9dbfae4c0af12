"""Features of images on disk, by a hash of the image: a folder of segments, which are never changed.

A segment is an array of features and an index, which has the images' hashes and a checksum.
"""

import hashlib
import io
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedseal.data.pool import Ints, PoolPixels
from fedseal.system.files import write_atomic
from fedseal.system.logs import log

Halves = npt.NDArray[np.float16]

HASH_BYTES = 16


@dataclass(frozen=True)
class FeatureTable:
    """The features of a pool's images, in memory-mapped files."""

    files: tuple[Path, ...]
    file: Ints  # by image: which file, −1 if it has no features
    row: Ints  # by image: which row of the file

    def __getitem__(self, rows: Ints) -> Halves:
        """A copy of the features of some images, [n, F]."""
        parts = [np.load(file, mmap_mode="r", allow_pickle=False) for file in self.files]
        result = np.empty((len(rows), parts[0].shape[1]), np.float16)
        for number, part in enumerate(parts):
            here = self.file[rows] == number
            result[here] = part[self.row[rows[here]]]
        return result


def hash_images(pixels: PoolPixels, rows: Ints) -> list[bytes]:
    """A hash of the pixels of some images."""
    return [hashlib.blake2b(pixels[row].tobytes(), digest_size=HASH_BYTES).digest() for row in rows.tolist()]


def find_images(folder: Path, pool_size: int, rows: Ints, hashes: Sequence[bytes]) -> FeatureTable:
    """Where the features of some images of a pool are; all of them must be there."""
    known = read_index(folder)
    names = {name: number for number, name in enumerate(sorted({name for name, _ in known.values()}))}
    file, row = np.full(pool_size, -1, np.int64), np.zeros(pool_size, np.int64)
    for place, digest in zip(rows.tolist(), hashes, strict=True):
        name, row[place] = known[digest]
        file[place] = names[name]
    return FeatureTable(tuple(folder / name for name in names), file, row)


def read_index(folder: Path) -> dict[bytes, tuple[str, int]]:
    """By hash of an image: the file with its features, and the row in it. Damaged segments are removed."""
    known: dict[bytes, tuple[str, int]] = {}
    for path in sorted(folder.glob("*.json")):
        features = path.with_suffix(".npy")
        try:
            index = json.loads(path.read_text("utf-8"))
            with features.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != index["sha256"]:
                    raise ValueError("its checksum is wrong")
            rows = {bytes.fromhex(digest): (features.name, row) for row, digest in enumerate(index["images"])}
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s is damaged (%s): its features are computed again", features, error)
            path.unlink(missing_ok=True)
            continue
        known |= rows
    return known


def add_segment(folder: Path, hashes: Sequence[bytes], features: Halves) -> None:
    """Adds features of images. The segment counts when its index is there, which is written last."""
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, features, allow_pickle=False)
    content = buffer.getvalue()
    index = {"sha256": hashlib.sha256(content).hexdigest(), "images": [digest.hex() for digest in hashes]}
    name = secrets.token_hex(8)
    write_atomic(folder / f"{name}.npy", content, private=True)
    write_atomic(folder / f"{name}.json", json.dumps(index), private=True)
