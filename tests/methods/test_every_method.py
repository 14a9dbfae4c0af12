"""Properties of every method on a small federation of real images: labels, resume and both engines."""

import gc
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from conftest import TINY, same_weights
from fedseal import weights
from fedseal.config.load import load_config
from fedseal.config.sections import AggregateSettings
from fedseal.core import Packet, Round
from fedseal.data.federation import load_federation
from fedseal.engines.client import LabelAudit
from fedseal.errors import UserError
from fedseal.methods import METHODS
from fedseal.run_setup import RunSetup
from fedseal.training.train import train

# Low thresholds, so that clients learn with an almost untrained network; FedMatch's helpers from round 2 on.
# One client sends noise.
EASY: dict[str, Any] = {
    "rounds": 3,
    "cohort": 2,
    "server.lr": 0.01,
    "bootstrap.epochs": 12,  # two portions
    "fedshift.teachers": 2,
    "fedavg-fixmatch.threshold": 0.1,
    "fedavg-uda.threshold": 0.1,
    "fedmatch.threshold": 0.1,
    "fedmatch.helpers_every": 2,
    "fedrgd.threshold": 0.1,
    "semifl.threshold": 0.1,
    "simulate.malicious": 1,
    "simulate.attack": "noise",
}
# How the server averages; all others have the plain mean.
RULES = {
    "fedavg-fixmatch": "median",
    "fedavg-uda": "trimmed-mean",
    "fedmatch": "clip",
    "fedrgd": "median",
    "fedseal": "fltrust",
    "semifl": "clip",
}


