"""Notices during a run that a client's key was revoked, was renewed or expired: it is no longer accepted."""

import logging
import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Self

from fedseal.deploy.expiry import explain_expired, read_expiry
from fedseal.deploy.keys import read_public_key
from fedseal.engines.flower.engine import ClientRegistry

log = logging.getLogger("fedseal")

POLL_SECONDS = 2.0

Keys = Mapping[bytes, str]  # names of clients by public key


class KeyWatch:
    """Looks at a folder of keys every two seconds, in a thread.

    `admit` makes the server accept exactly these keys. `expel` is told the names of revoked clients. A client
    whose key expired stays in the run, and is admitted again when it has a new key.
    """

    def __init__(
        self,
        folder: Path,
        registry: ClientRegistry,
        admit: Callable[[Keys], None],
        expel: Callable[[list[str]], None],
    ) -> None:
        self.folder, self.registry, self.admit, self.expel = folder / "clients", registry, admit, expel
        self._seen: object = None  # the state of the folder that was read last
        self._expiries: Mapping[str, datetime | None] = {}
        self._expired: Mapping[str, str] = {}  # of which the user has been told
        self._admitted = registry.keys
        self._expelled: set[str] = set()  # excluded, but not yet recorded
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="keys", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        before = ""
        while True:
            problem = ""
            try:
                self.check()
            except Exception as error:  # a disk that is away must not end the run, nor exclude anybody
                problem = str(error)
            if problem and problem != before:
                log.warning("cannot check whether keys were revoked (%s): trying again", problem)
            before = problem
            if self._closed.wait(POLL_SECONDS):
                return

    def check(self) -> None:
        """Compares the folder with the keys that are accepted."""
        files = {file.stem: file for file in sorted(self.folder.iterdir()) if file.suffix == ".pub"}
        states = {name: (s.st_mtime_ns, s.st_ino) for name, file in files.items() if (s := file.stat())}
        before = self.registry.keys or {}
        names = set(before.values())
        if states != self._seen:
            self._expiries = {name: read_expiry(files[name]) for name in sorted(names & files.keys())}
        expired = explain_expired(self.folder.parent, self._expiries)
        if states == self._seen and expired == self._expired:
            return
        now = {read_public_key(files[name]): name for name in sorted(names & files.keys())}
        revoked = sorted(names - set(now.values()))
        self.registry.replace_keys(now)
        self._expelled |= set(revoked)
        for name in revoked:
            log.warning("%s is excluded from the run, because its key was revoked", name)
        for name in sorted({now[key] for key in now.keys() - before.keys()}):
            log.warning("%s has a new key: its former key is no longer accepted", name)
        valid = {key: name for key, name in now.items() if name not in expired}
        if valid != self._admitted:
            self.admit(valid)
            self._admitted = valid
        for name in sorted(expired.keys() - self._expired.keys()):
            log.warning("%s", expired[name])
        self._expired = expired
        if self._expelled:  # last, because it needs space on the disk
            self.expel(sorted(self._expelled))
            self._expelled.clear()
        self._seen = states
