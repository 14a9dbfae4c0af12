"""What a client remembers of a run, on its own disk: p̄, its count, the last round, of which images."""

import hashlib
import logging
from collections import defaultdict, deque
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedseal.core import Packet
from fedseal.files import write_atomic

log = logging.getLogger("fedseal")

PER_IMAGE = "images"  # the group of a memory whose tensors have a row for each image
FINGERPRINT = "fingerprint"  # the group that says which row belongs to which image
DIGEST = 16  # bytes


def fingerprint(pixels: Tensor) -> Tensor:
    """A hash of each image's pixels, [n, 16]."""
    hashes = [hashlib.blake2b(image.tobytes(), digest_size=DIGEST).digest() for image in pixels.numpy()]
    return torch.from_numpy(np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, DIGEST).copy())


class Memory:
    """One file. It is there whole or not at all, and holds what a method's `client_round` gave back."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, pixels: Tensor) -> tuple[Packet, Tensor]:
        """The memory with one row for each of these images, and which of them it knows.

        Rows are found by content: whatever was added, removed or renamed, an image keeps its own. An image
        that is new gets zeros.
        """
        known = torch.zeros(len(pixels), dtype=torch.bool)
        try:
            packet = Packet.from_bytes(self.path.read_bytes())
            then = packet.tensors.get(FINGERPRINT, {}).get(PER_IMAGE)
            groups = {k: v for k, v in packet.tensors.items() if k != FINGERPRINT}
            if PER_IMAGE not in groups or then is None:  # it has no rows, or is of the local engine
                return Packet(groups, packet.scalars), ~known
            rows = matches(then, fingerprint(pixels))
            known = rows >= 0
            groups[PER_IMAGE] = {k: moved(v, rows) for k, v in groups[PER_IMAGE].items()}
            return Packet(groups, packet.scalars), known
        except FileNotFoundError:
            return Packet(), known
        except (OSError, MemoryError):  # not the file's fault: what it holds must not be written over
            raise
        except Exception as error:  # a damaged file can be damaged in any way
            log.warning("%s is damaged (%s): this client starts afresh", self.path, type(error).__name__)
            return Packet(), known

    def write(self, packet: Packet, pixels: Tensor) -> None:
        """Keeps a memory, and of which images it is."""
        groups = {**packet.tensors, FINGERPRINT: {PER_IMAGE: fingerprint(pixels)}}
        write_atomic(self.path, Packet(groups, packet.scalars).to_bytes())


def matches(then: Tensor, now: Tensor) -> Tensor:
    """For each image of now its row of then, or -1. Of equal images each has its own row."""
    places: dict[bytes, deque[int]] = defaultdict(deque)
    for row, digest in enumerate(then.numpy()):
        places[digest.tobytes()].append(row)
    found = (places[digest.tobytes()] for digest in now.numpy())
    return torch.tensor([rows.popleft() if rows else -1 for rows in found], dtype=torch.int64)


def moved(values: Tensor, rows: Tensor) -> Tensor:
    """`values` in the order of `rows`, zeros where a row is -1."""
    result = values.new_zeros((len(rows), *values.shape[1:]))
    result[rows >= 0] = values[rows[rows >= 0]]
    return result
