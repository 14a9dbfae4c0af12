"""Decoded images on disk, memory-mapped, so that only the first start decodes them.

A process holds a shared lock on the folder of a pool as long as it uses the pool's pixels.
"""

import errno
import hashlib
import json
import math
import os
import re
import shutil
import stat
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from fedseal.data.hashed_files import load_array, verify, write_array
from fedseal.data.pool import Pixels, Pool, PoolPixels, SegmentedPixels
from fedseal.errors import UserError
from fedseal.system.files import lock_folder, lock_if_unused, make_private
from fedseal.system.logs import log

FORMAT = 1  # raise it when the stored content changes; older caches are then rebuilt
# Keys from `own_images_key`, and features of images.
OWN_IMAGES = re.compile(r"\w+-[0-9a-f]{16}-[0-9a-f]{24}|features-[0-9a-f]{24}")
DEFAULT_LIMIT_GB = "20"
IN_USE = "in-use"  # a file in a folder of features that the processes lock which use them

FileState = tuple[str, int, int]  # name, size and modification time of a file


class DiskError(UserError):
    """The cache cannot be written. Another way to obtain the data would fail too."""


def root() -> Path:
    """The folder of the cache: FEDSEAL_DATA, or ~/.cache/fedseal."""
    if given := os.environ.get("FEDSEAL_DATA"):
        return Path(given)
    try:
        return Path.home() / ".cache" / "fedseal"
    except RuntimeError as error:
        raise UserError(
            "This user has no home folder: set FEDSEAL_DATA to a folder for the cache."
        ) from error


def get_or_build(key: str, build: Callable[[], tuple[Pool, str]]) -> Pool:
    """The pool stored under `key`. If it is missing or damaged, `build` returns a new one and its origin."""
    pool = load_cached(key)
    if pool is None:
        pool = store(key, *build())
        evict()
    return pool


def load_cached(key: str) -> Pool | None:
    """The pool stored under `key`, with verified checksums; None if it is missing or damaged."""
    folder = root() / key
    with ExitStack() as lock:
        lock.enter_context(lock_folder(folder, exclusive=False))
        try:
            about = read_about(folder)
            for name, checksum in about["sha256"].items():
                verify(folder / name, checksum)
            pixels, labels = _map_pixels(folder, about), load_array(folder / "labels.npy")
            parts = {part: range(start, stop) for part, (start, stop) in about["parts"].items()}
            classes, skipped = tuple(about["classes"]), dict(about["skipped"])
            pool = Pool(about["name"], pixels, labels, classes, parts, about["flips"], skipped)
        except FileNotFoundError:
            if folder.exists():
                log.warning("the cache %s is incomplete and will be rebuilt", folder)
            return None
        except PermissionError as error:
            raise UserError(
                f"The cache {folder} belongs to another user: set FEDSEAL_DATA to a folder of your own."
            ) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("the cache %s is damaged (%s) and will be rebuilt", folder, error)
            return None
        with suppress(OSError):
            os.utime(folder)  # records the time of the last use
        if OWN_IMAGES.fullmatch(key):  # it may be of an older version
            make_private(folder)
        weakref.finalize(pixels, lock.pop_all().close)
    return pool


def _map_pixels(folder: Path, about: Mapping[str, Any]) -> PoolPixels:
    """A plain array if possible: "pixels.npy", or the only segment if the images are in its order."""
    if "segments" not in about:
        pixels: Pixels = load_array(folder / "pixels.npy")
        return pixels
    segments = [map_segment(folder / name, about["shape"]) for name in about["segments"]]
    places = load_array(folder / "places.npy")
    if len(segments) == 1 and np.array_equal(places[:, 1], np.arange(len(segments[0]))):
        return segments[0]
    return SegmentedPixels(segments, places)


def map_segment(path: Path, shape: Sequence[int]) -> Pixels:
    """Images [N, C, H, W] in a file without a header; `shape` is [C, H, W]."""
    number = path.stat().st_size // math.prod(shape)
    return np.memmap(path, np.uint8, "r", shape=(number, *shape))


def origin(key: str) -> str | None:
    """The origin of the pool stored under `key`, or None if it is not stored."""
    try:
        return str(read_about(root() / key)["origin"])
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
        sums = {"pixels.npy": write_array(new / "pixels.npy", np.asarray(pool.pixels))}
        stored = publish(new, key, pool, origin, {"sha256": sums}, replace=replace)
    if stored is None:
        raise UserError(f"Cannot read back the cache {root() / key}: check the disk, or set FEDSEAL_DATA.")
    return stored


def publish(
    new: Path, key: str, pool: Pool, origin: str, files: Mapping[str, Any], *, replace: bool = False
) -> Pool | None:
    """Moves a folder in a workspace, which has the pool's pixels, to its place in the cache.

    `files` says what the folder contains. None if the pool cannot be read back.
    """
    about = {
        "format": FORMAT,
        "name": pool.name,
        "classes": list(pool.classes),
        "parts": {part: [span.start, span.stop] for part, span in pool.parts.items()},
        "flips": pool.flips,
        "skipped": list(pool.skipped.items()),
        "origin": origin,
        **files,
    }
    about["sha256"]["labels.npy"] = write_array(new / "labels.npy", pool.labels)
    (new / "about.json").write_text(json.dumps({"about": about, "sha256": _digest(about)}, indent=1))
    if OWN_IMAGES.fullmatch(key):  # other users could not read the workspace either
        for path in (new, *new.iterdir()):
            make_private(path)
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
            (root() / key).rename(new.parent / f"old-{attempt}")
        except FileNotFoundError:
            continue  # another process moved it first
    return load_cached(key)


