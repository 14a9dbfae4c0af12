"""`fedseal serve` with clients as processes on loopback, and its error messages."""

import json
import socket
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from conftest import Command, same_weights

pytest.importorskip("flwr")

from deployment import (  # noqa: F401
    NAMES,
    Deployment,
    Processes,
    create_keys_at,
    images,
    processes,
    wait_until,
)
from flwr.app import Message
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.task_identity import TaskIdentity

from fedseal.config.load import load_config
from fedseal.core import Packet
from fedseal.deploy import keys
from fedseal.deploy.server import without_gate
from fedseal.deploy.superlink import COMPONENTS, announce_end, run_id
from fedseal.engines.flower.engine import ClientRegistry
from fedseal.storage.events_file import read_events, read_rounds
from fedseal.storage.model_file import load
from fedseal.storage.run_folder import checkpoint_file
from fedseal.system.lazy import import_object
from fedseal.system.version import fedseal_version


def test_a_deployment_equals_the_local_engine_and_refuses_strangers(
    processes: Processes,  # noqa: F811
    images: Path,  # noqa: F811
    fedseal: Command,
) -> None:
    deployment = Deployment(processes, images, rounds=2)
    stranger = keys.create_keys(processes.folder / "other", ["127.0.0.1"], ["north"])[0]  # another CA
    wrong, right = keys.read_client_key(stranger).ca_certificate, (deployment.keys / "ca.crt").read_bytes()
    unregistered = processes.folder / "unregistered.key"
    unregistered.write_bytes(stranger.read_bytes().replace(wrong, right))
    unregistered.chmod(0o600)

    server = deployment.serve()
    refused = [deployment.join("north", key=key) for key in (unregistered, stranger)]
    assert [process.wait() for process in refused] == [2, 2]
    assert "its key is not registered" in refused[0].output
    assert "not the server that this key is for" in refused[1].output

    clients = [deployment.join(name) for name in NAMES]
    assert server.wait() == 0, server.output
    assert [client.wait() for client in clients] == [0, 0, 0]
    assert "3 of 3 clients are connected" in server.output
    assert "round 2: received" in clients[0].output and "sends" in clients[0].output
    assert "t = 2, counts = False" in clients[0].output and "positive" not in read_rounds(deployment.run)[0]
    assert same_weights(deployment.run, deployment.train_locally())
    assert processes.running() == []

    for name in NAMES:  # every client has the model, and the class mix of its own images
        folder = deployment.memory_folder(name)
        model = (folder / "model.safetensors").read_bytes()
        assert model == (deployment.run / "model.safetensors").read_bytes()
        mix = json.loads((folder / f"class-mix-{name}.json").read_text("utf-8"))
        expected = load(deployment.run).predict([images / "clients" / name], adapt=True).mix
        assert list(mix.values()) == pytest.approx(expected, abs=1e-4)
        assert is_private(folder) and all(map(is_private, folder.iterdir()))
    assert is_private(deployment.run) and all(map(is_private, (deployment.run / "checkpoint").glob("*.s*")))

    fedseal("evaluate", deployment.run).refuses("--test DIR")
    answer = fedseal("evaluate", deployment.run, "--test", images / "test")
    measured = json.loads((deployment.run / "summary.json").read_text("utf-8"))["test_accuracy"]["last"]
    assert answer.code == 0 and f"{measured:.2%}" in answer.out


def is_private(path: Path) -> bool:
    return not path.stat().st_mode & 0o077


