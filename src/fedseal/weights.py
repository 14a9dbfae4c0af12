"""Arithmetic on model weights: dictionaries of tensors, as `state_dict()` gives them."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

Tensors = dict[str, Tensor]


def average(models: Mapping[int, Mapping[str, Tensor]]) -> Tensors:
    """Eq. 2: the uniform average of the clients' models, whatever the order in which they came.

    Sums run in double precision by client number. Integer buffers (BatchNorm's batch counts) stay
    integers: the largest is taken.
    """
    if not models:
        raise ValueError("there is no model to average")
    ordered = [models[k] for k in sorted(models)]
    return {name: _mean([model[name] for model in ordered]) for name in ordered[0]}


def _mean(values: list[Tensor]) -> Tensor:
    if not values[0].is_floating_point():
        return torch.stack(values).amax(dim=0)
    total = values[0].to(torch.float64, copy=True)
    for value in values[1:]:
        total += value
    return (total / len(values)).to(values[0].dtype)


def finite(model: Mapping[str, Tensor]) -> bool:
    """True if no weight is NaN or infinite."""
    return all(bool(value.isfinite().all()) for value in model.values() if value.is_floating_point())


def largest(model: Mapping[str, Tensor]) -> float:
    """The largest weight in size, BatchNorm's statistics left out."""
    learnt = [v for k, v in model.items() if v.is_floating_point() and v.numel() and ".running_" not in k]
    return max((float(value.abs().max()) for value in learnt), default=0.0)


def same_layout(model: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> bool:
    """True if both have the same names, shapes and types."""
    return {k: (v.shape, v.dtype) for k, v in model.items()} == {
        k: (v.shape, v.dtype) for k, v in like.items()
    }


def load(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copies weights into a model in place, so that one model serves many clients."""
    model.load_state_dict(values)


def save(model: nn.Module) -> Tensors:
    """A copy of a model's weights on the CPU, in plain layout."""
    return {
        name: value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, value in model.state_dict().items()
    }
