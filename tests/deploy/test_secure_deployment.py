"""Secure aggregation with real processes over TLS: one of four clients is killed in one of the phases."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr")

from deployment import FEDSEAL, NAMES, SMALL, Deployment, Processes, processes, wait_until  # noqa: F401

from conftest import SHAPES, draw
from fedseal.engines import secure_client
from fedseal.engines.secure_client import KEYS, SHARES, UNMASK, UPLOAD, RefusedError
from fedseal.storage.events_file import read_rounds
from fedseal.training.train import train
from fedseal.weights import Tensors

ALL = (*NAMES, "west")
# Each client learns much in the only round, and none is left out for what it has learned.
LEARNING = {"rounds": 1, "client.lr": 0.2, "client.epochs": 3, "aggregate.gate": 0, "evaluate": "average"}
DEADLINE = 12  # seconds for a phase; it takes about one, or three on a very busy machine

# The phases: what a client computes for its answer, and what its output says when it has done so.
PHASES = {
    KEYS: ("make_keys", "made keys"),
    SHARES: ("share", "made shares of its secrets"),
    UPLOAD: ("upload", "trained"),
    UNMASK: ("reveal", "opened others' shares"),
}
DONE = [done for _, done in PHASES.values()]
# A real client that dies when it computes that.
KILLED = """
import os, signal
from fedseal.engines import secure_client
secure_client.{} = lambda *arguments, **options: os.kill(os.getpid(), signal.SIGKILL)
from fedseal.cli.main import main
main()
"""
# A real server that does not wait for the killed client to tell it that the run has ended.
IMPATIENT = """
from fedseal.deploy import superlink
announce_end = superlink.announce_end
def announce_to_others(engine, *arguments):
    engine.registry.seen.discard("west")
    announce_end(engine, *arguments)
superlink.announce_end = announce_to_others
from fedseal.cli.main import main
main()
"""


@dataclass(frozen=True)
class Local:
    """Images of four clients, and the averages of local runs by the clients in them."""

    images: Path
    plain: Mapping[tuple[str, ...], Tensors]  # secure.enabled = false
    secure: Mapping[tuple[str, ...], Tensors]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    """Local runs with all clients and without west, for all deployments."""
    root, rng = tmp_path_factory.mktemp("local"), np.random.default_rng(1)
    images, upload = root / "images", secure_client.upload

    def add_client(name: str) -> None:
        for shape in SHAPES:
            for i in range(4):
                draw(images / "clients" / name / f"{shape}-{i}.png", shape, rng)

    def average(name: str, **changes: Any) -> Tensors:
        local = {"data.path": str(images), "engine.workers": 1}
        train("folders", out=root / name, options=SMALL | LEARNING | local | changes)
        return load_file(root / name / "model.safetensors")

    def upload_unless_west(*arguments: Any, **options: Any) -> Any:
        secrets = arguments[3]
        if int(secrets["me"]) == ALL.index("west"):
            raise RefusedError("late")
        return upload(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDSEAL_DATA", str(root / "cache"))
        for part, number in (("server", 6), ("test", 2)):
            for shape in SHAPES:
                for i in range(number):
                    draw(images / part / shape / f"{i}.png", shape, rng)
        for name in NAMES:
            add_client(name)
        plain = {NAMES: average("plain-three")}
        add_client("west")
        plain[ALL] = average("plain-four")
        secure = {ALL: average("secure-four", **{"secure.enabled": True})}
        # West takes part until its upload, because levels depend on the number of clients asked.
        with patch.context() as without:
            without.setattr(secure_client, "upload", upload_unless_west)
            secure[NAMES] = average("secure-three", **{"secure.enabled": True})
        yield Local(images, plain, secure)


@pytest.mark.parametrize("phase", ["", *PHASES])
def test_the_average_is_the_plain_one_whichever_phase_a_client_is_killed_in(
    processes: Processes,  # noqa: F811
    local: Local,
    phase: str,
) -> None:
    """West is killed in one of the phases, or in none. If it is killed while unmasking, it is in the sum.

    From −16 to 16 there are 2³¹/4 levels, 2⁻²⁴ apart. Each client rounds its update by at most half of that,
    so the average of three or four clients is wrong by at most 2⁻²⁵. Both it and the plain average are then
    rounded to float32, by at most 2⁻²⁴ of their size.
    """
    changes = {"secure.enabled": "true", "engine.deadline": DEADLINE}
    deployment = Deployment(processes, local.images, ALL, **LEARNING | changes)
    server = deployment.serve(program=("-c", IMPATIENT) if phase else FEDSEAL)
    clients = [deployment.join(name) for name in NAMES]
    west = deployment.join("west", program=("-c", KILLED.format(PHASES[phase][0])) if phase else FEDSEAL)
    wait_until(lambda: server.process.poll() is not None, server, *clients)
    assert server.wait() == 0, server.output
    assert [client.wait() for client in clients] == [0, 0, 0], clients[0].output
    assert west.wait() == (-9 if phase else 0), west.output

    before = DONE[: [*PHASES].index(phase)] if phase else DONE
    for client, expected in [*((client, DONE) for client in clients), (west, before)]:
        assert re.findall(r"round 1: received [^,]+, (.+) in", client.output) == expected, client.output
    included, left_out = (ALL, []) if phase in ("", UNMASK) else (NAMES, ["west"])
    [event] = read_rounds(deployment.run)
    assert event["left_out"] == left_out
    assert re.findall(r"round 1: (\w+) is left out: no reply within", server.output) == left_out

    found, plain = load_file(deployment.run / "model.safetensors"), local.plain[included]
    assert found.keys() == plain.keys()
    for name, value in found.items():
        one, other = value.double(), plain[name].double()
        assert bool(((one - other).abs() <= 2**-25 + 2**-24 * (one.abs() + other.abs())).all()), name
        assert torch.equal(value, local.secure[included][name]), name
    with_west, without = local.plain[ALL], local.plain[NAMES]
    assert max(float((with_west[name] - without[name]).abs().max()) for name in found) > 1e-3