# What the server says about a client's reply with a fault.
REASONS = {
    "NaN": "NaN or infinite",
    "shape": "other names, shapes or types",
    "huge": "its reply is too large",
    "keys": "other names, shapes or types",
    "float8": "its reply contains other groups of tensors than model",
    "many": "its reply lists many more tensors",
    "raises": "it failed: RuntimeError, see the client's own output",
    "garbled": "its reply cannot be read",
    "slow": "no reply within 20 seconds",
}
# Runs a real client whose replies are then changed, with another fault in each round.
FAULTY_CLIENT = """
import sys, time, torch
from fedseal.system.environment import set_up_process
set_up_process()
from flwr.app import Message
from fedseal.core import Packet
from fedseal.engines.flower import client_app
run_client, deflate, faults = client_app.run_client, Message.deflate, sys.argv.pop(1).split()

def run_faulty_client(method, client, request, *arguments, **options):
    reply, memory = run_client(method, client, request, *arguments, **options)
    model, fault = reply.tensors["model"], faults[int(request.scalars["t"]) - 1]
    Message.deflate = deflate
    if fault == "NaN":
        model["mean"].fill_(torch.nan)
    elif fault == "shape":
        model["mean"] = torch.zeros(7)
    elif fault == "huge":
        model["mean"] = torch.zeros(500_000)
    elif fault == "keys":
        reply = Packet({"model": {"other": torch.zeros(1)}}, reply.scalars)
    elif fault == "float8":
        extra = {"x": torch.zeros(4).to(torch.float8_e4m3fn)}
        reply = Packet({"model": model, "extra": extra}, reply.scalars)
    elif fault == "many":
        extra = {f"{i}": torch.zeros(0) for i in range(15_000)}
        reply = Packet({"model": model, "extra": extra}, reply.scalars)
    elif fault == "raises":
        raise RuntimeError("a secret of this client")
    elif fault == "garbled":
        Message.deflate = lambda self: deflate(self)[:-40] + b"!" * 40
    elif fault == "slow":
        time.sleep(28)  # longer than the deadline
    return reply, memory

client_app.run_client = run_faulty_client
from fedseal.cli.main import main
main()
"""


# What a client says that accepts one epoch, requests of 1 MB, only the method fedseal, and the usual limits.
REFUSALS = {
    "epochs": "at most 1 for client.epochs, but the server asks for 2: join with --limit epochs=2",
    "batch": "at most 1024 for client.batch, but the server asks for 1025: join with --limit batch=1025",
    "threads": "at most 64 for client.threads, but the server asks for 65: join with --limit threads=65",
    "size": "at most 512 for the height and width of images, but the server asks for 513: join with --limit",
    "classes": "at most 1000 for the number of classes, but the server asks for 1001: join with --limit",
    "n": "at most 10 for augment.n, but the server asks for 11: join with --limit operations=11 to accept it",
    "method": "only the method fedseal, but the server uses fedshift: join with --only fedshift to accept it",
    "network": "the server's network is larger than the weights that it has sent",
    "request": "requests of at most 1 MB, but the server's is larger: join with --limit request=MB",
}
# Runs a real server that asks one client for too much, for something else in each round.
DEMANDING_SERVER = """
import sys
from fedseal.system.environment import set_up_process
set_up_process()
from fedseal.core import Packet
from fedseal.engines.flower.engine import FlowerEngine
send, client, demands = FlowerEngine._send, sys.argv.pop(1), sys.argv.pop(1).split()
sections = {"epochs": "client", "batch": "client", "threads": "client", "n": "augment"}
values = {"epochs": 2, "batch": 1025, "threads": 65, "size": 513, "classes": 1001, "n": 11}

def send_demand(engine, node, k, wire):
    if engine.names[k] != client:
        return send(engine, node, k, wire)
    demand, task = demands[int(Packet.from_bytes(wire).scalars["t"]) - 1], engine.task
    config, changes = task.config, {}
    if demand in sections:
        section = sections[demand]
        changes["config"] = config | {section: config[section] | {demand: values[demand]}}
    elif demand in values:
        changes[demand] = values[demand]
    elif demand == "method":
        changes["config"] = config | {"method": "fedshift"}
    elif demand == "network":
        changes["config"] = config | {"model": config["model"] | {"name": "resnet18"}}
    elif demand == "request":
        wire += bytes(1_000_000)
    engine.task = task.model_copy(update=changes)
    try:
        return send(engine, node, k, wire)
    finally:
        engine.task = task

FlowerEngine._send = send_demand
from fedseal.cli.main import main
main()
"""


