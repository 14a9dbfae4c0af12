"""README and docs show what `results/` holds, and nothing else."""

from pathlib import Path

import pytest

from fedseal.config.load import load_config
from fedseal.reproduce.docs import MARKED, PAGES, refresh
from fedseal.reproduce.evidence import list_changes
from fedseal.reproduce.store import ResultStore

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", PAGES)
def test_tables_are_written_from_the_results(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / page).read_text("utf-8")
    assert MARKED.search(text)
    assert refresh(text, ResultStore(Path("results"))) == text, "run: make docs"


def test_every_result_is_complete_and_belongs_to_its_configuration() -> None:
    store = ResultStore(ROOT / "results")
    runs = [run for runs in store.runs.values() for run in runs]
    assert runs and len(runs) == len(list((ROOT / "results").rglob("summary.json")))
    for run in runs:
        config = load_config(run.folder / "config.toml")
        assert run.summary["config"] == config.fingerprint() and run.summary["seed"] == config.seed
        assert run.summary["rounds"] == config.rounds
        assert run.accuracy == pytest.approx(run.accuracy_after(config.rounds), abs=1e-12)


def test_changed_keys_are_listed_as_in_a_file() -> None:
    default = {
        "rounds": 150,
        "cohort": 0,
        "engine": {"workers": 1},
        "fedseal": {"theta": 0.1, "ensemble": True},
    }
    other = {
        "rounds": 25,
        "cohort": 5,
        "engine": {"workers": 2},
        "fedseal": {"theta": 0.1, "ensemble": False},
    }
    assert list_changes(default, other) == "`cohort = 5`, `fedseal.ensemble = false`"
    assert list_changes(default, default | {"rounds": 1}) == "the defaults"
