"""docs/benchmarks.md shows what results/bench holds, and nothing else."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_tables_are_made_from_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from bench import page

    text = page.PAGE.read_text("utf-8")
    assert {match[2] for match in page.MARKED.finditer(text)} == page.BLOCKS.keys()
    assert page.refresh(text) == text, "run: make docs"
    used = {f"{name}.json" for _, *files in page.BLOCKS.values() for name in files}
    assert {path.name for path in page.RESULTS.iterdir()} == used
