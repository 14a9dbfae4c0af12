"""What the README shows is what lies under `results/`."""

from pathlib import Path

from fedseal.config import load_config
from fedseal.results import read_run, refresh, table

ROOT = Path(__file__).parents[1]


def test_the_readme_shows_what_was_measured() -> None:
    page = (ROOT / "README.md").read_text("utf-8")
    assert refresh(page, table(ROOT / "results", "fmnist-lenet")) == page


def test_kept_runs_belong_to_their_configuration() -> None:
    folders = sorted((ROOT / "results").glob("*/*"))
    assert folders
    for folder in folders:
        summary = read_run(folder).summary
        config = load_config(folder / "config.toml")
        assert (summary["config"], summary["seed"]) == (config.fingerprint(), config.seed)
        assert summary["method"] == config.method and summary["rounds"] == config.rounds
