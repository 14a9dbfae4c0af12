"""Your own network with frozen weights, deployed: each client has its own copy of both files."""

from pathlib import Path

import pytest

pytest.importorskip("flwr")

from conftest import same_weights
from deploy.deployment import NAMES, SMALL, Deployment, Processes, images, processes  # noqa: F401
from fedseal.storage.events_file import read_rounds
from fedseal.storage.model_file import load
from fedseal.training.train import train


def test_clients_with_copies_of_the_network_and_its_weights(
    processes: Processes,  # noqa: F811
    images: Path,  # noqa: F811
    own_network: Path,
) -> None:
    network = {"model.name": f"{own_network}:build"}
    first = {**SMALL, **network, "data.path": str(images), "rounds": 1, "engine.workers": 1}
    weights = train("folders", out=processes.folder / "first", options=first).folder / "model.safetensors"
    frozen = {**network, "model.weights": weights, "model.freeze": True}
    deployment = Deployment(processes, images, rounds=2, **frozen)
    server = deployment.serve()
    copies = {name: processes.folder / f"{name}.py" for name in NAMES}
    for copy in copies.values():
        copy.write_bytes(own_network.read_bytes())
    words = ("--weights", weights, "--network")
    clients = [deployment.join(name, *words, copies[name]) for name in NAMES]
    assert server.wait() == 0, server.output
    assert [client.wait() for client in clients] == [0, 0, 0], clients[0].output
    assert same_weights(deployment.run, deployment.train_locally())
    rounds = read_rounds(deployment.run)
    assert all(not event["left_out"] and event["bytes_up"] < len(NAMES) * 3000 for event in rounds)
    taken_home = load(deployment.memory_folder("north") / "model.safetensors", copies["north"])
    assert taken_home.classes == ("circle", "square", "triangle")
    assert "class mix of this client's images in" in clients[0].output
