"""A few hundred changed packets and files: each is refused in a clear way, or used."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from packets import ERROR, fuzz, try_input
from peak_memory import MEMORY

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is measured in /proc")


def test_changed_packets_and_files_are_refused_or_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSEAL_DATA", "")  # restored afterwards, as is the current folder
    monkeypatch.chdir(tmp_path)
    total = 0
    for kind, count in fuzz(tmp_path, 240):
        assert not count.bad, "\n".join([kind, *count.bad])
        total += count.ends.total()
    assert total >= 240


def test_the_fuzzer_of_packets_notices_errors_and_memory() -> None:
    def fail() -> str:
        raise KeyError("unexpected")

    assert try_input(fail)[0].startswith(ERROR)
    end, memory = try_input(lambda: str(len(bytearray(300_000_000))))
    assert end == "300000000" and memory > MEMORY
