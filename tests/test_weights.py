"""Averages derived by hand, and that nothing but the numbers of the clients decides them."""

from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedseal import weights
from fedseal.models import ModelSettings, Network, build


def network(seed: int) -> Network:
    """ResNet-9 with four channels and BatchNorm: convolutions in channels-last, integer buffers."""
    settings = ModelSettings(name="resnet9", norm="batch", width=4)
    return build(settings, channels=3, size=32, classes=5, mean=[100.0] * 3, std=[50.0] * 3, seed=seed)


def identical(a: weights.Tensors, b: weights.Tensors) -> bool:
    return list(a) == list(b) and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


# ------------------------------------------------------------------ average


def test_eq_2_average() -> None:
    """Three clients: (1 + 2 + 6) / 3 = 3 and (−4 + 0 + 1) / 3 = −1; each counts the same."""
    models = {
        k: {"w": torch.tensor(w), "b": torch.tensor([b])}
        for k, w, b in [(0, [1.0, -4.0], 0.5), (3, [2.0, 0.0], 0.5), (7, [6.0, 1.0], 2.0)]
    }
    average = weights.average(models)
    assert list(average) == ["w", "b"]
    assert average["w"].tolist() == [3.0, -1.0] and average["b"].tolist() == [1.0]


def test_average_sums_in_double_precision() -> None:
    """2²⁴ + 1 + 1 = 16,777,218, a third of it 5,592,406; in float32 2²⁴ + 1 is 2²⁴ again: 5,592,405.5."""
    models = {k: {"w": torch.tensor([value])} for k, value in enumerate([2.0**24, 1.0, 1.0])}
    assert weights.average(models)["w"].tolist() == [5_592_406.0]


def test_average_of_one_client_is_its_model() -> None:
    model = weights.save(network(seed=1))
    assert identical(weights.average({4: model}), model)


def test_average_of_equal_models_is_that_model() -> None:
    """(w + w + w) / 3 in double precision rounds back to w for every float32."""
    model = weights.save(network(seed=1))
    assert identical(weights.average({0: model, 1: model, 2: model}), model)


def test_average_does_not_depend_on_the_order_of_arrival() -> None:
    """Values for which a sum depends on the order: (10²⁰ + 1) − 10²⁰ = 0, (10²⁰ − 10²⁰) + 1 = 1.

    By client number: 10²⁰, 1, −10²⁰, 3 sums to 3, a quarter is 0.75, whoever came first.
    """
    models = {k: {"w": torch.tensor([value])} for k, value in enumerate([1e20, 1.0, -1e20, 3.0])}
    for order in permutations(models):
        assert weights.average({k: models[k] for k in order})["w"].tolist() == [0.75]


@settings(deadline=None)
@given(st.integers(0, 2**32), st.permutations(range(6)))
def test_average_gives_the_same_bits_in_any_order(seed: int, order: list[int]) -> None:
    draw = torch.Generator().manual_seed(seed)
    models = {k: {"w": torch.randn(20, generator=draw) * 10.0 ** (k - 3)} for k in range(6)}
    assert identical(weights.average({k: models[k] for k in order}), weights.average(models))


def test_average_leaves_integers_integers() -> None:
    """Counts 3, 10 and 4 become 10, the largest, not 5.67; the float beside them is a mean."""
    models = {
        k: {"count": torch.tensor(n), "w": torch.tensor(w)}
        for k, (n, w) in enumerate([(3, 1.0), (10, 2.0), (4, 6.0)])
    }
    average = weights.average(models)
    assert average["count"].dtype == torch.int64 and average["count"].shape == ()
    assert (int(average["count"]), float(average["w"])) == (10, 3.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_average_keeps_the_type_and_its_inputs(dtype: torch.dtype) -> None:
    models = {k: {"w": torch.tensor([k, 2.0 * k], dtype=dtype)} for k in (1, 3)}
    average = weights.average(models)["w"]
    assert average.dtype == dtype and average.tolist() == [2.0, 4.0]
    average.zero_()
    assert models[1]["w"].tolist() == [1.0, 2.0] and models[3]["w"].tolist() == [3.0, 6.0]


def test_average_of_nobody_is_an_error() -> None:
    with pytest.raises(ValueError, match="no model"):
        weights.average({})


# ------------------------------------------------------------------ checks


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_finite(bad: float) -> None:
    good: dict[str, Tensor] = {"w": torch.tensor([1.0, 3e38]), "n": torch.tensor([7]), "none": torch.zeros(0)}
    assert weights.finite(good)
    assert not weights.finite(good | {"b": torch.tensor([[0.0, bad]])})


def test_same_layout() -> None:
    like = {"w": torch.zeros(2, 3), "n": torch.tensor(1)}
    assert weights.same_layout({"n": torch.tensor(5), "w": torch.ones(2, 3)}, like)
    assert not weights.same_layout({"w": torch.zeros(2, 3)}, like)  # a name is missing
    assert not weights.same_layout(like | {"more": torch.zeros(1)}, like)
    assert not weights.same_layout(like | {"w": torch.zeros(3, 2)}, like)
    assert not weights.same_layout(like | {"w": torch.zeros(2, 3, dtype=torch.float64)}, like)
    assert not weights.same_layout(like | {"n": torch.tensor([1])}, like)


# ------------------------------------------------------------------ load, save


def test_save_is_a_plain_copy() -> None:
    model = network(seed=1)
    convolution = model.get_parameter("body.conv2.0.weight")
    assert not convolution.is_contiguous()  # channels-last
    saved = weights.save(model)
    assert all(value.is_contiguous() and not value.requires_grad for value in saved.values())
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())
    before = {name: value.clone() for name, value in saved.items()}
    with torch.no_grad():
        for parameter in model.parameters():  # in channels-last or not: none is shared
            parameter.add_(1)
    assert identical(saved, before)


def test_load_and_save_give_the_same_bits() -> None:
    """One model takes another's weights in place: parameters stay where and how they were."""
    first, second = network(seed=1), network(seed=2)
    with torch.no_grad():  # buffers with other values than a fresh network has
        first.train()(torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 255)
    saved = weights.save(first)
    assert not identical(weights.save(second), saved)

    places = [p.data_ptr() for p in second.parameters()]
    weights.load(second, saved)
    assert identical(weights.save(second), saved)
    assert [p.data_ptr() for p in second.parameters()] == places
    convolution = second.get_parameter("body.conv2.0.weight")
    assert convolution.is_contiguous(memory_format=torch.channels_last) and not convolution.is_contiguous()
    assert int(saved["body.conv1.1.num_batches_tracked"]) == 1

    images = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(first.eval()(images), second.eval()(images))


def test_load_copies() -> None:
    """Training the model afterwards does not reach the weights it was given."""
    model = network(seed=1)
    given_weights = weights.save(network(seed=2))
    before = {name: value.clone() for name, value in given_weights.items()}
    weights.load(model, given_weights)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert identical(given_weights, before)


def test_load_refuses_other_names() -> None:
    model = network(seed=1)
    saved = weights.save(model)
    with pytest.raises(RuntimeError, match="Missing key"):
        weights.load(model, {name: value for name, value in saved.items() if "fc" not in name})
