"""FedAvg-SL, FedAvg-FixMatch and FedAvg-UDA on a small federation of real images."""

from typing import Any

import pytest
import torch

from conftest import TINY
from fedseal import aggregate, learn, weights
from fedseal.config.load import load_config
from fedseal.core import LabelledParticipant, Packet, Round
from fedseal.data.federation import load_federation
from fedseal.learn import fit, labelled_batches, learning_rate, train_supervised, two_view_batches
from fedseal.losses import fixmatch_loss, uda_loss
from fedseal.run_setup import RunSetup


def make(method: str, **changes: Any) -> RunSetup:
    config = load_config("fmnist-lenet", {**TINY, "method": method, **changes})
    return RunSetup(config, load_federation(config.data, config.seed))


def test_fedavg_sl_is_standard_fedavg() -> None:
    """The server only averages, and a client takes the same steps as supervised training on its labels."""
    setup = make("fedavg-sl")
    method, server, model = setup.config.selected_method(), setup.server(), setup.network()
    state = method.initial_state(server)
    after, requests = method.server_round(Round(1, (0, 2), range(3)), state, server)
    assert sorted(requests) == [0, 2]
    assert weights.same_layout(after.tensors["model"], state.tensors["model"])
    assert all(torch.equal(after.tensors["model"][k], v) for k, v in state.tensors["model"].items())
    replies = {}
    for k in (0, 2):
        client = setup.client(k, model)
        replies[k], _ = method.client_round(requests[k], Packet(), client)
        expected = train_supervised(client, state.tensors["model"], 1)
        assert all(torch.equal(replies[k].tensors["model"][n], v) for n, v in expected.items())
    end = method.collect(Round(1, (0, 2), range(3)), after, replies, server)
    mean = aggregate.mean({k: reply.tensors["model"] for k, reply in replies.items()})
    for group in ("model", "average"):
        assert all(torch.equal(end.tensors[group][name], value) for name, value in mean.items())


def test_fedavg_sl_with_a_server_step() -> None:
    """The server trains the average on its labels, which gives w^t; the round ends with the clients' mean."""
    setup = make("fedavg-sl", **{"fedavg-sl.server_step": True})
    method, server, model = setup.config.selected_method(), setup.server(), setup.network()
    state, current = method.initial_state(server), Round(1, (0,), range(3))
    after, requests = method.server_round(current, state, server)
    expected = train_supervised(server, state.tensors["average"], 1, stream="rounds")
    for packet in (after, requests[0]):
        assert all(torch.equal(packet.tensors["model"][name], value) for name, value in expected.items())
    reply, _ = method.client_round(requests[0], Packet(), setup.client(0, model))
    end = method.collect(current, after, {0: reply}, server)
    assert all(torch.equal(end.tensors["model"][name], value) for name, value in expected.items())
    trained = train_supervised(setup.client(0, model), expected, 1)
    assert all(torch.equal(end.tensors["average"][name], value) for name, value in trained.items())


def test_fedavg_sl_with_an_adjusted_loss() -> None:
    """Cross-entropy of logits + log(mix · classes), with a tenth of an image more per class."""
    setup = make("fedavg-sl", **{"fedavg-sl.adjust": 1.0})
    client, start = setup.client(0, setup.network()), weights.get_weights(setup.network())
    assert isinstance(client, LabelledParticipant)
    counts = torch.bincount(client.data.labels, minlength=10) + 0.1
    shift = (10 * counts / counts.sum()).log()

    def loss(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(images) + shift, labels)

    rng = client.rng(1, "supervised")
    batches = labelled_batches(client, client.data, client.training.epochs, rng, "weak")
    expected = fit(client, start, batches, loss, learning_rate(client, 1))
    trained, _ = setup.config.selected_method().train_client(client, Packet({"model": start}, {"t": 1}))
    for name, value in expected.items():
        torch.testing.assert_close(trained[name], value)


def test_bootstrapping_depends_on_its_own_section_only() -> None:
    """Neither the epochs nor the learning rate of the rounds matter, and it can be resumed."""
    results = []
    for changes in ({"server.epochs": 1}, {"server.epochs": 5, "server.lr": 0.5, "server.decay": 0.5}):
        setup = make("fedavg-fixmatch", **{"bootstrap.epochs": 25, **changes})
        method, server = setup.config.selected_method(), setup.server()
        steps = list(method.prepare(method.initial_state(server), server))
        assert [(step.done, step.total) for step in steps] == [(10, 25), (20, 25), (25, 25)]
        resumed = list(method.prepare(steps[0].state, setup.server()))
        results += [steps[-1].state.to_bytes(), resumed[-1].state.to_bytes()]
    assert len(set(results)) == 1


