"""The measurement of what differential privacy costs."""

import json
from pathlib import Path

import pytest
import torch

from conftest import TINY
from fedseal.config.load import load_config
from fedseal.privacy import CentralPrivacy, add_update, noisy_mean, update_of
from fedseal.reproduce import privacy
from fedseal.reproduce.docs import write_privacy
from fedseal.reproduce.figures import draw_privacy
from fedseal.reproduce.privacy import OneRound, measure, read
from fedseal.reproduce.store import ResultStore

SMALL = TINY | {"rounds": 1, "bootstrap.epochs": 2, "fedshift.teachers": 1, "client.lr": 0.05}


def test_one_round_is_that_of_the_mechanism() -> None:
    """The mean of the clipped updates is what `CentralPrivacy` releases without noise."""
    config = load_config(privacy.PRESET, SMALL)
    found = OneRound(config)
    again = OneRound(config)
    assert found.clients == 3
    clip = privacy.CLIPS[0]
    mean = noisy_mean([found.totals[clip]], found.sent, 0.0, 3)
    length = sum(float(value.square().sum()) for value in mean.values()) ** 0.5
    assert 0 < length <= clip * (1 + 1e-9)
    alone = {name: value / 3 for name, value in again.totals[clip].items()}
    one_client = {0: add_update(found.sent, alone)}
    shown = CentralPrivacy(clip=clip, noise=0.0).release(one_client, {0: found.sent})[0]
    for name, value in update_of(shown, found.sent).items():
        torch.testing.assert_close(value, mean[name], atol=1e-6, rtol=0)
    assert found.after(0.0, 0.0).keys() == {"test", "validation"}


def test_every_epsilon_and_clip_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(privacy, "EPSILONS", {"1": 1.0})
    monkeypatch.setattr(privacy, "CLIPS", (0.1, 1.0))
    found = measure(load_config(privacy.PRESET, SMALL))
    assert list(found) == ["without clients", "∞", "1"]
    assert [len(draws) for draws in found["1"].values()] == [privacy.DRAWS] * 2


def test_clip_is_chosen_on_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clip 1 is better on validation (70 against 60), so its test accuracies count: 50 and 60, mean 55."""
    monkeypatch.setattr(privacy, "EPSILONS", {"1": 1.0})

    def run(test: float) -> dict[str, object]:
        small = [{"validation": 60.0, "test": 90.0}]
        large = [{"validation": 70.0, "test": test - 1}, {"validation": 70.0, "test": test + 1}]
        by_clip = {"0.1": small, "1.0": large}
        return {"1": by_clip, "∞": by_clip, "without clients": {"validation": 40.0, "test": 40.0}}

    path = tmp_path / "privacy.json"
    assert read(path) == {} and write_privacy(ResultStore(tmp_path)) == "Not run."
    path.write_text(json.dumps({"runs": {"fedshift": {"0": run(50.0), "1": run(60.0)}}}))
    point = read(path)["fedshift"]["1"]
    assert (point.mean, point.clip) == (55.0, "1.0") and point.deviation == pytest.approx(50**0.5)
    text = write_privacy(ResultStore(tmp_path))
    assert "| fedshift | 40.0 ± 0.0 | 55.0 ± 7.1 | 55.0 ± 7.1 |" in text
    assert "| clip | – | 1.0 | 1.0 |" in text
    assert draw_privacy(ResultStore(tmp_path), tmp_path / "privacy.svg") == tmp_path / "privacy.svg"
    assert "without clients" in (tmp_path / "privacy.svg").read_text()


def test_only_missing_seeds_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int, int]] = []

    def measured(config: privacy.Config) -> dict[str, int]:
        asked.append((config.method, config.data.clients, config.seed))
        return {}

    monkeypatch.setattr(privacy, "measure", measured)
    monkeypatch.setattr(privacy, "SEEDS", (0,))
    privacy.main(tmp_path / "privacy.json")
    monkeypatch.setattr(privacy, "SEEDS", (0, 1))
    privacy.main(tmp_path / "privacy.json")
    runs = [("fedshift", 10), ("fedshift", 1000), ("fedavg-sl", 10), ("fedavg-sl", 1000)]
    assert asked == [(*run, seed) for seed in (0, 1) for run in runs]
    assert list(json.loads((tmp_path / "privacy.json").read_text())["runs"]) == list(privacy.RUNS)
