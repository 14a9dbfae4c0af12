"""Observers of a run: the user's own, and the log."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from conftest import Command
from fedseal.config.load import load_config
from fedseal.core import Packet, Problem
from fedseal.rounds import LeftOut, RoundDone
from fedseal.training import train as training
from fedseal.training.observers import RunLog, TimeLeft

DOCS = Path(__file__).parents[2] / "docs"


def test_the_example_of_the_documentation_runs(
    tiny: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a smaller configuration under the name that the example uses."""
    [text] = re.findall(r"```python\n(.*?)```", (DOCS / "observers.md").read_text("utf-8"), re.DOTALL)
    assert text.count("\n") <= 18
    monkeypatch.chdir(tmp_path)
    config = load_config("fmnist-lenet", tiny | {"fedseal.bootstrap_epochs": 1})
    (tmp_path / "small.toml").write_text(config.to_toml(), "utf-8")
    exec(text.replace('"demo"', '"small.toml"'), {"__name__": "example"})
    events = [json.loads(line) for line in (tmp_path / "runs/small-seed0/events.jsonl").open()]
    lines = [f"round {event['t']}: {event['validation_accuracy']:.1%}" for event in events]
    assert len(lines) == 2
    assert capsys.readouterr().out.splitlines() == [*lines, "done"]


def test_an_observer_is_closed_after_an_error(tiny: dict[str, Any], tmp_path: Path) -> None:
    class Broken:
        closed = 0

        def __call__(self, event: object) -> None:
            raise RuntimeError("a mistake")

        def close(self) -> None:
            self.closed += 1

    observer = Broken()
    with pytest.raises(RuntimeError, match="a mistake"):
        training.train("fmnist-lenet", out=tmp_path / "run", observers=[observer], options=tiny)
    assert observer.closed == 1


def test_an_observer_of_a_finished_run_is_closed(finished: Path) -> None:
    class Quiet:
        closed = 0

        def __call__(self, event: object) -> None: ...

        def close(self) -> None:
            self.closed += 1

    observer = Quiet()
    training.train(finished / "config.toml", out=finished, resume=True, observers=[observer])
    assert observer.closed == 1


def test_time_left_is_that_of_the_last_ten_rounds() -> None:
    clock = TimeLeft(rounds=20)
    for t in range(1, 6):
        clock.after({"t": t, "seconds": {"server": 100.0}})
    for t in range(6, 15):
        clock.after({"t": t, "seconds": {"server": 1.0, "clients": 1.0}})
    assert clock.after({"t": 15, "seconds": {"server": 2.0}}) == 5 * 2.0


def test_the_log_has_a_line_per_left_out_client_and_few_for_quick_rounds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = RunLog(rounds=50, titles={"rounds": "my rounds"}, judged="average")
    caplog.set_level("INFO", "fedseal")
    for t in range(1, 51):
        if t == 7:
            log(LeftOut(t, "north", Problem("it was too slow")))
        metrics = {"t": t, "seconds": {"server": 2.0}, "test_accuracy": t / 100, "rounds": 7}
        metrics |= {"average_test_accuracy": t / 200, "average_validation_accuracy": 0.5}
        log(RoundDone(t, metrics, Packet()))
    assert caplog.messages == [
        "round 1 of 50, 98 s left: test 0.5% · my rounds 7",
        "round 7: north is left out: it was too slow",
        "round 50 of 50: test 25.0% · my rounds 7",
    ]
    fields = [record.__dict__["fields"] for record in caplog.records]
    assert fields[0] == {
        "round": 1, "rounds": 50, "seconds_left": 98.0, "test_accuracy": 0.01,
        "average_test_accuracy": 0.005, "average_validation_accuracy": 0.5,
    }  # fmt: skip
    assert fields[1] == {"round": 7, "client": "north", "reason": "it was too slow"}


def test_json_logs_of_a_run(fedseal: Command, tiny: dict[str, Any], tmp_path: Path) -> None:
    keys, log = tiny | {"fedseal.bootstrap_epochs": 1}, tmp_path / "log"
    answer = fedseal(
        "train", "fmnist-lenet", "--out", tmp_path / "run", "--json-logs", "--log", log, options=keys
    )
    assert (answer.code, answer.err) == (0, "")
    lines = [json.loads(line) for line in answer.out.splitlines()]
    assert lines == [json.loads(line) for line in log.read_text().splitlines()]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    last, result = lines[-2:]
    assert (last["event"], last["round"], last["rounds"]) == ("round", 2, 2)
    assert last["test_accuracy"] == summary["test_accuracy"]["last"]
    assert result["event"] == "result" and result["accuracy"] == summary["test_accuracy"]["mean_last_10"]
    again = fedseal(
        "train", "fmnist-lenet", "--out", tmp_path / "run", "--json-logs", "--log", log, options=keys
    )
    error = json.loads(again.err)
    assert again.code == 2 and error["event"] == "error" and "--resume" in error["message"]
    assert json.loads(log.read_text().splitlines()[-1]) == error


def test_events_are_on_the_disk_before_the_checkpoint_that_counts_them(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a power failure could leave a checkpoint of a round whose line is lost."""
    events, sync, synced, counted = tmp_path / "run" / "events.jsonl", os.fsync, b"", []

    def watch(handle: int) -> None:
        nonlocal synced
        sync(handle)
        file = Path(f"/proc/self/fd/{handle}").readlink()
        if file == events:
            synced = events.read_bytes()
        elif file.name.startswith(".next.safetensors") and events.exists():
            assert events.read_bytes() == synced
            counted.append(synced.count(b'"event": "round"'))

    monkeypatch.setattr(os, "fsync", watch)
    training.train("fmnist-lenet", out=tmp_path / "run", options=tiny | {"engine.checkpoint_every": 1})
    assert counted[-2:] == [1, 2]
