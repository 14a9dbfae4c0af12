"""Decoded images on disk, memory-mapped, so that only the first start decodes them."""

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

FORMAT = 1  # raise it when the stored content changes; older caches are then rebuilt
ARRAYS = ("pixels.npy", "labels.npy")


class DiskError(UserError):
    """The cache cannot be written. Another way to obtain the data would fail too."""


def root() -> Path:
    """The folder of the cache: FEDSEAL_DATA, or ~/.cache/fedseal."""
    return Path(os.environ.get("FEDSEAL_DATA") or Path.home() / ".cache" / "fedseal")


def get_or_build(key: str, build: Callable[[], tuple[Pool, str]]) -> Pool:
    """The pool stored under `key`. If it is missing or damaged, `build` returns a new one and its origin."""
    pool = load_cached(key)
    return store(key, *build()) if pool is None else pool


def load_cached(key: str) -> Pool | None:
    """The pool stored under `key`, with verified checksums; None if it is missing or damaged."""
    folder = root() / key
    try:
        about = _about(folder)
        for name in ARRAYS:
            with (folder / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != about["sha256"][name]:
                    raise ValueError(f"the checksum of {name} is wrong")
        pixels, labels = (np.load(folder / name, mmap_mode="r", allow_pickle=False) for name in ARRAYS)
    except FileNotFoundError:
        if folder.exists():
            log.warning("the cache %s is incomplete and will be rebuilt", folder)
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("the cache %s is damaged (%s) and will be rebuilt", folder, error)
        return None
    with suppress(OSError):
        os.utime(folder)  # records the time of the last use
    parts = {part: range(start, stop) for part, (start, stop) in about["parts"].items()}
    classes, skipped = tuple(about["classes"]), dict(about["skipped"])
    return Pool(about["name"], pixels, labels, classes, parts, about["flips"], skipped)


def origin(key: str) -> str | None:
    """The origin of the pool stored under `key`, or None if it is not stored."""
    try:
        return str(_about(root() / key)["origin"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store(key: str, pool: Pool, origin: str, *, replace: bool = False) -> Pool:
    """Stores a pool atomically and returns it as read back from the cache.

    If two processes build the same pool at once, the second one uses what the first one stored, unless that
    is damaged or `replace` is set.
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
            "skipped": list(pool.skipped.items()),
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
            if not replace and (there := load_cached(key)) is not None:
                return there
            try:  # move it away; the memory maps of other processes stay valid
                (root() / key).rename(work / f"old-{attempt}")
            except FileNotFoundError:
                continue  # another process moved it first
    stored = load_cached(key)
    if stored is None:
        raise UserError(f"Cannot read back the cache {root() / key}: check the disk, or set FEDSEAL_DATA.")
    return stored


def own_images_key(kind: str, folder: Path, files: Iterable[Path], *options: object) -> str:
    """The key of the user's own images, which depends on the folder, the options and the state of the files.

    Pools of earlier states are removed a week after their last use, because a run may still need them.
    """
    family = f"{kind}-{_digest([str(folder.resolve()), *map(str, options)])[:16]}-"
    key = family + files_state(folder, files)
    for former in root().glob(f"{family}*"):
        with suppress(OSError):
            if former.name != key and time.time() - former.stat().st_mtime > 7 * 86_400:
                shutil.rmtree(former)
    return key


@contextmanager
def workspace() -> Iterator[Path]:
    """A temporary folder on the same disk as the cache. Raises DiskError if the disk is full or read-only."""
    try:
        root().mkdir(parents=True, exist_ok=True)
        work = tempfile.TemporaryDirectory(prefix=".work-", dir=root(), ignore_cleanup_errors=True)
    except OSError as error:
        raise DiskError(
            f"Cannot write to {root()} ({error.strerror}): set FEDSEAL_DATA to another folder."
        ) from error
    for other in root().glob(".work-*"):  # left behind by killed processes
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
            f"No space left on the disk of {root()}: free some, or set FEDSEAL_DATA to another disk."
        ) from error


def files_state(folder: Path, files: Iterable[Path]) -> str:
    """A hash of the files' names, sizes and modification times: hashing the content would take too long."""
    rows = []
    for file in files:
        try:
            state = file.stat()
        except OSError:  # a broken link, which will be skipped
            state = file.lstat()
        about = (0, 0) if stat.S_ISDIR(state.st_mode) else (state.st_size, state.st_mtime_ns)
        rows.append((file.relative_to(folder).as_posix(), *about))
    return _digest(rows)[:24]


class _Hashing:
    """A file that computes the checksum of the data written to it.

    It also makes a full disk raise ENOSPC: NumPy writes real files with fwrite, which loses the reason.
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
        raise ValueError("the checksum of about.json is wrong")
    if about["format"] != FORMAT:
        raise ValueError(f"format {about['format']}, not {FORMAT}")
    return about


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
