"""Checkpoints are restored bit for bit; damaged ones and those of other runs are refused."""

from pathlib import Path

import pytest
import torch

from fedseal.core import Packet
from fedseal.errors import UserError
from fedseal.rounds import Progress
from fedseal.storage.checkpoint import Checkpoint


def test_checkpoint_round_trip(tmp_path: Path) -> None:
    state = Packet({"model": {"w": torch.tensor([1.5, float("nan")])}, "empty": {}}, {"lambda": 0.3})
    path = tmp_path / "checkpoint" / "state.safetensors"
    Checkpoint(Progress(7, state), {"3": b"\x00\x01memory"}, 12.5).save(path, "mine")
    loaded = Checkpoint.load(path, "mine")
    assert (loaded.progress.t, loaded.seconds, loaded.memories) == (7, 12.5, {"3": b"\x00\x01memory"})
    assert loaded.progress.state.to_bytes() == state.to_bytes()
    with pytest.raises(UserError, match="another configuration"):
        Checkpoint.load(path, "other")
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(UserError, match="damaged"):
        Checkpoint.load(path, "mine")
    assert [file.name for file in path.parent.iterdir()] == ["state.safetensors"]
