"""The equations of the FedSEAL paper (Bian, Fu, Xu 2021, arXiv 2110.07829), one pure function each.

The numbers are the paper's, in order of appearance. Eq. 2 is `fedseal.aggregate.mean`; Eqs. 4 and 16, the
mini-batch steps, are `fedseal.learn.fit`. Shapes: n images, M classes.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot, softplus

Schedule = Literal["approach-one", "divide", "divide-capped", "multiply", "constant"]
Denominator = Literal["true-count", "predicted-count"]


def server_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Eq. 1 and 3: mean cross-entropy of the server's labelled images."""
    return cross_entropy(logits, labels)


def thresholds(probs: Tensor, labels: Tensor, denominator: Denominator) -> Tensor:
    """Eq. 5: τ per class from the validation images' confidences [n, M] and labels [n].

    `true-count` divides by the number of images *of* class m, as printed; an over-predicted class may then
    get a τ above 1. `predicted-count` divides by the number *predicted* as m, so τ is their mean confidence.
    A class whose denominator is 0 gets the mean of the others, or 1 if all are 0.
    """
    classes = probs.shape[1]
    confidence, predicted = probs.max(dim=1)
    total = torch.zeros(classes).index_add_(0, predicted, confidence)
    counted = labels if denominator == "true-count" else predicted
    count = torch.bincount(counted, minlength=classes)
    known = count > 0
    tau = total / count.clamp(min=1)
    tau[~known] = tau[known].mean() if known.any() else 1.0
    return tau


def ensemble_mean(probs: Tensor) -> Tensor:
    """Eq. 7: p̄ as the plain mean over models, from confidences [models, n, M]."""
    return probs.mean(dim=0)


def ensemble_update(mean: Tensor, probs: Tensor, count: Tensor) -> Tensor:
    """Eq. 8: p̄ after one more model; `count` [n] is the number of models including this one."""
    t = count.to(probs.dtype).unsqueeze(1)
    return (t - 1) / t * mean + probs / t


def pseudo_labels(mean: Tensor) -> Tensor:
    """Eq. 9: y⁺, the class of highest mean confidence."""
    return mean.argmax(dim=1)


def positive_set(mean: Tensor, tau: Tensor) -> Tensor:
    """Eq. 10: the mask of D⁺, images whose confidence in y⁺ reaches the threshold of that class."""
    confidence, label = mean.max(dim=1)
    return confidence >= tau[label]


def complementary_labels(mean: Tensor, theta: float, generator: torch.Generator) -> Tensor:
    """Eq. 11: y⁻, drawn uniformly among the classes with p̄ ≤ θ; −1 if no class qualifies."""
    allowed = mean <= theta
    draw = torch.rand(mean.shape, generator=generator).masked_fill(~allowed, -1.0)
    return draw.argmax(dim=1).masked_fill(~allowed.any(dim=1), -1)


def negative_set(mean: Tensor, tau: Tensor, theta: float) -> Tensor:
    """Eq. 12: the mask of D⁻, images outside D⁺ that have at least one class with p̄ ≤ θ."""
    return (mean <= theta).any(dim=1) & ~positive_set(mean, tau)


def client_loss(weight: float, positive: Tensor, negative: Tensor) -> Tensor:
    """Eq. 13: L = λL⁺ + L⁻."""
    return weight * positive + negative


def positive_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Eq. 14: cross-entropy on strongly augmented images; zero for an empty set.

    `target` holds hard labels [n] or, for soft pseudo-labels, confidences [n, M].
    """
    return cross_entropy(logits, target, reduction="sum") / max(len(logits), 1)


def negative_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Eq. 15: mean of −log(1 − p_y) on plain images; zero for an empty set.

    1 − p_y is the other classes' share of the softmax, so −log(1 − p_y) = softplus(z_y − log Σ_{m≠y}
    e^{z_m}). In this form the loss is finite and has a gradient however confident a wrong model is.
    """
    others = logits.masked_fill(one_hot(labels, logits.shape[1]).bool(), -torch.inf).logsumexp(dim=1)
    own = logits.gather(1, labels.unsqueeze(1)).squeeze(1)
    return softplus(own - others).sum() / max(len(logits), 1)


def positive_weight(schedule: Schedule, start: float, t: int, rate: float = 0.95, until: int = 100) -> float:
    """λ of round t ≥ 1. The text says that it grows; the tables say "decay rate 0.95 until round 100"."""
    decay = rate ** min(t, until)
    match schedule:
        case "approach-one":
            return 1 - (1 - start) * decay
        case "divide":
            return start / decay
        case "divide-capped":
            return min(1.0, start / decay)
        case "multiply":
            return start * decay
        case "constant":
            return start
