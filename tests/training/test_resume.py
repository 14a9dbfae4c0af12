"""Resume: a killed run gives the same result as an uninterrupted one, bit for bit."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import fedseal
from conftest import alive, children
from fedseal.core import Packet
from fedseal.engines.memory_store import MemoryStore
from fedseal.storage.events_file import read_events

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


# A run whose process is killed before or after the commit of round 4.
KILLED_COMMIT = """
import os, signal
from fedseal.cli.main import main
from fedseal.engines.memory_store import MemoryStore

def commit(store, t, original=MemoryStore.commit):
    if t == 4 and {before}:
        os.kill(os.getpid(), signal.SIGKILL)
    original(store, t)
    if t == 4:
        os.kill(os.getpid(), signal.SIGKILL)

MemoryStore.commit = commit
main()
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run, in one process."""
    options = {**SMALL, "engine.workers": 1}
    return fedseal.train("fmnist-lenet", out=tmp_path_factory.mktemp("whole"), options=options).folder


def arguments(out: Path, **more: object) -> list[str]:
    settings = {**SMALL, **{key.replace("__", "."): value for key, value in more.items()}}
    words = ["train", "fmnist-lenet", "--out", str(out), "--resume", "--quiet"]
    return [*words, *(word for key, value in settings.items() for word in ("--set", f"{key}={value}"))]


def command(out: Path, **more: object) -> list[str]:
    return [sys.executable, "-m", "fedseal", *arguments(out, **more)]


def events(run: Path) -> list[dict[str, Any]]:
    """The events of a run without times."""
    found = read_events(run / "events.jsonl")
    return [{key: value for key, value in event.items() if key != "seconds"} for event in found]


def check_same_result(cut: Path, whole: Path) -> None:
    assert (cut / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert [event["t"] for event in events(cut)] == list(range(1, 7))
    assert events(cut) == events(whole)
    before, after = (
        MemoryStore(run / "checkpoint" / "memories.sqlite", fingerprint(run)) for run in (whole, cut)
    )
    with closing(before), closing(after):
        assert [after.get(k) for k in range(4)] == [before.get(k) for k in range(4)]
        assert before.t == after.t == 6 and all(before.get(k) for k in range(4))


def fingerprint(run: Path) -> str:
    state = run / "checkpoint" / "state.safetensors"
    return str(Packet.from_bytes(state.read_bytes()).scalars["fingerprint"])


def test_run_killed_at_any_moment_and_resumed_gives_the_same_result(whole: Path, tmp_path: Path) -> None:
    """Kills the run during bootstrapping, then at random moments until it finishes. No worker outlives it."""
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
        log = tmp_path / "cut" / "events.jsonl"
        before = log.read_text().count("\n") if log.exists() else 0
        while run.poll() is None and (not log.exists() or log.read_text().count("\n") < before + 2):
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
    check_same_result(tmp_path / "cut", whole)


@pytest.mark.parametrize("before", [True, False])
def test_run_killed_before_or_after_the_commit_of_memories_gives_the_same_result(
    before: bool, whole: Path, tmp_path: Path
) -> None:
    """With a checkpoint every two rounds, the memories of rounds 3 and 4 are lost or kept with the commit."""
    run = tmp_path / "cut"
    script, one = KILLED_COMMIT.format(before=before), {"engine__workers": 1}
    words = arguments(run, engine__checkpoint_every=2, **one)
    killed = subprocess.run([sys.executable, "-c", script, *words])
    assert killed.returncode == -signal.SIGKILL
    for name, t in (("state", 2), ("next", 4)):
        assert Packet.from_bytes((run / "checkpoint" / f"{name}.safetensors").read_bytes()).scalars["t"] == t
    with closing(MemoryStore(run / "checkpoint" / "memories.sqlite", fingerprint(run))) as store:
        assert store.t == (2 if before else 4)
    assert subprocess.run(command(run, **one)).returncode == 0
    check_same_result(run, whole)