def own_images_key(kind: str, folder: Path, files: Iterable[Path], *options: object) -> str:
    """The key of the user's own images, which depends on the folder, the options and the state of the files.

    Pools of earlier states are removed a week after their last use.
    """
    family = f"{kind}-{_digest([str(folder.resolve()), *map(str, options)])[:16]}-"
    key = family + files_state(folder, files)
    for former in former_states(key):
        if time.time() - last_used(former) > 7 * 86_400:
            with suppress(UserError):  # a cache that this user cannot change can still be read
                remove(former)
    return key


def former_states(key: str) -> list[Path]:
    """The pools of earlier states of the same folder with the same options, the last used one first."""
    family = key.rpartition("-")[0]
    found = [path for path in root().glob(f"{family}-*") if path.name != key]
    return sorted(found, key=last_used, reverse=True)


def last_used(path: Path) -> float:
    """The time of the last use of an entry of the cache, 0 if it has just been removed."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def entries() -> list[Path]:
    """Everything in the cache, in the order of the last use. The folder may hold other files, too."""
    found = [path for path in (root().iterdir() if root().is_dir() else ()) if path.name[0] != "."]
    own = (path for path in found if OWN_IMAGES.fullmatch(path.name) or origin(path.name) is not None)
    return sorted(own, key=last_used)


def size_of(paths: Iterable[Path]) -> int:
    """Bytes on disk of some entries together. A file that several of them share counts once."""
    sizes = {}
    for path in paths:
        with suppress(OSError):  # another process removes it
            for file in [path, *path.rglob("*")]:
                state = file.lstat()
                if not stat.S_ISDIR(state.st_mode):
                    sizes[state.st_dev, state.st_ino] = state.st_size
    return sum(sizes.values())


def evict() -> None:
    """Removes pools and features of images, the least recently used first, until FEDSEAL_CACHE_GB is kept."""
    given = os.environ.get("FEDSEAL_CACHE_GB") or DEFAULT_LIMIT_GB
    if not re.fullmatch(r"\d+(\.\d+)?(e[-+]?\d+)?", given):
        raise UserError(
            f"FEDSEAL_CACHE_GB is '{given}': set it to a number of gigabytes, such as {DEFAULT_LIMIT_GB}."
        )
    limit = float(given) * 1e9
    own = [path for path in entries() if OWN_IMAGES.fullmatch(path.name)]
    for path in list(own):
        if size_of(own) <= limit:
            break
        with suppress(UserError):
            if remove(path):
                own.remove(path)
                log.info("removed %s, because the cache is larger than %s GB", path, given)


def remove(path: Path) -> bool:
    """Removes an entry of the cache, all of it at once. False if a process uses it."""
    try:
        with ExitStack() as locks, workspace() as work:
            locked = [path, *path.glob(IN_USE)]
            unused = all(locks.enter_context(lock_if_unused(item)) for item in locked)
            if unused:
                path.rename(work / path.name)
    except FileNotFoundError:  # another process was faster
        return True
    except OSError as error:
        raise UserError(
            f"Cannot remove {path} ({error.strerror}): remove it as the user that it belongs to."
        ) from error
    return unused


def mark_used(folder: Path, user: object) -> None:
    """Records the use of features, and keeps them from being removed as long as `user` exists.

    The folder itself is locked by a process that adds features.
    """
    with suppress(OSError):  # a cache that this user cannot change can still be read
        (folder / IN_USE).touch(0o600)
        os.utime(folder)
    lock = ExitStack()
    lock.enter_context(lock_folder(folder / IN_USE, exclusive=False))
    weakref.finalize(user, lock.close)


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
                with lock_if_unused(other) as unused:
                    if unused:
                        shutil.rmtree(other)
    try:
        with work as folder, lock_folder(Path(folder), exclusive=False):
            yield Path(folder)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskError(
            f"No space left on the disk of {root()}: free some, or set FEDSEAL_DATA to another disk."
        ) from error


def files_state(folder: Path, files: Iterable[Path]) -> str:
    """A hash of the files' names, sizes and modification times: hashing the content would take too long."""
    return _digest([file_state(folder, file) for file in files])[:24]


def file_state(folder: Path, file: Path) -> FileState:
    """The state of a file in a folder; a subfolder has only a name."""
    try:
        state = file.stat()
    except OSError:  # a broken link, which will be skipped
        state = file.lstat()
    about = (0, 0) if stat.S_ISDIR(state.st_mode) else (state.st_size, state.st_mtime_ns)
    return file.relative_to(folder).as_posix(), *about


def read_about(folder: Path) -> dict[str, Any]:
    """The description of a pool in the cache."""
    outer = json.loads((folder / "about.json").read_text())
    about: dict[str, Any] = outer["about"]
    if outer["sha256"] != _digest(about):
        raise ValueError("the checksum of about.json is wrong")
    if about["format"] != FORMAT:
        raise ValueError(f"format {about['format']}, not {FORMAT}")
    return about


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
