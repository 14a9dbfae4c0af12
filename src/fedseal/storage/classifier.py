"""A trained model in use: predictions for images."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedseal.data.inputs import GivenImage, Input, list_inputs, read_batches
from fedseal.errors import UserError
from fedseal.frozen import FrozenNetwork
from fedseal.label_shift import Calibration, estimate_mix, posterior
from fedseal.learn import INFERENCE_BATCH
from fedseal.models import Network

BATCH_BYTES = 2**21  # of pixels that the network sees at once, since large images need more memory


@dataclass(frozen=True)
class Predictions:
    """The classes of some images, and how often each class occurs among them."""

    files: list[Path | None]  # None for an image that was not given as a file
    labels: list[str]  # "" where the confidence is below the minimum
    confidences: list[float]
    plain_mix: list[float]  # by the class that the model finds most probable
    mix: list[float]  # as estimated; without adapting, the same as `plain_mix`


@dataclass(frozen=True)
class Classifier:
    """A trained model, ready for use."""

    model: Network | FrozenNetwork
    classes: tuple[str, ...]
    channels: int
    size: int
    calibration: Calibration | None = None  # files written before version 0.2 have none

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:
        """Confidences [n, M] of uint8 images [n, C, H, W]."""
        confidences: Tensor = self.model(images).softmax(dim=1)
        return confidences

    def predict(
        self,
        images: GivenImage | Iterable[GivenImage],
        *,
        adapt: bool = False,
        min_confidence: float = 0.0,
        skip: bool = False,
        progress: bool = False,
    ) -> Predictions:
        """Classes of one image or of many.

        An image is given as a path, a PIL image or an array: uint8 [H, W], [H, W, C] or [n, H, W, C] with
        1 or 3 channels C. A folder stands for all images in it and below; other files there are skipped.
        Every image is cropped to a centred square and resized, as for training.

        With `adapt`, the class mix of all of them is estimated and used (docs/label-shift.md). An image whose
        confidence is below `min_confidence` has the label "". With `skip`, files that are not readable images
        are skipped with a warning even if they were given by name.
        """
        calibration = self.calibration if adapt else None
        if adapt and calibration is None:
            raise UserError("The model has no calibration, since its version is older: train it again.")
        if not 0 <= min_confidence <= 1:
            raise UserError(f"The minimum confidence must be between 0 and 1, not {min_confidence}.")
        inputs = list_inputs(images)
        positions, logits = self._logits(inputs, skip, progress)
        if not positions:
            raise UserError(f"There are no readable images in {_describe(images)}: check the path.")
        probs = logits.softmax(dim=1)
        counts = probs.argmax(dim=1).bincount(minlength=len(self.classes)).double()
        plain_mix = mix = counts / counts.sum()
        if calibration is not None:
            probs = calibration.probs(logits)
            mix = estimate_mix(probs, calibration)
            probs = posterior(probs, calibration.mix, mix)
        confidences, best = (values.tolist() for values in probs.max(dim=1))
        labels = [
            self.classes[m] if confidence >= min_confidence else ""
            for m, confidence in zip(best, confidences, strict=True)
        ]
        sources = [inputs[i].source for i in positions]
        files = [source if isinstance(source, Path) else None for source in sources]
        return Predictions(files, labels, confidences, plain_mix.tolist(), mix.tolist())

    @torch.inference_mode()
    def _logits(self, inputs: Sequence[Input], skip: bool, progress: bool) -> tuple[list[int], Tensor]:
        """The positions of the readable images, and their logits; the pixels of only one batch are kept."""
        network = self.model.backbone if isinstance(self.model, FrozenNetwork) else self.model
        side = max(self.size, network.resize)
        batch = max(1, min(INFERENCE_BATCH, BATCH_BYTES // (self.channels * side**2)))
        positions: list[int] = []
        logits: list[Tensor] = []
        for rows, pixels in read_batches(
            inputs, size=self.size, channels=self.channels, batch=batch, skip=skip, progress=progress
        ):
            positions += rows
            logits.append(self.model(torch.from_numpy(pixels)))
        return positions, torch.cat(logits) if logits else torch.zeros(0, len(self.classes))


def _describe(images: object) -> str:
    """The given paths, for a message; the first three if there are many."""
    given = images if isinstance(images, Sequence) and not isinstance(images, str) else [images]
    names = [str(one) for one in given if isinstance(one, str | os.PathLike)]
    return ", ".join([*names[:3], *(["…"] if len(names) > 3 else [])]) or "what was given"
