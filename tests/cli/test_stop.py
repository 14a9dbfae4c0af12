"""Ctrl-C and SIGTERM stop a command in one sentence, whatever it is doing."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from conftest import Command, settings

QUICK = {"fedseal.bootstrap_epochs": 1, "engine.workers": 1}


@contextmanager
def started(*words: object, **options: Any) -> Iterator["subprocess.Popen[str]"]:
    """A command in its own process, which does not survive the test."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fedseal", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs ignore it
        **options,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def stop_when(process: "subprocess.Popen[str]", condition: Callable[[], bool], number: int) -> str:
    """Sends a signal when a condition holds, and returns what the process then said on stderr."""
    end = time.monotonic() + 200
    while not condition():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.005)
    process.send_signal(number)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 128 + number, err
    *before, last = err.splitlines(keepends=True)
    assert last.startswith("Stopped.") and all("warning: --insecure" in line for line in before)
    return last


def handles_signals(process: "subprocess.Popen[str]") -> bool:
    """True once SIGTERM has a handler, long before the command line is imported."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_command_line_is_imported(number: int) -> None:
    with started("train", "fmnist-lenet") as process:
        assert stop_when(process, lambda: handles_signals(process), number) == "Stopped.\n"


def test_sigterm_during_rounds(fedseal: Command, tiny: dict[str, Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    events, keys = run / "events.jsonl", tiny | QUICK | {"rounds": 200}
    with started(
        "train", "fmnist-lenet", "--out", run, *settings(keys), "--log", tmp_path / "log"
    ) as process:
        err = stop_when(process, lambda: events.exists() and bool(events.read_text()), signal.SIGTERM)
    assert f"Continue with: fedseal train {run}/config.toml --out {run} --resume" in err
    assert not (run / "summary.json").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_images_are_decoded(number: int, shapes: Path, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (1500, 1500, 3), np.uint8)
    Image.fromarray(pixels).save(shapes / "clients" / "north" / "large.png")
    for i in range(100):
        os.link(shapes / "clients" / "north" / "large.png", shapes / "clients" / "north" / f"{i}.png")
    cache, run = tmp_path / "cache", tmp_path / "run"
    with started("train", "folders", "--set", f"data.path={shapes}", "--out", run) as process:
        stop_when(process, lambda: any(cache.rglob("pixels-*")), number)
    assert not run.exists() and not list(cache.rglob("about.json"))


def test_sigterm_while_pytorch_is_imported(tmp_path: Path) -> None:
    with started("train", "fmnist-lenet", "--out", tmp_path / "run") as process:
        maps = Path(f"/proc/{process.pid}/maps")
        stop_when(process, lambda: "libtorch" in maps.read_text(), signal.SIGTERM)


def test_sigterm_while_the_report_is_written(fedseal: Command, tiny: dict[str, Any], tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    keys = tiny | QUICK | {"rounds": 1, "data.held_out_test": 5000}
    words = ("train", "fmnist-lenet", "--out", run, *settings(keys))
    with started(*words, "--log", log) as process:
        err = stop_when(process, (run / "summary.json").exists, signal.SIGTERM)
    assert f"Continue with: fedseal train {run}/config.toml --out {run} --resume" in err
    assert not (run / "report.html").exists()
    assert err.strip() in log.read_text().splitlines()[-1]
    answer = fedseal("train", run / "config.toml", "--out", run, "--resume")
    assert answer.code == 0 and (run / "report.html").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_reproduce_stops_its_cells(number: int, tmp_path: Path) -> None:
    words = ("reproduce", "figure-correct-rates", "--scale", "smoke")
    with started(*words, cwd=tmp_path) as process:
        work = tmp_path / "runs" / "reproduce"
        err = stop_when(process, lambda: any(work.rglob("config.toml")), number)
    assert err == "Stopped. Continue with the same command.\n"
    [folder] = {path.parent for path in work.rglob("config.toml")}
    lock = folder / "checkpoint" / "lock"
    done = subprocess.run(["flock", "--nonblock", lock, "true"])  # no cell is left
    assert done.returncode == 0 or not lock.exists()


def test_join_stops_while_it_waits(tmp_path: Path, shapes: Path) -> None:
    log = tmp_path / "log"
    words = ("--insecure", "--name", "north", "--images", shapes / "clients" / "north", "--log", log)
    with started("join", "127.0.0.1:9", *words, cwd=tmp_path) as process:
        err = stop_when(process, lambda: log.exists() and "127.0.0.1:9" in log.read_text(), signal.SIGTERM)
    assert err == "Stopped. Take part again with the same command.\n"


def test_an_ignored_interrupt_stays_ignored(tmp_path: Path) -> None:
    """As in a background job of a script."""
    code = (
        "import os, signal; signal.signal(signal.SIGINT, signal.SIG_IGN);"
        "from fedseal.system.processes import stop_on_signals; stop_on_signals();"
        "os.kill(os.getpid(), signal.SIGINT); print('goes on')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    assert done.stdout == "goes on\n"