def settings(method: str, **more: Any) -> dict[str, Any]:
    without = {"bootstrap.epochs": 0} if method == "fedmatch" else {}
    rule = {"aggregate.rule": RULES[method]} if method in RULES else {}
    return {**TINY, **EASY, **without, **rule, "method": method, "server.threads": 1, **more}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns the folder of an uninterrupted run of a method, without workers; each method runs once."""
    folder, done = tmp_path_factory.mktemp("uninterrupted"), set[str]()

    def run(method: str) -> Path:
        if method not in done:
            train("fmnist-lenet", out=folder / method, options=settings(method))
            done.add(method)
        return folder / method

    return run


@pytest.mark.parametrize("method", METHODS)
def test_only_fedavg_sl_can_access_the_labels_of_clients(method: str) -> None:
    """For all other methods, no tensor or array that is reachable from a client contains its labels."""
    config = load_config("fmnist-lenet", settings(method))
    setup = RunSetup(config, load_federation(config.data, config.seed))
    client = setup.client(0, setup.network(), LabelAudit().record)
    truth = setup.true_labels(0).tolist()
    arrays = (
        x.tolist() for x in reachable(client) if isinstance(x, torch.Tensor | np.ndarray) and x.ndim == 1
    )
    assert (truth in list(arrays)) == (method == "fedavg-sl")


def reachable(root: object) -> list[object]:
    """All objects reachable from `root` through attributes, items, closures and bound methods."""
    seen: dict[int, object] = {}
    queue = [root]
    while queue:
        item = queue.pop()
        if id(item) in seen or isinstance(item, types.ModuleType | type):
            continue
        seen[id(item)] = item
        if not isinstance(item, torch.Tensor | np.ndarray):
            queue += [x for x in gc.get_referents(item) if not isinstance(x, dict) or "__builtins__" not in x]
    return list(seen.values())


@pytest.mark.parametrize("method", METHODS)
def test_resumed_run_gives_the_same_weights(method: str, uninterrupted: Any, tmp_path: Path) -> None:
    for rounds in (1, 3):
        train("fmnist-lenet", out=tmp_path / "run", resume=True, options=settings(method, rounds=rounds))
    assert same_weights(tmp_path / "run", uninterrupted(method))


@pytest.fixture(scope="module")
def one_ray() -> Iterator[None]:
    """Ray stays between these tests: it takes several seconds to start."""
    simulation, ray = pytest.importorskip("fedseal.engines.flower.simulation"), pytest.importorskip("ray")
    folder = simulation.private_ray_folder()
    ray.init(**simulation.ray_options(1, folder.name))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "shutdown", lambda: None)
        yield
    ray.shutdown()
    folder.cleanup()


@pytest.mark.parametrize("method", sorted(METHODS.keys() - {"server-sl"}))  # it asks no client
@pytest.mark.usefixtures("one_ray")
def test_flower_gives_the_same_weights(method: str, uninterrupted: Any, tmp_path: Path) -> None:
    keys = settings(method, **{"engine.name": "flower", "engine.workers": 1})
    train("fmnist-lenet", out=tmp_path / "run", options=keys)
    assert same_weights(tmp_path / "run", uninterrupted(method))


@pytest.mark.parametrize("method", sorted(METHODS.keys() - {"server-sl"}))
def test_client_changes_the_model_and_a_round_without_replies_keeps_it_valid(method: str) -> None:
    config = load_config("fmnist-lenet", settings(method))
    setup = RunSetup(config, load_federation(config.data, config.seed))
    chosen, server, model = config.selected_method(), setup.server(), setup.network()
    current = Round(1, (0, 1), range(3))
    state, requests = chosen.server_round(current, chosen.initial_state(server), server)
    reply, _ = chosen.client_round(requests[0], Packet(), setup.client(0, model))
    sent, received = requests[0].tensors[chosen.uploads], reply.tensors[chosen.uploads]
    assert weights.same_layout(received, sent) and weights.all_finite(received)
    assert any(not torch.equal(received[name], sent[name]) for name in sent)

    without_replies = chosen.collect(current, state, {}, server)
    assert weights.all_finite(without_replies.tensors["average"])
    assert weights.same_layout(without_replies.tensors["average"], state.tensors["model"])


@pytest.mark.parametrize("rule", get_args(AggregateSettings.model_fields["rule"].annotation))
@pytest.mark.parametrize("method", sorted(METHODS.keys() - {"server-sl", "fedmatch"}))  # it refuses fltrust
def test_every_rule_averages(method: str, rule: str) -> None:
    """All clients send the same update, which every rule keeps, but for fltrust, which changes its length."""
    config = load_config("fmnist-lenet", settings(method) | {"aggregate.rule": rule, "fedshift.momentum": 0})
    setup = RunSetup(config, load_federation(config.data, config.seed))
    chosen, server = config.selected_method(), setup.server()
    current = Round(1, (0, 1, 2), range(3))
    state, requests = chosen.server_round(current, chosen.initial_state(server), server)
    moved = {name: value + 0.01 for name, value in requests[0].tensors["model"].items()}
    counts = dict.fromkeys(chosen.nonzero_counts, 1)
    replies = {k: Packet({"model": moved}, {"t": 1, **counts}) for k in current.cohort}
    average = chosen.collect(current, state, replies, server).tensors["average"]
    assert weights.same_layout(average, moved) and weights.all_finite(average)
    if rule != "fltrust" and method in ("fedseal", "fedavg-fixmatch", "fedavg-uda", "semifl"):
        assert all(torch.allclose(average[name], moved[name], atol=1e-6) for name in moved)


@pytest.mark.parametrize("method", METHODS)
def test_frozen_networks(method: str, tmp_path: Path, finished: Path) -> None:
    """Features take the place of images."""
    frozen = {"model.freeze": True, "model.views": 1, "model.weights": str(finished / "model.safetensors")}
    train("fmnist-lenet", out=tmp_path / "run", options=settings(method, rounds=1, **frozen))


@pytest.mark.parametrize("method", ["fedmatch", "fedrgd"])
@pytest.mark.parametrize("name", ["resnet18", "own.py:build"])
def test_fedmatch_and_fedrgd_refuse_batch_norm(method: str, name: str, tmp_path: Path) -> None:
    own = "nn.Sequential(nn.Flatten(), nn.Linear(784, 9), nn.BatchNorm1d(9), nn.Linear(9, classes))"
    code = f"from torch import nn\ndef build(channels, size, classes):\n    return {own}\n"
    (tmp_path / "own.py").write_text(code)
    name = name.replace("own.py", f"{tmp_path}/own.py")
    keys = settings(method, **{"model.name": name, "model.norm": "batch", "model.width": 8})
    with pytest.raises(UserError, match=r"set model\.norm to 'group' or 'none'"):
        train("fmnist-lenet", out=tmp_path / "run", options=keys)
    assert not (tmp_path / "run").exists()
