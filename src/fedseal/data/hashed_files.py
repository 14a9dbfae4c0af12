"""Files with checksums: written, verified, and mapped into memory."""

import hashlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np


class HashingFile:
    """A file that computes the checksum of the data written to it.

    It also makes a full disk raise ENOSPC: NumPy writes real files with fwrite, which loses the reason.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.sum = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> int:
        self.sum.update(data)
        return self.file.write(data)


def write_array(path: Path, array: np.ndarray[Any, Any]) -> str:
    """Writes an array as .npy and returns the checksum of the file."""
    with path.open("wb") as file:
        out = HashingFile(file)
        np.lib.format.write_array(out, array, allow_pickle=False)
    return out.sum.hexdigest()


def verify(path: Path, checksum: str) -> None:
    """Raises a ValueError if the file's content is not that of the checksum."""
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != checksum:
            raise ValueError(f"the checksum of {path.name} is wrong")


def load_array(path: Path) -> Any:
    """An array, memory-mapped."""
    return np.load(path, mmap_mode="r", allow_pickle=False)
