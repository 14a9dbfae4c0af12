"""Files that are there whole or not at all."""

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedseal.errors import UserError


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
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    path = folder / "checkpoint" / "lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        raise cannot_write(folder, error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{folder} is in use: another process is training in it.") from error
        yield


def cannot_write(path: Path, error: OSError) -> UserError:
    """What to tell the user when a file cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(f"No space left to write {path}: free some; a run goes on with --resume.")
    return UserError(f"Cannot write {path} ({error.strerror}): choose another folder.")
