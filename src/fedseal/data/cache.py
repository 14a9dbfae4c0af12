"""Decoded images on disk, read back through memory maps, so that a second start decodes nothing."""

import errno
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fedseal.data.pool import Pool
from fedseal.errors import UserError

log = logging.getLogger("fedseal")

FORMAT = 1  # raise it when what is stored changes: older caches are then rebuilt
ARRAYS = ("pixels.npy", "labels.npy")


class DiskError(UserError):
    """The cache cannot be written, so no other way to the same data helps."""


def root() -> Path:
    """The folder of all caches: FEDSEAL_DATA, or ~/.cache/fedseal."""
    return Path(os.environ.get("FEDSEAL_DATA") or Path.home() / ".cache" / "fedseal")


def cached(key: str, build: Callable[[], tuple[Pool, str]]) -> Pool:
    """The pool stored under `key`; if there is none, or a damaged one, what `build` gives, stored."""
    pool = load(key)
    return store(key, *build()) if pool is None else pool


def load(key: str) -> Pool | None:
    """A stored pool with its checksums verified, or None. A damaged one is reported and counts as None."""
    folder = root() / key
    try:
        about = _about(folder)
        for name in ARRAYS:
            with (folder / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != about["sha256"][name]:
                    raise ValueError(f"{name} has another checksum")
        pixels, labels = (np.load(folder / name, mmap_mode="r", allow_pickle=False) for name in ARRAYS)
    except FileNotFoundError:
        if folder.exists():
            log.warning("the cache %s is incomplete and is built again", folder)
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("the cache %s is damaged (%s) and is built again", folder, error)
        return None
    with suppress(OSError):
        os.utime(folder)  # when it was last read
    parts = {part: range(start, stop) for part, (start, stop) in about["parts"].items()}
    classes, skipped = tuple(about["classes"]), tuple(about["skipped"])
    return Pool(about["name"], pixels, labels, classes, parts, about["flips"], skipped)


def origin(key: str) -> str | None:
    """Where the pool stored under `key` came from, for reports; None if it is not there."""
    try:
        return str(_about(root() / key)["origin"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store(key: str, pool: Pool, origin: str, *, replace: bool = False) -> Pool:
    """Store a pool and return it as read back. It appears whole or not at all, whoever else writes.

    Of two processes that build the same pool at once, the second keeps what the first one stored,
    unless it is damaged or `replace` is set.
    """
    with workspace() as work:
        new = work / "new"
        new.mkdir()
        sums = {
            "pixels.npy": _write(new / "pixels.npy", pool.pixels),
            "labels.npy": _write(new / "labels.npy", pool.labels),
        }
        about = {
            "format": FORMAT,
            "name": pool.name,
            "classes": list(pool.classes),
            "parts": {part: [span.start, span.stop] for part, span in pool.parts.items()},
            "flips": pool.flips,
            "skipped": list(pool.skipped),
            "origin": origin,
            "sha256": sums,
        }
        (new / "about.json").write_text(json.dumps({"about": about, "sha256": _digest(about)}, indent=1))
        for attempt in range(100):
            try:
                new.rename(root() / key)
                break
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
            if not replace and (there := load(key)) is not None:
                return there
            try:  # out of the way; maps that others hold on it stay valid
                (root() / key).rename(work / f"old-{attempt}")
            except FileNotFoundError:
                continue  # somebody else was quicker
    stored = load(key)
    if stored is None:
        raise UserError(f"the cache {root() / key} cannot be read back: check the disk, or set FEDSEAL_DATA")
    return stored


def own_key(kind: str, folder: Path, files: Iterable[Path], *options: object) -> str:
    """The key of one's own images in their present state, which begins with that of the folder and options.

    What is stored of a former state is removed when it has not been read for a week: a run may still need it.
    """
    family = f"{kind}-{_digest([str(folder.resolve()), *map(str, options)])[:16]}-"
    key = family + fingerprint(folder, files)
    for former in root().glob(f"{family}*"):
        with suppress(OSError):
            if former.name != key and time.time() - former.stat().st_mtime > 7 * 86_400:
                shutil.rmtree(former)
    return key


@contextmanager
def workspace() -> Iterator[Path]:
    """A temporary folder on the cache's disk; a full or read-only disk becomes a DiskError."""
    try:
        root().mkdir(parents=True, exist_ok=True)
        work = tempfile.TemporaryDirectory(prefix=".work-", dir=root(), ignore_cleanup_errors=True)
    except OSError as error:
        raise DiskError(
            f"cannot write to {root()} ({error.strerror}): set FEDSEAL_DATA to a folder with room"
        ) from error
    for other in root().glob(".work-*"):  # left by processes that were killed
        with suppress(OSError):
            if time.time() - other.stat().st_mtime > 86_400:
                shutil.rmtree(other)
    try:
        with work as folder:
            yield Path(folder)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskError(
            f"no space left for {root()}: free some, or set FEDSEAL_DATA to another disk"
        ) from error


def fingerprint(folder: Path, files: Iterable[Path]) -> str:
    """Of the names, sizes and times of files (their content would take long), and of folders' names."""
    rows = []
    for file in files:
        try:
            state = file.stat()
        except OSError:  # a link to nothing, which will be skipped
            state = file.lstat()
        about = (0, 0) if stat.S_ISDIR(state.st_mode) else (state.st_size, state.st_mtime_ns)
        rows.append((file.relative_to(folder).as_posix(), *about))
    return _digest(rows)[:24]


class _Hashing:
    """A file that keeps the checksum of what is written.

    np.save would write to a real file by C's fwrite, whose error on a full disk does not say ENOSPC.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.sum = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.sum.update(data)
        return self.file.write(data)


def _write(path: Path, array: np.ndarray[Any, Any]) -> str:
    with path.open("wb") as file:
        out = _Hashing(file)
        np.lib.format.write_array(out, array, allow_pickle=False)
    return out.sum.hexdigest()


def _about(folder: Path) -> dict[str, Any]:
    outer = json.loads((folder / "about.json").read_text())
    about: dict[str, Any] = outer["about"]
    if outer["sha256"] != _digest(about):
        raise ValueError("about.json has another checksum")
    if about["format"] != FORMAT:
        raise ValueError(f"it has format {about['format']}, not {FORMAT}")
    return about


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
