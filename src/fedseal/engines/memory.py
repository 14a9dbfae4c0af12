"""A client's memory of a run as bytes: what a method's `client_round` returned, such as p̄ and its counts.

On a client's own machine images come and go, so the memory also holds a hash of each image. Its rows then
follow the images by content, whatever their file names and order.
"""

import hashlib
from collections import defaultdict, deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedseal.core import Images, Packet, Participant
from fedseal.system.checksums import add_checksum, verify_checksum
from fedseal.system.files import read_file, write_atomic
from fedseal.system.logs import log

PER_IMAGE = "images"  # the group whose tensors have one row per image
HASHES = "hashes"  # the group with the images' hashes
HASH_BYTES = 16


class MemoryFile:
    """A memory on a client's disk; written atomically."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> bytes:
        """The stored memory; empty if there is no file, or only a damaged one."""
        try:
            memory = read_file(self.path)
        except FileNotFoundError:
            return b""
        try:
            verify_checksum(memory)
            packet = Packet.from_bytes(memory)
            groups = (packet.tensors.get(PER_IMAGE, {}), packet.tensors.get(HASHES, {}))
            if len({len(value) for group in groups for value in group.values()}) > 1:
                raise ValueError("rows are missing")
        except Exception as error:  # a damaged file can be damaged in any way
            log.warning("%s is damaged (%s): this client starts afresh", self.path, type(error).__name__)
            return b""
        return memory

    def write(self, memory: bytes) -> None:
        write_atomic(self.path, add_checksum(memory), private=True)


def read(memory: bytes) -> Packet:
    """A memory without its image hashes; empty bytes are an empty memory."""
    packet = Packet.from_bytes(memory) if memory else Packet()
    return replace(packet, tensors={k: v for k, v in packet.tensors.items() if k != HASHES})


def write(packet: Packet, pixels: Tensor | None = None) -> bytes:
    """The bytes of a memory, with the hashes of its images if `pixels` are given."""
    hashes = {} if pixels is None else {HASHES: {PER_IMAGE: hash_images(pixels)}}
    return Packet({**packet.tensors, **hashes}, packet.scalars).to_bytes()


def align(memory: bytes, request: Packet, client: Participant) -> tuple[Packet, Participant]:
    """The memory with one row for each of the client's images, zeros for a new one; and the client.

    If the client gets the same round again, images that are new since then take part from the next round on,
    so that the client's answer stays the same.
    """
    packet, known = _match(memory, client.data.pixels)
    again = "t" in packet.scalars and packet.scalars["t"] == request.scalars.get("t")
    if again and not bool(known.all()):
        client = replace(client, data=Images(client.data.pixels[known]))
        packet, _ = _match(memory, client.data.pixels)
    return packet, client


def _match(memory: bytes, pixels: Tensor) -> tuple[Packet, Tensor]:
    """The memory with one row per image, and a mask of the images that it knows."""
    if not memory:
        return Packet(), torch.zeros(len(pixels), dtype=torch.bool)
    packet, hashes = read(memory), Packet.from_bytes(memory).tensors.get(HASHES, {}).get(PER_IMAGE)
    if PER_IMAGE not in packet.tensors or hashes is None:  # nothing in it belongs to single images
        return packet, torch.ones(len(pixels), dtype=torch.bool)
    rows = match_rows(hashes, hash_images(pixels))
    aligned = {k: take_rows(v, rows) for k, v in packet.tensors[PER_IMAGE].items()}
    return replace(packet, tensors={**packet.tensors, PER_IMAGE: aligned}), rows >= 0


def hash_images(pixels: Tensor) -> Tensor:
    """A hash of each image's pixels, [n, 16]."""
    hashes = [hashlib.blake2b(image.tobytes(), digest_size=HASH_BYTES).digest() for image in pixels.numpy()]
    return torch.from_numpy(np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, HASH_BYTES).copy())


def match_rows(before: Tensor, now: Tensor) -> Tensor:
    """For each hash of `now` its row in `before`, or −1. Equal images get different rows."""
    places: dict[bytes, deque[int]] = defaultdict(deque)
    for row, digest in enumerate(before.numpy()):
        places[digest.tobytes()].append(row)
    found = (places[digest.tobytes()] for digest in now.numpy())
    return torch.tensor([rows.popleft() if rows else -1 for rows in found], dtype=torch.int64)


def take_rows(values: Tensor, rows: Tensor) -> Tensor:
    """`values` in the order of `rows`, zeros where a row is −1."""
    result = values.new_zeros((len(rows), *values.shape[1:]))
    result[rows >= 0] = values[rows[rows >= 0]]
    return result
