"""Differential privacy: clipping, noise, and ε compared with another library."""

import math

import numpy as np
import pytest
import torch
from opacus.accountants import PRVAccountant
from scipy import integrate, stats

from fedseal import privacy
from fedseal.privacy import CentralPrivacy, LocalPrivacy, gaussian, needed_noise, spent_epsilon
from fedseal.weights import Tensors


def norm(update: Tensors) -> float:
    return float(torch.cat([value.flatten() for value in update.values()]).norm())


def test_update_is_clipped_over_all_of_its_tensors() -> None:
    """√(3² + 4²) = 5, so a limit of 2.5 halves the update, and a limit of 5 leaves it alone."""
    update = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}
    half = privacy.clipped(update, 2.5)
    assert half["a"].tolist() == [1.5, 0.0] and half["b"].tolist() == [[2.0]]
    assert privacy.clipped(update, 5.0)["b"].item() == 4.0
    zero = {"a": torch.zeros(2)}
    assert privacy.clipped(zero, 1.0)["a"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_update_without_a_length_becomes_zero(value: float) -> None:
    """Its other weights would otherwise leave the client at full length."""
    found = privacy.clipped({"a": torch.tensor([value, 3.0]), "b": torch.tensor([1e6])}, 1.0)
    assert found["a"].tolist() == [0.0, 0.0] and found["b"].tolist() == [0.0]


def test_constants_and_integer_buffers_are_not_part_of_an_update() -> None:
    sent = {
        "mean": torch.tensor([5.0]),
        "std": torch.tensor([2.0]),
        "w": torch.tensor([1.0, 2.0]),
        "bn.running_var": torch.tensor([1.0, 0.5]),
        "bn.num_batches_tracked": torch.tensor(3),
    }
    trained = sent | {"w": torch.tensor([1.5, 2.0]), "bn.num_batches_tracked": torch.tensor(9)}
    update = privacy.update_of(trained, sent)
    assert {name: value.tolist() for name, value in update.items()} == {
        "w": [0.5, 0.0],
        "bn.running_var": [0.0, 0.0],
    }
    moved = privacy.add_update(sent, {"w": torch.ones(2), "bn.running_var": torch.tensor([-2.0, 1.0])})
    assert moved["w"].tolist() == [2.0, 3.0] and moved["w"].dtype == torch.float32
    assert moved["bn.running_var"].tolist() == [0.0, 1.5]  # a variance is never negative
    assert moved["mean"].item() == 5.0 and moved["bn.num_batches_tracked"].item() == 3


def test_central_mean_is_over_all_clients_that_were_asked() -> None:
    """Clients 0 and 2 reply. Their updates are (3, 4), clipped to (0.6, 0.8), and (0, −0.5).

    The sum is (0.6, 0.3). Three clients were asked, so the mean is (0.2, 0.1), and all of them seem to have
    sent (1.2, 1.1).
    """
    sent = {k: {"w": torch.ones(2)} for k in range(3)}
    received = {0: {"w": torch.tensor([4.0, 5.0])}, 2: {"w": torch.tensor([1.0, 0.5])}}
    shown = CentralPrivacy(clip=1.0, noise=0.0).release(received, sent)
    assert list(shown) == [0, 1, 2]
    for model in shown.values():
        torch.testing.assert_close(model["w"], torch.tensor([1.2, 1.1]))


def test_a_client_moves_the_sum_by_at_most_the_clip() -> None:
    """With client 3 and without it, for updates from far below to far above the clip."""
    generator = torch.Generator().manual_seed(0)
    mechanism, sent = CentralPrivacy(clip=0.7, noise=0.0), {k: {"w": torch.zeros(50)} for k in range(4)}
    for size in (0.01, 0.1, 1.0, 100.0):
        received = {k: {"w": size * torch.randn(50, generator=generator)} for k in range(4)}
        with_it = mechanism.release(received, sent)[0]["w"]
        without = mechanism.release({k: received[k] for k in range(3)}, sent)[0]["w"]
        assert float((4 * (with_it - without)).norm()) <= 0.7 * (1 + 1e-5)


def test_noise_of_both_modes() -> None:
    """On a sum of 5 updates, σ·C = 2 · 0.5; on the mean 1/5 of that. A local upload has all of it."""
    model = {"w": torch.zeros(200_000)}
    central = CentralPrivacy(clip=0.5, noise=2.0).release({}, dict.fromkeys(range(5), model))[0]["w"]
    local = LocalPrivacy(clip=0.5, noise=2.0).upload(model, model)["w"]
    # the standard deviation of an estimate from n numbers is σ/√(2n), here 0.16 % of σ
    assert float(central.std()) == pytest.approx(0.2, rel=0.01)
    assert float(local.std()) == pytest.approx(1.0, rel=0.01)
    assert abs(float(local.mean())) < 0.02


def test_noise_is_gaussian() -> None:
    """A Kolmogorov–Smirnov distance above 1.95/√n has a probability of 0.1 %; 3/√n one of 3e-8."""
    n = 400_000
    values = gaussian(torch.Size([4, n // 4])).flatten().numpy()
    assert stats.kstest(values, "norm").statistic < 3 / math.sqrt(n)
    assert np.isfinite(values).all() and float(np.abs(values).max()) > 3.5


def test_noise_does_not_depend_on_a_seed() -> None:
    draws = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        draws.append(gaussian(torch.Size([10])))
    assert not torch.equal(*draws)


def test_nothing_is_added_without_noise() -> None:
    model, trained = {"w": torch.zeros(3)}, {"w": torch.tensor([0.0, 3.0, 4.0])}
    torch.testing.assert_close(LocalPrivacy(clip=5.0, noise=0.0).upload(trained, model)["w"], trained["w"])


CASES = [(1.0, 1, 1e-5), (2.0, 10, 1e-5), (6.0, 150, 1e-6), (20.0, 100, 1e-5), (0.7, 3, 1e-3)]


@pytest.mark.parametrize(("noise", "uploads", "delta"), CASES)
def test_epsilon_agrees_with_another_accountant(noise: float, uploads: int, delta: float) -> None:
    """Opacus composes numerically; both differ by less than 1 %."""
    other = PRVAccountant()
    other.history = [(noise, 1.0, uploads)]
    expected = other.get_epsilon(delta, eps_error=0.001)
    assert spent_epsilon(noise, uploads, delta) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("sigma", "delta"), [(1.0, 0.1), (2.0, 1e-3), (1.0, 1e-5), (0.2, 1e-5)])
def test_delta_is_the_area_between_two_bell_curves(sigma: float, delta: float) -> None:
    """δ = ∫ max(p(x) − e^ε q(x), 0) dx for p = N(1, σ²), the sum with a client, and q = N(0, σ²)."""
    epsilon = spent_epsilon(sigma, 1, delta)
    start = sigma**2 * epsilon + 0.5  # where p = e^ε q
    p, q = stats.norm(1, sigma), stats.norm(0, sigma)
    area, _ = integrate.quad(lambda x: p.pdf(x) - math.exp(epsilon) * q.pdf(x), start, start + 12 * sigma)
    assert area == pytest.approx(delta, rel=1e-4)


def test_epsilon_at_its_limits() -> None:
    assert spent_epsilon(1.0, 1, 1e-5) == pytest.approx(4.377, abs=1e-3)
    assert spent_epsilon(1.0, 0, 1e-5) == 0.0
    assert spent_epsilon(1e6, 1, 1e-5) == 0.0  # δ alone covers it
    assert spent_epsilon(0.0, 1, 1e-5) == math.inf
    assert math.isfinite(spent_epsilon(0.001, 10**9, 1e-5))


def test_four_uploads_need_twice_the_noise() -> None:
    assert spent_epsilon(2.0, 4, 1e-5) == pytest.approx(spent_epsilon(1.0, 1, 1e-5))
    assert needed_noise(3.0, 4, 1e-5) == pytest.approx(2 * needed_noise(3.0, 1, 1e-5))


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 10.0, 1000.0])
def test_needed_noise_spends_just_the_budget(epsilon: float) -> None:
    noise = needed_noise(epsilon, 7, 1e-5)
    assert spent_epsilon(noise, 7, 1e-5) == pytest.approx(epsilon, rel=1e-6)
    assert spent_epsilon(0.99 * noise, 7, 1e-5) > epsilon
