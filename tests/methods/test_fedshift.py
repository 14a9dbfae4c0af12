"""fedshift: teachers, labels by the client's own class mix, and what leaves a client."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from conftest import TINY
from fedseal import weights
from fedseal.config.load import load_config
from fedseal.core import Packet, Round
from fedseal.data.federation import load_federation
from fedseal.engines import memory as memories
from fedseal.engines.client import SimulatedClients
from fedseal.errors import UserError
from fedseal.label_shift import Calibration, calibrate, estimate_mix, posterior
from fedseal.learn import accuracy, predict_logits
from fedseal.methods.fedshift import FedShift, balanced
from fedseal.run_setup import RunSetup

EVERYONE = range(3)


OWN_NETWORK = """
from torch import nn

def build(channels, size, classes):
    body = nn.Linear(784, 8), nn.LayerNorm(8), nn.Dropout()
    return nn.Sequential(nn.Flatten(), *body, nn.Linear(8, classes))
"""


def make_setup(**more: Any) -> RunSetup:
    options = {"method": "fedshift", "bootstrap.epochs": 30, "fedshift.teachers": 2, "bootstrap.lr": 0.02}
    config = load_config("fmnist-lenet", {**TINY, **options, **more})
    return RunSetup(config, load_federation(config.data, config.seed))


@pytest.fixture(scope="module")
def setup() -> RunSetup:
    return make_setup()


@pytest.fixture(scope="module")
def prepared(setup: RunSetup) -> Packet:
    server, method = setup.server(), setup.config.selected_method()
    return list(method.prepare(method.initial_state(server), server))[-1].state


def first_round(setup: RunSetup, state: Packet) -> tuple[Packet, dict[int, Packet]]:
    return setup.config.selected_method().server_round(Round(1, (0, 2), EVERYONE), state, setup.server())


def test_teachers_differ_and_the_first_one_is_the_model(prepared: Packet) -> None:
    first, second = prepared.tensors["teacher-0"], prepared.tensors["teacher-1"]
    assert all(torch.equal(value, prepared.tensors["model"][name]) for name, value in first.items())
    assert not torch.equal(first["body.fc3.weight"], second["body.fc3.weight"])
    assert prepared.scalars["bootstrapped"] == 60


def test_preparation_continues_where_it_was_stopped(setup: RunSetup, prepared: Packet) -> None:
    server, method = setup.server(), setup.config.selected_method()
    for step in method.prepare(method.initial_state(server), server):
        again = list(method.prepare(Packet.from_bytes(step.state.to_bytes()), setup.server()))
        last = again[-1].state if again else step.state
        assert last.to_bytes() == prepared.to_bytes()


def test_teachers_of_your_own_network_are_the_same_after_a_stop(tmp_path: Path) -> None:
    """Dropout draws the same numbers, and no layer of a teacher comes from the one before."""
    (tmp_path / "own.py").write_text(OWN_NETWORK)
    setup = make_setup(**{"model.name": f"{tmp_path}/own.py:build", "fedshift.balance": False})
    server, method = setup.server(), setup.config.selected_method()
    states = [step.state for step in method.prepare(method.initial_state(server), server)]
    assert len(states) == 6
    for state in states[:-1]:
        [*_, last] = method.prepare(state, setup.server())
        assert last.state.to_bytes() == states[-1].to_bytes()


def test_teachers_of_a_pretrained_network_are_all_pretrained(finished: Path) -> None:
    """With 10 classes the file has all weights, so before they are trained teachers do not differ."""
    setup = make_setup(**{"model.weights": str(finished / "model.safetensors")})
    expected, found = load_file(finished / "model.safetensors"), setup.server().new_network(5).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_everyone_gets_the_teachers_in_round_1_only(setup: RunSetup, prepared: Packet) -> None:
    method, server = setup.config.selected_method(), setup.server()
    state, requests = first_round(setup, prepared)
    assert {k: request.trains for k, request in requests.items()} == {0: True, 1: False, 2: True}
    assert all("teacher-1" in request.tensors for request in requests.values())
    assert not any(name.startswith("teacher") for name in state.tensors)
    state = method.collect(Round(1, (0, 2), EVERYONE), state, {}, server)
    _, requests = method.server_round(Round(2, (1,), EVERYONE), state, server)
    assert list(requests) == [1]
    assert set(requests[1].tensors) == {"model", "calibration"}


def test_a_client_labels_by_teachers_and_its_own_mix(setup: RunSetup, prepared: Packet) -> None:
    """Against the same written down once more."""
    _, requests = first_round(setup, prepared)
    given: dict[str, Any] = {}

    def record(name: str, rows: torch.Tensor, labels: torch.Tensor, *, complementary: bool = False) -> None:
        given.update(name=name, rows=rows, labels=labels)

    client = setup.client(0, setup.network(), record)
    reply, memory = setup.config.selected_method().client_round(requests[0], Packet(), client)
    calibration = Calibration.from_tensors(requests[0].tensors["teachers"])
    logits = sum(
        predict_logits(client, requests[0].tensors[f"teacher-{k}"], client.data).double() for k in (0, 1)
    )
    probs = calibration.probs(logits / 2)
    mix = estimate_mix(probs, calibration)
    assert float((mix - calibration.mix).abs().max()) > 0.05  # this client's mix is another one
    assert torch.equal(given["labels"], posterior(probs, calibration.mix, mix).argmax(dim=1))
    torch.testing.assert_close(memory.tensors["images"]["probs"], probs)
    shown, groups = setup.config.selected_method().explain_labels(memory, {}, lambda: torch.zeros(0))
    torch.testing.assert_close(shown, posterior(probs, calibration.mix, mix).float())
    assert bool(groups["learned as this class"].all()) and not bool(groups["not used"].any())
    assert reply.counts == {"labelled": len(client.data)}


def test_nothing_of_the_mix_leaves_the_client(setup: RunSetup, prepared: Packet) -> None:
    """A reply has the weights and a number of images; a client that only listens replies with nothing."""
    _, requests = first_round(setup, prepared)
    clients = SimulatedClients(setup)
    trained, listened = (clients.run(k, requests[k], b"") for k in (0, 1))
    assert set(trained.reply.tensors) == {"model"}
    assert set(trained.reply.tensors["model"]) == set(requests[0].tensors["model"])
    assert set(trained.reply.scalars) == {"t", "labelled"}
    assert (listened.reply.tensors, dict(listened.reply.scalars)) == ({}, {"t": 1})
    assert "images" in memories.read(listened.memory).tensors  # it remembers what the teachers say


def test_a_client_that_missed_round_1_labels_with_the_model(setup: RunSetup, prepared: Packet) -> None:
    method, server = setup.config.selected_method(), setup.server()
    state, _ = first_round(setup, prepared)
    state = method.collect(Round(1, (0, 2), EVERYONE), state, {}, server)
    _, requests = method.server_round(Round(2, (1,), EVERYONE), state, server)
    reply, memory = method.client_round(requests[1], Packet(), setup.client(1, setup.network()))
    assert reply.counts == {"labelled": len(setup.federation.clients[1])}
    assert not memory.tensors


def test_new_images_are_labelled_with_the_model(setup: RunSetup, prepared: Packet) -> None:
    """As after `memory.align`: a new image has zeros in the memory."""
    method = setup.config.selected_method()
    assert isinstance(method, FedShift)
    _, requests = first_round(setup, prepared)
    client = setup.client(0, setup.network())
    _, memory = method.client_round(requests[0], Packet(), client)
    images = {name: value.clone() for name, value in memory.tensors["images"].items()}
    for value in images.values():
        value[:5] = 0
    later = Packet({k: v for k, v in requests[0].tensors.items() if k in ("model", "calibration")}, {"t": 2})
    reply, after = method.client_round(later, Packet({"images": images}, {"t": 1}), client)
    assert reply.counts == {"labelled": len(client.data)}
    assert after.scalars == {"t": 2}


def test_switches(prepared: Packet) -> None:
    """Without mix and with a threshold, only images that the teachers are sure of are labelled."""
    setup = make_setup(**{"fedshift.mix": False, "fedshift.threshold": 0.5})
    _, requests = first_round(setup, prepared)
    reply = SimulatedClients(setup).run(0, requests[0], b"").reply
    client = setup.client(0, setup.network())
    _, memory = setup.config.selected_method().client_round(requests[0], Packet(), client)
    sure = memory.tensors["images"]["probs"].max(dim=1).values >= 0.5
    assert 0 < int(sure.sum()) < len(sure)
    assert reply.counts == {"labelled": int(sure.sum())}


def test_a_balanced_model_predicts_as_the_calibrated_one(setup: RunSetup, prepared: Packet) -> None:
    """Class 0 gets an advantage of 2; the biases take some of it back, and nothing else changes."""
    server, w = setup.server(), dict(prepared.tensors["model"])
    w["body.fc3.bias"] = w["body.fc3.bias"] + 2 * torch.eye(10)[0]
    after = balanced(server, w)
    labels = torch.cat([server.data.labels, server.validation.labels])
    before, logits = (
        torch.cat([predict_logits(server, v, images) for images in (server.data, server.validation)])
        for v in (w, after)
    )
    calibrated = calibrate(before, labels, deviation=1.0).probs(before)
    assert torch.equal(logits.argmax(dim=1), calibrated.argmax(dim=1))
    assert accuracy(logits, labels) > accuracy(before, labels)
    assert [name for name in w if not torch.equal(w[name], after[name])] == ["body.fc3.bias"]


def test_the_model_to_take_home_is_balanced_and_training_goes_on_without(
    setup: RunSetup, prepared: Packet
) -> None:
    method, server = setup.config.selected_method(), setup.server()
    state, requests = first_round(setup, prepared)
    moved = {name: value + 0.01 for name, value in requests[0].tensors["model"].items()}
    after = method.collect(Round(1, (0, 2), EVERYONE), state, {0: Packet({"model": moved})}, server).tensors
    expected = balanced(server, after["mean"])
    assert all(torch.equal(value, expected[name]) for name, value in after["average"].items())
    assert not torch.equal(after["average"]["body.fc3.bias"], after["mean"]["body.fc3.bias"])
    torch.testing.assert_close(after["next"], moved)


def test_calibration_survives_a_packet() -> None:
    before = Calibration(2.5, torch.tensor([0.1, -0.1]).double(), torch.tensor([0.25, 0.75]).double(), 200)
    packet = Packet.from_bytes(Packet({"c": before.to_tensors()}).to_bytes())
    after = Calibration.from_tensors(packet.tensors["c"])
    assert (after.temperature, after.images) == (2.5, 200)
    assert torch.equal(after.bias, before.bias) and torch.equal(after.mix, before.mix)


def test_momentum_and_moving_average(setup: RunSetup) -> None:
    """Two rounds from w with the same mean w + 0.5: the steps are 0.5 and 0.5 + 0.9 · 0.5 = 0.95.

    The moving average starts at w. It is 0.1 · 0.5 = 0.05 away from it, then 0.9 · 0.05 + 0.1 · 0.95 = 0.14.
    """
    method, server, current = setup.config.selected_method(), setup.server(), Round(1, (0,), EVERYONE)
    w = weights.get_weights(setup.network())
    reply = Packet({"model": {n: v + 0.5 if v.is_floating_point() else v for n, v in w.items()}})
    state = Packet({"model": w, "average": w}, {"temperature": 1.0})
    for step, distance in ((0.5, 0.05), (0.95, 0.14)):
        state = method.collect(
            current, Packet({**state.tensors, "model": w}, state.scalars), {0: reply}, server
        )
        for group, expected in (("next", step), ("mean", distance)):
            moved = state.tensors[group]["body.fc3.bias"] - w["body.fc3.bias"]
            torch.testing.assert_close(moved, torch.full_like(moved, expected))
    _, requests = method.server_round(current, state, server)
    assert torch.equal(requests[0].tensors["model"]["body.fc3.bias"], state.tensors["next"]["body.fc3.bias"])


def test_it_needs_bootstrapping() -> None:
    setup = make_setup(**{"bootstrap.epochs": 0})
    with pytest.raises(UserError, match=r"set bootstrap\.epochs"):
        setup.config.selected_method().check(setup.server())
