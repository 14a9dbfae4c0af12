"""Losses of the compared methods: pure functions of logits [n, M]."""

from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax, one_hot


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


def mixup_loss(logits: Tensor, labels: Tensor, mixed_in: Tensor, share: Tensor) -> Tensor:
    """Mixup (Zhang et al. 2018): images with weight `share`, mixed with others of weight 1 − `share`."""
    return share * cross_entropy(logits, labels) + (1 - share) * cross_entropy(logits, mixed_in)


def consistency_loss(logits: Tensor, helped: Tensor) -> Tensor:
    """FedMatch: KL divergence of the model from its helpers' confidences [n, H, M], averaged over images and
    helpers; zero without helpers."""
    own = log_softmax(logits, dim=1).unsqueeze(1).expand_as(helped)
    return kl_div(own, helped, reduction="sum") / max(helped.shape[0] * helped.shape[1], 1)


def agreed_labels(logits: Tensor, helped: Tensor) -> Tensor:
    """FedMatch: the majority vote of the model and its helpers [n, H, M]; ties go to the lowest class."""
    classes = logits.shape[1]
    votes = one_hot(logits.argmax(dim=1), classes) + one_hot(helped.argmax(dim=2), classes).sum(dim=1)
    return votes.argmax(dim=1)
