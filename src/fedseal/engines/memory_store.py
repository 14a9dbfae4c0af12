"""The clients' memories of a simulated run, in one SQLite file.

A round reads and writes the memories of the clients that it asks, and no others. All changes since the last
`commit` are one transaction. If the process is killed, the file is as the last commit left it. A commit is on
the disk when it returns, so a power failure loses no more than a kill. In a deployed run, where clients keep
their memories themselves, the store holds only the round.

SQLite notices damage to the structure of its file, but not to every byte. So each memory has a checksum,
which is checked when the memory is read. The table `run` has a checksum of its own, and the XOR of the
checksums of all memories: if a client has no memory, the XOR shows whether it was lost. So reading takes no
longer with many clients than with few. Files of older versions have no checksums.
"""

import errno
import hashlib
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedseal.errors import FolderInUseError, UserError
from fedseal.system.files import cannot_write, make_private

PAGE = 4096  # bytes; SQLite's default
HASH_BYTES = 16

SCHEMA = (
    # A client number is the row's key in the B-tree, so inner pages hold numbers only and the tree is flat.
    "CREATE TABLE memories (client INTEGER PRIMARY KEY, memory BLOB NOT NULL, checksum BLOB NOT NULL)",
    "CREATE TABLE run (fingerprint TEXT NOT NULL, t INTEGER NOT NULL, memories BLOB, checksum BLOB)",
)


