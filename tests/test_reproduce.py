"""The paper's tables and figures: their files, and the running of cells, at the smallest scale."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from conftest import Command, alive, children, contents
from fedseal import reproduce as lib
from fedseal import tables
from fedseal.engines.local import DIED
from fedseal.errors import UserError
from fedseal.files import locked
from fedseal.machine import cores, processor

SMOKE = ("--scale", "smoke")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to be in, with `results` and `runs` below it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_there_are_eight_tables_and_five_figures() -> None:
    names = list(tables.tables())
    assert sum(name.startswith("table-") for name in names) == 8
    assert sum(name.startswith("figure-") for name in names) == 5
    with pytest.raises(UserError, match="no table or figure 'table-mnist'; there are"):
        tables.find_table("table-mnist")


def test_what_a_row_changes_counts_more_than_what_the_scale_does() -> None:
    table = tables.find_table("table-cifar10")

    def rates(row: str, scale: tables.Scale) -> tuple[float, float, int]:
        config = tables.Cell(table, row, "IID", 0, scale).config
        return config.server.lr, config.client.lr, config.client.epochs

    assert rates("FedSEAL", "paper") == (0.001, 0.001, 5)
    assert rates("FedSEAL", "reduced") == (0.01, 0.01, 2)
    # FedRGD's server learns 3.5 times as fast as its clients, which have one epoch
    assert rates("FedRGD", "paper") == (0.0035, 0.001, 1)
    assert rates("FedRGD", "reduced") == (0.035, 0.01, 1)
    assert table.reductions.startswith("`rounds = 20`, `model.width = 8`, ")
    assert table.reductions.endswith(
        "; FedAvg-SL: `fedavg-sl.server_step = true`; FedRGD: `server.lr = 0.035`"
    )


@pytest.mark.parametrize("name", tables.tables())
@pytest.mark.parametrize("scale", ["paper", "reduced", "smoke"])
def test_every_cell_is_a_configuration(name: str, scale: tables.Scale) -> None:
    table = tables.find_table(name)
    cells = table.cells(2, scale)
    assert len({cell.name for cell in cells}) == len(cells) == 2 * len(table.rows) * len(table.columns)
    for cell in cells:
        assert cell.config.seed == cell.seed
        assert cell.config.rounds <= {"paper": 150, "reduced": 30, "smoke": 2}[scale]
    if scale != "smoke" or name.startswith("figure"):  # where clients and labels are few in every cell
        assert len({lib.identity(cell.config) for cell in cells}) == len(cells)
    assert all(len(values) == len(table.columns) for values in table.paper.values())
    assert table.paper.keys() <= table.rows.keys()


@pytest.mark.parametrize("name", [name for name in tables.tables() if name.startswith("table-")])
def test_every_table_prints_before_anything_is_run(name: str, here: Path, fedseal: Command) -> None:
    answer = fedseal("reproduce", name, "--no-run", "--scale", "reduced")
    assert answer.code == 0 and "REDUCED" in answer.out and "not run (" in answer.out, answer.err
    assert "Reduced: rounds = " in answer.out


def test_margin_and_gap_recovered() -> None:
    """Over the seeds that all have: margins of seeds 0 and 1 are 76 − 73 = 3 and 78 − 74 = 4, mean 3.5;
    FedAvg-SL has seed 0 alone: 3 of 83 − 73 = 10 is 30 %. The paper's LeNet at 0.3: 78.62 − 74.95 = 3.67 of
    84.51 − 74.95 = 9.56 is 38 %.
    """
    measured = {
        "Server-SL": {"a": lib.Measured({0: 73.0, 1: 74.0, 2: 10.0}, 74.95)},
        "FedAvg-SL": {"a": lib.Measured({0: 83.0}, 84.51)},
        "FedSEAL": {"a": lib.Measured({0: 76.0, 1: 78.0}, 78.62)},
        "SemiFL": {"a": lib.Measured()},
    }
    assert lib.readings(measured)["FedSEAL"]["a"] == "+3.50 (+3.67), 30% over 1 of 2 seeds (38%)"
    assert lib.readings(measured)["SemiFL"]["a"] == "– (–), – (–)"
    # seeds 0 and 1 of two: 3 + 4 of (83 − 73) + (78 − 74) is 7 of 14; no gap, no share of it
    both = lib.Measured({0: 83.0, 1: 78.0})
    assert lib.gap_recovered(measured["FedSEAL"]["a"], measured["Server-SL"]["a"], both) == "50% (–)"
    assert lib.gap_recovered(both, both, both) == "– (–)"
    # a method above it shows that FedAvg-SL is no bound there, for none of them
    measured["SemiFL"] = {"a": lib.Measured({0: 83.1})}
    assert lib.readings(measured)["FedSEAL"]["a"] == "+3.50 (+3.67), – (38%)"
    assert lib.readings(measured)["SemiFL"]["a"] == "+10.10 (–), – (–)"
    assert lib.readings({"FedSEAL": measured["FedSEAL"]}) == {}
    # the spread of 76 and 78 is √2
    assert measured["FedSEAL"]["a"].text() == "77.00 ± 1.41 (78.62)"
    assert lib.Measured().text() == "not run (–)"


def test_cells_are_run_once_kept_and_verified(here: Path, fedseal: Command) -> None:
    words = ("reproduce", "figure-self-ensemble", *SMOKE)
    listed = fedseal("reproduce", "--list", *SMOKE).out
    assert "0/2" in listed and "≈" in listed + fedseal("reproduce", "--list").out
    assert "not all" in fedseal(*words, "--no-run").out
    answer = fedseal(*words, "--jobs", 2)
    assert answer.code == 0, answer.err
    assert "2 of 2 cells to run, < 1 min, into results" in answer.out and "ResNet-18" in answer.out
    place = here / "results" / "figure-self-ensemble-smoke"
    cells = ("with-self-ensemble-dir-0.3-seed0", "without-dir-0.3-seed0")
    for cell in cells:
        assert sorted(path.name for path in (place / cell).iterdir()) == sorted(lib.KEPT)
    with Image.open(place / "figure.png") as picture:
        assert picture.size[0] > 500
    assert "<svg" in (place / "figure.svg").read_text("utf-8")
    data = json.loads((place / "figure.json").read_text("utf-8"))
    assert [len(points) for points in data.values()] == [2, 2]

    before = contents(place)
    shutil.rmtree(here / "runs")
    assert fedseal(*words).code == 0
    assert not (here / "runs").exists()
    assert contents(place).keys() == before.keys()
    assert {k: v[0] for k, v in contents(place).items()} == {k: v[0] for k, v in before.items()}

    assert "2/2" in fedseal("reproduce", "--list", *SMOKE).out
    kept = here / "runs" / "reproduce" / f"verify-figure-self-ensemble-{cells[1]}"
    assert "the same 2 rounds" in fedseal(*words, "--verify", cells[1]).out
    assert not kept.exists()
    events = place / cells[1] / "events.jsonl"
    events.write_text(
        events.read_text("utf-8").replace('"t": 2, "test_accuracy": 0.', '"t": 2, "test_accuracy": 1.')
    )
    differing = fedseal(*words, "--verify", cells[1])
    differing.refuses(f"{cells[1]} differs", "from round 2 on; last ten rounds: ", " %, now ")
    assert "processor" not in differing.err and "runs/reproduce/verify-figure" in differing.err
    assert list(kept.rglob("model.safetensors"))
    summary = place / cells[1] / "summary.json"
    summary.write_text(summary.read_text("utf-8").replace(processor(), "an abacus"))
    fedseal(*words, "--verify", cells[1]).refuses(f"then: an abacus; now: {processor()}.")
    fedseal(*words, "--verify", "other").refuses("no cell 'other'", cells[0])
    fedseal(*words, "--verify", cells[1].replace("seed0", "seed7")).refuses("not been measured")
    fedseal("reproduce", "table-fmnist-labels", *SMOKE, "--verify", "server-sl-500-labels-seed0").refuses(
        "has not been measured yet", "--only server-sl-500-labels-seed0 --seeds 1"
    )


def test_a_table_is_printed_and_marked(here: Path, fedseal: Command) -> None:
    """At this scale both columns have 50 labels: two cells serve for four."""
    answer = fedseal("reproduce", "table-fmnist-labels", *SMOKE)
    assert answer.code == 0, answer.err
    assert "SMOKE SCALE" in answer.out and "(74.95)" in answer.out and "not run" not in answer.out
    assert len(list((here / "results").rglob("summary.json"))) == 2
    assert "not run" in fedseal("reproduce", "table-fmnist-labels", "--no-run").out  # at the paper's scale


def test_this_version_has_its_own_numbers() -> None:
    """A release must say whether its numbers are those of the last."""
    assert lib.SAME[-1] == version("fedseal")


def test_what_serves_for_a_cell(here: Path) -> None:
    """A run of as many rounds or more, of this version."""
    [cell] = tables.find_table("figure-correct-rates").cells(1, "smoke")
    library = lib.Library(here / "results")
    for _ in lib.run_cells([cell], library, here / "runs", 1):
        pass
    assert library.find(cell) is not None
    kept = next((here / "results").rglob("summary.json"))
    summary = json.loads(kept.read_text("utf-8"))
    for change, serves in (
        ({"rounds": 3}, True),
        ({"rounds": 1}, False),
        ({"versions": {"fedseal": "0.0.0"}}, False),
    ):
        kept.write_text(json.dumps(summary | change), "utf-8")
        assert (lib.Library(here / "results").find(cell) is not None) == serves


@pytest.mark.parametrize("name", tables.tables())
def test_threads_that_a_run_settled_do_not_hide_it(name: str) -> None:
    cell = tables.find_table(name).cells(1, "paper")[0]
    assert lib.identity(cell.config.with_threads(7)) == lib.identity(cell.config)
    assert lib.identity(cell.config.model_copy(update={"seed": 9})) != lib.identity(cell.config)


def test_what_was_left_by_a_kill_is_passed_over_and_damage_is_named(here: Path) -> None:
    results = here / "results"
    (results / ".new").mkdir(parents=True)
    (results / ".new" / "summary.json").write_text("{")
    assert lib.Library(results).runs == {}
    (results / "cell").mkdir()
    (results / "cell" / "summary.json").write_text("{")
    with pytest.raises(UserError, match=r"results/cell is damaged: delete it"):
        lib.Library(results)


def test_a_cell_that_fails_is_named_and_the_others_go_on(here: Path) -> None:
    table = tables.find_table("figure-theta")
    rows: dict[str, Any] = {"bad": {"server.lr": 1e9}, "good": {"method": "server-sl"}}
    library = lib.Library(here / "results")
    *_, last = lib.run_cells(replace(table, rows=rows).cells(1, "smoke"), library, here / "runs", 1)
    assert (
        list(last.failed) == ["bad-dir-0.3-seed0"] and "lower server.lr" in last.failed["bad-dir-0.3-seed0"]
    )
    assert [path.parent.name for path in (here / "results").rglob("summary.json")] == ["good-dir-0.3-seed0"]


def test_a_cell_that_cannot_be_kept_does_not_stop_the_others(here: Path) -> None:
    table = tables.find_table("figure-theta")
    rows: dict[str, Any] = {
        name: {"method": "server-sl", "server.lr": lr} for name, lr in (("a", 1e-3), ("b", 2e-3))
    }
    library = lib.Library(here / "results")
    first, second = replace(table, rows=rows).cells(1, "smoke")
    (library.folder / "figure-theta-smoke").mkdir(parents=True)
    (library.folder / "figure-theta-smoke" / first.name).write_text("in the way")
    *_, last = lib.run_cells([first, second], library, here / "runs", 1)
    assert list(last.ended) == [first.name, second.name]  # what was in the way is swapped out
    (library.folder / "figure-theta-smoke").rename(here / "elsewhere")
    (library.folder / "figure-theta-smoke").write_text("in the way")
    *_, last = lib.run_cells([first, second], lib.Library(library.folder), here / "runs", 1)
    assert list(last.failed) == [first.name, second.name]
    assert "figure-theta-smoke" in last.failed[first.name]


def test_a_cell_that_another_process_runs_is_waited_for(here: Path) -> None:
    [cell] = tables.find_table("figure-correct-rates").cells(1, "smoke")
    place = here / "runs" / lib.SAME[0] / f"{lib.identity(cell.config)}-2"
    before = children(os.getpid())
    with locked(place):
        states = lib.run_cells([cell], lib.Library(here / "results"), here / "runs", 1)
        for _ in range(3):
            state = next(states)
            assert state.running == {cell.name: 0} and not state.failed and children(os.getpid()) == before
    *_, last = states
    assert list(last.ended) == [cell.name] and not last.failed


def test_a_cell_whose_worker_died_is_no_result(here: Path) -> None:
    [cell] = tables.find_table("figure-correct-rates").cells(1, "smoke")
    library = lib.Library(here / "results")
    run = here / "run"
    events: list[dict[str, Any]] = [{"event": "round", "t": 1}, {"event": "round", "t": 2}]
    run.mkdir()
    events.insert(1, {"event": "left-out", "t": 2, "client": "client-3", "reason": DIED})
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    with pytest.raises(
        UserError, match=r"client-3 was left out in round 2, since its worker .* delete .*run,"
    ):
        library.keep(cell, run)
    assert not (here / "results").exists()


def test_a_killed_cell_is_called_so(here: Path) -> None:
    """Whatever it had said before."""
    [cell] = tables.find_table("figure-correct-rates").cells(1, "smoke")
    job = lib.start(cell, here / "run", 1)
    job.said.write("warning: something else\n")
    job.process.kill()
    job.process.wait()
    assert job.error == "it was killed by SIGKILL (out of memory?)"


def test_modules_in_the_current_folder_are_not_taken_for_python_s(here: Path) -> None:
    (here / "random.py").write_text("raise SystemExit('mine')")
    [cell] = tables.find_table("figure-correct-rates").cells(1, "smoke")
    *_, last = lib.run_cells([cell], lib.Library(here / "results"), here / "runs", 1)
    assert list(last.ended) == [cell.name], last.failed


def test_killed_it_leaves_no_process_and_goes_on(here: Path, fedseal: Command) -> None:
    """SIGKILL after round 1 of 2: neither cell nor workers outlive it, and round 1 is not run again."""
    table = tables.find_table("figure-correct-rates")
    words = ["reproduce", table.name, *SMOKE]
    process = subprocess.Popen([sys.executable, "-m", "fedseal", *words], stdout=subprocess.DEVNULL)
    [cell] = table.cells(1, "smoke")
    run = here / "runs" / "reproduce" / lib.SAME[0] / f"{lib.identity(cell.config)}-2"
    events, end = run / "events.jsonl", time.monotonic() + 120
    while not (events.exists() and events.read_text("utf-8").count("\n") == 1):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.005)
    below = children(process.pid)
    below += [worker for child in below for worker in children(child)]
    first = events.read_text("utf-8").splitlines()[0]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert len(below) >= min(cores(), 2)  # with one core there is no worker
    while any(alive(pid) for pid in below):
        assert time.monotonic() < end
        time.sleep(0.05)
    answer = fedseal(*words)
    assert answer.code == 0, answer.err
    found = lib.Library(here / "results").find(cell)
    assert found is not None
    assert (found.folder / "events.jsonl").read_text("utf-8").splitlines()[0] == first  # seconds and all


def test_damage_is_named_and_never_a_number(here: Path, fedseal: Command) -> None:
    words = ("reproduce", "figure-correct-rates", *SMOKE)
    assert fedseal(*words).code == 0
    [cell] = (here / "results").rglob("*-seed0")
    events = cell / "events.jsonl"
    events.write_text(events.read_text("utf-8").splitlines(keepends=True)[0])
    fedseal(*words, "--no-run").refuses(f"{events.relative_to(here)} is damaged, or lacks a round")
    (cell / "config.toml").unlink()
    for more in ("--no-run", "--list"):
        fedseal(*words, more).refuses(f"{cell.relative_to(here)} is damaged: delete it")


def test_mistakes_are_named(here: Path, fedseal: Command) -> None:
    fedseal("reproduce").refuses("--list")
    fedseal("reproduce", "table-x").refuses("'table-x'")
    fedseal("reproduce", "table-svhn", "--only", "dir-7").refuses("'dir-7'", "server-sl-dir-0.1-seed0")
    fedseal("reproduce", "figure-theta", "--seeds", 3).refuses("figure-theta is a figure", "--seeds")
    (here / "file").touch()
    fedseal("reproduce", "table-svhn", "--no-run", "--results", "file").refuses("file is no folder")
    fedseal("reproduce", "table-svhn", "--results", "file/below").refuses("Cannot write file/below")
    fedseal("reproduce", "table-svhn", "--scale", "big").refuses("--scale", "'big'")
