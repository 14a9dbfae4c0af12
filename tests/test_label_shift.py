"""The mathematics of label shift: hand-derived numbers, properties, and an independent implementation."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from fedseal import label_shift
from fedseal.label_shift import (
    Calibration,
    adjusted_loss,
    calibrate,
    estimate_mix,
    most_likely_mix,
    posterior,
    sharpened,
)

EVEN = torch.tensor([0.5, 0.5], dtype=torch.float64)


def doubles(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def calibration(images: int, classes: int = 2) -> Calibration:
    zeros = torch.zeros(classes, dtype=torch.float64)
    return Calibration(1.0, zeros, torch.full((classes,), 1 / classes, dtype=torch.float64), images)


def draw(n: int, mix: list[float], seed: int, separation: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of normally distributed classes: the true log-likelihood ratios as logits, and labels."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.tensor(mix, dtype=torch.float64)
    labels = torch.multinomial(weights, n, replacement=True, generator=generator)
    centres = separation * torch.eye(len(mix), dtype=torch.float64)
    x = centres[labels] + torch.randn(n, len(mix), dtype=torch.float64, generator=generator)
    return separation * x, labels  # log N(x; centre_c) = separation · x_c + a constant


# ------------------------------------------------------------------ posterior


def test_posterior_by_hand() -> None:
    """Odds 4 : 1 where classes are equal become 4·0.2 : 1·0.8 = 1 : 1."""
    assert posterior(doubles([0.8, 0.2]), EVEN, torch.tensor([0.2, 0.8])).tolist()[0] == pytest.approx(
        [0.5, 0.5]
    )
    # From a mix of 3 : 1 to 1 : 1, odds of 3 : 1 become 1 : 1.
    old = torch.tensor([0.75, 0.25], dtype=torch.float64)
    assert posterior(doubles([0.75, 0.25]), old, EVEN).tolist()[0] == pytest.approx([0.5, 0.5])


def test_posterior_without_shift_changes_nothing_and_goes_back() -> None:
    probs = torch.rand(50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).softmax(1)
    old, new = doubles([0.1, 0.2, 0.3, 0.4])[0], doubles([0.7, 0.1, 0.1, 0.1])[0]
    torch.testing.assert_close(posterior(probs, old, old), probs)
    torch.testing.assert_close(posterior(posterior(probs, old, new), new, old), probs)


def test_sharpened_by_hand() -> None:
    """0.8² : 0.2² = 16 : 1."""
    probs = doubles([0.8, 0.2])
    assert sharpened(probs, 0.5).tolist()[0] == pytest.approx([16 / 17, 1 / 17])
    assert sharpened(probs, 0.0).tolist() == [[1, 0]]
    torch.testing.assert_close(sharpened(probs, 1.0), probs)
    assert sharpened(doubles([1, 0]), 0.5).tolist() == [[1, 0]]  # a confidence of zero stays zero


# ------------------------------------------------------------------ class mix


def test_em_by_hand() -> None:
    """With certain predictions EM counts: 3 and 1 of 4 images, with a tenth of an image more per class."""
    probs = doubles([1, 0], [1, 0], [1, 0], [0, 1])
    assert most_likely_mix(probs, EVEN).tolist() == pytest.approx([3.1 / 4.2, 1.1 / 4.2], abs=1e-6)


def test_em_finds_the_maximum_of_the_likelihood() -> None:
    """Against scipy: the mixture's log-likelihood with a Dirichlet(1 + 0.1) prior."""
    logits, _ = draw(400, [0.6, 0.3, 0.1], seed=1, separation=1.0)
    probs, old = logits.softmax(1), torch.full((3,), 1 / 3, dtype=torch.float64)

    def objective(scores: list[float]) -> float:
        mix = torch.tensor(scores, dtype=torch.float64).softmax(0)
        gain = (probs * mix / old).sum(1).log().sum() + label_shift.PSEUDO_COUNT * mix.log().sum()
        return -float(gain)

    found = torch.tensor(minimize(objective, [0.0, 0.0, 0.0], tol=1e-10).x).softmax(0)
    torch.testing.assert_close(most_likely_mix(probs, old), found, atol=1e-3, rtol=0)


def test_em_respects_the_servers_mix() -> None:
    """A model trained where classes are 9 : 1, and images that have the same mix: nothing has shifted."""
    logits, _ = draw(4000, [0.9, 0.1], seed=2)
    old = torch.tensor([0.9, 0.1], dtype=torch.float64)
    probs = (logits + old.log()).softmax(1)
    torch.testing.assert_close(most_likely_mix(probs, old), old, atol=0.02, rtol=0)


