"""Robust averaging: one model from uploads of which some may be forged.

An update is what a client uploads minus what it was sent. Learned weights and BatchNorm statistics are looked
at apart, because their sizes have nothing in common. Sums run in double precision by client number, so the
order of arrival does not matter. Of integer buffers the largest upload is taken.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fedseal.weights import Tensors, is_statistic

AMBIGUOUS = 2  # times that the upper one of two middle norms may be as long as the lower one

Models = Mapping[int, Tensors]
Reduce = Callable[[Tensor], Tensor]  # values [K, …] of K clients to one value


class Pair(NamedTuple):
    """A number for a client's learned weights, and one for its BatchNorm statistics."""

    learned: float
    statistics: float


def update_norms(uploads: Models, sent: Tensors) -> dict[int, Pair]:
    """By client: the Euclidean norms of its update."""
    return {k: update_norm(uploads[k], sent) for k in sorted(uploads)}


def update_norm(upload: Tensors, sent: Tensors) -> Pair:
    """The Euclidean norms of one update."""
    squares: tuple[list[float], list[float]] = ([], [])
    for name, value in _floats(sent):
        squares[is_statistic(name)].append(float((upload[name].double() - value.double()).square().sum()))
    return Pair(*(math.sqrt(math.fsum(each)) for each in squares))


def most_moved(norms: Iterable[float]) -> bool:
    """Whether more than half of the updates are not zero."""
    moved = [norm > 0 for norm in norms]
    return 2 * sum(moved) > len(moved)


def usual_norms(norms: Mapping[int, Pair], own: Callable[[], Pair]) -> Pair:
    """The median norms of all updates but zeros: a client that found no labels sends back what it was sent.

    If most clients do so, all others may be malicious. Then the norms of the server's own update count. If
    the two middle norms differ much, half of those that moved may be malicious. Then the lower one of the two
    counts, or the server's own norm if that is longer.
    """

    def usual(column: tuple[float, ...], part: int) -> float:
        moved = [norm for norm in column if norm > 0]
        if moved and not most_moved(column):
            return own()[part]
        low, high = statistics.median_low(moved or [0.0]), statistics.median_high(moved or [0.0])
        if high > AMBIGUOUS * low and len(column) > 2:  # of two clients, nobody knows which one is usual
            return max(low, own()[part])
        return (low + high) / 2

    columns = zip(*norms.values(), strict=True)
    return Pair(*(usual(column, part) for part, column in enumerate(columns))) if norms else Pair(0.0, 0.0)


def beyond_gate(norms: Mapping[int, Pair], usual: Pair, gate: float) -> dict[int, str]:
    """The clients whose update is longer than `gate` times the usual norm, and how much longer it is."""
    found: dict[int, str] = {}
    for part, what in enumerate(("weights", "BatchNorm statistics")):
        for k, pair in norms.items():
            if pair[part] > gate * usual[part]:
                times = f"{pair[part] / usual[part]:.3g} times as far as is usual" if usual[part] else ""
                found.setdefault(k, f"its {what} moved {times or 'although those of most clients did not'}")
    return found


def common_steps(uploads: Models, sent: Models, norms: Mapping[int, Pair]) -> dict[int, float]:
    """By client: how far its update goes in the common direction; negative if it goes against it.

    The common direction is the sum of all updates, each brought to length one, so that long ones do not
    decide.
    """
    clients = sorted(uploads)
    products: dict[int, list[float]] = {k: [] for k in clients}
    squares: list[float] = []
    for name, value in _learned(sent[clients[0]]):
        direction = torch.zeros_like(value, dtype=torch.float64)
        for k in clients:
            direction += (uploads[k][name].double() - sent[k][name].double()) / norms[k].learned
        squares.append(float(direction.square().sum()))
        for k in clients:
            update = uploads[k][name].double() - sent[k][name].double()
            products[k].append(float((update * direction).sum()))
    length = math.sqrt(math.fsum(squares)) or 1.0
    return {k: math.fsum(parts) / length for k, parts in products.items()}


def off_course(
    norms: Mapping[int, Pair], steps: Mapping[int, float], usual: float, gate: float
) -> dict[int, str]:
    """The clients whose update is too long for its direction; `steps` are those in the common direction.

    In units of the usual norm, an update must end in the ball of radius 2 · gate / 3 around the point that
    lies gate / 3 ahead in the common direction. So it may be `gate` long in that direction, gate / √3 across
    it, and gate / 3 against it.
    """
    found: dict[int, str] = {}
    for k, step in steps.items():
        length, ahead = norms[k].learned / usual, step / usual
        if length**2 > gate**2 / 3 + 2 * gate / 3 * ahead:
            where = "against" if ahead < 0 else "not with"
            found[k] = f"its weights moved {length:.3g} times as far as is usual, and {where} the others"
    return found


