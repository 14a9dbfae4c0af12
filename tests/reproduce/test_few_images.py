"""The measurement of class mixes from few images."""

import json
from pathlib import Path

import pytest

from conftest import TINY
from fedseal.config.load import load_config
from fedseal.reproduce import few_images
from fedseal.reproduce.docs import write_few_images
from fedseal.reproduce.store import ResultStore

SMALL = TINY | {
    "data.held_out_test": 0,
    "data.test_per_client": 30,
    "bootstrap.epochs": 20,
    "data.alpha": 0.1,
}


def test_more_images_say_more_about_the_class_mix() -> None:
    """All 40 images of these clients are used for 50, 200 and 1,200."""
    found = few_images.measure(load_config("fmnist-tuned", SMALL))
    assert list(found) == ["plain", "20", "50", "200", "1200"]
    assert found["50"] == found["200"] == found["1200"] > found["plain"]


def test_all_seeds_and_their_mean_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_images, "COLUMNS", {"Dir 0.1": {}})
    monkeypatch.setattr(few_images, "SEEDS", (0, 1))
    values = iter([{"plain": 70.0, "20": 80.0}, {"plain": 72.0, "20": 90.0}])
    monkeypatch.setattr(few_images, "measure", lambda config: next(values))
    assert write_few_images(ResultStore(tmp_path)) == "Not run."
    few_images.main(tmp_path / "few-images.json")
    written = json.loads((tmp_path / "few-images.json").read_text())
    assert written["mean"] == {"Dir 0.1": {"plain": 71.0, "20": 85.0}}
    assert written["by_seed"]["Dir 0.1"][1] == {"plain": 72.0, "20": 90.0} and "versions" in written
    assert "| Dir 0.1 | 71.0 | 85.0 |" in write_few_images(ResultStore(tmp_path))
