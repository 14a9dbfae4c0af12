"""A few hundred generated inputs: the command line refuses each with one sentence, or works."""

from pathlib import Path

import pytest
from fuzzing import GOOD, fuzz, run_here


def test_generated_input_is_refused_or_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSEAL_DATA", "")  # restored afterwards, as is the current folder
    monkeypatch.chdir(tmp_path)
    total = 0
    for kind, count in fuzz(tmp_path, 250, processes=False):
        assert not count.bad, "\n".join([kind, *count.bad])
        total += count.ends.total()
    assert total >= 200


def test_the_fuzzer_notices_an_unexpected_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise KeyError("unexpected")

    monkeypatch.setattr("fedseal.config.load.list_presets", fail)
    end, text = run_here(["presets"])
    assert end == "exit code 70" and end not in GOOD.values() and "unexpected error" in text
