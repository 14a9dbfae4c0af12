"""Label shift: a client's class mix differs from the server's, and the client estimates it without labels.

The server calibrates its model on validation images. A client predicts its own images with the calibrated
model, finds the class mix that explains them best, and predicts and labels with it. See docs/label-shift.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

HIGHEST_TEMPERATURE = 20.0
# What is believed of a model before any validation image is seen: mean and deviation.
SHARPNESS = 1.0, 10.0  # 1 / temperature
BIAS = 0.3  # deviation of a class's bias, whose mean is 0
PSEUDO_COUNT = 0.1  # per class, so that no class becomes impossible
NEWTON_STEPS, EM_STEPS = 50, 200


@dataclass(frozen=True)
class Calibration:
    """Makes confidences true on average: softmax(logits / temperature + bias)."""

    temperature: float
    bias: Tensor  # [M]
    mix: Tensor  # [M], the class mix of the images that it was fitted on
    images: int  # their number

    def probs(self, logits: Tensor) -> Tensor:
        """Calibrated confidences [n, M], in double precision."""
        return (logits.double() / self.temperature + self.bias).softmax(dim=1)

    def adapt(self, logits: Tensor, mix: Tensor) -> Tensor:
        """Logits whose softmax has the calibrated confidences where classes have the mix `mix`."""
        return logits / self.temperature + (self.bias + (mix / self.mix).log()).to(logits)

    def to_tensors(self) -> dict[str, Tensor]:
        """As part of a packet."""
        return {
            "temperature": torch.tensor(self.temperature, dtype=torch.float64),
            "bias": self.bias,
            "mix": self.mix,
            "images": torch.tensor(self.images),
        }

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "temperature": self.temperature,
            "bias": self.bias.tolist(),
            "mix": self.mix.tolist(),
            "images": self.images,
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> "Calibration":
        """The inverse of `to_dict`."""
        bias, mix = (torch.tensor(found[key], dtype=torch.float64) for key in ("bias", "mix"))
        return cls(float(found["temperature"]), bias, mix, int(found["images"]))

    @classmethod
    def from_tensors(cls, group: Mapping[str, Tensor]) -> "Calibration":
        """The inverse of `to_tensors`."""
        return cls(float(group["temperature"]), group["bias"], group["mix"], int(group["images"]))


def calibrate(logits: Tensor, labels: Tensor, deviation: float = BIAS) -> Calibration:
    """The calibration with the least negative log-likelihood on validation images.

    Guo et al. (2017) introduced the temperature, Alexandari et al. (2020) the biases. Validation images are
    few, so both have a normal prior, that of the biases with this deviation. The sum is convex in
    1 / temperature and biases, and Newton's method finds its minimum.
    """
    finite = logits.isfinite().all(dim=1)  # a model may have diverged
    logits, labels, classes = logits[finite].double(), labels[finite], logits.shape[1]
    truth = one_hot(labels, classes).double()
    mean = torch.tensor([SHARPNESS[0], *classes * [0.0]], dtype=torch.float64)
    precision = torch.tensor([SHARPNESS[1], *classes * [deviation]], dtype=torch.float64) ** -2
    # Scores are linear in the parameters: features [n, M, 1 + M] · parameters [1 + M].
    units = torch.eye(classes, dtype=torch.float64).expand(len(logits), -1, -1)
    features = torch.cat([logits.unsqueeze(2), units], dim=2)

    def objective(values: Tensor) -> Tensor:
        scores = features @ values
        prior = (precision * (values - mean) ** 2).sum() / 2
        return scores.logsumexp(dim=1).sum() - (scores * truth).sum() + prior

    values = mean
    for _ in range(NEWTON_STEPS):
        probs = (features @ values).softmax(dim=1)
        expected = torch.einsum("nmk,nm->nk", features, probs)
        gradient = torch.einsum("nmk,nm->k", features, probs - truth) + precision * (values - mean)
        curvature = torch.einsum("nmk,nm,nml->kl", features, probs, features) - expected.T @ expected
        step = torch.linalg.solve(curvature + precision.diag(), gradient)
        while step.abs().max() > 1e-9 and objective(values - step) > objective(values):
            step = step / 2
        values = values - step
        if step.abs().max() <= 1e-9:
            break
    counts = truth.sum(dim=0) + 1  # a class without a validation image is rare, not impossible
    sharpness = max(float(values[0]), 1 / HIGHEST_TEMPERATURE)
    return Calibration(1 / sharpness, values[1:], counts / counts.sum(), len(labels))


def posterior(probs: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """Confidences [n, M] where classes have the mix `new`, from those where they have the mix `old`."""
    weighted = probs * (new / old)
    return weighted / weighted.sum(dim=1, keepdim=True)


def most_likely_mix(probs: Tensor, old: Tensor) -> Tensor:
    """The class mix of the images with these confidences, by EM (Saerens, Latinne and Decaestecker 2002)."""
    mix = old
    for _ in range(EM_STEPS):
        counts = posterior(probs, old, mix).sum(dim=0) + PSEUDO_COUNT
        before, mix = mix, counts / counts.sum()
        if (mix - before).abs().max() < 1e-6:
            break
    return mix


def estimate_mix(probs: Tensor, calibration: Calibration) -> Tensor:
    """A client's class mix [M], from the calibrated confidences of its images.

    The most likely mix is drawn towards that of the server, as in James and Stein (1961). The more images
    and validation images there are, the less a gain in likelihood can be chance. Without a shift, the gain
    is about (M − 1) / 2 · (1 + images / validation images), and the result is the server's mix.
    """
    n, classes = probs.shape
    old = calibration.mix
    if n == 0 or calibration.images == 0:
        return old
    mix = most_likely_mix(probs, old)
    gain = float((probs * (mix / old)).sum(dim=1).log().sum())
    chance = (classes - 1) / 2 * (1 + n / calibration.images)
    trust = max(0.0, 1 - chance / gain) if gain > 0 else 0.0
    return trust * mix + (1 - trust) * old


def sharpened(probs: Tensor, temperature: float) -> Tensor:
    """Confidences to the power of 1 / temperature, normalised: as they are at 1, one class alone at 0."""
    if temperature == 0:
        return one_hot(probs.argmax(dim=1), probs.shape[1]).to(probs)
    return (probs.log() / temperature).softmax(dim=1)


def adjusted_loss(logits: Tensor, target: Tensor, old: Tensor, new: Tensor, strength: float = 1.0) -> Tensor:
    """Cross-entropy of logits + log(new / old), for images with the class mix `new` (Menon et al. 2021).

    The model then learns what tells classes apart, and not how frequent they are here: its own mix stays
    `old`. With `strength` 0 it learns the frequencies, too. `target` has classes [n] or probabilities [n, M].
    """
    return cross_entropy(logits + strength * (new / old).to(logits).log(), target)
