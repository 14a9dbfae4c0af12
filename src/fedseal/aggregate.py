"""Aggregation: what a client uploads, and what the server makes of all uploads.

Every method averages through `Aggregation.combine`, and every client uploads through `Aggregation.upload`,
on all engines. Another aggregation is a subclass of `Aggregation` that `RunSetup.aggregation` returns.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import ClassVar

import torch
from torch import Tensor

from fedseal import robust
from fedseal.config.sections import DEFAULT_GATE, AggregateSettings
from fedseal.weights import Tensors, is_statistic

# The server's own model of a round t, trained on its labels from the model that clients were sent.
Root = Callable[[Tensors, int], Tensors]


@dataclass(frozen=True)
class Aggregation:
    """Averaging as `[aggregate]` says. `root` is known at the server only."""

    settings: AggregateSettings = field(default_factory=AggregateSettings)
    root: Root | None = None

    counts: ClassVar[bool] = True  # if False, a client sends its upload and nothing else

    def upload(self, trained: Tensors, received: Tensors) -> Tensors:
        """At a client: what it sends after training `received` into `trained`."""
        return trained

    def screen(self, uploads: Mapping[int, Tensors], sent: Mapping[int, Tensors], t: int) -> dict[int, str]:
        """At the server: the clients that are left out of the average of round t, and why."""
        gate, krum = self.settings.gate, self.settings.rule == "multi-krum"
        if not uploads or (not gate and not krum):
            return {}
        norms = {k: robust.update_norm(uploads[k], sent[k]) for k in sorted(uploads)}
        most_moved = robust.most_moved(norm.learned for norm in norms.values())
        if krum and not most_moved:
            gate = gate or DEFAULT_GATE  # too few models to compare with each other
        usual = self._usual_norms(norms, next(iter(sent.values())), t)
        found = robust.beyond_gate(norms, usual, gate) if gate else {}
        if gate and most_moved:
            moved = {k: uploads[k] for k, norm in norms.items() if k not in found and norm.learned}
            if len(moved) > 2:  # of two directions, nobody knows which one is the common one
                steps = robust.common_steps(moved, sent, norms)
                found |= robust.off_course(norms, steps, usual.learned, gate)
        if krum:
            # Clients that found no labels send back what they were sent: they are close, and say nothing.
            left = {k: uploads[k] for k, norm in norms.items() if k not in found and any(norm)}
            malicious = self.malicious(len(uploads)) - len(found)
            if 0 < malicious < len(left) - 2:
                reason = "its model is farther from the others than they are from each other (multi-krum)"
                found |= dict.fromkeys(robust.krum_rejects(left, malicious), reason)
        return found

    def release(self, received: Mapping[int, Tensors], sent: Mapping[int, Tensors]) -> Mapping[int, Tensors]:
        """At the server: the uploads as the method sees them; `sent` has the model of each client asked."""
        return received

    def combine(self, uploads: Mapping[int, Tensors], sent: Tensors, t: int) -> Tensors:
        """At the server: one model from the uploads of clients that were sent the model `sent` in round t."""
        match self.settings.rule:
            case "clip":
                norms = robust.update_norms(uploads, sent)
                factors = robust.clip_factors(norms, self._usual_norms(norms, sent, t))
                return robust.weighted_update(uploads, sent, factors)
            case "median":
                return robust.reduce_weights(uploads, sent, robust.median)
            case "trimmed-mean":
                trim = self.malicious(len(uploads))
                return robust.reduce_weights(uploads, sent, partial(robust.trimmed_mean, trim=trim))
            case "fltrust":
                assert self.root is not None
                factors = robust.trust_factors(uploads, sent, self.root(sent, t))
                trusted = {k: uploads[k] for k, factor in factors.items() if factor.learned} or uploads
                moved = robust.weighted_update(uploads, sent, factors)
                return moved | robust.median_statistics(trusted, sent)
            case "multi-krum":  # of the clients that it left
                return mean(uploads) | robust.median_statistics(uploads, sent)
        return mean(uploads)

    def _usual_norms(self, norms: Mapping[int, robust.Pair], sent: Tensors, t: int) -> robust.Pair:
        """How long updates are usually. The server trains a model of its own only if that is needed."""

        @cache
        def own() -> robust.Pair:
            return robust.update_norm(self.root(sent, t), sent) if self.root else robust.Pair(0.0, 0.0)

        return robust.usual_norms(norms, own)

    def malicious(self, clients: int) -> int:
        """How many of some clients may be malicious."""
        return max(int(self.settings.malicious * clients + 1e-9), 1)  # 0.29 · 100 is 28.999…


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
        if old.is_floating_point() and not is_statistic(name):
            kept[name] = old - after[name]
            if velocity is not None:
                kept[name] = kept[name] + momentum * velocity[name]
            moved[name] = old - kept[name]
    return moved, kept
