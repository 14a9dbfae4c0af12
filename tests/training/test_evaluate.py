"""Accuracies of a model, plain and with each client's class mix."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fedseal import weights
from fedseal.config.load import load_config
from fedseal.data.federation import load_federation
from fedseal.data.pool import Ints
from fedseal.label_shift import calibrate, estimate_mix
from fedseal.run_setup import RunSetup
from fedseal.training.evaluate import MIX_IMAGES, Evaluator, mix_rows

SMALL = {"data.labels": 100, "data.validation": 100, "data.clients": 3, "data.images_per_client": 600}


def setup_of(**changes: object) -> RunSetup:
    config = load_config("fmnist-lenet", {**SMALL, **changes})
    return RunSetup(config, load_federation(config.data, config.seed))


def logits(setup: RunSetup, rows: Ints) -> Tensor:
    """What the initial network says of some images of the pool."""
    model = setup.network().eval()
    with torch.no_grad():
        return model(setup.images(rows).pixels)


def test_client_accuracy_uses_each_clients_own_mix() -> None:
    """Against the same written down once more, with the odds of every image by hand."""
    setup = setup_of(**{"data.test_per_client": 50})
    federation = setup.federation
    measured = Evaluator(setup, setup.server()).measure(weights.get_weights(setup.network()))

    validation = logits(setup, federation.validation)
    calibration = calibrate(validation, torch.from_numpy(federation.pool.labels[federation.validation]))
    right = 0
    for rows, test in zip(federation.clients, federation.client_tests, strict=True):
        seen = logits(setup, rows[:MIX_IMAGES])
        mix = estimate_mix(calibration.probs(seen), calibration)
        odds = logits(setup, test).double() / calibration.temperature + calibration.bias
        guesses = (odds + mix.log() - calibration.mix.log()).argmax(dim=1).numpy()
        right += int((guesses == federation.pool.labels[test]).sum())
    assert measured["client_accuracy"] == pytest.approx(right / 150)
    assert len(np.concatenate(federation.client_tests)) == 150


def test_mixes_of_your_own_images_do_not_depend_on_their_order() -> None:
    """Files may be sorted by class, so the images are drawn from all of a client's."""
    setup = setup_of()
    data = setup.config.data.model_copy(update={"source": "parquet"})
    own = replace(setup, config=setup.config.model_copy(update={"data": data}))
    rows = setup.federation.clients[1]
    drawn = mix_rows(own, 1, 100)
    assert len(set(drawn)) == 100 and set(drawn) <= set(rows) and np.array_equal(drawn, mix_rows(own, 1, 100))
    assert 30 < (drawn > np.median(rows)).sum() < 70
    assert np.array_equal(mix_rows(own, 1, 1000), rows)
    assert np.array_equal(mix_rows(setup, 1, 100), rows[:100])


def test_client_tests_are_the_test_images_in_the_clients_mix() -> None:
    federation = setup_of(**{"data.test_per_client": 100, "data.alpha": 0.1}).federation
    assert np.array_equal(np.concatenate(federation.client_tests), federation.tests["test"])
    for rows, test in zip(federation.clients, federation.client_tests, strict=True):
        shares = [np.bincount(federation.pool.labels[r], minlength=10) / len(r) for r in (rows, test)]
        assert np.abs(shares[0] - shares[1]).max() < 0.02


def test_without_test_images_of_clients_there_is_no_client_accuracy() -> None:
    setup = setup_of(**{"data.test_per_client": 0, "data.held_out_test": 50})
    measured = Evaluator(setup, setup.server()).measure(weights.get_weights(setup.network()), "average")
    assert set(measured) == {"average_test_accuracy", "average_validation_accuracy"}
