"""`fedseal reproduce`, at the smallest scale."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from conftest import Command, alive, children, contents
from fedseal import __version__
from fedseal.errors import UserError
from fedseal.reproduce.cells import find_cell, find_table, load_tables
from fedseal.reproduce.run_cells import compare, run_folder
from fedseal.reproduce.store import KEPT_FILES, ResultStore
from fedseal.storage.events_file import format_lines, read_events
from fedseal.system.machine import cores, processor

SMOKE = ("--scale", "smoke")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, in which the command makes `results` and `runs`."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", [name for name, table in load_tables().items() if not table.figure])
def test_every_table_prints_before_anything_is_run(name: str, here: Path, fedseal: Command) -> None:
    answer = fedseal("reproduce", name, "--no-run", "--scale", "reduced")
    assert answer.code == 0 and "REDUCED" in answer.out and "not run" in answer.out, answer.err
    assert "Reduced: rounds = " in answer.out


def test_cells_are_run_once_kept_and_verified(here: Path, fedseal: Command) -> None:
    words = ("reproduce", "figure-self-ensemble", *SMOKE)
    listed = fedseal("reproduce", "--list", *SMOKE).out
    assert "0/2" in listed and "≈" in listed + fedseal("reproduce", "--list").out
    assert "some of its cells have not been run" in fedseal(*words, "--no-run").out
    answer = fedseal(*words, "--jobs", 2)
    assert answer.code == 0, answer.err
    assert "2 of 2 cells to run, < 1 min, into results" in answer.out and "ResNet-18" in answer.out
    place = here / "results" / "figure-self-ensemble-smoke"
    cells = ("with-self-ensemble-dir-0.3-seed0", "without-dir-0.3-seed0")
    for cell in cells:
        assert sorted(path.name for path in (place / cell).iterdir()) == sorted(KEPT_FILES)
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

    listed = fedseal("reproduce", "--list", *SMOKE).out
    assert "2/2" in listed and "outdated in" not in listed
    kept = here / "runs" / "reproduce" / f"verify-figure-self-ensemble-{cells[1]}"
    assert "all 2 rounds are identical" in fedseal(*words, "--verify", cells[1]).out
    assert not kept.exists()
    events = place / cells[1] / "events.jsonl"
    first, second = read_events(events)
    second["test_accuracy"] /= 2
    events.write_text(format_lines([first, second])[0])
    differing = fedseal(*words, "--verify", cells[1])
    differing.refuses(f"{cells[1]} differs", "from round 2 on; mean of the last ten rounds: ", " %, now ")
    assert "processor" not in differing.err and "runs/reproduce/verify-figure" in differing.err
    assert list(kept.rglob("model.safetensors"))
    summary = place / cells[1] / "summary.json"
    summary.write_text(summary.read_text("utf-8").replace(processor(), "an abacus"))
    cell = find_cell(find_table("figure-self-ensemble"), cells[1], "smoke")
    with pytest.raises(UserError, match=f"an abacus then, {re.escape(processor())} now"):
        compare(cell, ResultStore(here / "results"), ResultStore(kept / "results"))
    made_with = '"fedseal": "{}"'.format
    summary.write_text(summary.read_text("utf-8").replace(made_with(__version__), made_with("0.1.0")))
    assert f"outdated in figure-self-ensemble: {cells[1]}\n" in fedseal("reproduce", "--list", *SMOKE).out
    fedseal(*words, "--verify", "other").refuses("no cell 'other'", cells[0])
    fedseal(*words, "--verify", cells[1].replace("seed0", "seed7")).refuses("not been measured")
    fedseal("reproduce", "table-fmnist-labels", *SMOKE, "--verify", "server-sl-500-labels-seed0").refuses(
        "has not been measured yet", "--only server-sl-500-labels-seed0 --seeds 1"
    )


def test_a_table_is_printed_and_marked(here: Path, fedseal: Command) -> None:
    """At this scale both columns have 50 labels, so two cells answer for four."""
    answer = fedseal("reproduce", "table-fmnist-labels", *SMOKE)
    assert answer.code == 0, answer.err
    assert "SMOKE SCALE" in answer.out and "(74.95)" in answer.out and "not run" not in answer.out
    assert len(list((here / "results").rglob("summary.json"))) == 2
    assert "not run" in fedseal("reproduce", "table-fmnist-labels", "--no-run").out  # at the paper's scale


def test_after_a_kill_no_process_is_left_and_the_cell_continues(here: Path, fedseal: Command) -> None:
    """SIGKILL after round 1 of 2: neither cell nor workers survive, and round 1 is not run again."""
    table = find_table("figure-correct-rates")
    words = ["reproduce", table.name, *SMOKE]
    process = subprocess.Popen([sys.executable, "-m", "fedseal", *words], stdout=subprocess.DEVNULL)
    [cell] = table.cells(1, "smoke")
    events = run_folder(cell, here / "runs" / "reproduce") / "events.jsonl"
    end = time.monotonic() + 120
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
    found = ResultStore(here / "results").find(cell)
    assert found is not None
    # The same line, including its seconds.
    assert (found.folder / "events.jsonl").read_text("utf-8").splitlines()[0] == first


def test_damage_is_named_and_never_a_number(here: Path, fedseal: Command) -> None:
    words = ("reproduce", "figure-correct-rates", *SMOKE)
    assert fedseal(*words).code == 0
    [cell] = (here / "results").rglob("*-seed0")
    events = cell / "events.jsonl"
    events.write_text(events.read_text("utf-8").splitlines(keepends=True)[0])
    fedseal(*words, "--no-run").refuses(f"{events.relative_to(here)} is damaged, or a round is missing")
    (cell / "config.toml").unlink()
    for more in ("--no-run", "--list"):
        fedseal(*words, more).refuses(f"{cell.relative_to(here)} is damaged: delete it")


def test_mistakes_are_named(here: Path, fedseal: Command) -> None:
    fedseal("reproduce").refuses("--list")
    fedseal("reproduce", "table-x").refuses("'table-x'")
    fedseal("reproduce", "table-svhn", "--only", "dir-7").refuses("'dir-7'", "server-sl-dir-0.1-seed0")
    fedseal("reproduce", "figure-theta", "--seeds", 3).refuses("figure-theta is a figure", "--seeds")
    (here / "file").touch()
    fedseal("reproduce", "table-svhn", "--no-run", "--results", "file").refuses("file is not a folder")
    fedseal("reproduce", "table-svhn", "--results", "file/below").refuses("Cannot write file/below")
    fedseal("reproduce", "table-svhn", "--scale", "big").refuses("--scale", "'big'")
