"""The clients' memories of a simulated run, in one SQLite file.

A round reads and writes the memories of the clients that it asks, and no others. All changes since the last
`commit` are one transaction. If the process is killed, the file is as the last commit left it. A commit is on
the disk when it returns, so a power failure loses no more than a kill. In a deployed run, where clients keep
their memories themselves, the store holds only the round.
"""

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedseal.errors import FolderInUseError, UserError
from fedseal.system.files import cannot_write

PAGE = 4096  # bytes; SQLite's default

SCHEMA = (
    # A client number is the row's key in the B-tree, so inner pages hold numbers only and the tree is flat.
    "CREATE TABLE memories (client INTEGER PRIMARY KEY, memory BLOB NOT NULL)",
    "CREATE TABLE run (fingerprint TEXT NOT NULL, t INTEGER NOT NULL)",
)


class MemoryStore:
    """The memories by client number, in a file or, without `path`, in RAM.

    `fingerprint` identifies the run, and `t` is the round of the last commit. Opening a file does not change
    it; a missing one is created.
    """

    def __init__(self, path: Path | None = None, fingerprint: str = "") -> None:
        self.path, self.fingerprint, self.t = path, fingerprint, 0
        known = path is not None and path.exists()
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
            row = self._db.execute("SELECT memory FROM memories WHERE client = ?", (client,)).fetchone()
        return row[0] if row else b""

    def put(self, client: int, memory: bytes) -> None:
        """Replaces a client's memory."""
        with self._clear_errors():
            self._begin()
            self._db.execute("INSERT OR REPLACE INTO memories VALUES (?, ?)", (client, memory))

    def commit(self, t: int) -> None:
        """Makes all changes permanent, as the memories after round t."""
        with self._clear_errors():
            self._begin()
            self._db.execute("UPDATE run SET t = ?", (t,))
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
            self._db.execute("INSERT INTO run VALUES (?, 0)", (self.fingerprint,))
            self._db.execute("COMMIT")
            return
        if self.path and self.path.stat().st_size % PAGE and not self._log_exists():
            raise self._damaged("its end is missing")  # SQLite would read zeros
        row = self._db.execute("SELECT fingerprint, t FROM run").fetchone()
        if row is None:
            raise self._damaged("it has no round")
        found, self.t = row
        if found != self.fingerprint:
            raise UserError(
                f"{self.path} belongs to another configuration, other data or other clients: use those of its"
                " run, or choose another --out."
            )

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
