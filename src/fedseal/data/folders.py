"""Your own images in folders: `server/<class>/…` with labels, `clients/<name>/…` without.

`test/<class>/…` and `validation/<class>/…` are optional.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedseal.config.sections import DataSettings
from fedseal.data import cache
from fedseal.data.decode import decode_image, decode_images, failure_reason, is_unreadable
from fedseal.data.folder_cache import Listing, NoImageError, cache_folders
from fedseal.data.pool import Pixels, Pool, PoolPart
from fedseal.errors import UserError
from fedseal.system.logs import log
from fedseal.system.progress import progress_bar

DEFAULT_SIZE = 32
DEFAULT_CHANNELS = 3
# What operating systems and archives add to folders; other such names start with a dot.
FOREIGN = {"__macosx", "thumbs.db", "ehthumbs.db", "desktop.ini", "@eadir", "$recycle.bin", "lost+found"}
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
    return _read(_list_labelled(folder, classes), size, channels, workers, progress)


def _read(listing: Listing, size: int, channels: int, workers: int | None, progress: bool) -> PoolPart:
    pixels, kept, skipped = _decode_all(listing.files, size, channels, workers, progress)
    return PoolPart(pixels, listing.keep(kept), listing.classes, skipped | listing.stray)


def read_folders(
    path: Path,
    *,
    size: int,
    channels: int,
    workers: int | None = None,
    progress: bool = True,
) -> Pool:
    """The images of the server and of all clients as one pool, cached until a file changes.

    After a change, only new and changed files are decoded.
    """
    if not path.is_dir():
        raise UserError(f"There is no folder {path}: give a folder that contains server/ and clients/.")
    for needed, content in (("server", "class"), ("clients", "client")):
        if not (path / needed).is_dir():
            raise UserError(f"{path} has no {needed}/: add it, with one folder for each {content}.")
    clients = _subfolders(path / "clients")
    if not clients:
        raise UserError(f"{path / 'clients'} is empty: add one folder for each client.")
    parts = [path / name for name in ("server", "clients", "validation", "test") if (path / name).is_dir()]
    found = [part / name for part in parts for name in _subfolders(part)]  # a new one may be empty
    files = [file for folder in found for file in list_files(folder)]
    stray = [file for part in parts for file in _find_stray(part)]
    key = cache.own_images_key("folders", path, [*found, *files, *stray], size, channels)

    def list_parts() -> dict[str, Listing]:
        server = _list_labelled(path / "server", None)
        listed = {"server": server}
        listed |= {f"clients/{name}": _list_unlabelled(path / "clients" / name) for name in clients}
        first = f"clients/{clients[0]}"
        listed[first] = replace(listed[first], stray=_skip_stray(path / "clients", "client"))
        for name in ("validation", "test"):
            if (path / name).is_dir():
                listed[name] = _list_labelled(path / name, server.classes)
        return listed

    return _load_or_decode(key, path, list_parts, size, channels, workers, progress)


def read_client(
    folder: Path, classes: Sequence[str], *, size: int, channels: int, workers: int | None = None
) -> Pool:
    """The images of one client as a pool, cached until a file changes, as in `read_folders`."""
    listing = _list_unlabelled(folder)
    key = cache.own_images_key("client", folder, listing.files, size, channels)
    pool = _load_or_decode(key, folder, lambda: {"client": listing}, size, channels, workers, False)
    return replace(pool, classes=tuple(classes))


def _load_or_decode(
    key: str,
    path: Path,
    list_parts: Callable[[], Mapping[str, Listing]],
    size: int,
    channels: int,
    workers: int | None,
    progress: bool,
) -> Pool:
    """The pool stored under `key`; if there is none, the new and changed files are decoded."""
    pool = cache.load_cached(key)
    if pool is not None:
        if pool.skipped:  # building the pool names each of them
            log.warning(
                "skipped %d files in %s that are not readable images, such as %s",
                len(pool.skipped),
                path,
                next(iter(pool.skipped)),
            )
        return pool
    listed = list_parts()
    files = [file for listing in listed.values() for file in listing.files]

    def decode(numbers: Sequence[int]) -> Iterator[Pixels | str]:
        return _decode([files[i] for i in numbers], size, channels, workers, progress)

    pool = cache_folders(key, path, listed, (channels, size, size), decode)
    cache.evict()
    return pool


def _list_labelled(folder: Path, classes: Sequence[str] | None) -> Listing:
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
    labels = np.array([label for _, label in files], dtype=np.int64)
    stray = _skip_stray(folder, "class")
    return Listing(folder, [file for file, _ in files], labels, tuple(classes), tuple(found), stray)


def _find_stray(folder: Path) -> list[Path]:
    """Files beside the folders of classes or clients."""
    return sorted(path for path in folder.iterdir() if not path.is_dir() and _is_own(path.name))


def _skip_stray(folder: Path, kind: str) -> dict[str, str]:
    stray = {str(path): f"not in the folder of a {kind}" for path in _find_stray(folder)}
    for path, reason in stray.items():
        log.warning("skipped %s: %s", path, reason)
    return stray


def _list_unlabelled(folder: Path) -> Listing:
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}: check the path.")
    files = list_files(folder)
    return Listing(folder, files, np.full(len(files), -1, dtype=np.int64))


def require_image(folder: Path) -> None:
    """Raises if a client's folder has no readable image; reads no more than the first one."""
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}: give the folder of this client's images.")
    files = list_files(folder)
    for file in files:
        try:
            decode_image(file, None, None)
            return
        except Exception as error:  # Pillow raises many different exceptions on broken files
            log.debug("%s is not a readable image (%s)", file, failure_reason(error))
    content = f"none of its {len(files)} files is a readable image" if files else "it is empty"
    raise NoImageError(f"{folder} has no images ({content}): give the folder of this client's images.")


