"""Secure aggregation with real processes over TLS: four clients, one of which is killed before its upload."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

pytest.importorskip("flwr")

from deployment import NAMES, Deployment, Processes, images, processes  # noqa: F401

from conftest import SHAPES, draw
from fedseal.secure import FixedPoint
from fedseal.storage.events_file import read_rounds

# A real server that does not stay until the killed client has learned of the end.
IMPATIENT = """
from fedseal.deploy import superlink
superlink.END_SECONDS = 10.0
from fedseal.cli.main import main
main()
"""
# A real client that dies when it has trained, before it uploads.
KILLED = """
import os, signal
from fedseal.engines import secure_client
secure_client.upload = lambda *arguments, **options: os.kill(os.getpid(), signal.SIGKILL)
from fedseal.cli.main import main
main()
"""


def test_a_client_is_killed_after_it_has_shared_its_secrets(
    processes: Processes,  # noqa: F811
    images: Path,  # noqa: F811
) -> None:
    rng = np.random.default_rng(1)
    for shape in SHAPES:
        draw(images / "clients" / "west" / f"{shape}.png", shape, rng)
    keys = {"secure.enabled": "true", "engine.deadline": 20, "evaluate": "average", "rounds": 1}
    deployment = Deployment(processes, images, (*NAMES, "west"), **keys)
    server = deployment.serve(program=("-c", IMPATIENT))
    clients = [deployment.join(name) for name in NAMES]
    killed = deployment.join("west", program=("-c", KILLED))
    assert server.wait() == 0, server.output
    assert [client.wait() for client in clients] == [0, 0, 0], clients[0].output
    assert killed.wait() == -9
    [event] = read_rounds(deployment.run)
    assert event["left_out"] == ["west"]
    for done in ("made keys", "made shares of its secrets", "trained", "opened others' shares"):
        assert re.search(rf"round 1: received [^,]+, {done} in", clients[0].output), clients[0].output

    shutil.rmtree(images / "clients" / "west")
    found, local = (
        load_file(run / "model.safetensors") for run in (deployment.run, deployment.train_locally())
    )
    error = FixedPoint(16.0, 4).step + 2**-23  # of both runs; and of float32 below 2
    for name, value in local.items():
        assert float((value.double() - found[name].double()).abs().max()) <= error
