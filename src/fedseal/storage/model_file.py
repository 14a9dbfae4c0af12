"""A trained model as one safetensors file; its header holds everything that is needed to use it."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_safetensors
from torch import Tensor

from fedseal import weights
from fedseal.config.sections import ModelSettings
from fedseal.data.folders import read_image
from fedseal.errors import UserError
from fedseal.learn import INFERENCE_BATCH
from fedseal.models import Network, build_network
from fedseal.run_setup import RunSetup
from fedseal.system.files import write_atomic


def save_model(path: Path, values: weights.Tensors, setup: RunSetup) -> None:
    """Writes weights as safetensors, with network, classes and input format in the header."""
    pool = setup.federation.pool
    about = {
        "model": setup.config.model.model_dump(),
        "classes": pool.classes,
        "channels": pool.pixels.shape[1],
        "size": pool.pixels.shape[2],
        "mean": values["mean"].flatten().tolist(),
        "std": values["std"].flatten().tolist(),
        "version": version("fedseal"),
    }
    write_atomic(path, bytes(save_safetensors(values, {"fedseal": json.dumps(about)})))


@dataclass(frozen=True)
class Classifier:
    """A trained model, ready for use."""

    model: Network
    classes: tuple[str, ...]
    channels: int
    size: int

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:
        """Confidences [n, M] of uint8 images [n, C, H, W]."""
        confidences: Tensor = self.model(images).softmax(dim=1)
        return confidences

    def predict(self, paths: Sequence[str | os.PathLike[str]]) -> list[tuple[str, float]]:
        """Class and confidence of image files."""
        found: list[tuple[int, float]] = []
        for start in range(0, len(paths), INFERENCE_BATCH):
            some = paths[start : start + INFERENCE_BATCH]
            images = np.stack([read_image(Path(path), self.size, self.channels) for path in some])
            confidence, best = self(torch.from_numpy(images)).max(dim=1)
            found += zip(best.tolist(), confidence.tolist(), strict=True)
        return [(self.classes[m], p) for m, p in found]


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
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{path} is damaged, or not a fedseal model ({type(error).__name__}).") from error
    return Classifier(model.eval(), classes, channels, size)
