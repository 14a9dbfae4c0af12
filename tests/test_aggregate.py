"""The mean of the clients' models (Eq. 2), with hand-derived numbers and in any order of arrival."""

from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedseal import aggregate, weights
from fedseal.config.sections import ModelSettings
from fedseal.models import Network, build_network


def network(seed: int) -> Network:
    """ResNet-9 with four channels and BatchNorm: convolutions in channels-last, integer buffers."""
    settings = ModelSettings(name="resnet9", norm="batch", width=4)
    return build_network(
        settings, channels=3, size=32, classes=5, mean=[100.0] * 3, std=[50.0] * 3, seed=seed
    )


def identical(a: weights.Tensors, b: weights.Tensors) -> bool:
    return list(a) == list(b) and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def test_eq_2_mean() -> None:
    """Three clients: (1 + 2 + 6) / 3 = 3, (−4 + 0 + 1) / 3 = −1 and (0.5 + 0.5 + 2) / 3 = 1."""
    models = {
        k: {"w": torch.tensor(w), "b": torch.tensor([b])}
        for k, w, b in [(0, [1.0, -4.0], 0.5), (3, [2.0, 0.0], 0.5), (7, [6.0, 1.0], 2.0)]
    }
    average = aggregate.mean(models)
    assert list(average) == ["w", "b"]
    assert average["w"].tolist() == [3.0, -1.0] and average["b"].tolist() == [1.0]


def test_mean_sums_in_double_precision() -> None:
    """(2²⁴ + 1 + 1) / 3 = 5,592,406. In float32, 2²⁴ + 1 rounds to 2²⁴, which would give 5,592,405.5."""
    models = {k: {"w": torch.tensor([value])} for k, value in enumerate([2.0**24, 1.0, 1.0])}
    assert aggregate.mean(models)["w"].tolist() == [5_592_406.0]


def test_mean_of_one_client_is_its_model() -> None:
    model = weights.get_weights(network(seed=1))
    assert identical(aggregate.mean({4: model}), model)


def test_mean_of_equal_models_is_that_model() -> None:
    """(w + w + w) / 3 in double precision rounds back to w for every float32."""
    model = weights.get_weights(network(seed=1))
    assert identical(aggregate.mean({0: model, 1: model, 2: model}), model)


def test_mean_does_not_depend_on_the_order_of_arrival() -> None:
    """The sum of these values depends on the order: (10²⁰ + 1) − 10²⁰ = 0, but (10²⁰ − 10²⁰) + 1 = 1.

    In the order of the client numbers, 10²⁰ + 1 − 10²⁰ + 3 = 3, and the mean is 3 / 4 = 0.75.
    """
    models = {k: {"w": torch.tensor([value])} for k, value in enumerate([1e20, 1.0, -1e20, 3.0])}
    for order in permutations(models):
        assert aggregate.mean({k: models[k] for k in order})["w"].tolist() == [0.75]


@given(st.integers(0, 2**32), st.permutations(range(6)))
def test_mean_gives_the_same_bits_in_any_order(seed: int, order: list[int]) -> None:
    draw = torch.Generator().manual_seed(seed)
    models = {k: {"w": torch.randn(20, generator=draw) * 10.0 ** (k - 3)} for k in range(6)}
    assert identical(aggregate.mean({k: models[k] for k in order}), aggregate.mean(models))


def test_mean_takes_the_largest_integer() -> None:
    """Counts 3, 10 and 4 give 10, not 5.67. Floats are averaged: (1 + 2 + 6) / 3 = 3."""
    models = {
        k: {"count": torch.tensor(n), "w": torch.tensor(w)}
        for k, (n, w) in enumerate([(3, 1.0), (10, 2.0), (4, 6.0)])
    }
    average = aggregate.mean(models)
    assert average["count"].dtype == torch.int64 and average["count"].shape == ()
    assert (int(average["count"]), float(average["w"])) == (10, 3.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_mean_keeps_the_dtype_and_does_not_modify_its_inputs(dtype: torch.dtype) -> None:
    models = {k: {"w": torch.tensor([k, 2.0 * k], dtype=dtype)} for k in (1, 3)}
    average = aggregate.mean(models)["w"]
    assert average.dtype == dtype and average.tolist() == [2.0, 4.0]
    average.zero_()
    assert models[1]["w"].tolist() == [1.0, 2.0] and models[3]["w"].tolist() == [3.0, 6.0]


def test_mean_of_no_models_is_an_error() -> None:
    with pytest.raises(ValueError, match="no model"):
        aggregate.mean({})