def test_bootstrapping_lowers_its_learning_rate_per_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.1, then 0.1 · 0.9¹⁰ after ten epochs."""
    rates: list[float] = []
    monkeypatch.setattr(learn, "fit", lambda server, w, batches, loss, lr: rates.append(lr) or w)
    setup = make("fedavg-uda", **{"bootstrap.epochs": 20, "bootstrap.lr": 0.1, "bootstrap.decay": 0.9})
    list(learn.bootstrap(setup.server(), weights.get_weights(setup.network())))
    assert rates == pytest.approx([0.1, 0.1 * 0.9**10])


@pytest.mark.parametrize("method", ["fedavg-fixmatch", "fedavg-uda"])
def test_client_minimises_the_loss_of_its_method(method: str) -> None:
    """One step on one batch equals a step that the test takes with the loss function."""
    changes = {"client.batch": 40, f"{method}.threshold": 0.05}
    setup = make(method, **changes)
    chosen, model = setup.config.selected_method(), setup.network()
    client = setup.client(1, model)
    start = weights.get_weights(model)
    request = Packet({"model": start}, {"t": 3, "train": True})
    reply, memory = chosen.client_round(request, Packet(), client)
    assert memory == Packet()

    def loss(net: torch.nn.Module, weak: torch.Tensor, strong: torch.Tensor) -> torch.Tensor:
        weak_logits = net(weak).detach()
        if method == "fedavg-uda":
            return uda_loss(weak_logits, net(strong), 0.05, 0.4)
        return fixmatch_loss(weak_logits, net(strong), 0.05)

    batches = list(two_view_batches(client, client.rng(3, "batches")))
    assert [tuple(view.shape) for view in batches[0]] == [(40, 1, 28, 28)] * 2
    expected = fit(client, start, batches, loss, learning_rate(client, 3))
    assert all(torch.equal(reply.tensors["model"][name], value) for name, value in expected.items())
    assert any(not torch.equal(start[name], value) for name, value in expected.items())


def test_client_without_confident_images_returns_the_model() -> None:
    setup = make("fedavg-fixmatch", **{"fedavg-fixmatch.threshold": 1.0})
    model = setup.network()
    start = weights.get_weights(model)
    client = setup.client(0, model)
    reply, _ = setup.config.selected_method().client_round(
        Packet({"model": start}, {"t": 1}), Packet(), client
    )
    assert all(torch.equal(reply.tensors["model"][name], value) for name, value in start.items())


@pytest.mark.parametrize("method", ["fedavg-fixmatch", "fedavg-uda"])
def test_server_trains_the_average_as_in_fedseal(method: str) -> None:
    setup = make(method)
    server, chosen = setup.server(), setup.config.selected_method()
    state = chosen.initial_state(server)
    after, requests = chosen.server_round(Round(1, (1,), range(3)), state, server)
    expected = train_supervised(server, state.tensors["average"], 1, stream="rounds")
    assert list(requests) == [1]
    assert all(torch.equal(after.tensors["model"][name], value) for name, value in expected.items())
    without_replies = chosen.collect(Round(1, (1,), range(3)), after, {}, server)
    assert without_replies.tensors["average"] is after.tensors["model"]


def test_two_view_batches_contain_every_image_once_per_epoch_in_a_new_order() -> None:
    setup = make("fedavg-fixmatch", **{"client.epochs": 2, "augment.shift": 0, "augment.flip": "false"})
    client = setup.client(0, setup.network())
    weak = torch.cat([w for w, _ in two_view_batches(client, client.rng(1, "x"))])
    strong = torch.cat([s for _, s in two_view_batches(client, client.rng(1, "x"))])
    originals = sorted(image.numpy().tobytes() for image in client.data.pixels.float())
    for epoch in (weak[:40], weak[40:]):  # with these settings, the weak augmentation changes nothing
        assert sorted(image.numpy().tobytes() for image in epoch) == originals
    assert not torch.equal(weak[:40], weak[40:])
    assert not torch.equal(weak, strong)
