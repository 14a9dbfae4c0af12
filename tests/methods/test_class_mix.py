"""The option `mix` of methods with pseudo-labels: what travels, and by what a client labels."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from conftest import TINY
from fedseal import weights
from fedseal.config.load import load_config
from fedseal.core import Packet, Round
from fedseal.data.federation import load_federation
from fedseal.engines.client import SimulatedClients
from fedseal.label_shift import Calibration, estimate_mix, posterior
from fedseal.learn import predict_logits
from fedseal.methods.class_mix import find_adapter
from fedseal.run_setup import RunSetup

METHODS = ("fedavg-fixmatch", "fedavg-uda", "fedrgd", "semifl", "fedseal")
BOOTSTRAP = {"bootstrap.epochs": 30, "bootstrap.lr": 0.02}


def make_setup(method: str, **more: Any) -> RunSetup:
    config = load_config("fmnist-lenet", {**TINY, **BOOTSTRAP, "method": method, **more})
    return RunSetup(config, load_federation(config.data, config.seed))


def requests_of(setup: RunSetup) -> Mapping[int, Packet]:
    """The requests of round 1, of which clients 0 and 2 are sampled."""
    server, method = setup.server(), setup.config.selected_method()
    state = list(method.prepare(method.initial_state(server), server))[-1].state
    return method.server_round(Round(1, (0, 2), range(3)), state, server)[1]


@pytest.mark.parametrize("method", METHODS)
def test_the_calibration_travels_and_the_mix_stays(method: str) -> None:
    """Replies have the same groups and numbers with and without the mix."""
    plain, mixed = (make_setup(method, **{f"{method}.mix": mix}) for mix in (False, True))
    before, after = requests_of(plain)[0], requests_of(mixed)[0]
    assert set(after.tensors) == set(before.tensors) | {"calibration"}
    replies = [SimulatedClients(s).run(0, r, b"").reply for s, r in ((plain, before), (mixed, after))]
    assert set(replies[0].tensors) == set(replies[1].tensors)
    assert set(replies[0].scalars) == set(replies[1].scalars)


def test_adapted_logits_have_the_posterior_as_softmax() -> None:
    setup = make_setup("semifl", **{"semifl.mix": True})
    request, client = requests_of(setup)[0], setup.client(0, setup.network())
    calibration = Calibration.from_tensors(request.tensors["calibration"])
    logits = predict_logits(client, request.tensors["model"], client.data)
    probs = calibration.probs(logits)
    mix = estimate_mix(probs, calibration)
    assert float((mix - calibration.mix).abs().max()) > 0.05  # this client's mix is another one
    adapted = find_adapter(request, client)(logits).softmax(dim=1)
    torch.testing.assert_close(adapted, posterior(probs, calibration.mix, mix).float())
    assert torch.equal(find_adapter(Packet({"model": request.tensors["model"]}), client)(logits), logits)


@pytest.mark.parametrize("method", ("semifl", "fedseal"))
def test_a_client_labels_by_the_posterior(method: str) -> None:
    """With a threshold of 0 every image is labelled."""
    everything = {
        "semifl": {"semifl.threshold": 0.0},
        "fedseal": {"fedseal.threshold": "fixed", "fedseal.tau": 0.0},
    }
    setup = make_setup(method, **{f"{method}.mix": True}, **everything[method])
    request, given = requests_of(setup)[0], dict[str, torch.Tensor]()

    def record(name: str, rows: torch.Tensor, labels: torch.Tensor, *, complementary: bool = False) -> None:
        given[name] = labels

    client = setup.client(0, setup.network(), record)
    setup.config.selected_method().client_round(request, Packet(), client)
    logits = predict_logits(client, request.tensors["model"], client.data)
    adapted, plain = find_adapter(request, client)(logits).argmax(dim=1), logits.argmax(dim=1)
    labels = given["confident" if method == "semifl" else "positive"]
    assert torch.equal(labels, adapted)
    assert not torch.equal(labels, plain)


def test_weak_views_are_adapted() -> None:
    """FixMatch with a threshold of 0: another class mix gives other labels, and so other weights."""
    setup = make_setup("fedavg-fixmatch", **{"fedavg-fixmatch.mix": True, "fedavg-fixmatch.threshold": 0.0})
    request, method = requests_of(setup)[0], setup.config.selected_method()
    client = setup.client(0, setup.network())
    plain = Packet({"model": request.tensors["model"]}, request.scalars)
    adapted, same = (method.client_round(r, Packet(), client)[0].tensors["model"] for r in (request, plain))
    assert weights.get_weights(client.model).keys() == adapted.keys()
    assert not torch.equal(adapted["body.fc3.bias"], same["body.fc3.bias"])
