"""Malicious clients of a simulation: what they send instead of what they have learned (`[simulate]`).

A deployed client never comes here.
"""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedseal.config.sections import SimulateSettings
from fedseal.core import Packet, derive_seed
from fedseal.replies import MAX_GROWTH
from fedseal.robust import update_norm
from fedseal.weights import Tensors, is_statistic, largest_statistic, largest_weight

HUGE = 0.9 * MAX_GROWTH  # just below what the server's check of single replies lets through


def malicious_clients(settings: SimulateSettings, clients: int, seed: int) -> frozenset[int]:
    """The malicious ones of some clients, chosen by the seed."""
    rng = np.random.default_rng(derive_seed(seed, "malicious"))
    return frozenset(rng.permutation(clients)[: settings.malicious].tolist())


def forge(
    reply: Packet, request: Packet, group: str, names: Iterable[str], settings: SimulateSettings, seed: int
) -> Packet:
    """The reply of a malicious client in place of its honest one.

    `group` holds the trained weights. `names` lists all weights of the network in the order of its layers.
    """
    if group not in reply.tensors:
        return reply
    sent, honest = request.tensors[group], reply.tensors[group]
    trained = {name: honest[name] for name in names if name in honest}
    generator = torch.Generator().manual_seed(seed)
    forged = forge_weights(trained, sent, settings, generator)
    return replace(reply, tensors={**reply.tensors, group: forged})


def forge_weights(
    trained: Tensors, sent: Tensors, settings: SimulateSettings, generator: torch.Generator
) -> Tensors:
    """Weights by `simulate.attack`. The input's normalisation and integers stay: the server checks them."""
    names = [n for n, v in trained.items() if v.is_floating_point() and n not in ("mean", "std")]
    weights = [name for name in names if not is_statistic(name)]
    length = settings.strength * update_norm(trained, sent).learned
    match settings.attack:
        case "zeros":
            return trained | {name: torch.zeros_like(trained[name]) for name in weights}
        case "nan":
            return trained | {name: torch.full_like(trained[name], torch.nan) for name in weights}
        case "huge":
            limit = HUGE * (1 + largest_weight(sent))
            return trained | {name: _signs(trained[name], generator) * limit for name in weights}
        case "statistics":
            limit = HUGE * MAX_GROWTH * (1 + largest_statistic(sent))
            return trained | {n: torch.full_like(trained[n], limit) for n in names if is_statistic(n)}
        case "scale":
            direction = {name: trained[name] - sent[name] for name in weights}
        case "sign-flip":
            direction = {name: sent[name] - trained[name] for name in weights}
        case "noise":
            direction = {name: torch.randn(sent[name].shape, generator=generator) for name in weights}
        case "class-swap":
            direction = swapped_classes(sent, weights)
    moved = trained | {name: sent[name] + value for name, value in direction.items()}
    factor = length / (update_norm(moved, sent).learned or 1.0)
    return moved | {name: sent[name] + factor * value for name, value in direction.items()}


def swapped_classes(sent: Tensors, weights: list[str]) -> Tensors:
    """The way to a model that takes every class for its neighbour: the last layer's rows change places."""
    classes = len(sent[weights[-1]])
    last = [name for name in weights[-2:] if len(sent[name]) == classes]  # weight and bias
    zeros = {name: torch.zeros_like(sent[name]) for name in weights}
    pairs = torch.arange(classes) ^ 1  # 0 ↔ 1, 2 ↔ 3, …
    order = torch.where(pairs < classes, pairs, torch.arange(classes))
    return zeros | {name: sent[name][order] - sent[name] for name in last}


def _signs(like: Tensor, generator: torch.Generator) -> Tensor:
    return (torch.randint(0, 2, like.shape, generator=generator) * 2 - 1).to(like.dtype)
