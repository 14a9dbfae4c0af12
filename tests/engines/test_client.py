"""A client's part of a round: its upload goes through the aggregation, and its labels are counted."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from conftest import TINY
from fedseal.aggregate import Aggregation, mean
from fedseal.config.load import load_config
from fedseal.core import Packet, Round
from fedseal.data.federation import load_federation
from fedseal.engines.client import LabelAudit, SimulatedClients, run_client
from fedseal.methods import METHODS
from fedseal.run_setup import RunSetup
from fedseal.weights import Tensors

EASY = {
    f"{name}.threshold": 0.1 for name in ("fedavg-fixmatch", "fedavg-uda", "fedmatch", "fedrgd", "semifl")
}


class Halved(Aggregation):
    """Clients upload half of their update and the server doubles the mean: the same up to rounding."""

    combined: ClassVar[list[list[int]]] = []

    def upload(self, trained: Tensors, received: Tensors) -> Tensors:
        return {name: (value + received[name]) / 2 for name, value in trained.items()}

    def combine(self, uploads: Mapping[int, Tensors], sent: Tensors, t: int) -> Tensors:
        self.combined.append(sorted(uploads))
        average = mean(uploads)
        return {name: 2 * value - sent[name] for name, value in average.items()}


def make_setup(method: str, **more: Any) -> RunSetup:
    config = load_config("fmnist-lenet", {**TINY, **EASY, "server.lr": 0.01, "method": method, **more})
    return RunSetup(config, load_federation(config.data, config.seed))


def one_round(setup: RunSetup) -> tuple[Packet, dict[int, Packet], dict[int, Packet]]:
    """Runs one round; returns the state after it, the requests and the replies."""
    method, server, clients = setup.config.selected_method(), setup.server(), SimulatedClients(setup)
    current = Round(1, (0, 1, 2), range(3))
    state, requests = method.server_round(current, method.initial_state(server), server)
    replies = {k: clients.run(k, request, b"").reply for k, request in requests.items()}
    return method.collect(current, state, replies, server), requests, replies


@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"server-sl"}))
def test_every_method_uploads_and_averages_through_the_aggregation(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `Halved`, an upload is half as far from the model that was sent, and the average is the same.

    FedRGD is an exception: its groups contain the server's model, so its average changes.
    """
    plain_state, requests, plain = one_round(make_setup(name))
    aggregation = Halved()
    aggregation.combined.clear()
    monkeypatch.setattr(RunSetup, "aggregation", lambda self: aggregation)
    setup = make_setup(name)
    state, _, replies = one_round(setup)
    group = setup.config.selected_method().uploads
    for k, reply in replies.items():
        for tensor, trained in plain[k].tensors[group].items():
            half = (trained + requests[k].tensors[group][tensor]) / 2
            assert torch.equal(reply.tensors[group][tensor], half)
    clients = sorted(k for combined in aggregation.combined for k in combined if k >= 0)
    assert clients == [0, 1, 2]
    if name != "fedrgd":
        for tensor, value in plain_state.tensors["average"].items():
            assert torch.allclose(state.tensors["average"][tensor], value, atol=1e-5)


def test_reply_without_a_model_is_not_changed() -> None:
    setup = make_setup("fedseal")
    method, client = setup.config.selected_method(), setup.client(0, setup.network())
    w = method.initial_state(setup.server()).tensors["model"]
    request = Packet({"model": w}, {"t": 1, "lambda": 0.5, "train": False})
    reply, memory = run_client(method, client, request, b"", images_change=False, counts=True)
    assert reply.tensors == {} and "images" in Packet.from_bytes(memory).tensors


@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"server-sl"}))
def test_no_method_needs_the_clients_counts(name: str) -> None:
    plain, _, replies = one_round(make_setup(name))
    private, _, without = one_round(make_setup(name, **{"engine.counts": False}))
    for tensor, value in plain.tensors["average"].items():
        assert torch.equal(private.tensors["average"][tensor], value)
    for k, reply in without.items():
        assert reply.counts == {} and (reply.scalars.get("counts") is False) == bool(replies[k].counts)


def test_correct_labels_are_counted() -> None:
    """The true labels of images 0 to 4 are 2, 0, 1, unknown, 3.

    Labels 0 → 2, 1 → 1, 3 → 0, 4 → 3: of the three with a known label (0, 1, 4), two are correct (0 and 4).
    Complementary labels 2 → 1 and 1 → 2: wrong for image 2, which is of class 1; correct for image 1.
    Later complementary labels are added: 3 → 1 is unknown; 0 → 0 is correct, since image 0 is of class 2.
    """
    audit, truth = LabelAudit(), np.array([2, 0, 1, -1, 3])
    audit.record("positive", torch.tensor([0, 1, 3, 4]), torch.tensor([2, 1, 0, 3]))
    audit.record("negative", torch.tensor([2, 1]), torch.tensor([1, 2]), complementary=True)
    positive = {"positive_known": 3, "positive_right": 2}
    assert audit.count_correct(truth) == positive | {"negative_known": 2, "negative_right": 1}
    audit.record("negative", torch.tensor([3, 0]), torch.tensor([1, 0]), complementary=True)
    assert audit.count_correct(truth) == positive | {"negative_known": 3, "negative_right": 2}