def test_shrinkage_by_hand() -> None:
    """Four certain images 3 : 1. Mix q = (31, 11) / 42, gain = 3 log 2q₀ + log 2q₁ = 0.5214.

    With 4 validation images, chance = 1/2 · (1 + 4/4) = 1 is more than that: the server's mix stays. With 40,
    chance = 0.55 still is. With 10⁹, chance = 0.5, and the trust in q is 1 − 0.5 / 0.5214 = 0.0410.
    """
    probs = doubles([1, 0], [1, 0], [1, 0], [0, 1])
    gain = 3 * math.log(62 / 42) + math.log(22 / 42)
    assert gain == pytest.approx(0.5217, abs=1e-3)
    for images in (4, 40):
        assert estimate_mix(probs, calibration(images)).tolist() == [0.5, 0.5]
    trust = 1 - 0.5 / gain
    expected = trust * 31 / 42 + (1 - trust) / 2
    assert float(estimate_mix(probs, calibration(10**9))[0]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("n", [20, 50, 200, 1000])
def test_clients_without_shift_keep_the_servers_mix(n: int) -> None:
    """Noise is not taken for a shift: the distance to the even mix is far below that of EM."""
    even, plain, shrunk = torch.full((5,), 0.2, dtype=torch.float64), [], []
    for seed in range(20):
        logits, _ = draw(n, [0.2] * 5, seed, separation=1.5)
        probs = logits.softmax(1)
        plain.append(float((most_likely_mix(probs, even) - even).abs().sum()))
        shrunk.append(float((estimate_mix(probs, calibration(200, 5)) - even).abs().sum()))
    assert sum(shrunk) < 0.35 * sum(plain)


@pytest.mark.parametrize("n", [20, 50, 200, 1000])
def test_skewed_clients_gain(n: int) -> None:
    """Two classes are missing. The adapted predictions of new images are better, with few images, too."""
    mix = [0.7, 0.2, 0.1, 0.0, 0.0]
    before = after = 0.0
    for seed in range(10):
        seen, _ = draw(n, mix, seed, separation=1.5)
        new, labels = draw(500, mix, 100 + seed, separation=1.5)
        client = estimate_mix(seen.softmax(1), calibration(200, 5))
        assert float(client.min()) > 0  # a class that was not seen stays possible
        adapted = posterior(new.softmax(1), calibration(200, 5).mix, client)
        before += float((new.argmax(1) == labels).double().mean()) / 10
        after += float((adapted.argmax(1) == labels).double().mean()) / 10
    assert after > before + 0.05


def test_no_images_means_no_estimate() -> None:
    none = torch.zeros(0, 2, dtype=torch.float64)
    assert estimate_mix(none, calibration(200)).tolist() == [0.5, 0.5]
    assert estimate_mix(doubles([1, 0]), calibration(0)).tolist() == [0.5, 0.5]


@given(st.integers(0, 10_000), st.integers(1, 60), st.integers(2, 6), st.integers(1, 500))
@settings(max_examples=50)
def test_a_mix_is_a_distribution_in_which_order_does_not_matter(
    seed: int, n: int, classes: int, images: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    probs = (4 * torch.randn(n, classes, dtype=torch.float64, generator=generator)).softmax(1)
    mix = estimate_mix(probs, calibration(images, classes))
    assert float(mix.sum()) == pytest.approx(1)
    assert float(mix.min()) > 0
    order, other = torch.randperm(n, generator=generator), torch.randperm(classes, generator=generator)
    torch.testing.assert_close(estimate_mix(probs[order], calibration(images, classes)), mix)
    torch.testing.assert_close(estimate_mix(probs[:, other], calibration(images, classes)), mix[other])


# ------------------------------------------------------------------ calibration


def test_temperature_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits (3, 0), and three of four images have the first class: confidence 3/4 means logits (log 3, 0).

    So T = 3 / log 3, without a bias and without priors.
    """
    monkeypatch.setattr(label_shift, "SHARPNESS", (1.0, 1e6))
    logits = torch.tensor([[3.0, 0.0]] * 4 + [[0.0, 3.0]] * 4)
    found = calibrate(logits, torch.tensor([0, 0, 0, 1, 1, 1, 1, 0]), deviation=1e-6)
    assert found.temperature == pytest.approx(3 / math.log(3), rel=1e-6)
    assert found.mix.tolist() == [0.5, 0.5]


def test_bias_by_hand() -> None:
    """Logits that say nothing, and classes 3 : 1: the biases differ by log 3."""
    found = calibrate(torch.zeros(4, 2), torch.tensor([0, 0, 0, 1]), deviation=1e3)
    assert float(found.bias[0] - found.bias[1]) == pytest.approx(math.log(3), rel=1e-4)
    assert found.mix.tolist() == pytest.approx([4 / 6, 2 / 6])  # one image more per class


def test_calibration_finds_the_minimum_that_scipy_finds() -> None:
    logits, labels = draw(200, [0.4, 0.3, 0.2, 0.1], seed=3, separation=1.5)
    logits = 2.5 * logits + torch.tensor([0.0, 0.5, 0.0, -0.5], dtype=torch.float64)

    def objective(values: list[float]) -> float:
        scores = logits * values[0] + torch.tensor(values[1:])
        likelihood = torch.nn.functional.cross_entropy(scores, labels, reduction="sum")
        return float(likelihood) + (values[0] - 1) ** 2 / 200 + sum(v**2 for v in values[1:]) / 2 / 0.3**2

    wanted = minimize(
        objective, [1.0, 0, 0, 0, 0], method="L-BFGS-B", options={"ftol": 1e-14, "gtol": 1e-9}
    ).x
    found = calibrate(logits, labels)
    assert [1 / found.temperature, *found.bias.tolist()] == pytest.approx(wanted.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    ("logits", "lowest", "highest"),
    [
        (torch.eye(3).repeat(20, 1), 0.05, 1.0),  # always right: sharper, but finite
        (-torch.eye(3).repeat(20, 1), 20.0, 20.0),  # always wrong: as unsure as it can be
        (torch.zeros(60, 3), 1.0, 1.0),  # says nothing: as it was
        (1e4 * torch.eye(3).repeat(20, 1), 0.05, 1.0001),
    ],
)
def test_extreme_temperatures_are_finite(logits: torch.Tensor, lowest: float, highest: float) -> None:
    found = calibrate(logits, torch.arange(3).repeat(20))
    assert lowest <= found.temperature <= highest
    assert bool(found.probs(logits).isfinite().all())


def test_logits_that_are_not_numbers_are_left_out() -> None:
    logits, labels = draw(50, [0.5, 0.5], seed=4)
    broken = torch.cat([logits, doubles([math.nan, 0], [math.inf, 0])])
    found = calibrate(broken, torch.cat([labels, torch.tensor([0, 1])]))
    assert (found.temperature, found.images) == (calibrate(logits, labels).temperature, 50)


def test_without_validation_images_nothing_is_calibrated() -> None:
    found = calibrate(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
    assert (found.temperature, found.bias.tolist(), found.images) == (1.0, [0, 0, 0], 0)


# ------------------------------------------------------------------ loss


def test_adjusted_loss_by_hand() -> None:
    """Logits (0, 0) at a client with a mix of 3 : 1 are confidences of 3/4 and 1/4."""
    even, mix = torch.tensor([0.5, 0.5]), torch.tensor([0.75, 0.25])
    logits = torch.zeros(2, 2)
    assert float(adjusted_loss(logits, torch.tensor([0, 0]), even, mix)) == pytest.approx(-math.log(0.75))
    assert float(adjusted_loss(logits, torch.tensor([1, 1]), even, mix)) == pytest.approx(-math.log(0.25))
    soft = torch.tensor([[0.75, 0.25]] * 2)
    entropy = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    assert float(adjusted_loss(logits, soft, even, mix)) == pytest.approx(entropy)
    assert float(adjusted_loss(logits, soft, even, mix, 0.0)) == pytest.approx(math.log(2))


def test_adjusted_loss_does_not_teach_how_frequent_classes_are() -> None:
    """Where images say nothing and labels are 3 : 1 as the mix is, the gradient is zero."""
    logits = torch.zeros(4, 2, requires_grad=True)
    adjusted_loss(logits, torch.tensor([0, 0, 0, 1]), EVEN, torch.tensor([0.75, 0.25])).backward()
    assert logits.grad is not None
    assert logits.grad.sum(dim=0).tolist() == pytest.approx([0, 0], abs=1e-7)
