"""Atomic writes and folder locks."""

import errno
import hashlib
import os
import secrets
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from fedseal.errors import FolderInUseError, UserError

if sys.platform != "win32":
    import fcntl


def write_atomic(path: Path, data: bytes | str, *, private: bool = False) -> None:
    """Writes a file through a temporary one beside it, so that it is never half-written.

    Only its owner can read a private one; if its folder is missing, that is created in the same way.
    """
    content = data.encode() if isinstance(data, str) else data
    try:
        require_regular(path)  # a device must not be replaced by a file
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        path.parent.mkdir(0o700 if private else 0o777, parents=True, exist_ok=True)
        work = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
        try:
            handle = os.open(work, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            work.replace(path)
        except BaseException:
            work.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise cannot_write(path, error) from error


def make_private(path: Path) -> None:
    """Makes a file or folder unreadable for other users, if it belongs to this one. Creates no file."""
    with suppress(OSError):
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            path.chmod(mode & 0o700)


def sync_folder(folder: Path) -> None:
    """Makes new file names in a folder survive a power failure, where the system supports it."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_new_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes a new folder through a temporary one beside it, so that it is never half-written."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as work:
            new = Path(work, folder.name)  # with the usual permissions, unlike the temporary folder
            new.mkdir()
            for name, content in files.items():
                (new / name).write_bytes(content)
            new.rename(folder)
    except OSError as error:
        raise UserError(f"Cannot write {folder} ({error.strerror}): choose another folder.") from error


def hash_file(path: Path) -> str:
    """A hash of a file's content."""
    try:
        require_regular(path)
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"Cannot read {path} ({error.strerror}): check the path.") from error


def read_file(path: Path) -> bytes:
    """The content of a regular file."""
    require_regular(path)
    return path.read_bytes()


def require_regular(path: Path) -> None:
    """Raises an OSError for a FIFO, which would block, a device or the like."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Reserves a run folder for this process; the lock ends with the process, however it ends."""
    path = folder / "checkpoint" / "lock"
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)  # runs, reports and models are about private images
        path.parent.mkdir(0o700, exist_ok=True)
        make_private(path.parent)
        require_regular(path)
        file = path.open("a")
    except OSError as error:
        raise cannot_write(folder, error) from error
    with file:
        try:
            _lock(file.fileno(), exclusive=True, wait=False)
        except BlockingIOError as error:
            raise FolderInUseError(
                f"{folder} is in use: another process is training in it. Try again when it has ended."
            ) from error
        yield


def in_use(folder: Path) -> bool:
    """True if a process has reserved the run folder."""
    try:
        path = folder / "checkpoint" / "lock"
        require_regular(path)
        with path.open() as file:
            _lock(file.fileno(), exclusive=False, wait=False)
    except BlockingIOError:
        return True
    except OSError:  # no lock file
        return False
    return False


@contextmanager
def lock_folder(folder: Path, *, exclusive: bool) -> Iterator[None]:
    """Holds a shared or exclusive lock on a folder; does nothing where locks are not supported."""
    with ExitStack() as stack:
        with suppress(OSError):
            handle = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, handle)
            _lock(handle, exclusive=exclusive, wait=True)
        yield


@contextmanager
def lock_if_unused(path: Path) -> Iterator[bool]:
    """Holds an exclusive lock on a folder or file. False if a process uses it, or if locks do not work."""
    handle = os.open(path, os.O_RDONLY)
    try:
        _lock(handle, exclusive=True, wait=False)
        unused = True
    except OSError:
        unused = False
    try:
        yield unused
    finally:
        os.close(handle)


def _lock(handle: int, *, exclusive: bool, wait: bool) -> None:
    if sys.platform != "win32":
        fcntl.flock(handle, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | (0 if wait else fcntl.LOCK_NB))


def cannot_write(path: Path, error: OSError) -> UserError:
    """The error for a file that cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            f"No space left to write {path}: free some space, then continue the run with --resume."
        )
    return UserError(f"Cannot write {path} ({error.strerror}): choose another folder.")
