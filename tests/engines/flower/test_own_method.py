"""A deployed client loads its own copy of a method's file, and no file that the server names."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedseal.config.load import load_config
from fedseal.core import Packet
from fedseal.data.federation import load_federation
from fedseal.engines.flower.client_app import OwnFiles, TaskRefusedError, run_deployed
from fedseal.engines.flower.task import make_task
from fedseal.methods import METHODS
from fedseal.methods.loader import find_method
from fedseal.run_setup import RunSetup
from fedseal.training.train import train


def test_a_client_loads_only_its_own_copy(own_method: Path, own: dict[str, Any], tmp_path: Path) -> None:
    keys = own | {"data.path": str(own["data.path"]), "method": f"{own_method}:FedProxMatch"}
    config = load_config("folders", keys)
    setup, method = RunSetup(config, load_federation(config.data, 0)), config.selected_method()
    task = make_task(setup, "a" * 32)
    assert task.config["method"] == "fedprox.py:FedProxMatch"  # without the server's path
    assert type(method) is find_method(config.method) and config.method not in METHODS

    w = method.initial_state(setup.server()).tensors["model"]
    request = Packet({"model": w}, {"t": 1, "train": True})
    folders = (Path(keys["data.path"]) / "clients" / "north", tmp_path / "memory")
    with_path = task.model_copy(update={"config": task.config | {"method": config.method}})
    for named in (task, with_path):
        with pytest.raises(TaskRefusedError, match="join with --method"):
            run_deployed(named, request, *folders)
    other = tmp_path / "other.py"
    other.write_text(own_method.read_text("utf-8") + "#", "utf-8")
    with pytest.raises(TaskRefusedError, match=r"copy of the method file differs from the server's"):
        run_deployed(task, request, *folders, OwnFiles(str(other)))
    copy = tmp_path / "copy.py"
    copy.write_bytes(own_method.read_bytes())
    reply = run_deployed(task, request, *folders, OwnFiles(str(copy)))
    expected, _ = method.client_round(request, Packet(), setup.client(0, setup.network()))
    assert reply.to_bytes() == expected.without_counts().to_bytes()


def test_a_client_needs_its_own_copies_of_network_and_frozen_weights(
    own_network: Path, own: dict[str, Any], tmp_path: Path
) -> None:
    keys = own | {"data.path": str(own["data.path"]), "model.name": f"{own_network}:build"}
    weights = train("folders", out=tmp_path / "first", options=keys).folder / "model.safetensors"
    config = load_config("folders", keys | {"model.freeze": True, "model.weights": str(weights)})
    setup = RunSetup(config, load_federation(config.data, 0)).with_features()
    task, server = make_task(setup, "a" * 32), setup.server()
    assert task.config["model"]["name"] == "my_net.py:build"  # without the server's paths
    assert task.config["model"]["weights"] == "model.safetensors"
    [step, *_] = config.selected_method().prepare(config.selected_method().initial_state(server), server)
    request = Packet({"model": step.state.tensors["model"]}, {"t": 1, "train": True})
    client = (Path(keys["data.path"]) / "clients" / "north", tmp_path / "memory")

    def refuse(text: str, **files: object) -> None:
        with pytest.raises(TaskRefusedError, match=text):
            run_deployed(task, request, *client, OwnFiles(**{k: str(v) for k, v in files.items()}))

    refuse("join with --network")
    refuse("the weights model.safetensors: join with --weights", network=own_network)
    other = train("folders", out=tmp_path / "other", options=keys | {"seed": 1}).folder / "model.safetensors"
    refuse("the frozen weights differ from the server's", network=own_network, weights=other)
    changed = tmp_path / "changed.py"
    changed.write_text(own_network.read_text("utf-8") + "#", "utf-8")
    refuse("copy of the network file differs", network=changed, weights=weights)
