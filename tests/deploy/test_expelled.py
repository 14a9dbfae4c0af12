"""A client is expelled from a run that has begun."""

from pathlib import Path

import pytest
from rich.console import Console

from conftest import Command, same_weights

pytest.importorskip("flwr")

from deployment import NAMES, Deployment, Processes, images, processes, wait_until  # noqa: F401

from fedseal.config.load import load_config
from fedseal.core import Engine, Packet
from fedseal.deploy import keys
from fedseal.deploy import server as deploy_server
from fedseal.engines.local import LocalEngine
from fedseal.engines.memory_store import MemoryStore
from fedseal.errors import UserError
from fedseal.rounds import Progress
from fedseal.run_setup import RunSetup
from fedseal.storage.checkpoint import Checkpoint, open_checkpoint
from fedseal.storage.events_file import read_rounds
from fedseal.storage.run_folder import checkpoint_file, checkpoint_fingerprint, read_expelled, read_summary
from fedseal.training.train import run_training

SHARED = ("--share-counts",)


def test_a_run_goes_on_without_a_client(processes: Processes, images: Path) -> None:  # noqa: F811
    """The clients share their counts here, and so the report has them."""
    deployment = Deployment(processes, images, rounds=5, cohort=2)
    server = deployment.serve("--counts")
    clients = {name: deployment.join(name, *SHARED) for name in NAMES}
    wait_until(lambda: deployment.last_round() >= 2, server, *clients.values())
    server.kill()

    resumed = deployment.serve("--counts", "--resume", "--without", "north")
    assert clients["north"].wait() == 2 and "its key is not registered" in clients["north"].output
    assert resumed.wait() == 0, resumed.output
    assert [clients[name].wait() for name in ("east", "south")] == [0, 0]
    [(name, first)] = read_expelled(deployment.run).items()
    assert name == "north" and 2 <= first <= 5
    assert f"north is expelled: it takes no part from round {first} on" in resumed.output
    assert read_summary(deployment.run)["expelled"] == {"north": first}
    assert all("positive" in event for event in read_rounds(deployment.run))
    assert same_weights(deployment.run, repeat_locally(deployment, first))

    for path in (deployment.keys / "clients").glob("north.*"):
        path.unlink()  # the run folder knows that the client has taken part
    again = deployment.serve("--resume")
    assert again.wait() == 0, again.output


def repeat_locally(deployment: Deployment, first: int) -> Path:
    """The same run on the local engine, from round `first` on without client 1, which is north."""
    folder = deployment.processes.folder / "local"
    local = deployment.settings | {"data.path": str(deployment.images), "engine.workers": 1}

    def start(setup: RunSetup, memories: MemoryStore) -> Engine:
        engine = LocalEngine(setup, memories)
        if setup.config.rounds >= first:
            engine.clients = [0, 2]
        return engine

    for rounds in (first - 1, 5):
        config = load_config("folders", local | {"rounds": rounds})
        run_training(config, folder, resume=True, console=Console(quiet=True), start_engine=start)
    return folder


def test_mistakes_in_expelling(fedseal: Command, images: Path, tmp_path: Path) -> None:  # noqa: F811
    keys.create_keys(tmp_path / "keys", [], ["north", "south"])
    serve = ("serve", "folders", "--labels", images / "server", "--out", tmp_path / "run")
    serve += ("--keys", tmp_path / "keys")
    fedseal(*serve, "--without", "north").refuses("--without needs --resume")
    fedseal(*serve, "--resume", "--without", "nroth").refuses("--without names nroth", "north, south")
    both = ("--without", "north", "--without", "south")
    fedseal(*serve, "--resume", *both).refuses("All clients are expelled")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "expelled.json").write_text("[1]")
    fedseal(*serve, "--resume").refuses("expelled.json is damaged")


def test_a_run_is_resumed_with_the_clients_with_which_it_began(
    fedseal: Command,
    images: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A checkpoint is saved in place of bootstrapping."""
    setups: list[RunSetup] = []

    def connect(setup: RunSetup, *arguments: object, **options: object) -> None:
        setups.append(setup)
        raise UserError("Stopped here.")

    monkeypatch.setattr(deploy_server, "connect", connect)
    keys.create_keys(tmp_path / "keys", [], ["north", "south"])
    serve = ("serve", "folders", "--labels", images / "server", "--out", tmp_path / "run", "--resume")
    serve += ("--keys", tmp_path / "keys", "--set", "data.size=16")
    fedseal(*serve).refuses("Stopped here")
    saved = checkpoint_file(tmp_path / "run")
    _, memories = open_checkpoint(saved, checkpoint_fingerprint(setups[0]))
    Checkpoint(Progress(0, Packet({"model": {}}))).save(saved, memories)
    memories.close()
    keys.add_clients(tmp_path / "keys", ["west"])
    answer = fedseal(*serve)
    assert "Stopped here" in answer.err and "began without west: only a new run has them" in answer.err
    assert [setup.federation.names for setup in setups] == [("north", "south")] * 2
    fedseal(*serve, "--without", "west").refuses("--without names west")
    keys.revoke_client(tmp_path / "keys", "north")
    answer = fedseal(*serve)
    assert answer.code == 2
    assert "began with north, now without a key: continue with --without north, or restore" in answer.err
    assert "Stopped here" in fedseal(*serve, "--without", "north").err
