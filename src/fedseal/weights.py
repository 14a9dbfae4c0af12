"""Model weights as dictionaries of tensors, as `state_dict()` returns them."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

Tensors = dict[str, Tensor]
NORMALISATION = ("mean", "std")  # buffers of `Network` that training does not change


def get_weights(model: nn.Module) -> Tensors:
    """A copy of a model's weights on the CPU, in contiguous layout."""
    return {
        name: value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, value in model.state_dict().items()
    }


def set_weights(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copies weights into a model in place, so that one model serves many clients."""
    model.load_state_dict(values)


def all_finite(model: Mapping[str, Tensor]) -> bool:
    """True if no weight is NaN or infinite."""
    floats = (value for value in model.values() if value.is_floating_point())
    # PyTorch cannot say it of float8.
    wide = (value.float() if value.element_size() == 1 else value for value in floats)
    return all(bool(value.isfinite().all()) for value in wide)


def is_statistic(name: str) -> bool:
    """True for BatchNorm's running mean and variance, which are measured, not learned."""
    return name.rpartition(".")[2] in ("running_mean", "running_var")


def is_batch_count(name: str) -> bool:
    """True for the number of batches that BatchNorm has seen."""
    return name.rpartition(".")[2] == "num_batches_tracked"


def largest_weight(model: Mapping[str, Tensor]) -> float:
    """The largest absolute weight; BatchNorm statistics and the images' normalisation do not count."""
    return _largest(
        value for name, value in model.items() if not is_statistic(name) and name not in NORMALISATION
    )


def largest_statistic(model: Mapping[str, Tensor]) -> float:
    """The largest absolute value among BatchNorm's running means and variances."""
    return _largest(value for name, value in model.items() if is_statistic(name))


def _largest(tensors: Iterable[Tensor]) -> float:
    floats = (value for value in tensors if value.is_floating_point() and value.numel())
    return max((float(value.abs().max()) for value in floats), default=0.0)


def same_layout(model: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> bool:
    """True if both have the same names, shapes and types."""
    return {k: (v.shape, v.dtype) for k, v in model.items()} == {
        k: (v.shape, v.dtype) for k, v in like.items()
    }