def _subfolders(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}: check the path.")
    try:
        names = sorted(path.name for path in folder.iterdir() if path.is_dir() and _is_own(path.name))
    except OSError as error:
        _refuse_folder(error)
        raise
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise UserError(f"The name of the folder {folder / name} is not UTF-8: rename it.") from None
    return names


def _refuse_folder(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # it has just been removed
        raise UserError(
            f"Cannot read {error.filename} ({error.strerror}): check the folder, then try again."
        ) from error


def _is_own(name: str) -> bool:
    return name[0] != "." and name.lower() not in FOREIGN


def list_files(folder: Path) -> list[Path]:
    """All files in a folder and below, except hidden ones, in the same order on every machine.

    A link to a folder is one of them: it is not followed, and decoding names it.
    """
    found = []
    for where, subfolders, names in os.walk(folder, onerror=_refuse_folder):
        subfolders[:] = filter(_is_own, subfolders)
        links = [name for name in subfolders if Path(where, name).is_symlink()]
        found += [Path(where, name) for name in [*filter(_is_own, names), *links]]
    return sorted(found, key=lambda file: file.relative_to(folder).as_posix())


def _decode_all(
    files: Sequence[Path], size: int, channels: int, workers: int | None, progress: bool
) -> tuple[Pixels, list[int], dict[str, str]]:
    """The decoded images, the indices of their files, and the files that are not readable, with reasons."""
    pixels = np.empty((len(files), channels, size, size), dtype=np.uint8)
    kept: list[int] = []
    skipped: dict[str, str] = {}
    for i, image in enumerate(_decode(files, size, channels, workers, progress)):
        if isinstance(image, str):
            skipped[str(files[i])] = image
        else:
            pixels[len(kept)] = image
            kept.append(i)
    return pixels[: len(kept)], kept, skipped


def _decode(
    files: Sequence[Path], size: int, channels: int, workers: int | None, progress: bool
) -> Iterator[Pixels | str]:
    """The images one after another; the reason for a file that is not a readable image."""
    with progress_bar("images", len(files), show=progress and len(files) >= PROGRESS_FROM) as advance:
        for file, image in zip(files, decode_images(files, size, channels, workers), strict=True):
            if isinstance(image, Exception):
                if is_unreadable(image):  # a skipped file would stay skipped when it can be read again
                    raise UserError(
                        f"Cannot read {file} ({failure_reason(image)}): check the file, then try again."
                    ) from image
                reason = f"not a readable image ({failure_reason(image)})"
                log.warning("skipped %s: %s", file, reason)
                yield reason
            else:
                yield image
            advance(1)
