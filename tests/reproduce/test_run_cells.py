"""Running cells, at the smallest scale."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conftest import children
from fedseal.reproduce.cells import Cell, find_table
from fedseal.reproduce.run_cells import count_rounds, longest_runs, run_cells, run_folder, start
from fedseal.reproduce.store import ResultStore
from fedseal.system.files import lock_run


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def cell() -> Cell:
    [cell] = find_table("figure-correct-rates").cells(1, "smoke")
    return cell


def test_a_failed_cell_is_named_and_the_others_continue(here: Path) -> None:
    table = find_table("figure-theta")
    rows: dict[str, Any] = {"bad": {"server.lr": 1e9}, "good": {"method": "server-sl"}}
    store = ResultStore(here / "results")
    *_, last = run_cells(replace(table, rows=rows).cells(1, "smoke"), store, here / "runs", 1)
    assert list(last.failed) == ["bad-dir-0.3-seed0"]
    assert "lower server.lr" in last.failed["bad-dir-0.3-seed0"]
    assert [path.parent.name for path in (here / "results").rglob("summary.json")] == ["good-dir-0.3-seed0"]


def test_a_cell_that_cannot_be_kept_does_not_stop_the_others(here: Path) -> None:
    table = find_table("figure-theta")
    rows: dict[str, Any] = {
        name: {"method": "server-sl", "server.lr": lr} for name, lr in (("a", 1e-3), ("b", 2e-3))
    }
    store = ResultStore(here / "results")
    first, second = replace(table, rows=rows).cells(1, "smoke")
    (store.folder / "figure-theta-smoke").mkdir(parents=True)
    (store.folder / "figure-theta-smoke" / first.name).write_text("in the way")
    *_, last = run_cells([first, second], store, here / "runs", 1)
    assert list(last.finished) == [first.name, second.name]  # the file in the way is replaced
    (store.folder / "figure-theta-smoke").rename(here / "elsewhere")
    (store.folder / "figure-theta-smoke").write_text("in the way")
    *_, last = run_cells([first, second], ResultStore(store.folder), here / "runs", 1)
    assert list(last.failed) == [first.name, second.name]
    assert "figure-theta-smoke" in last.failed[first.name]


def test_of_cells_that_differ_in_rounds_the_longest_is_run() -> None:
    table = find_table("figure-theta")
    rows: dict[str, Any] = {
        "short": {"rounds": 10},
        "long": {"rounds": 30},
        "other": {"rounds": 5, "fedseal.theta": 0.5},
    }
    cells = replace(table, rows=rows).cells(1, "paper")
    assert [cell.row for cell in longest_runs(cells)] == ["long", "other"]


def test_a_cell_that_another_process_runs_is_waited_for(here: Path, cell: Cell) -> None:
    before = children(os.getpid())
    with lock_run(run_folder(cell, here / "runs")):
        states = run_cells([cell], ResultStore(here / "results"), here / "runs", 1)
        for _ in range(3):
            state = next(states)
            assert state.running == {cell.name: 0} and not state.failed and children(os.getpid()) == before
    *_, last = states
    assert list(last.finished) == [cell.name] and not last.failed


def test_a_cell_that_another_process_starts_at_the_same_time_is_tried_again(
    here: Path, cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the folder looks free, but its lock is taken when the cell's process comes to it."""
    monkeypatch.setattr("fedseal.reproduce.run_cells.in_use", lambda folder: False)
    states = run_cells([cell], ResultStore(here / "results"), here / "runs", 1)
    with lock_run(run_folder(cell, here / "runs")):
        while next(states).running:  # until the process has given up
            pass
    *_, last = states
    assert list(last.finished) == [cell.name] and not last.failed


def test_a_killed_cell_is_reported_as_killed(here: Path, cell: Cell) -> None:
    """Whatever it printed before."""
    running = start(cell, here / "run", 1, {})
    running.stderr.write("warning: something else\n")
    running.process.kill()
    running.process.wait()
    assert running.error == "the process was killed by SIGKILL (out of memory?)"


def test_a_module_in_the_current_folder_does_not_replace_pythons(here: Path, cell: Cell) -> None:
    (here / "random.py").write_text("raise SystemExit('mine')")
    *_, last = run_cells([cell], ResultStore(here / "results"), here / "runs", 1)
    assert list(last.finished) == [cell.name], last.failed


def test_damaged_events_do_not_stop_other_cells(here: Path) -> None:
    (here / "events.jsonl").write_text('{"event": "round", "t": 1}\nnot JSON\n{"event": "round", "t": 2}\n')
    assert count_rounds(here) == count_rounds(here / "missing") == 0
