"""Checkpoints are restored bit for bit, wherever saving stopped; damaged and unrelated files are refused."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from fedseal.core import Packet
from fedseal.engines.memory_store import MemoryStore
from fedseal.errors import UserError
from fedseal.rounds import Progress
from fedseal.storage import checkpoint as checkpoints
from fedseal.storage.checkpoint import Checkpoint, memories_file, open_checkpoint

STATE = Packet({"model": {"w": torch.tensor([1.5, float("nan")])}, "empty": {}}, {"lambda": 0.3})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The state file of a run with a checkpoint of round 7, in which client 3 has a memory."""
    path = tmp_path / "checkpoint" / "state.safetensors"
    save(path, 7)
    return path


def save(path: Path, t: int) -> None:
    """Saves a checkpoint of round t; client 3's memory names the round."""
    _, memories = open_checkpoint(path, "mine")
    with closing(memories):
        memories.put(3, f"after {t}".encode())
        Checkpoint(Progress(t, STATE), 12.5).save(path, memories)


def resume(path: Path) -> tuple[int, bytes]:
    """The round from which a run continues, and client 3's memory; round 0 for a new run."""
    resumed, memories = open_checkpoint(path, "mine")
    with closing(memories):
        return resumed.progress.t if resumed else 0, memories.get(3)


def test_checkpoint_round_trip(path: Path) -> None:
    loaded, memories = open_checkpoint(path, "mine")
    assert loaded is not None and (loaded.progress.t, loaded.seconds) == (7, 12.5)
    assert loaded.progress.state.to_bytes() == STATE.to_bytes()
    assert (memories.t, memories.get(3), memories.get(4)) == (7, b"after 7", b"")
    memories.close()
    assert sorted(file.name for file in path.parent.iterdir()) == ["memories.sqlite", "state.safetensors"]


def test_checkpoint_of_another_run_is_refused(path: Path) -> None:
    with pytest.raises(UserError, match=r"state\.safetensors belongs to another configuration"):
        open_checkpoint(path, "other")


def test_damaged_state_is_refused(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(UserError, match=r"state\.safetensors is damaged \(.*\): delete it to start again\."):
        open_checkpoint(path, "mine")
    path.unlink()
    assert resume(path) == (0, b"")


def test_every_changed_byte_of_a_state_is_refused_or_harmless(path: Path) -> None:
    whole, refused = path.read_bytes(), 0
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= 0x41
        path.write_bytes(data)
        try:
            found = Checkpoint.load(path, "mine")
        except UserError as error:
            assert str(error).startswith(f"{path} is damaged (")
            refused += 1
            continue
        assert found.progress.t == 7 and found.progress.state.to_bytes() == STATE.to_bytes()
    assert refused > len(whole) - 20  # the others are padding and the name of the checksum


def test_a_state_without_a_checksum_is_continued(path: Path) -> None:
    """As versions before 0.3 wrote it."""
    path.write_bytes(Packet.from_bytes(path.read_bytes()).to_bytes())
    assert b"sha256" not in path.read_bytes() and resume(path) == (7, b"after 7")


class StopError(Exception):
    """Stands for the end of the process."""


def stop(*_: object, **__: object) -> None:
    raise StopError


def stop_after(function: Callable[..., None]) -> Callable[..., None]:
    def stopping(*arguments: object, **options: object) -> None:
        function(*arguments, **options)
        stop()

    return stopping


@pytest.mark.parametrize(
    ("owner", "name", "replacement", "expected"),
    [
        (checkpoints, "write_atomic", stop, 7),
        (checkpoints, "write_atomic", stop_after(checkpoints.write_atomic), 7),
        (MemoryStore, "commit", stop, 7),
        (MemoryStore, "commit", stop_after(MemoryStore.commit), 9),
        (Path, "replace", stop, 7),  # of the new state beside the old one
    ],
)
def test_stop_while_saving(
    owner: object,
    name: str,
    replacement: object,
    expected: int,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Saving round 9 stops between two steps. State and memories are those of the same round afterwards, and
    the run goes on from there."""
    with monkeypatch.context() as patch, pytest.raises(StopError):
        patch.setattr(owner, name, replacement)
        save(path, 9)
    assert resume(path) == resume(path) == (expected, f"after {expected}".encode())
    save(path, 9)
    assert resume(path) == (9, b"after 9")
    save(path, 10)
    assert resume(path) == (10, b"after 10")


@pytest.mark.parametrize(("replacement", "expected"), [(stop, 0), (stop_after(MemoryStore.commit), 1)])
def test_stop_while_saving_the_first_checkpoint(
    replacement: object, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checkpoint" / "state.safetensors"
    with monkeypatch.context() as patch, pytest.raises(StopError):
        patch.setattr(MemoryStore, "commit", replacement)
        save(path, 1)
    assert resume(path) == (expected, b"after 1" if expected else b"")


def test_missing_memories_are_reported(path: Path) -> None:
    memories_file(path).unlink()
    with pytest.raises(UserError) as caught:
        open_checkpoint(path, "mine")
    assert str(caught.value) == (
        f"{memories_file(path)} is missing (state.safetensors may be of an older version of fedseal): delete"
        f" {path.parent} to start again."
    )


def test_state_and_memories_of_different_rounds_are_refused(path: Path) -> None:
    old = memories_file(path).read_bytes()
    save(path, 8)
    memories_file(path).write_bytes(old)
    with pytest.raises(UserError) as caught:
        open_checkpoint(path, "mine")
    assert str(caught.value) == (
        f"{memories_file(path)} is of round 7, but {path} is of round 8: restore both files of one round, or"
        f" delete {path.parent} to start again."
    )


def test_new_run_does_not_see_the_memories_of_an_earlier_start(path: Path) -> None:
    path.unlink()
    assert resume(path) == (0, b"")
    resumed, memories = open_checkpoint(path, "other")
    assert resumed is None and memories.fingerprint == "other"
    memories.close()
