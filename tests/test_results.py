"""README and docs show what `results/` holds, and nothing else."""

from pathlib import Path

import pytest

from fedseal.config import load_config
from fedseal.reproduce import Library
from fedseal.results import MARKED, refresh

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "docs/results.md", "docs/paper-map.md"]


@pytest.mark.parametrize("page", PAGES)
def test_tables_are_made_from_the_results(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / page).read_text("utf-8")
    assert MARKED.search(text)
    assert refresh(text, Library(Path("results"))) == text, (
        f"run: python -m fedseal.results {' '.join(PAGES)}"
    )


def test_every_result_is_whole_and_of_its_configuration() -> None:
    library = Library(ROOT / "results")
    runs = [run for runs in library.runs.values() for run in runs]
    assert runs and len(runs) == len(list((ROOT / "results").rglob("summary.json")))
    for run in runs:
        config = load_config(run.folder / "config.toml")
        assert run.summary["config"] == config.fingerprint() and run.summary["seed"] == config.seed
        assert run.summary["rounds"] == config.rounds
        assert run.accuracy == pytest.approx(run.accuracy_after(config.rounds), abs=1e-12)
