"""FedMatch: its losses with hand-derived numbers, and its rounds on a small federation."""

import math
from typing import Any

import pytest
import torch

from conftest import TINY
from fedseal import weights
from fedseal.config.load import load_config
from fedseal.core import Packet, Round
from fedseal.data.federation import load_federation
from fedseal.losses import agreed_labels, consistency_loss
from fedseal.methods.fedmatch import FedMatch, added, nearest
from fedseal.paper import positive_loss
from fedseal.replies import find_problem
from fedseal.run_setup import RunSetup


def make(**changes: Any) -> tuple[RunSetup, FedMatch]:
    keys = {**TINY, "method": "fedmatch", "fedmatch.threshold": 0.1, "fedmatch.helpers_every": 2}
    config = load_config("fmnist-lenet", keys | {k.replace("__", "."): v for k, v in changes.items()})
    method = config.selected_method()
    assert isinstance(method, FedMatch)
    return RunSetup(config, load_federation(config.data, config.seed)), method


def close(a: weights.Tensors, b: weights.Tensors, tolerance: float = 1e-6) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[k], b[k], atol=tolerance) for k in a)


def test_labels_are_a_majority_vote() -> None:
    """The model votes first, then its two helpers. Votes 2, 2, 0 give class 2, and 1, 0, 0 give class 0. The
    votes 2, 1, 0 are a tie, which the lowest class wins. Without helpers only the model votes."""
    logits = torch.tensor([[0.0, 0.0, 1.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    eye = torch.eye(3)
    helped = torch.stack([eye[[2, 0]], eye[[0, 0]], eye[[1, 0]]])
    assert agreed_labels(logits, helped).tolist() == [2, 0, 0]
    assert agreed_labels(logits, torch.zeros(3, 0, 3)).tolist() == [2, 1, 2]


def test_consistency_loss() -> None:
    """One image, two classes; the model predicts (1/2, 1/2). Helper (1, 0): KL = ln 2. Helper (3/4, 1/4):
    ¾ ln(3/2) + ¼ ln(1/2). The loss is the mean of both."""
    logits = torch.zeros(1, 2, requires_grad=True)
    helped = torch.tensor([[[1.0, 0.0], [0.75, 0.25]]])
    second = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    loss = consistency_loss(logits, helped)
    assert loss.item() == pytest.approx((math.log(2) + second) / 2)
    loss.backward()  # dKL/dz = p − h: mean of (½ − 1, ½ − 0) and (½ − ¾, ½ − ¼)
    assert logits.grad is not None and logits.grad.tolist()[0] == pytest.approx([-0.375, 0.375])
    assert consistency_loss(logits, torch.zeros(1, 0, 2)).item() == 0


def test_regularisation() -> None:
    """σ = (1, −2), w = (1.5, −1), so ψ = (0.5, 1): |ψ| = 1.5, ‖σ − ψ‖² = 0.5² + 3² = 9.25."""
    method = FedMatch(sparsity=2.0, proximity=4.0)
    w, sigma = {"a": torch.tensor([1.5, -1.0])}, {"a": torch.tensor([1.0, -2.0])}
    assert method.regularisation(w, sigma).item() == pytest.approx(2 * 1.5 + 4 * 9.25)


def test_helpers_are_the_clients_with_the_nearest_outputs() -> None:
    outputs = {str(k): torch.tensor([float(v), 0.0]) for k, v in {0: 0, 1: 5, 2: 1, 7: -2, 9: 2}.items()}
    assert nearest(0, outputs, 2) == [
        2,
        7,
    ]  # distances 1 and 2; client 9 also has distance 2, but comes after 7
    assert nearest(1, outputs, 1) == [9]
    assert nearest(3, outputs, 2) == []  # client 3 has not replied yet
    assert nearest(0, {"0": torch.zeros(2)}, 2) == []


def test_weights_are_the_sum_of_sigma_and_psi() -> None:
    """w = σ + ψ before and after the server's step, which keeps ψ. Only σ has the input normalisation."""
    setup, method = make()
    server = setup.server()
    before = method.initial_state(server)
    fresh = weights.get_weights(server.model)
    parameters = {name for name, _ in server.model.named_parameters()}
    assert before.tensors["psi"].keys() == parameters == fresh.keys() - {"mean", "std"}
    assert all(torch.equal(v, 0.2 * fresh[k]) for k, v in before.tensors["psi"].items())
    assert close(before.tensors["model"], added(fresh, before.tensors["psi"]))

    after, requests = method.server_round(Round(1, (0, 2), range(3)), before, server)
    assert sorted(requests) == [0, 2]
    sent = requests[0].tensors
    assert list(sent) == ["sigma", "psi"]  # no helpers in round 1
    assert all(torch.equal(sent["psi"][k], v) for k, v in before.tensors["psi"].items())
    assert close(after.tensors["model"], added(sent["sigma"], sent["psi"]))
    assert not close(sent["sigma"], before.tensors["sigma"], 1e-4)


def test_client_trains_only_psi() -> None:
    """One step on one batch changes ψ by −lr · ∂L/∂ψ, with σ held fixed."""
    setup, method = make(client__batch=40)
    server, client = setup.server(), setup.client(0, setup.network())
    _, requests = method.server_round(Round(1, (0,), range(3)), method.initial_state(server), server)
    sigma, psi = requests[0].tensors["sigma"], requests[0].tensors["psi"]
    helper = {name: 3 * value for name, value in psi.items()}
    request = Packet({**requests[0].tensors, "helper.0": helper}, requests[0].scalars)
    reply, memory = method.client_round(request, Packet(), client)
    assert memory == Packet() and list(reply.tensors) == ["psi"]

    leaves = {name: value.clone().requires_grad_() for name, value in psi.items()}
    net = setup.network()

    def run(parts: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(net, {**sigma, **{n: sigma[n] + parts[n] for n in parts}}, (x,))

    net.eval()
    helped = run(helper, client.data.pixels).softmax(dim=1).unsqueeze(1).detach()
    plain, strong, helped = next(method.client_batches(client, 1, helped))
    logits = run(leaves, plain)
    confident = logits.softmax(dim=1).amax(dim=1) >= 0.1
    assert bool(confident.any())
    loss = 0.01 * positive_loss(
        run(leaves, strong[confident]), agreed_labels(logits[confident], helped[confident])
    )
    loss = loss + 0.01 * consistency_loss(logits[confident], helped[confident])
    loss = loss + sum(
        1e-5 * leaf.abs().sum() + 10 * (sigma[name] - leaf).square().sum() for name, leaf in leaves.items()
    )
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    expected = {n: psi[n] - 0.001 * g for n, g in zip(leaves, gradients, strict=True)}
    assert close(reply.tensors["psi"], expected, 1e-6)
    assert not close(reply.tensors["psi"], psi, 1e-5)


def test_psi_is_averaged_and_helpers_are_sent_every_second_round() -> None:
    setup, method = make()
    server, cohort = setup.server(), Round(1, (0, 1, 2), range(3))
    state, requests = method.server_round(cohort, method.initial_state(server), server)
    replies = {
        k: Packet({"psi": {n: torch.full_like(v, k / 100) for n, v in requests[k].tensors["psi"].items()}})
        for k in (0, 1, 2)
    }
    state = method.collect(cohort, state, replies, server)
    assert all(torch.allclose(v, torch.tensor(0.01)) for v in state.tensors["psi"].values())
    assert close(state.tensors["average"], added(state.tensors["sigma"], state.tensors["psi"]))
    assert state.tensors["outputs"].keys() == {"0", "1", "2"}
    assert all(
        v.shape == (10,) and float(v.sum()) == pytest.approx(1) for v in state.tensors["outputs"].values()
    )
    _, second = method.server_round(Round(2, (0, 2), range(3)), state, server)
    for k, others in ((0, {1, 2}), (2, {0, 1})):
        helpers = [v for name, v in second[k].tensors.items() if name.startswith("helper.")]
        assert {round(float(next(iter(h.values())).flatten()[0]) * 100) for h in helpers} == others
    _, third = method.server_round(Round(3, (0,), range(3)), state, server)
    assert list(third[0].tensors) == ["sigma", "psi"]


def test_momentum_gives_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    for momentum, warnings in ((0.0, 0), (0.9, 1)):
        setup, method = make(server__momentum=momentum)
        method.check(setup.server())
        assert len(caplog.records) == warnings
    assert "FedMatch may not learn with momentum: set server.momentum" in caplog.text


def test_reply_without_psi_is_unusable() -> None:
    psi = {"w": torch.zeros(2)}
    request = Packet({"sigma": psi, "psi": psi}, {"train": True})
    assert find_problem(Packet({"psi": psi}), request, FedMatch.uploads) == ""
    assert "no model" in find_problem(Packet({"sigma": psi}), request, FedMatch.uploads)
    assert "NaN" in find_problem(
        Packet({"psi": {"w": torch.tensor([0, math.nan])}}), request, FedMatch.uploads
    )


def test_noise_is_deterministic_and_in_the_range_of_pixels() -> None:
    setup, method = make()
    noise = method.noise(setup.server())
    assert torch.equal(noise, method.noise(setup.server())) and noise.shape == (1, 1, 28, 28)
    assert float(noise.min()) >= 0 and float(noise.max()) <= 255 and float(noise.std()) > 40