class MemoryStore:
    """The memories by client number, in a file or, without `path`, in RAM.

    `fingerprint` identifies the run, and `t` is the round of the last commit. Opening a file does not change
    it; a missing one is created.
    """

    def __init__(self, path: Path | None = None, fingerprint: str = "") -> None:
        self.path, self.fingerprint, self.t = path, fingerprint, 0
        self._all = bytes(HASH_BYTES)  # the XOR of all checksums
        self._has_checksums = True
        known = path is not None and path.exists()
        self._complete = not known  # whether no memory can be lost
        if path is not None:
            _make_private(path, create=not known)
        with self._clear_errors():
            self._db = sqlite3.connect(path or ":memory:", timeout=0, isolation_level=None)
            try:
                self._open(known)
            except BaseException:
                self._db.close()
                raise

    def get(self, client: int) -> bytes:
        """A client's memory; empty if it has none."""
        with self._clear_errors():
            row = self._db.execute("SELECT * FROM memories WHERE client = ?", (client,)).fetchone()
            if row is None:
                self._check_complete()
                return b""
        _, memory, *checksum = row
        if not isinstance(memory, bytes) or (checksum and checksum != [_hash(client, memory)]):
            raise self._damaged(f"the memory of client {client} has another checksum")
        return memory

    def put(self, client: int, memory: bytes) -> None:
        """Replaces a client's memory."""
        with self._clear_errors():
            self._begin()
            if not self._has_checksums:
                self._db.execute("INSERT OR REPLACE INTO memories VALUES (?, ?)", (client, memory))
                return
            old, new = _hash(client, self.get(client)), _hash(client, memory)
            self._all = _xor(self._all, _xor(old, new))
            self._db.execute("INSERT OR REPLACE INTO memories VALUES (?, ?, ?)", (client, memory, new))

    def commit(self, t: int) -> None:
        """Makes all changes permanent, as the memories after round t."""
        with self._clear_errors():
            self._begin()
            self._db.execute("UPDATE run SET t = ?", (t,))
            if self._has_checksums:
                self._db.execute("UPDATE run SET memories = ?, checksum = ?", (self._all, self._checksum(t)))
            self._db.execute("COMMIT")
        self.t = t

    def close(self) -> None:
        """Drops all changes since the last commit, and leaves a single file."""
        with suppress(sqlite3.Error):  # the next run that opens the file does the same
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            self._db.execute("PRAGMA journal_mode = DELETE")
        self._db.close()

    def _open(self, known: bool) -> None:
        # The run's lock keeps other processes out. SQLite then needs no shared memory, which does not work on
        # network drives.
        self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._db.execute("PRAGMA synchronous = FULL")
        if not known:
            self._begin()
            for statement in SCHEMA:
                self._db.execute(statement)
            row = (self.fingerprint, self._all, self._checksum(0))
            self._db.execute("INSERT INTO run VALUES (?, 0, ?, ?)", row)
            self._db.execute("COMMIT")
            return
        if self.path and self.path.stat().st_size % PAGE and not self._log_exists():
            raise self._damaged("its end is missing")  # SQLite would read zeros
        row = self._db.execute("SELECT * FROM run").fetchone()
        if row is None:
            raise self._damaged("it has no round")
        found, self.t, *checksums = row
        if found != self.fingerprint:
            raise UserError(
                f"{self.path} belongs to another configuration, other data or other clients: use those of its"
                " run, or choose another --out."
            )
        self._has_checksums = bool(checksums)
        if checksums:
            self._all = checksums[0]
            if not isinstance(self._all, bytes) or checksums[1:] != [self._checksum(self.t)]:
                raise self._damaged("the round has another checksum")

    def _check_complete(self) -> None:
        """Refuses a file in which a memory was lost. It takes a look at all of them, but only once."""
        if self._complete or not self._has_checksums:
            return
        [state] = self._db.execute("PRAGMA quick_check(1)").fetchone()
        found = bytes(HASH_BYTES)
        for client, memory in self._db.execute("SELECT client, CAST(memory AS BLOB) FROM memories"):
            found = _xor(found, _hash(client, memory or b""))
        if state != "ok" or found != self._all:
            raise self._damaged("memories are lost")
        self._complete = True

    def _checksum(self, t: object) -> bytes:
        """The checksum of the table `run`."""
        return _hash(t, self.fingerprint.encode() + self._all)

    def _log_exists(self) -> bool:
        """True after a kill; the log then holds the pages that may be incomplete in the file."""
        return self.path is not None and self.path.with_name(f"{self.path.name}-wal").exists()

    def _begin(self) -> None:
        if not self._db.in_transaction:
            self._db.execute("PRAGMA journal_mode = WAL")  # commits with one sync of the disk
            self._db.execute("BEGIN IMMEDIATE")

    @contextmanager
    def _clear_errors(self) -> Iterator[None]:
        """Turns SQLite's errors into sentences that name the file and say what to do."""
        try:
            yield
        except UnicodeDecodeError as error:  # in SQLite's own message about a damaged file
            raise self._damaged("not text") from error
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # without the detail
            if code == sqlite3.SQLITE_FULL and self.path:
                raise cannot_write(self.path, OSError(errno.ENOSPC, str(error))) from error
            if code == sqlite3.SQLITE_BUSY:
                raise FolderInUseError(
                    f"{self.path} is in use by another process. Try again when it has ended."
                ) from error
            if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR):
                raise self._damaged(str(error)) from error
            raise UserError(
                f"Cannot read or write {self.path} ({error}): check the file and its folder, then try again."
            ) from error

    def _damaged(self, why: str) -> UserError:
        folder = self.path.parent if self.path else None
        return UserError(f"{self.path} is damaged ({why}): delete {folder} to start again.")


def _make_private(path: Path, *, create: bool) -> None:
    """Lets only the file's owner read it. SQLite gives the files beside it the same permissions."""
    if create:
        with suppress(OSError):  # SQLite reports it
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    make_private(path)


def _hash(number: object, content: bytes) -> bytes:
    if not content:
        return bytes(HASH_BYTES)  # an empty memory is the same as none
    return hashlib.blake2b(f"{number}:".encode() + content, digest_size=HASH_BYTES).digest()


def _xor(one: bytes, other: bytes) -> bytes:
    return (int.from_bytes(one) ^ int.from_bytes(other)).to_bytes(HASH_BYTES)
