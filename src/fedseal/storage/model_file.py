"""A trained model as one safetensors file; its header holds everything that is needed to use it."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_safetensors
from torch import Tensor

from fedseal import weights
from fedseal.config.sections import ModelSettings
from fedseal.data.folders import read_images
from fedseal.errors import UserError
from fedseal.label_shift import Calibration, calibrate, estimate_mix, posterior
from fedseal.learn import INFERENCE_BATCH, predict_logits
from fedseal.models import Network, build_network
from fedseal.run_setup import RunSetup
from fedseal.system.files import write_atomic


def save_model(path: Path, values: weights.Tensors, setup: RunSetup) -> None:
    """Writes weights as safetensors, with network, classes, input format and calibration in the header."""
    pool, server = setup.federation.pool, setup.server()
    logits = predict_logits(server, values, server.validation)
    calibration = calibrate(logits, server.validation.labels)
    about = {
        "model": setup.config.model.model_dump(),
        "classes": pool.classes,
        "channels": pool.pixels.shape[1],
        "size": pool.pixels.shape[2],
        "mean": values["mean"].flatten().tolist(),
        "std": values["std"].flatten().tolist(),
        "calibration": {
            "temperature": calibration.temperature,
            "bias": calibration.bias.tolist(),
            "mix": calibration.mix.tolist(),
            "images": calibration.images,
        },
        "version": version("fedseal"),
    }
    write_atomic(path, bytes(save_safetensors(values, {"fedseal": json.dumps(about)})))


@dataclass(frozen=True)
class Predictions:
    """The classes of some images, and how often each class occurs among them."""

    files: list[Path]
    labels: list[str]
    confidences: list[float]
    plain_mix: list[float]  # by the class that the model finds most probable
    mix: list[float]  # as estimated; without adapting, the same as `plain_mix`


@dataclass(frozen=True)
class Classifier:
    """A trained model, ready for use."""

    model: Network
    classes: tuple[str, ...]
    channels: int
    size: int
    calibration: Calibration | None = None  # files written before version 0.2 have none

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:
        """Confidences [n, M] of uint8 images [n, C, H, W]."""
        confidences: Tensor = self.model(images).softmax(dim=1)
        return confidences

    def predict(self, paths: Sequence[str | os.PathLike[str]], *, adapt: bool = False) -> Predictions:
        """Classes of image files, and of all images in folders.

        With `adapt`, the class mix of all of them is estimated and used (docs/label-shift.md).
        """
        files, pixels = read_images([Path(path) for path in paths], size=self.size, channels=self.channels)
        if not files:
            raise UserError(f"There are no images in {', '.join(map(str, paths))}: check the path.")
        logits = self._logits(torch.from_numpy(pixels))
        probs = logits.softmax(dim=1)
        counts = probs.argmax(dim=1).bincount(minlength=len(self.classes)).double()
        plain_mix = mix = counts / counts.sum()
        if adapt:
            if self.calibration is None:
                raise UserError("The model has no calibration, since its version is older: train it again.")
            probs = self.calibration.probs(logits)
            mix = estimate_mix(probs, self.calibration)
            probs = posterior(probs, self.calibration.mix, mix)
        confidences, best = probs.max(dim=1)
        labels = [self.classes[m] for m in best.tolist()]
        return Predictions(files, labels, confidences.tolist(), plain_mix.tolist(), mix.tolist())

    @torch.inference_mode()
    def _logits(self, images: Tensor) -> Tensor:
        return torch.cat([self.model(some) for some in images.split(INFERENCE_BATCH)])


def load(run: str | os.PathLike[str]) -> Classifier:
    """The model of a run folder, or of a model file."""
    path = Path(run)
    path = path / "model.safetensors" if path.is_dir() else path
    if not path.exists():
        raise UserError(f"There is no model {path}: give the folder of a finished run.")
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()["fedseal"])
            values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        classes, channels, size = tuple(about["classes"]), int(about["channels"]), int(about["size"])
        model = build_network(
            ModelSettings.model_validate(about["model"]),
            channels=channels,
            size=size,
            classes=len(classes),
            mean=about["mean"],
            std=about["std"],
            seed=0,
        )
        weights.set_weights(model, values)
        calibration = read_calibration(about["calibration"]) if "calibration" in about else None
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{path} is damaged, or not a fedseal model ({type(error).__name__}).") from error
    return Classifier(model.eval(), classes, channels, size, calibration)


def read_calibration(about: Mapping[str, Any]) -> Calibration:
    """The calibration in the header of a model file."""
    bias, mix = (torch.tensor(about[key], dtype=torch.float64) for key in ("bias", "mix"))
    return Calibration(float(about["temperature"]), bias, mix, int(about["images"]))
