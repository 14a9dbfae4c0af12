"""Properties of every method on a small federation of real images: labels, resume and both engines."""

import gc
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from conftest import TINY, same_weights
from fedseal import weights
from fedseal.config.load import load_config
from fedseal.config.sections import AggregateSettings
from fedseal.core import Packet, Reply, Round
from fedseal.data.federation import load_federation
from fedseal.engines.attack import malicious_clients
from fedseal.engines.client import LabelAudit
from fedseal.errors import UserError
from fedseal.methods import METHODS
from fedseal.rounds import find_outliers, sample_cohort
from fedseal.run_setup import RunSetup
from fedseal.storage.events_file import read_rounds
from fedseal.training.train import train
from fedseal.weights import Tensors

# Low thresholds, so that clients learn with an almost untrained network; FedMatch's helpers from round 2 on.
# One client sends an update that the gate leaves out.
EASY: dict[str, Any] = {
    "seed": 1,  # the malicious client is asked in the first two of three rounds
    "rounds": 3,
    "data.clients": 5,
    "cohort": 4,
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
    "simulate.attack": "scale",
    "simulate.strength": 50,
    "aggregate.gate": 3,
}
# How the server averages; server-sl asks no client.
RULES = {
    "fedavg-fixmatch": "median",
    "fedavg-sl": "mean",
    "fedavg-uda": "trimmed-mean",
    "fedmatch": "clip",
    "fedrgd": "median",
    "fedseal": "fltrust",
    "fedshift": "multi-krum",
    "semifl": "clip",
}
# With BatchNorm, and another rule. Multi-Krum then leaves out one client more than the gate.
BATCH_NORM: dict[str, dict[str, Any]] = {
    "fedseal": {"aggregate.rule": "multi-krum", "aggregate.malicious": 0.4, "cohort": 0},
    "semifl": {"aggregate.rule": "fltrust"},
}


def settings(method: str, **more: Any) -> dict[str, Any]:
    without = {"bootstrap.epochs": 0} if method == "fedmatch" else {}
    rule = {"aggregate.rule": RULES[method]} if method in RULES else {}
    return {**TINY, **EASY, **without, **rule, "method": method, "server.threads": 1, **more}


def left_out(run: Path) -> list[list[str]]:
    """The clients that each round of a run left out."""
    return [event["left_out"] for event in read_rounds(run)]


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
    assert left_out(tmp_path / "run") == left_out(uninterrupted(method))
    assert any(left_out(tmp_path / "run")) == (method != "server-sl")


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
    assert left_out(tmp_path / "run") == left_out(uninterrupted(method))


@pytest.fixture(scope="module")
def with_batch_norm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns the folder of a run with BatchNorm; each run is made once."""
    folder = tmp_path_factory.mktemp("batch-norm")

    def run(method: str, name: str = "one worker", *, rounds: int = 3, **more: Any) -> Path:
        path = folder / f"{method} {name}"
        if rounds not in (event["t"] for event in read_rounds(path)):
            keys = settings(method, rounds=rounds, **{"model.norm": "batch"}, **BATCH_NORM[method], **more)
            train("fmnist-lenet", out=path, resume=True, options=keys)
        return path

    return run


@pytest.mark.parametrize("method", BATCH_NORM)
def test_clients_are_left_out_with_batch_norm(method: str, with_batch_norm: Any) -> None:
    """The malicious client in each round that asks it; and with Multi-Krum another one, f = 0.4 · 5 = 2."""
    config = load_config("fmnist-lenet", settings(method, **BATCH_NORM[method]))
    names = load_federation(config.data, config.seed).names
    [malicious] = malicious_clients(config.simulate, 5, config.seed)
    for t, found in enumerate(left_out(with_batch_norm(method)), start=1):
        asked = malicious in sample_cohort(config.seed, t, range(5), config.cohort)
        assert (names[malicious] in found) == asked
        assert len(found) == asked + (method == "fedseal")


@pytest.mark.parametrize("method", BATCH_NORM)
@pytest.mark.parametrize("way", ["two workers", "resumed", "flower"])
def test_clients_are_left_out_alike_however_a_run_is_computed(
    way: str, method: str, with_batch_norm: Any, request: pytest.FixtureRequest
) -> None:
    more: dict[str, Any] = {}
    if way == "two workers":
        more = {"engine.workers": 2}
    elif way == "flower":
        request.getfixturevalue("one_ray")
        more = {"engine.name": "flower"}
    else:
        with_batch_norm(method, way, rounds=1)
    run, expected = with_batch_norm(method, way, **more), with_batch_norm(method)
    assert same_weights(run, expected)
    assert left_out(run) == left_out(expected) and any(left_out(run))


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


@pytest.mark.parametrize(
    ("method", "rule"),
    [
        (method, rule)
        for method in sorted(METHODS.keys() - {"server-sl"})
        for rule in get_args(AggregateSettings.model_fields["rule"].annotation)
        if (method, rule) != ("fedmatch", "fltrust")  # it refuses fltrust
    ],
)
def test_every_method_averages_by_the_rule(method: str, rule: str) -> None:
    """Four of five clients move every weight by 0.01, the last one by 10, and the server by 0.02.

    The plain mean moves by 10.04 / 5, FLTrust by as much as the server, all other rules by as much as most.
    FedRGD also averages the server's model, which does not move, into each of its two groups.
    """
    single = {"fedshift.momentum": 0, "fedshift.keep": 0, "semifl.momentum": 0}  # of this round alone
    still = {"server.lr": 1e-9, "aggregate.rule": rule, "aggregate.gate": 0}
    config = load_config("fmnist-lenet", settings(method) | single | still)
    setup = RunSetup(config, load_federation(config.data, config.seed))
    chosen, server = config.selected_method(), setup.server()

    def moved(sent: Tensors, step: float) -> Tensors:
        return {name: value + step for name, value in sent.items()}

    root = replace(server.aggregation, root=lambda sent, t: moved(sent, 0.02))
    server, current = replace(server, aggregation=root), Round(1, (0, 1, 2, 3, 4), range(5))
    state, requests = chosen.server_round(current, chosen.initial_state(server), server)
    sent, counts = requests[0].tensors[chosen.uploads], dict.fromkeys(chosen.nonzero_counts, 1)
    replies = {
        k: Packet({chosen.uploads: moved(sent, step)}, {"t": 1, **counts})
        for k, step in enumerate((0.01, 0.01, 0.01, 0.01, 10.0))
    }
    found = find_outliers(chosen.uploads, requests, {k: Reply(k, p) for k, p in replies.items()}, server, 1)
    assert list(found) == ([4] if rule == "multi-krum" else [])
    kept = {k: reply for k, reply in replies.items() if k not in found}
    before, after = (chosen.collect(current, state, given, server).tensors["average"] for given in ({}, kept))
    assert weights.same_layout(after, before) and weights.all_finite(after)
    step = float((after["body.conv1.weight"] - before["body.conv1.weight"]).mean())
    expected = {"mean": 10.04 / 5, "fltrust": 0.02}.get(rule, 0.01)
    assert step == pytest.approx(expected, rel=0.5 if method == "fedrgd" else 1e-3)


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