def test_faulty_clients_and_refusals_do_not_stop_a_run(
    processes: Processes,  # noqa: F811
    images: Path,  # noqa: F811
) -> None:
    """Over TLS, with another fault and another refusal in each round: the rounds continue without them."""
    changes = {"engine.deadline": 20, "engine.min_replies": 1, "rounds": len(REASONS)}
    deployment = Deployment(processes, images, **changes)
    server = deployment.serve(program=("-c", DEMANDING_SERVER, "east", " ".join(REFUSALS)))
    correct = deployment.join("north")
    faulty = deployment.join("south", program=("-c", FAULTY_CLIENT, " ".join(REASONS)))
    limits = ("--limit", "epochs=1", "--limit", "request=1", "--only", "fedseal")
    limited = deployment.join("east", *limits)
    assert server.wait() == 0, server.output
    assert [correct.wait(), limited.wait()] == [0, 0], correct.output + limited.output
    assert faulty.wait() == 0 and "the run has ended" in faulty.output  # it was slow, and learns it later
    left_out = [e for e in read_events(deployment.run / "events.jsonl") if e["event"] == "left-out"]
    reasons = {name: [e["reason"] for e in left_out if e["client"] == name] for name in NAMES}
    assert reasons["north"] == []
    for reason, expected in zip(reasons["south"], REASONS.values(), strict=True):
        assert expected in reason
    for reason, expected in zip(reasons["east"], REFUSALS.values(), strict=True):
        assert reason.startswith("it failed: ") and expected in reason
        assert expected in limited.output  # on the client's terminal, too
    assert list(deployment.memory_folder("east").glob("*-*.safetensors")) == []  # it never took part
    assert "a secret of this client" in faulty.output  # on the client's terminal only
    assert "a secret" not in server.output + "".join(reasons["south"])
    assert [event["left_out"] for event in read_rounds(deployment.run)] == [["east", "south"]] * len(REASONS)


