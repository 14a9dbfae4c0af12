"""Aggregation: what a client uploads, and what the server makes of all uploads.

Every method averages through `Aggregation.combine`, and every client uploads through `Aggregation.upload`,
on all engines. Another aggregation is a subclass of `Aggregation` that `RunSetup.aggregation` returns.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedseal.weights import Tensors


class Aggregation:
    """The uniform mean of the clients' models."""

    def upload(self, trained: Tensors, received: Tensors) -> Tensors:
        """At a client: what it sends after training `received` into `trained`."""
        return trained

    def combine(self, uploads: Mapping[int, Tensors], sent: Tensors) -> Tensors:
        """At the server: one model from the uploads of clients that were sent the model `sent`."""
        return mean(uploads)


def mean(models: Mapping[int, Mapping[str, Tensor]]) -> Tensors:
    """Eq. 2: the uniform mean of the clients' models.

    Sums run in double precision by client number, so the order of arrival does not matter. Integer buffers
    (BatchNorm's batch counts) stay integers: the largest is taken.
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


def moving_average(before: Tensors, new: Tensors, keep: float) -> Tensors:
    """`keep` · before + (1 − keep) · new; integer buffers are taken from `new`."""
    return {
        name: keep * before[name] + (1 - keep) * value if value.is_floating_point() else value
        for name, value in new.items()
    }


def momentum_step(
    before: Tensors, after: Tensors, velocity: Tensors | None, momentum: float
) -> tuple[Tensors, Tensors]:
    """Averaging as a step of SGD with momentum, with `before` − `after` as the gradient.

    Returns the weights and the new velocity. Integer buffers and BatchNorm statistics, which momentum could
    make negative, are taken from `after`.
    """
    moved: Tensors = {}
    kept: Tensors = {}
    for name, old in before.items():
        moved[name] = after[name]
        if old.is_floating_point() and ".running_" not in name:
            kept[name] = old - after[name]
            if velocity is not None:
                kept[name] = kept[name] + momentum * velocity[name]
            moved[name] = old - kept[name]
    return moved, kept
