"""For tests of a deployment: a server and clients as real processes, with TLS and authentication."""

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timedelta, tzinfo
from pathlib import Path

import numpy as np
import pytest

from conftest import PAPERS_METHOD, SHAPES, draw, settings
from fedseal.deploy import certificates, keys
from fedseal.storage.events_file import read_rounds
from fedseal.training.train import train

NAMES = ("east", "north", "south")
FEDSEAL = ("-m", "fedseal")
TIME_LIMIT = 240.0  # seconds for anything that a test waits for, on a busy machine
SMALL = {
    "data.size": 16,
    **PAPERS_METHOD,
    "fedseal.bootstrap_epochs": 3,
    "server.lr": 0.02,
    "server.epochs": 1,
    "client.epochs": 1,
    "server.threads": 1,
}


class Process:
    """A command that was started, and its output."""

    def __init__(self, process: "subprocess.Popen[bytes]", path: Path) -> None:
        self.process, self.path = process, path

    @property
    def output(self) -> str:
        return self.path.read_text("utf-8")

    def wait(self) -> int:
        """The exit code, once the process has ended."""
        try:
            return self.process.wait(TIME_LIMIT)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the process did not end; its output: {self.output}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Processes:
    """All processes of one test. They, and their own child processes, are killed when the test ends."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.mark = folder, uuid.uuid4().hex
        self.port, self.started = free_port(), 0

    def start(self, *words: object, namespace: str = "", program: Sequence[str] = FEDSEAL) -> Process:
        """Starts `fedseal` with these arguments, in a network namespace if one is given."""
        self.started += 1
        path = self.folder / f"output-{self.started}.txt"
        variables = {"FEDSEAL_TEST": self.mark, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        command = ["ip", "netns", "exec", namespace] if namespace else []
        command += [sys.executable, *program, *map(str, words)]
        with path.open("wb") as file:
            process = subprocess.Popen(
                command, env={**os.environ, **variables}, stdout=file, stderr=file, start_new_session=True
            )
        return Process(process, path)

    def running(self) -> list[int]:
        """Every process that has this test's mark in its environment."""
        numbers = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"FEDSEAL_TEST={self.mark}".encode() in (folder / "environ").read_bytes():
                    numbers.append(int(folder.name))
        return numbers

    def stop(self) -> None:
        end = time.monotonic() + 30
        while (left := self.running()) and time.monotonic() < end:
            for number in left:
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            time.sleep(0.2)


class Deployment:
    """The commands that deploy a folder of images."""

    def __init__(
        self, processes: Processes, images: Path, names: Sequence[str] = NAMES, **changes: object
    ) -> None:
        self.processes, self.images, self.settings = processes, images, SMALL | changes
        self.keys, self.run = processes.folder / "keys", processes.folder / "run"
        keys.create_keys(self.keys, ["127.0.0.1"], names)

    def serve(self, *words: str, with_keys: bool = True, program: Sequence[str] = FEDSEAL) -> Process:
        options = ["--labels", self.images / "server", "--test", self.images / "test"]
        options += ["--port", self.processes.port, "--out", self.run, "--wait", TIME_LIMIT]
        options += ["--keys", self.keys] if with_keys else []
        command = ("serve", "folders", *options, *settings(self.settings), *words)
        return self.processes.start(*command, program=program)

    def join(
        self, name: str, *words: object, key: Path | None = None, program: Sequence[str] = FEDSEAL
    ) -> Process:
        options = ["--images", self.images / "clients" / name, "--memory", self.memory_folder(name)]
        options += ["--key", key or self.keys / "clients" / f"{name}.key"]
        return self.processes.start(
            "join", f"127.0.0.1:{self.processes.port}", *options, *words, program=program
        )

    def memory_folder(self, name: str) -> Path:
        return self.processes.folder / "memory" / name

    def memory(self, name: str) -> Path:
        """A client's newest memory file; a server killed before its first checkpoint leaves another one."""
        files = self.memory_folder(name).glob("*-*.safetensors")  # not the model
        return max(files, key=lambda file: file.stat().st_mtime)

    def last_round(self) -> int:
        return max([event["t"] for event in read_rounds(self.run)], default=0)

    def train_locally(self) -> Path:
        """The same run on the local engine."""
        folder = self.processes.folder / "local"
        local = {"data.path": str(self.images), "engine.workers": 1}
        train("folders", out=folder, options=self.settings | local)
        return folder


def create_keys_at(shift: timedelta, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keys with certificates that were created in the past or in the future; returns the key of north."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + shift

    with monkeypatch.context() as patch:
        patch.setattr(certificates, "datetime", Clock)
        return keys.create_keys(folder, [], ["north"])[0]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], object], *watched: Process) -> None:
    """Waits for a condition; fails with the output of the watched processes."""
    end = time.monotonic() + TIME_LIMIT
    while not condition():
        if time.monotonic() > end or any(p.process.poll() not in (None, 0) for p in watched):
            pytest.fail("the condition never came true; output:\n" + "\n".join(p.output for p in watched))
        time.sleep(0.1)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    processes = Processes(tmp_path)
    yield processes
    processes.stop()


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Images of three classes, for the server, three clients and a test folder."""
    monkeypatch.setenv("FEDSEAL_DATA", str(tmp_path / "cache"))
    root, rng = tmp_path / "images", np.random.default_rng(0)
    for shape in SHAPES:
        for part, number in (("server", 8), ("test", 5)):
            for i in range(number):
                draw(root / part / shape / f"{i}.png", shape, rng)
        for client in NAMES:
            for i in range(6):
                draw(root / "clients" / client / f"{shape}-{i}.png", shape, rng)
    return root