def test_a_deployment_without_tls_and_keys(
    processes: Processes,  # noqa: F811
    images: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With fedshift, whose first round sends the teachers, and with a proxy that nobody uses."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    shift = {"method": "fedshift", "bootstrap.epochs": 3, "fedshift.teachers": 2}
    deployment = Deployment(processes, images, rounds=2, **shift)
    names = [word for name in NAMES for word in ("--name", name)]
    server = deployment.serve("--insecure", *names, with_keys=False)
    with_key = deployment.join("north")
    assert with_key.wait() == 2 and "does not use TLS" in with_key.output
    clients = [
        processes.start(
            *("join", f"127.0.0.1:{processes.port}", "--insecure", "--name", name),
            *("--images", images / "clients" / name, "--memory", processes.folder / "memory"),  # shared
            *("--device", "cpu", "--threads", 1),
        )
        for name in NAMES
    ]
    assert server.wait() == 0, server.output
    assert [client.wait() for client in clients] == [0, 0, 0]
    assert same_weights(deployment.run, deployment.train_locally())
    address = f"127.0.0.1:{processes.port}"
    assert f"warning: --insecure: anyone who reaches {address} can take part" in server.output
    assert "warning: --insecure: anyone on the network can read and change" in clients[0].output


def test_client_and_server_are_killed_and_continue(processes: Processes, images: Path) -> None:  # noqa: F811
    # w⁴, the model that is compared, does not depend on whether the client is back in time for round 4.
    deployment = Deployment(processes, images, rounds=4, evaluate="model")
    server = deployment.serve()
    clients = {name: deployment.join(name) for name in NAMES}
    wait_until(lambda: deployment.last_round() >= 1, server, *clients.values())
    server.kill()

    resumed = deployment.serve("--resume")
    wait_until(lambda: deployment.last_round() >= 3, resumed, *clients.values())
    memory = Packet.from_bytes(deployment.memory("north").read_bytes())
    assert int(memory.scalars["t"]) >= 3
    clients["north"].kill()
    clients["north"] = deployment.join("north")
    assert resumed.wait() == 0, resumed.output
    assert [client.wait() for client in clients.values()] == [0, 0, 0]  # each learns that the run has ended
    model = (deployment.memory_folder("north") / "model.safetensors").read_bytes()
    assert model == (deployment.run / "model.safetensors").read_bytes()

    assert [event["t"] for event in read_rounds(deployment.run)] == [1, 2, 3, 4]
    memory = Packet.from_bytes(deployment.memory("north").read_bytes())
    assert int(memory.tensors["images"]["count"].min()) >= 3  # the memory survived
    assert same_weights(deployment.run, deployment.train_locally())


# A real client that has another version of fedseal.
OTHER_VERSION = """
from importlib import metadata
usual = metadata.version
metadata.version = lambda name: "9.8.7" if name == "fedseal" else usual(name)
from fedseal.cli.main import main
main()
"""


def test_clients_before_the_first_round(
    processes: Processes,  # noqa: F811
    images: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client is one process without a port, others are refused, and it says when the server is gone."""
    (processes.folder / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(processes.folder / "tmp"))
    deployment = Deployment(processes, images, rounds=1)
    server = deployment.serve()
    wait_until(lambda: "listening" in server.output, server)
    before = set(processes.running())
    client = deployment.join("north")
    wait_until(lambda: "1 of 3 clients are connected" in server.output, server, client)
    assert set(processes.running()) - before == {client.process.pid}
    assert "joined" in client.output and listening_ports(client.process.pid) == []
    assert len(listening_ports(*before)) == 1  # the server's
    assert list(deployment.memory_folder("north").iterdir()) == []

    same_key = deployment.join("north", "--wait", 1)
    other_version = deployment.join("south", program=("-c", OTHER_VERSION))
    assert [same_key.wait(), other_version.wait()] == [2, 2]
    assert same_key.output.count("another connected client with this key: stop the other") == 2
    version = fedseal_version()
    assert f"has fedseal {version}, this client 9.8.7: install fedseal" in other_version.output
    wait_until(lambda: "south has fedseal 9.8.7, this server" in server.output, server)
    assert server.output.count("refused a client") == 1

    client.process.terminate()
    assert client.wait() == 143
    wait_until(lambda: "Deactivated" in (deployment.run / "flower.log").read_text("utf-8"), server)
    wait_until(lambda: server.output.count("0 of 3 clients are connected") == 2, server)

    client = deployment.join("north", "--wait", 2)
    wait_until(lambda: "joined" in client.output, client)
    [private] = (processes.folder / "tmp").glob("fedseal-*")
    assert private.stat().st_mode & 0o777 == 0o700 and not (private / "secret").exists()
    server.kill()
    wait_until(lambda: not private.exists())  # the SuperLink removes it
    assert client.wait() == 2
    assert "does not answer: waiting for it up to 2 seconds" in client.output
    assert "has not answered for 2 seconds: its run may have ended" in client.output
    assert client.output.count("error:") == 1 and "Traceback" not in client.output


def listening_ports(*numbers: int) -> list[str]:
    """The TCP ports on which these processes listen, each as the kernel writes it."""
    sockets = set()
    for number in numbers:
        for path in Path(f"/proc/{number}/fd").iterdir():
            with suppress(OSError):  # closed in the meantime
                sockets.add(path.readlink().name)
    rows = [
        row.split()
        for name in ("tcp", "tcp6")
        for row in Path("/proc/net", name).read_text().splitlines()[1:]
    ]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]  # 0A: listening


def test_a_restarted_run_has_another_identifier(tmp_path: Path) -> None:
    first = run_id(tmp_path)
    assert run_id(tmp_path) != first  # the first one left no checkpoint
    checkpoint_file(tmp_path).touch()
    assert run_id(tmp_path) == run_id(tmp_path)


SUMMARY = {
    **{"method": "fedseal", "evaluate": "model", "rounds": 5, "clients": 1, "split": "", "seconds": 1.0},
    **{"labels": {"training": 1, "validation": 1, "total": 2}, "versions": {}},
    "validation_accuracy": {"last": 0.5, "mean_last_10": 0.5, "best_on_validation": 0.5, "best_round": 1},
}


@pytest.mark.parametrize("missing", ["", "summary.json", "report.html"])
def test_clients_are_told_of_the_end_only_if_the_run_is_finished(missing: str, tmp_path: Path) -> None:
    """A last round that fails, or a report that cannot be written, can be resumed with the same clients."""
    node = NodeInfo(node_id=7, public_key=b"1", last_activated_at="1")
    told: list[int] = []

    def push(messages: list[Message]) -> list[str]:
        told.extend(message.metadata.dst_node_id for message in messages)
        return ["message"]

    metadata = SimpleNamespace(reply_to_message_id="message")
    reply = SimpleNamespace(metadata=metadata, has_error=lambda: False)
    grid = SimpleNamespace(get_nodes=lambda: [node], push_messages=push, pull_messages=lambda names: [reply])
    registry = ClientRegistry(grid, ["north"], {b"1": "north"})  # type: ignore[arg-type]
    registry.seen = {"north"}
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    for name in {"summary.json", "report.html", "model.safetensors"} - {missing}:
        (tmp_path / name).write_text(json.dumps(SUMMARY))
    engine = SimpleNamespace(grid=grid, registry=registry)
    announce_end(engine, tmp_path, load_config("folders", {"rounds": 5}), print)  # type: ignore[arg-type]
    assert told == ([] if missing else [7])


def test_the_app_bundle_names_objects_that_exist() -> None:
    assert all(import_object(path) for path in COMPONENTS.values())


@pytest.fixture
def small(tmp_path: Path, images: Path) -> tuple[str, ...]:  # noqa: F811
    """A `serve` command that lacks only --keys or --insecure."""
    keys.create_keys(tmp_path / "keys", [], ["north"])
    return ("serve", "folders", "--labels", str(images / "server"), "--out", str(tmp_path / "run"))


def test_tls_and_keys_are_the_default(small: tuple[str, ...], fedseal: Command, tmp_path: Path) -> None:
    fedseal(*small).refuses("--keys", "--insecure")
    fedseal(*small, "--keys", tmp_path / "keys", "--insecure").refuses("either --keys DIR", "or --insecure")
    fedseal(*small, "--insecure").refuses("--name")
    fedseal("join", "127.0.0.1:1", "--images", tmp_path).refuses("--key FILE", "--insecure")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"aggregate.gate": 0}, "aggregate.gate is 0"),
        ({"secure.enabled": True}, "secure aggregation hides single updates"),
        ({"privacy.mode": "central", "privacy.noise": 1}, "central privacy clips them instead"),
        ({"privacy.mode": "local", "privacy.noise": 1}, ""),
    ],
)
def test_the_server_knows_why_no_update_is_left_out_for_its_length(
    changes: dict[str, object], why: str
) -> None:
    assert without_gate(load_config("folders", changes)) == why


def test_errors_of_the_server(
    small: tuple[str, ...], fedseal: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    safe = (*small, "--keys", tmp_path / "keys", "--set", "data.size=16")
    fedseal(*small, "--keys", tmp_path / "none").refuses("There are no keys in", "fedseal keys init")
    fedseal(*safe, "--clients", 2).refuses("--clients is 2, but only 1 may take part: north")
    fedseal(*safe, "--host", "10.9.8.7").refuses("not valid for 10.9.8.7", "--host 10.9.8.7")
    for days, reason in ((-4000, "ca.crt expired on"), (10, "ca.crt is valid only from")):
        create_keys_at(timedelta(days=days), tmp_path / reason, monkeypatch)
        fedseal(*small, "--keys", tmp_path / reason).refuses(reason)
    fedseal(*safe, "--set", "method=fedavg-sl").refuses("fedavg-sl needs the clients' labels")
    attack = ("--set", "simulate.malicious=1", "--set", "simulate.attack=zeros")
    fedseal(*safe, *attack).refuses("simulate.malicious is for 'fedseal train' only: set it to 0")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        fedseal(*safe, "--port", port).refuses(f"Cannot listen on 127.0.0.1:{port}")
    (tmp_path / "keys" / "server.key").write_text("nonsense")
    fedseal(*safe).refuses("server.key", "is damaged", "restore them")
    assert not (tmp_path / "run").exists()
