"""Weights copied out of and into models, and checks of their values and layout."""

import pytest
import torch
from torch import Tensor

from fedseal import weights
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


# ------------------------------------------------------------------ checks


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_all_finite(bad: float) -> None:
    good: dict[str, Tensor] = {"w": torch.tensor([1.0, 3e38]), "n": torch.tensor([7]), "none": torch.zeros(0)}
    assert weights.all_finite(good)
    assert not weights.all_finite(good | {"b": torch.tensor([[0.0, bad]])})
    narrow = torch.tensor([0.0, bad]).to(torch.float8_e5m2)
    assert weights.all_finite({"w": narrow[:1]}) and not weights.all_finite({"w": narrow})


def test_same_layout() -> None:
    like = {"w": torch.zeros(2, 3), "n": torch.tensor(1)}
    assert weights.same_layout({"n": torch.tensor(5), "w": torch.ones(2, 3)}, like)
    assert not weights.same_layout({"w": torch.zeros(2, 3)}, like)  # a name is missing
    assert not weights.same_layout(like | {"more": torch.zeros(1)}, like)
    assert not weights.same_layout(like | {"w": torch.zeros(3, 2)}, like)
    assert not weights.same_layout(like | {"w": torch.zeros(2, 3, dtype=torch.float64)}, like)
    assert not weights.same_layout(like | {"n": torch.tensor([1])}, like)


# ------------------------------------------------------------------ get_weights, set_weights


def test_get_weights_returns_a_contiguous_copy() -> None:
    model = network(seed=1)
    convolution = model.get_parameter("body.conv2.0.weight")
    assert not convolution.is_contiguous()  # channels-last
    saved = weights.get_weights(model)
    assert all(value.is_contiguous() and not value.requires_grad for value in saved.values())
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())
    before = {name: value.clone() for name, value in saved.items()}
    with torch.no_grad():
        for parameter in model.parameters():  # no parameter shares memory with the copy
            parameter.add_(1)
    assert identical(saved, before)


def test_set_weights_restores_the_same_bits_in_place() -> None:
    """The parameters keep their addresses and their memory format."""
    first, second = network(seed=1), network(seed=2)
    with torch.no_grad():  # changes the buffers of the new network
        first.train()(torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 255)
    saved = weights.get_weights(first)
    assert not identical(weights.get_weights(second), saved)

    addresses = [p.data_ptr() for p in second.parameters()]
    weights.set_weights(second, saved)
    assert identical(weights.get_weights(second), saved)
    assert [p.data_ptr() for p in second.parameters()] == addresses
    convolution = second.get_parameter("body.conv2.0.weight")
    assert convolution.is_contiguous(memory_format=torch.channels_last) and not convolution.is_contiguous()
    assert int(saved["body.conv1.1.num_batches_tracked"]) == 1

    images = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(first.eval()(images), second.eval()(images))


def test_set_weights_copies() -> None:
    """Training the model afterwards does not change the weights that were passed in."""
    model = network(seed=1)
    given_weights = weights.get_weights(network(seed=2))
    before = {name: value.clone() for name, value in given_weights.items()}
    weights.set_weights(model, given_weights)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert identical(given_weights, before)


def test_set_weights_rejects_missing_names() -> None:
    model = network(seed=1)
    saved = weights.get_weights(model)
    with pytest.raises(RuntimeError, match="Missing key"):
        weights.set_weights(model, {name: value for name, value in saved.items() if "fc" not in name})
