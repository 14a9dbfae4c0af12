"""Files that are there whole or not at all."""

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from fedseal.errors import UserError

IN_USE = "is in use: another process is training in it."


def write_atomic(path: Path, data: bytes | str) -> None:
    """Writes a file through a temporary one beside it; a full disk leaves the old file as it was."""
    content = data.encode() if isinstance(data, str) else data
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        work = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
        try:
            with work.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            work.replace(path)
        except BaseException:
            work.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise cannot_write(path, error) from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps a run's folder to this process for a while; the lock ends with it, however it ends."""
    path = folder / "checkpoint" / "lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        raise cannot_write(folder, error) from error
    with file:
        try:
            _lock(file.fileno(), alone=True, wait=False)
        except BlockingIOError as error:
            raise UserError(f"{folder} {IN_USE}") from error
        yield


def in_use(folder: Path) -> bool:
    """Whether a process has a run's folder to itself just now."""
    try:
        with (folder / "checkpoint" / "lock").open() as file:
            _lock(file.fileno(), alone=False, wait=False)
    except BlockingIOError:
        return True
    except OSError:  # there is none
        return False
    return False


@contextmanager
def held(folder: Path, *, alone: bool) -> Iterator[None]:
    """Waits for who holds a folder alone, or for all holders; for nobody where there are no locks."""
    with ExitStack() as stack:
        with suppress(OSError):
            handle = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, handle)
            _lock(handle, alone=alone, wait=True)
        yield


def _lock(handle: int, *, alone: bool, wait: bool) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        return
    fcntl.flock(handle, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | (0 if wait else fcntl.LOCK_NB))


def cannot_write(path: Path, error: OSError) -> UserError:
    """What to tell the user when a file cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(f"No space left to write {path}: free some; a run goes on with --resume.")
    return UserError(f"Cannot write {path} ({error.strerror}): choose another folder.")
