"""The store of measured results: what it finds, and what it refuses to keep."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from fedseal.errors import UserError
from fedseal.reproduce.cells import find_table, load_tables
from fedseal.reproduce.run_cells import run_cells
from fedseal.reproduce.store import KEPT_FILES, KNOWN_VERSIONS, ResultStore, identity


def test_a_release_says_whether_earlier_results_stay_valid() -> None:
    assert KNOWN_VERSIONS[0] == version("fedseal")


def test_a_longer_run_of_a_compatible_version_answers_for_a_cell(tmp_path: Path) -> None:
    [cell] = find_table("figure-correct-rates").cells(1, "smoke")
    store = ResultStore(tmp_path / "results")
    for _ in run_cells([cell], store, tmp_path / "runs", 1):
        pass
    assert store.find(cell) is not None
    kept = next((tmp_path / "results").rglob("summary.json"))
    assert sorted(path.name for path in kept.parent.iterdir()) == sorted(KEPT_FILES)
    summary = json.loads(kept.read_text("utf-8"))
    for change, answers in (
        ({"rounds": 3}, True),
        ({"rounds": 1}, False),
        ({"versions": {"fedseal": KNOWN_VERSIONS[-1]}}, True),
        ({"versions": {"fedseal": "0.0.0"}}, False),
    ):
        kept.write_text(json.dumps(summary | change), "utf-8")
        assert (ResultStore(tmp_path / "results").find(cell) is not None) == answers


@pytest.mark.parametrize("name", load_tables())
def test_the_number_of_threads_does_not_hide_a_result(name: str) -> None:
    cell = find_table(name).cells(1, "paper")[0]
    assert identity(cell.config.with_threads(7)) == identity(cell.config)
    assert identity(cell.config.model_copy(update={"seed": 9})) != identity(cell.config)


def test_remains_of_a_kill_are_skipped_and_damage_is_named(tmp_path: Path) -> None:
    results = tmp_path / "results"
    (results / ".new").mkdir(parents=True)
    (results / ".new" / "summary.json").write_text("{")
    assert ResultStore(results).runs == {}
    (results / "cell").mkdir()
    (results / "cell" / "summary.json").write_text("{")
    with pytest.raises(UserError, match=r"results/cell is damaged: delete it"):
        ResultStore(results)


@pytest.mark.parametrize("died", [True, False, None])
def test_a_run_whose_worker_died_is_not_kept(died: bool | None, tmp_path: Path) -> None:
    """A client that was left out for another reason is part of the result; older files do not say."""
    [cell] = find_table("figure-correct-rates").cells(1, "smoke")
    store, run = ResultStore(tmp_path / "results"), tmp_path / "run"
    left_out: dict[str, Any] = {"event": "left-out", "t": 2, "client": "client-3", "reason": "any text"}
    if died is not None:
        left_out["worker_died"] = died
    events = [{"event": "round", "t": 1}, left_out, {"event": "round", "t": 2}]
    run.mkdir()
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (run / "config.toml").touch()
    (run / "summary.json").write_text("{}")
    if died:
        with pytest.raises(UserError, match=r"worker process of client-3 died in round 2.* delete .*run and"):
            store.add(cell, run)
        assert not (tmp_path / "results").exists()
    else:
        assert store.add(cell, run).folder == tmp_path / "results" / "figure-correct-rates-smoke" / cell.name


def test_a_run_that_lacks_a_round_is_not_kept(tmp_path: Path) -> None:
    [cell] = find_table("figure-correct-rates").cells(1, "smoke")
    run = tmp_path / "run"
    run.mkdir()
    (run / "events.jsonl").write_text('{"event": "round", "t": 1}\n')
    with pytest.raises(UserError, match="is damaged, or a round is missing"):
        ResultStore(tmp_path / "results").add(cell, run)
    assert not (tmp_path / "results").exists()


def test_results_with_one_channel_are_outdated_and_those_with_three_are_not(tmp_path: Path) -> None:
    """Version 0.1.0 rounds differently with one channel. A current result is preferred to an outdated one."""
    for name, outdated in (("table-fmnist-lenet", True), ("table-svhn-lenet", False)):
        cell, results = find_table(name).cells(1, "paper")[0], tmp_path / name
        for made_with in ("0.1.0", "0.2.0"):
            folder = results / made_with
            folder.mkdir(parents=True)
            (folder / "config.toml").write_text(cell.config.to_toml(), "utf-8")
            summary = {"rounds": cell.config.rounds, "versions": {"fedseal": made_with}}
            (folder / "summary.json").write_text(json.dumps(summary), "utf-8")
            store = ResultStore(results)
            assert not store.is_missing(cell)
            assert store.is_missing(cell, renew=True) == (outdated and made_with == "0.1.0")
        found = store.find(cell)
        assert found is not None and (found.folder.name == "0.2.0" or not outdated)
