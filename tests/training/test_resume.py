"""Resume: a killed run gives the same result as an uninterrupted one, bit for bit."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import fedseal
from conftest import alive, children
from fedseal.core import Packet

SMALL = {
    "rounds": 6,
    "data.clients": 4,
    "data.images_per_client": 60,
    "data.labels": 50,
    "data.validation": 20,
    "data.test_per_client": 20,
    "server.epochs": 1,
    "client.epochs": 1,
    "cohort": 3,
    "fedseal.bootstrap_epochs": 60,
    "engine.workers": 2,
}


def command(out: Path) -> list[str]:
    settings = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    words = ["-m", "fedseal", "train", "fmnist-lenet", "--out", str(out), "--resume", "--quiet"]
    return [sys.executable, *words, *settings]


def test_run_killed_at_any_moment_and_resumed_gives_the_same_result(tmp_path: Path) -> None:
    """Kills the run during bootstrapping, then at random moments until it finishes. No worker outlives it."""
    whole = fedseal.train("fmnist-lenet", out=tmp_path / "whole", options=SMALL)
    checkpoint = tmp_path / "cut" / "checkpoint" / "state.safetensors"
    run = subprocess.Popen(command(tmp_path / "cut"))
    while run.poll() is None and not checkpoint.exists():
        time.sleep(0.001)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    scalars = Packet.from_bytes(checkpoint.read_bytes()).scalars
    assert scalars["t"] == 0 and 0 < int(scalars["state.bootstrapped"]) < 60
    moment, kills = random.Random(0), 0
    for _ in range(20):
        run = subprocess.Popen(command(tmp_path / "cut"))
        events = tmp_path / "cut" / "events.jsonl"
        before = events.read_text().count("\n") if events.exists() else 0
        while run.poll() is None and (not events.exists() or events.read_text().count("\n") < before + 2):
            time.sleep(0.01)
        time.sleep(moment.uniform(0, 0.2))
        workers = children(run.pid)
        if run.poll() is not None:
            break
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
        kills += 1
        deadline = time.monotonic() + 20
        while any(alive(worker) for worker in workers):
            assert time.monotonic() < deadline, "a worker outlives its run"
            time.sleep(0.05)
    assert run.wait() == 0 and kills >= 2
    assert (tmp_path / "cut/model.safetensors").read_bytes() == (
        whole.folder / "model.safetensors"
    ).read_bytes()
    lines = [json.loads(line) for line in (tmp_path / "cut/events.jsonl").read_text().splitlines()]
    assert [line["t"] for line in lines] == list(range(1, 7))
    expected_lines = [json.loads(line) for line in (whole.folder / "events.jsonl").read_text().splitlines()]
    for event, expected in zip(lines, expected_lines, strict=True):
        event.pop("seconds"), expected.pop("seconds")
        assert event == expected
