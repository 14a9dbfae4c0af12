"""Losses of the compared methods, as pure functions of logits [n, M]."""

from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax


def fixmatch_loss(weak: Tensor, strong: Tensor, threshold: float) -> Tensor:
    """FixMatch (Sohn et al. 2020, Eq. 4): cross-entropy of the strong view against the weak view's class,
    over images whose weak view is confident; the mean is over all images."""
    confidence, label = weak.softmax(dim=1).max(dim=1)
    return (cross_entropy(strong, label, reduction="none") * (confidence >= threshold)).mean()


def uda_loss(weak: Tensor, strong: Tensor, threshold: float, temperature: float) -> Tensor:
    """UDA (Xie et al. 2020): KL divergence of the strong view from the weak view's sharpened confidences,
    over images whose weak view is confident before sharpening; the mean is over all images."""
    confidence = weak.softmax(dim=1).max(dim=1).values
    target = (weak / temperature).log_softmax(dim=1)
    divergence = (target.exp() * (target - log_softmax(strong, dim=1))).sum(dim=1)
    return (divergence * (confidence >= threshold)).mean()
