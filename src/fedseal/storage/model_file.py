"""A trained model as one safetensors file; its header holds everything that is needed to use it."""

import json
import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_safetensors

from fedseal import weights
from fedseal.config.sections import ModelSettings
from fedseal.errors import UserError
from fedseal.label_shift import Calibration, calibrate
from fedseal.learn import predict_logits
from fedseal.models import build_network
from fedseal.run_setup import RunSetup
from fedseal.storage.classifier import Classifier
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
