"""Differential privacy for clients: clipped updates, Gaussian noise, and ε (docs/privacy.md).

A client's update is clipped to the norm C, so its presence moves the sum of all updates by at most C. Noise
with standard deviation σ·C on the sum is the Gaussian mechanism with noise multiplier σ.
"""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedseal.aggregate import Aggregation
from fedseal.config.sections import AggregateSettings, PrivacySettings
from fedseal.system.lazy import LazyModule
from fedseal.weights import NORMALISATION, Tensors

dp_accounting = LazyModule("dp_accounting")  # Google's accountant


@dataclass(frozen=True)
class PrivateAggregation(Aggregation):
    """The part that both modes share: nothing but the upload leaves a client."""

    counts: ClassVar[bool] = False
    clip: float = 1.0
    noise: float = 1.0


class CentralPrivacy(PrivateAggregation):
    """The server adds noise to the sum. A method sees only the noisy mean, as if each client had sent it.

    So the guarantee does not depend on what a method does with the uploads. The mean is over all clients that
    were asked: a client that does not reply counts as an update of zero.
    """

    def screen(self, uploads: Mapping[int, Tensors], sent: Mapping[int, Tensors], t: int) -> dict[int, str]:
        """Leaves out nobody: a choice by the other clients' updates would reveal something about them."""
        return {}

    def release(self, received: Mapping[int, Tensors], sent: Mapping[int, Tensors]) -> Mapping[int, Tensors]:
        if not sent:
            return {}
        updates = (clipped(update_of(upload, sent[k]), self.clip) for k, upload in sorted(received.items()))
        mean = noisy_mean(updates, next(iter(sent.values())), self.noise * self.clip, len(sent))
        models = {id(model): add_update(model, mean) for model in sent.values()}  # mostly one for all
        return {k: models[id(model)] for k, model in sent.items()}


class LocalPrivacy(PrivateAggregation):
    """Each client adds noise to its own update, so that not even the server knows it."""

    def upload(self, trained: Tensors, received: Tensors) -> Tensors:
        update = clipped(update_of(trained, received), self.clip)
        return add_update(received, noisy_mean([update], received, self.noise * self.clip, 1))


def make_aggregation(settings: PrivacySettings, aggregate: AggregateSettings) -> Aggregation:
    """The aggregation of the sections `[privacy]` and `[aggregate]`."""
    if settings.mode == "none":
        return Aggregation(aggregate)
    mode = CentralPrivacy if settings.mode == "central" else LocalPrivacy
    return mode(aggregate, clip=settings.clip, noise=settings.noise)


def update_of(trained: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> Tensors:
    """What training changed, in double precision. Constants and integer buffers are left out."""
    return {
        name: trained[name].double() - value.double() for name, value in sent.items() if _moves(name, value)
    }


def add_update(sent: Mapping[str, Tensor], update: Mapping[str, Tensor]) -> Tensors:
    """The model after an update. A variance that noise has made negative becomes 0."""
    result = {}
    for name, value in sent.items():
        moved = (value.double() + update[name]).to(value.dtype) if name in update else value
        result[name] = moved.clamp(min=0) if name.endswith("running_var") else moved
    return result


def clipped(update: Mapping[str, Tensor], limit: float) -> Tensors:
    """The update, scaled down to an L2 norm of `limit` over all of its tensors if it is longer.

    An update with NaN or infinite values has no length and becomes zero.
    """
    norm = math.sqrt(sum(float(value.square().sum()) for value in update.values()))
    if not math.isfinite(norm):
        return {name: torch.zeros_like(value) for name, value in update.items()}
    scale = min(1.0, limit / norm) if norm else 1.0
    return {name: scale * value for name, value in update.items()}


def noisy_mean(
    updates: Iterable[Mapping[str, Tensor]], like: Mapping[str, Tensor], deviation: float, count: int
) -> Tensors:
    """(the sum of all updates + noise with this standard deviation) / count, for the tensors of `like`."""
    total = {
        name: deviation * gaussian(value.shape)
        if deviation
        else torch.zeros(value.shape, dtype=torch.float64)
        for name, value in like.items()
        if _moves(name, value)
    }
    for update in updates:
        for name, value in update.items():
            total[name] += value
    return {name: value / count for name, value in total.items()}


def gaussian(shape: torch.Size) -> Tensor:
    """Standard normal numbers from the operating system's entropy, by Box and Muller's method.

    Never from a seed: the run's seed is known to all clients, and who knows the noise can subtract it.
    """
    n = shape.numel()
    bits = np.frombuffer(os.urandom(16 * n), np.uint64).reshape(2, n) >> np.uint64(11)
    radius, angle = (bits + 0.5) * 2.0**-53  # uniform, neither 0 nor 1
    return torch.from_numpy(np.sqrt(-2 * np.log(radius)) * np.cos(2 * np.pi * angle)).view(shape)


def _moves(name: str, value: Tensor) -> bool:
    return value.is_floating_point() and name not in NORMALISATION


# Accounting. n uploads with noise multiplier σ are as private as one with σ/√n. For one Gaussian mechanism
# ε is known exactly (Balle and Wang 2018, Theorem 8).


@np.errstate(divide="ignore")  # log 0 = −∞ is meant
def spent_epsilon(noise: float, uploads: int, delta: float) -> float:
    """ε of a client after this number of uploads; infinite without noise."""
    if not uploads:
        return 0.0
    if not noise:
        return math.inf
    return float(dp_accounting.get_epsilon_gaussian(noise / math.sqrt(uploads), delta))


@np.errstate(divide="ignore")  # log 0 = −∞ is meant
def needed_noise(epsilon: float, uploads: int, delta: float) -> float:
    """The smallest noise multiplier with which this number of uploads spends at most ε > 0."""
    return float(dp_accounting.get_sigma_gaussian(epsilon, delta)) * math.sqrt(uploads)