def weighted_update(uploads: Models, sent: Tensors, factors: Mapping[int, Pair]) -> Tensors:
    """sent + Σ factor · update, with one factor for learned weights and one for statistics."""
    result = _largest_integers(uploads, sent)
    for name, value in _floats(sent):
        start = value.double()
        total = torch.zeros_like(start)
        for k in sorted(uploads):
            total += factors[k][is_statistic(name)] * (uploads[k][name].double() - start)
        result[name] = (start + total).to(value.dtype)
    return {name: result[name] for name in sent}


def clip_factors(norms: Mapping[int, Pair], usual: Pair) -> dict[int, Pair]:
    """Factors of a mean of updates that are shortened to the usual norm if they are longer."""
    return {
        k: Pair(*(min(1.0, u / n if n > 0 else 1.0) / len(norms) for u, n in zip(usual, pair, strict=True)))
        for k, pair in norms.items()
    }


def reduce_weights(uploads: Models, sent: Tensors, reduce: Reduce) -> Tensors:
    """Every weight from the clients' values of it: their median, for example."""
    result = _largest_integers(uploads, sent)
    for name, value in _floats(sent):
        values = torch.stack([uploads[k][name].double() for k in sorted(uploads)])
        result[name] = reduce(values).to(value.dtype)
    return {name: result[name] for name in sent}


def median_statistics(uploads: Models, sent: Tensors) -> Tensors:
    """BatchNorm statistics alone, for rules that only look at learned weights."""
    return reduce_weights(uploads, {name: v for name, v in _floats(sent) if is_statistic(name)}, median)


def median(values: Tensor) -> Tensor:
    """The median over the first dimension; of two middle values their mean."""
    ordered = values.sort(dim=0).values
    return (ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) / 2


def trimmed_mean(values: Tensor, trim: int) -> Tensor:
    """The mean over the first dimension without the `trim` smallest and the `trim` largest values."""
    trim = min(trim, (len(values) - 1) // 2)
    return values.sort(dim=0).values[trim : len(values) - trim].mean(dim=0)


def krum_scores(uploads: Models, malicious: int) -> dict[int, float]:
    """Krum (Blanchard et al. 2017): sums of squared distances to the n − f − 2 nearest other uploads."""
    clients = sorted(uploads)
    nearest = max(len(clients) - malicious - 2, 1)
    far: dict[int, list[float]] = {k: [] for k in clients}
    for i, a in enumerate(clients):
        for b in clients[i + 1 :]:
            square = _squared_distance(uploads[a], uploads[b])
            far[a].append(square)
            far[b].append(square)
    return {k: math.fsum(sorted(squares)[:nearest]) for k, squares in far.items()}


def krum_rejects(uploads: Models, malicious: int) -> list[int]:
    """Multi-Krum: the f clients with the highest scores."""
    scores = krum_scores(uploads, malicious)
    ranked = sorted(scores, key=lambda k: (scores[k], k))
    return ranked[len(ranked) - malicious :]


def trust_factors(uploads: Models, sent: Tensors, root: Tensors) -> dict[int, Pair]:
    """FLTrust (Cao et al. 2021): each update is brought to the length of the server's own, `root` − `sent`,
    and weighs as much as its cosine with that one, or nothing if the cosine is negative.

    Statistics stay as they were sent: see `median_statistics`.
    """
    norms, length = update_norms(uploads, sent), update_norm(root, sent).learned
    trusts: dict[int, float] = {}
    for k, (own, _) in norms.items():
        product = math.fsum(
            float(((uploads[k][name].double() - v.double()) * (root[name].double() - v.double())).sum())
            for name, v in _learned(sent)
        )
        trusts[k] = max(product / (own * length), 0.0) if own * length > 0 else 0.0
    total = sum(trusts.values()) or 1.0
    return {
        k: Pair(trust / total * length / norms[k].learned if trust else 0.0, 0.0)
        for k, trust in trusts.items()
    }


def _floats(model: Tensors) -> Iterable[tuple[str, Tensor]]:
    return ((name, value) for name, value in model.items() if value.is_floating_point())


def _learned(model: Tensors) -> Iterable[tuple[str, Tensor]]:
    return ((name, value) for name, value in _floats(model) if not is_statistic(name))


def _largest_integers(uploads: Models, sent: Tensors) -> Tensors:
    names = [name for name, value in sent.items() if not value.is_floating_point()]
    return {name: torch.stack([model[name] for model in uploads.values()]).amax(dim=0) for name in names}


def _squared_distance(a: Tensors, b: Tensors) -> float:
    """Of the learned weights."""
    return math.fsum(float((value.double() - b[name].double()).square().sum()) for name, value in _learned(a))
