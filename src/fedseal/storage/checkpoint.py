"""Checkpoints: everything that is needed to continue a run.

A checkpoint is a file with the server's state and a store with the clients' memories. It is saved in three
steps: the new state is written beside the old one, the memories are committed, and the new state replaces the
old one. The commit decides which state counts, so a process can end between any two of these steps. A kill or
a power failure loses the work since the last commit, and nothing else.
"""

from dataclasses import dataclass
from pathlib import Path

from fedseal.core import Packet
from fedseal.engines.memory_store import MemoryStore
from fedseal.errors import UserError
from fedseal.rounds import Progress
from fedseal.system.checksums import add_checksum, verify_checksum
from fedseal.system.files import cannot_write, read_file, sync_folder, write_atomic


@dataclass(frozen=True)
class Checkpoint:
    """A run's progress and the seconds that it has taken. The clients' memories are in a store beside it."""

    progress: Progress
    seconds: float = 0.0

    def save(self, path: Path, memories: MemoryStore) -> None:
        """Saves the state as `path`, and commits the memories."""
        state = self.progress.state
        tensors = {f"state.{name}": group for name, group in state.tensors.items()}
        scalars = {f"state.{name}": value for name, value in state.scalars.items()}
        scalars |= {"t": self.progress.t, "seconds": self.seconds, "fingerprint": memories.fingerprint}
        following = _next(path)
        write_atomic(following, add_checksum(Packet(tensors, scalars).to_bytes()), private=True)
        sync_folder(path.parent)
        memories.commit(self.progress.t)
        _replace(path, following)

    @staticmethod
    def load(path: Path, fingerprint: str) -> "Checkpoint":
        """Reads a state; refuses a damaged one and one of another run."""
        try:
            data = read_file(path)
            verify_checksum(data)
            packet = Packet.from_bytes(data)
            scalars = packet.scalars
            t, seconds, found = int(scalars["t"]), float(scalars["seconds"]), scalars["fingerprint"]
        except OSError as error:
            raise UserError(
                f"Cannot read {path} ({error.strerror}): check the file, then try again."
            ) from error
        except Exception as error:
            raise UserError(
                f"{path} is damaged ({type(error).__name__}): delete it to start again."
            ) from error
        if found != fingerprint:
            raise UserError(
                f"{path} belongs to another configuration, other data, other clients or another text of your"
                " own Python files: restore them, or choose another --out."
            )
        state = Packet(
            {k.removeprefix("state."): v for k, v in packet.tensors.items() if k.startswith("state.")},
            {k.removeprefix("state."): v for k, v in scalars.items() if k.startswith("state.")},
        )
        return Checkpoint(Progress(t, state), seconds)


def open_checkpoint(path: Path, fingerprint: str) -> tuple[Checkpoint | None, MemoryStore]:
    """The last checkpoint, whose state is in `path`, and its memories; None and an empty store without one.

    `fingerprint` identifies the run.
    """
    states = {file: Checkpoint.load(file, fingerprint) for file in (path, _next(path)) if file.exists()}
    store = memories_file(path)
    if not states:
        return None, _empty_store(store, fingerprint)
    if not store.exists():
        raise UserError(
            f"{store} is missing ({path.name} may be of an older version of fedseal): delete {path.parent} to"
            " start again."
        )
    memories = MemoryStore(store, fingerprint)
    for file, checkpoint in states.items():
        if checkpoint.progress.t == memories.t:
            if file != path:  # the run ended before the last step
                _replace(path, file)
            return checkpoint, memories
    memories.close()
    if path not in states:  # it ended before its first commit
        return None, _empty_store(store, fingerprint)
    raise UserError(
        f"{store} is of round {memories.t}, but {path} is of round {states[path].progress.t}: restore both"
        f" files of one round, or delete {path.parent} to start again."
    )


def memories_file(path: Path) -> Path:
    """The store of the memories that belong to the state in `path`."""
    return path.with_name("memories.sqlite")


def _next(path: Path) -> Path:
    """Where a new state waits for the commit of its memories."""
    return path.with_name("next.safetensors")


def _replace(path: Path, new: Path) -> None:
    try:
        new.replace(path)
    except OSError as error:
        raise cannot_write(path, error) from error


def _empty_store(file: Path, fingerprint: str) -> MemoryStore:
    """A new store, in place of one that an earlier start has left."""
    try:
        file.parent.mkdir(0o700, parents=True, exist_ok=True)
        for suffix in ("", "-wal", "-journal"):
            file.with_name(file.name + suffix).unlink(missing_ok=True)
    except OSError as error:
        raise cannot_write(file, error) from error
    return MemoryStore(file, fingerprint)
