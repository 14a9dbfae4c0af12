"""A server and three clients as processes of their own on loopback, with TLS and authentication."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from conftest import SHAPES, Command, draw, same_weights, settings
from fedseal import api, keys
from fedseal.core import Packet
from fedseal.observers import read_events

pytest.importorskip("flwr")

NAMES = ("east", "north", "south")
PROGRAM = ("-m", "fedseal")
PATIENCE = 240.0  # seconds, on a busy machine
LEARNS = {
    "data.size": 16,
    "fedseal.bootstrap_epochs": 3,
    "server.lr": 0.02,
    "server.epochs": 1,
    "client.epochs": 1,
    "server.threads": 1,
}


class Crew:
    """Processes of one test. All of them, and all that they started, are gone when it ends."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.mark = folder, uuid.uuid4().hex
        self.port, self.started = free_port(), 0

    def start(self, *words: object, inside: str = "", program: Sequence[str] = PROGRAM) -> "Process":
        """`fedseal` with these words, inside a network namespace if one is named."""
        self.started += 1
        path = self.folder / f"output-{self.started}.txt"
        about = {"FEDSEAL_TEST": self.mark, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        command = ["ip", "netns", "exec", inside] if inside else []
        command += [sys.executable, *program, *map(str, words)]
        with path.open("wb") as file:
            process = subprocess.Popen(
                command, env={**os.environ, **about}, stdout=file, stderr=file, start_new_session=True
            )
        return Process(process, path)

    def all(self) -> list[int]:
        """Every process that bears this test's mark."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"FEDSEAL_TEST={self.mark}".encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
        return found

    def stop(self) -> None:
        end = time.monotonic() + 30
        while (left := self.all()) and time.monotonic() < end:
            for number in left:
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            time.sleep(0.2)


class Process:
    """A started command and what it has printed."""

    def __init__(self, process: "subprocess.Popen[bytes]", path: Path) -> None:
        self.process, self.path = process, path

    @property
    def said(self) -> str:
        return self.path.read_text("utf-8")

    def ends(self) -> int:
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it did not end; it said: {self.said}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(true: Callable[[], object], *watched: Process) -> None:
    """Waits; fails with what the watched processes said."""
    end = time.monotonic() + PATIENCE
    while not true():
        if time.monotonic() > end or any(p.process.poll() not in (None, 0) for p in watched):
            pytest.fail("it never came to be; they said:\n" + "\n".join(p.said for p in watched))
        time.sleep(0.1)


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Crew]:
    crew = Crew(tmp_path)
    yield crew
    crew.stop()


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three classes, three clients, a test folder."""
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


class Deployment:
    """The commands of a deployment of `images`."""

    def __init__(self, crew: Crew, images: Path, names: Sequence[str] = NAMES, **more: object) -> None:
        self.crew, self.images, self.settings = crew, images, LEARNS | more
        self.keys, self.run = crew.folder / "keys", crew.folder / "run"
        keys.init(self.keys, ["127.0.0.1"], names)

    def serve(self, *more: str, keys: bool = True) -> Process:
        where = ["--labels", self.images / "server", "--test", self.images / "test"]
        where += ["--port", self.crew.port, "--out", self.run, "--wait", PATIENCE]
        where += ["--keys", self.keys] if keys else []
        return self.crew.start("serve", "folders", *where, *settings(self.settings), *more)

    def join(self, name: str, key: Path | None = None, program: Sequence[str] = PROGRAM) -> Process:
        where = ["--images", self.images / "clients" / name, "--memory", self.memory(name).parent]
        key = key or self.keys / "clients" / f"{name}.key"
        words = ("join", f"127.0.0.1:{self.crew.port}", "--key", key, *where)
        return self.crew.start(*words, program=program)

    def memory(self, name: str) -> Path:
        """The last file in a client's memory, or where it will be; a server that was killed before its first
        checkpoint has left another."""
        folder = self.crew.folder / "memory" / name
        return max(folder.glob("*.safetensors"), key=lambda f: f.stat().st_mtime, default=folder / "none")

    def done(self) -> int:
        """The last round in the events."""
        return max(
            [e["t"] for e in read_events(self.run / "events.jsonl") if e["event"] == "round"], default=0
        )

    def as_local(self) -> Path:
        """The same run on the local engine."""
        folder = self.crew.folder / "local"
        more = {"data.path": str(self.images), "engine.workers": 1}
        api.train("folders", out=folder, set=self.settings | more)
        return folder


def test_a_deployment_equals_the_local_engine_and_refuses_strangers(
    crew: Crew, images: Path, fedseal: Command
) -> None:
    deployment = Deployment(crew, images, rounds=2)
    stranger = keys.init(crew.folder / "other", ["127.0.0.1"], ["north"])[0]  # another CA
    wrong, right = keys.client_key(stranger).root, (deployment.keys / "ca.crt").read_bytes()
    unregistered = crew.folder / "unregistered.key"
    unregistered.write_bytes(stranger.read_bytes().replace(wrong, right))

    server = deployment.serve()
    refused = [deployment.join("north", key) for key in (unregistered, stranger)]
    assert [process.ends() for process in refused] == [2, 2]
    assert "its key is not registered" in refused[0].said
    assert "not the server that this key is for" in refused[1].said

    clients = [deployment.join(name) for name in NAMES]
    assert server.ends() == 0, server.said
    assert [client.ends() for client in clients] == [0, 0, 0]
    assert "3 of 3 clients are there" in server.said
    assert "round 2: got" in clients[0].said and "sends" in clients[0].said
    assert same_weights(deployment.run, deployment.as_local())
    assert crew.all() == []

    fedseal("evaluate", deployment.run).refuses("clients' images", "--test DIR")
    answer = fedseal("evaluate", deployment.run, "--test", images / "test")
    measured = json.loads((deployment.run / "summary.json").read_text("utf-8"))["test_accuracy"]["last"]
    assert answer.code == 0 and f"{measured:.2%}" in answer.out


# What a broken client does, in a real client's process: it changes what the honest one would reply.
BREAK = """
import sys, time, torch
from flwr.app import Message
from fedseal.core import Packet
from fedseal.engines import flower_client
honest, way = flower_client.serve, sys.argv.pop(1)

def broken(*arguments):
    reply = honest(*arguments)
    model = reply.tensors["model"]
    if way == "NaN":
        model["mean"].fill_(torch.nan)
    elif way == "shape":
        model["mean"] = torch.zeros(7)
    elif way == "huge":
        model["mean"] = torch.zeros(500_000)
    elif way == "keys":
        return Packet({"model": {"other": torch.zeros(1)}}, reply.scalars)
    elif way == "raises":
        raise RuntimeError("a secret of this client")
    elif way == "slow":
        time.sleep(600)
    elif way == "garbled":
        Message.deflate = lambda self, usual=Message.deflate: usual(self)[:-40] + b"!" * 40
    return reply

flower_client.serve = broken
from fedseal.cli import main
main()
"""
REASONS = {
    "NaN": "NaN or infinite",
    "shape": "other names, shapes or types",
    "huge": "far too large",
    "keys": "other names, shapes or types",
    "raises": "it failed: RuntimeError",
    "slow": "no reply within 25 seconds",
    "garbled": "a reply that cannot be read",
}


def test_broken_clients_do_not_break_a_run(crew: Crew, images: Path) -> None:
    """One honest client and one of each broken kind, over TLS: the round goes on with the honest one."""
    for way in REASONS:
        (images / "clients" / way).symlink_to(images / "clients" / "south")
    names = ("north", *REASONS)
    deployment = Deployment(crew, images, names, rounds=1, **{"engine.deadline": 25})
    server = deployment.serve()
    honest = deployment.join("north")
    broken = {way: deployment.join(way, program=("-c", BREAK, way)) for way in REASONS}
    assert server.ends() == 0, server.said
    assert honest.ends() == 0, honest.said
    events = read_events(deployment.run / "events.jsonl")
    for way, reason in REASONS.items():
        found = [e["reason"] for e in events if e["event"] == "left-out" and e["client"] == way]
        assert len(found) == 1 and reason in found[0], (way, found)
        assert "a secret" not in "".join(found)
    assert "a secret of this client" in broken["raises"].said  # there, and only there
    [last] = [e for e in events if e["event"] == "round"]
    assert sorted(last["left_out"]) == sorted(REASONS)


def test_without_tls_and_keys_where_it_is_said(crew: Crew, images: Path) -> None:
    deployment = Deployment(crew, images, rounds=1)
    names = [word for name in NAMES for word in ("--name", name)]
    server = deployment.serve("--insecure", *names, keys=False)
    with_key = deployment.join("north")
    assert with_key.ends() == 2 and "does not speak TLS" in with_key.said
    clients = [
        crew.start(
            *("join", f"127.0.0.1:{crew.port}", "--insecure", "--name", name),
            *("--images", images / "clients" / name, "--memory", crew.folder / "memory"),  # one for all
        )
        for name in NAMES
    ]
    assert server.ends() == 0, server.said
    assert [client.ends() for client in clients] == [0, 0, 0]
    assert same_weights(deployment.run, deployment.as_local())


def test_client_and_server_are_killed_and_come_back(crew: Crew, images: Path) -> None:
    # w⁴, which is judged here, is the same whether or not the client is back in time for round 4.
    deployment = Deployment(crew, images, rounds=4, evaluate="model")
    server = deployment.serve()
    clients = {name: deployment.join(name) for name in NAMES}
    until(lambda: deployment.done() >= 1, server, *clients.values())
    server.kill()

    resumed = deployment.serve("--resume")
    until(lambda: deployment.done() >= 3, resumed, *clients.values())
    assert last_round(deployment.memory("north")) >= 3
    clients["north"].kill()
    clients["north"] = deployment.join("north")
    assert resumed.ends() == 0, resumed.said

    events = read_events(deployment.run / "events.jsonl")
    assert [event["t"] for event in events if event["event"] == "round"] == [1, 2, 3, 4]
    memory = Packet.from_bytes(deployment.memory("north").read_bytes())
    assert int(memory.tensors["images"]["count"].min()) >= 3  # it was not forgotten
    assert same_weights(deployment.run, deployment.as_local())


def test_a_run_that_starts_again_is_another_to_its_clients(tmp_path: Path) -> None:
    from fedseal import deploy

    first = deploy.identity(tmp_path)
    assert deploy.identity(tmp_path) != first  # nothing has come of the first
    (tmp_path / "state.safetensors").touch()
    assert deploy.identity(tmp_path) == deploy.identity(tmp_path)


def last_round(path: Path) -> int:
    return int(Packet.from_bytes(path.read_bytes()).scalars["t"])


@pytest.fixture
def small(tmp_path: Path, images: Path) -> tuple[str, ...]:
    """A `serve` command that lacks nothing but keys or --insecure."""
    keys.init(tmp_path / "keys", [], ["north"])
    return ("serve", "folders", "--labels", str(images / "server"), "--out", str(tmp_path / "run"))


def test_tls_and_keys_are_the_default(small: tuple[str, ...], fedseal: Command, tmp_path: Path) -> None:
    fedseal(*small).refuses("--keys", "--insecure")
    fedseal(*small, "--keys", tmp_path / "keys", "--insecure").refuses("--insecure instead")
    fedseal(*small, "--insecure").refuses("--name")
    fedseal("join", "127.0.0.1:1", "--images", tmp_path).refuses("--key FILE", "--insecure")
    assert not (tmp_path / "run").exists()


def test_mistakes_of_the_server_are_named(small: tuple[str, ...], fedseal: Command, tmp_path: Path) -> None:
    safe = (*small, "--keys", tmp_path / "keys", "--set", "data.size=16")
    fedseal(*small, "--keys", tmp_path / "none").refuses("has no client's key")
    fedseal(*safe, "--clients", 2).refuses("--clients is 2, but there are 1")
    fedseal(*safe, "--host", "10.9.8.7").refuses("not for 10.9.8.7", "--host 10.9.8.7")
    fedseal(*safe, "--set", "method=fedavg-sl").refuses("fedavg-sl needs the clients' labels")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        fedseal(*safe, "--port", port).refuses(f"Cannot listen on 127.0.0.1:{port}")
    (tmp_path / "keys" / "server.key").write_text("nonsense")
    fedseal(*safe).refuses("server.key", "is damaged", "restore it")
    assert not (tmp_path / "run").exists()


def test_mistakes_of_a_client_are_named(fedseal: Command, tmp_path: Path) -> None:
    key = keys.init(tmp_path / "keys", [], ["north"])[0]
    join = ("--images", tmp_path, "--key", key, "--memory", tmp_path / "memory", "--wait", 0)
    fedseal("join", "server", *join).refuses("HOST:PORT", "'server'")
    fedseal("join", "a..b:8000", *join).refuses("HOST:PORT", "'a..b:8000'")
    fedseal("join", "localhost:1", "--images", tmp_path / "none", "--key", key).refuses("There is no folder")
    fedseal("join", "localhost:1", "--images", tmp_path, "--key", tmp_path / "keys/ca.crt").refuses(
        "no client's"
    )
    fedseal("join", f"127.0.0.1:{free_port()}", *join).refuses("No server answered", "check address and port")
