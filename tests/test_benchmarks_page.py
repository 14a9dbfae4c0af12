"""docs/benchmarks.md shows what results/bench holds, and nothing else."""

from pathlib import Path
from statistics import mean

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


def test_what_the_pages_claim_of_robustness_is_in_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills lose nothing, memory is flat, changed inputs are refused, an attack costs at most a point."""
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.syspath_prepend(ROOT / "tests" / "torture")
    from bench.page import read
    from serving_memory import is_flat

    torture = read("torture")
    assert torture["kills"] >= 1000 and torture["lost"] == torture["different"] == 0
    memory = read("serving-memory")["megabytes"]
    assert memory[-1]["round"] >= 499 and is_flat(memory)
    for name in ("fuzz", "fuzz-packets"):
        assert read(name)["inputs"] >= 10_000 and read(name)["errors"] == read(name)["hangs"] == 0
    assert not {"HIGH", "CRITICAL"} & read("tls")["severities"].keys()
    attacks = read("attacks")["runs"]
    for setting in ("A", "B", "A5", "B5"):
        clean = mean(attacks[f"{setting}/{seed}/mean/none/0"] for seed in range(3))
        found: dict[str, list[float]] = {}
        for name, accuracy in attacks.items():
            place, _, rule, attack, number = name.split("/")
            if (place, rule) == (setting, "mean, gate") and int(number) <= 2:
                found.setdefault(f"{attack}, {number}", []).append(accuracy)
        assert len(found) == 25  # none, eleven attacks by one and by two clients, two more by two clients
        for attack, values in found.items():
            allowed = 1 if attack != "none, 0" else 0.2
            assert len(values) == 3 and mean(values) >= clean - allowed, (setting, attack)
