"""Your own images in folders: `server/<class>/…` with labels, `clients/<name>/…` without.

`test/<class>/…` and `validation/<class>/…` are optional.
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedseal.config.sections import DataSettings
from fedseal.data import cache
from fedseal.data.decode import decode_images, failure_reason
from fedseal.data.pool import Pixels, Pool, PoolPart, join_parts
from fedseal.errors import UserError
from fedseal.system.progress import progress_bar

log = logging.getLogger("fedseal")

DEFAULT_SIZE = 32
DEFAULT_CHANNELS = 3
PROGRESS_FROM = 200  # files; fewer are read too fast for a progress bar


def load_folders(data: DataSettings, progress: bool) -> Pool:
    """The source "folders" of the `[data]` section."""
    return read_folders(
        Path(data.path),
        size=data.size or DEFAULT_SIZE,
        channels=data.channels or DEFAULT_CHANNELS,
        progress=progress,
    )


def read_labelled(
    folder: Path,
    classes: Sequence[str] | None = None,
    *,
    size: int,
    channels: int,
    workers: int | None = None,
    progress: bool = True,
) -> PoolPart:
    """Images in `folder/<class>/…`. Without `classes`, the names of the folders are the classes."""
    found = _subfolders(folder)
    if classes is None:
        classes = found
        if len(found) < 2:
            raise UserError(f"{folder} needs a folder for each of two or more classes, but has {len(found)}.")
    elif unknown := [name for name in found if name not in classes]:
        raise UserError(
            f"{folder / unknown[0]} is not one of the classes {', '.join(classes)}: rename or remove it."
        )
    elif not found:
        raise UserError(f"{folder} has no folders: put its images into one folder for each class.")
    files = [(file, classes.index(name)) for name in found for file in list_files(folder / name)]
    pixels, kept, skipped = _decode_all([file for file, _ in files], size, channels, workers, progress)
    labels = np.array([files[i][1] for i in kept], dtype=np.int64)
    for name in found:
        if not np.any(labels == classes.index(name)):
            raise UserError(
                f"Class '{name}' has no readable image: add images to {folder / name}, or remove it."
            )
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name[0] != ".":
            skipped[str(path)] = "not in the folder of a class"
            log.warning("skipped %s: not in the folder of a class", path)
    return PoolPart(pixels, labels, tuple(classes), skipped)


def read_unlabelled(
    folder: Path, *, size: int, channels: int, workers: int | None = None, progress: bool = True
) -> PoolPart:
    """All images in a client's folder and below."""
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}: check the path.")
    pixels, kept, skipped = _decode_all(list_files(folder), size, channels, workers, progress)
    if not kept:
        raise UserError(
            f"Client '{folder.name}' has no readable image: add images to {folder}, or remove it."
        )
    return PoolPart(pixels, np.full(len(kept), -1, dtype=np.int64), (), skipped)


def read_folders(
    path: Path,
    *,
    size: int,
    channels: int,
    workers: int | None = None,
    progress: bool = True,
) -> Pool:
    """The images of the server and of all clients as one pool, cached until a file changes."""
    if not path.is_dir():
        raise UserError(f"There is no folder {path}: give a folder that contains server/ and clients/.")
    for needed, content in (("server", "class"), ("clients", "client")):
        if not (path / needed).is_dir():
            raise UserError(f"{path} has no {needed}/: add it, with one folder for each {content}.")
    clients = _subfolders(path / "clients")
    if not clients:
        raise UserError(f"{path / 'clients'} is empty: add one folder for each client.")

    def build() -> tuple[Pool, str]:
        def labelled(name: str, classes: Sequence[str] | None) -> PoolPart:
            return read_labelled(
                path / name, classes, size=size, channels=channels, workers=workers, progress=progress
            )

        server = labelled("server", None)
        read = {"server": server}
        for name in clients:
            read[f"clients/{name}"] = read_unlabelled(
                path / "clients" / name, size=size, channels=channels, workers=workers, progress=progress
            )
        for name in ("validation", "test"):
            if (path / name).is_dir():
                read[name] = labelled(name, server.classes)
        return join_parts("folders", read, server.classes), f"the folder {path}"

    parts = [path / name for name in ("server", "clients", "validation", "test") if (path / name).is_dir()]
    found = [part / name for part in parts for name in _subfolders(part)]  # a new one may be empty
    files = [file for folder in found for file in list_files(folder)]
    key = cache.own_images_key("folders", path, [*found, *files], size, channels)
    pool = cache.load_cached(key)
    if pool is not None and pool.skipped:  # building the pool names each of them
        log.warning(
            "skipped %d files in %s that are not readable images, such as %s",
            len(pool.skipped),
            path,
            next(iter(pool.skipped)),
        )
    return pool or cache.store(key, *build())


def _subfolders(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}: check the path.")
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")


def list_files(folder: Path) -> list[Path]:
    """All files in a folder and below, except hidden ones, in the same order on every machine."""
    found = []
    for where, subfolders, names in os.walk(folder):
        subfolders[:] = [name for name in subfolders if name[0] != "."]
        found += [Path(where, name) for name in names if name[0] != "."]
    return sorted(found, key=lambda file: file.relative_to(folder).as_posix())


def _decode_all(
    files: Sequence[Path], size: int, channels: int, workers: int | None, progress: bool
) -> tuple[Pixels, list[int], dict[str, str]]:
    """The decoded images, the indices of their files, and the files that are not readable, with reasons."""
    pixels = np.empty((len(files), channels, size, size), dtype=np.uint8)
    kept: list[int] = []
    skipped: dict[str, str] = {}
    with progress_bar("images", len(files), show=progress and len(files) >= PROGRESS_FROM) as advance:
        for i, image in enumerate(decode_images(files, size, channels, workers)):
            if isinstance(image, Exception):
                reason = f"not a readable image ({failure_reason(image)})"
                log.warning("skipped %s: %s", files[i], reason)
                skipped[str(files[i])] = reason
            else:
                pixels[len(kept)] = image
                kept.append(i)
            advance(1)
    return pixels[: len(kept)], kept, skipped
