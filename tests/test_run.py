"""Checkpoint and resume: a run that was stopped ends like one that was not, to the bit."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import fedseal
from conftest import alive, children
from fedseal.core import Packet
from fedseal.errors import UserError
from fedseal.processes import uninterrupted
from fedseal.run import Checkpoint, sample, unusable

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


def test_killed_at_any_moment_and_resumed_ends_the_same(tmp_path: Path) -> None:
    """SIGKILL while it bootstraps, then at random moments until the run has ended by itself; no worker
    outlives its run."""
    whole = fedseal.train("fmnist-lenet", out=tmp_path / "whole", set=SMALL)
    saved = tmp_path / "cut" / "checkpoint" / "state.safetensors"
    run = subprocess.Popen(command(tmp_path / "cut"))
    while run.poll() is None and not saved.exists():
        time.sleep(0.001)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    begun = Packet.from_bytes(saved.read_bytes()).scalars
    assert begun["t"] == 0 and 0 < int(begun["state.bootstrapped"]) < 60
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
    reference = [json.loads(line) for line in (whole.folder / "events.jsonl").read_text().splitlines()]
    for mine, theirs in zip(lines, reference, strict=True):
        mine.pop("seconds"), theirs.pop("seconds")
        assert mine == theirs


def test_ctrl_c_waits_while_files_are_written() -> None:
    before, done = (
        signal.signal(signal.SIGINT, signal.default_int_handler),
        [],
    )  # a shell's "&" has it ignored
    try:
        with pytest.raises(KeyboardInterrupt), uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("written")
        assert done == ["written"]
        with pytest.raises(KeyboardInterrupt):  # and then it is as before
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_checkpoint_round_trip(tmp_path: Path) -> None:
    state = Packet({"model": {"w": torch.tensor([1.5, float("nan")])}, "empty": {}}, {"lambda": 0.3})
    path = tmp_path / "checkpoint" / "state.safetensors"
    Checkpoint(7, state, {"3": b"\x00\x01memory"}, 12.5).save(path, "mine")
    back = Checkpoint.load(path, "mine")
    assert (back.t, back.seconds, back.memories) == (7, 12.5, {"3": b"\x00\x01memory"})
    assert back.state.to_bytes() == state.to_bytes()
    with pytest.raises(UserError, match="another configuration"):
        Checkpoint.load(path, "other")
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(UserError, match="damaged"):
        Checkpoint.load(path, "mine")
    assert [file.name for file in path.parent.iterdir()] == ["state.safetensors"]


def test_sample_is_fair_and_seeded() -> None:
    assert sample(0, 1, 5, 0) == sample(0, 1, 5, 5) == (0, 1, 2, 3, 4)
    assert sample(0, 1, 100, 10) == sample(0, 1, 100, 10) != sample(1, 1, 100, 10)
    counts = torch.zeros(20)
    for t in range(1, 2001):
        chosen = sample(3, t, 20, 5)
        assert len(set(chosen)) == 5 and list(chosen) == sorted(chosen)
        counts[list(chosen)] += 1
    # each client is expected 500 times with a standard deviation of √(2000·¼·¾) ≈ 19.4
    assert float((counts - 500).abs().max()) < 4 * 19.4


def test_what_makes_a_reply_unusable() -> None:
    sent = Packet({"model": {"w": torch.zeros(2), "n": torch.tensor(1)}}, {"train": True})

    def reply(**model: torch.Tensor) -> Packet:
        return Packet({"model": model})

    assert unusable(reply(w=torch.ones(2), n=torch.tensor(5)), sent) == ""
    assert "NaN" in unusable(reply(w=torch.tensor([1.0, float("nan")]), n=torch.tensor(5)), sent)
    assert "infinite" in unusable(reply(w=torch.tensor([1.0, float("inf")]), n=torch.tensor(5)), sent)
    assert "shapes" in unusable(reply(w=torch.ones(3), n=torch.tensor(5)), sent)
    assert "types" in unusable(reply(w=torch.ones(2).double(), n=torch.tensor(5)), sent)
    assert "names" in unusable(reply(w=torch.ones(2)), sent)
    assert "no model" in unusable(Packet(), sent)
    good = reply(w=torch.ones(2), n=torch.tensor(5)).tensors
    assert unusable(Packet(good, {"t": 1, "positive": 5, "share": 0.5}), sent) == ""
    for name in ("test_accuracy", "positive_correct", "event", "bytes_up"):
        assert f"counts '{name}'" in unusable(Packet(good, {"t": 1, name: 1}), sent)
    for number in (-1, 2**53, 10**400):
        assert "'positive' is no number" in unusable(Packet(good, {"positive": number}), sent)
    listens = Packet(scalars={"train": False})
    assert unusable(Packet(), listens) == ""
    assert "counts 'event'" in unusable(Packet(scalars={"event": 7}), listens)
