"""Recorded results are reproduced bit for bit."""

from pathlib import Path

import pytest
import torch

from fedseal.reproduce.run_cells import differing_rounds, read_numbers
from fedseal.training.train import train

RESULTS = Path(__file__).parents[2] / "results"
GOLDEN = Path(__file__).parent / "golden"  # short runs with clients
CPU = Path("/proc/cpuinfo")
AMD = pytest.mark.skipif(
    not CPU.exists()
    or "AuthenticAMD" not in CPU.read_text("utf-8")
    or torch.backends.cpu.get_cpu_capability() != "AVX2",
    reason="results were measured on AMD processors with AVX2; others may round differently",
)


@AMD
@pytest.mark.parametrize(
    ("recorded", "rounds"),
    [
        (RESULTS / "table-fmnist-lenet" / "server-sl-dir-0.9-seed0", 3),
        (GOLDEN / "fedseal", 2),
        (GOLDEN / "semifl", 2),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_recorded_rounds_are_reproduced(recorded: Path, rounds: int, tmp_path: Path) -> None:
    """Compares all numbers of the first rounds, possibly on another processor than the recorded one."""
    train(recorded / "config.toml", out=tmp_path / "run", rounds=rounds, options={"engine.device": "cpu"})
    numbers = read_numbers(recorded, rounds)
    assert len(numbers) == rounds
    assert differing_rounds(numbers, read_numbers(tmp_path / "run", rounds)) == []
