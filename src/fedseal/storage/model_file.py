"""A trained model as one safetensors file; its header holds everything that is needed to use it."""

import json
import os
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors

from fedseal import weights
from fedseal.config.sections import ModelSettings
from fedseal.errors import UserError
from fedseal.frozen import FrozenNetwork, build_classifier
from fedseal.label_shift import Calibration, calibrate
from fedseal.learn import predict_logits
from fedseal.models import Network, weight_bytes
from fedseal.run_setup import RunSetup
from fedseal.storage.classifier import Classifier
from fedseal.storage.model_header import read_header
from fedseal.system.checksums import add_checksum, verify_checksum
from fedseal.system.files import read_file, write_atomic
from fedseal.system.own_code import hash_source, source_hash, split_path


def save_model(path: Path, values: weights.Tensors, setup: RunSetup) -> None:
    """Writes weights as safetensors, with network, classes, input format and calibration in the header."""
    pool, server = setup.federation.pool, setup.server()
    logits = predict_logits(server, values, server.validation)
    calibration = calibrate(logits, server.validation.labels)
    model = setup.config.model
    values, prefix = setup.whole_model(values), "backbone." if model.freeze else ""
    about = {
        # Weights are in this file, and paths of this machine are of no use elsewhere.
        "model": model.model_dump() | {"weights": "", "name": Path(model.name).name},
        "code": source_hash(model.name),
        "classes": pool.classes,
        "channels": pool.pixels.shape[1],
        "size": pool.pixels.shape[2],
        "mean": values[f"{prefix}mean"].flatten().tolist(),
        "std": values[f"{prefix}std"].flatten().tolist(),
        "calibration": calibration.to_dict(),
        "version": version("fedseal"),
    }
    write_atomic(path, add_checksum(save_safetensors(values, {"fedseal": json.dumps(about)})))


def load(run: str | os.PathLike[str], network: str | os.PathLike[str] | None = None) -> Classifier:
    """The model of a run folder, or of a model file.

    If it has your own network, `network` is the Python file that builds it. A run folder names that file; a
    model file alone does not, so that it cannot make this machine run code.
    """
    path = Path(run)
    if path.is_dir():
        network = network or _own_network(path / "config.toml")
        path = path / "model.safetensors"
    if not path.exists():
        raise UserError(f"There is no model {path}: give the folder of a finished run.")
    with model_errors(path):
        data = read_file(path)
        about = read_header(verify_checksum(data))
        values = load_safetensors(data)
        classes, channels, size = tuple(about["classes"]), int(about["channels"]), int(about["size"])
        settings = ModelSettings.model_validate(about["model"])
        if own := split_path(settings.name):
            name = f"{_check_network(path, own[0].name, network, about['code'])}:{own[1]}"
            settings = settings.model_copy(update={"name": name})
        if weight_bytes(settings, channels, size, len(classes)) > len(data):
            raise ValueError("the header describes a larger network")  # it could need all memory
        model = build_classifier(
            settings,
            channels=channels,
            size=size,
            classes=len(classes),
            mean=about["mean"],
            std=about["std"],
        )
        if not weights.same_layout(values, model.state_dict()):
            raise ValueError("the weights are those of another network")
        weights.set_weights(model, values)
        calibration = Calibration.from_dict(about["calibration"]) if "calibration" in about else None
    if not weights.all_finite(values):
        raise UserError(f"{path} has NaN or infinite weights: train it again with a lower learning rate.")
    return Classifier(model.eval(), classes, channels, size, calibration)


def read_classes(path: Path) -> tuple[str, ...]:
    """The names of a model's classes. The network is not built."""
    with model_errors(path):
        return tuple(read_header(verify_checksum(read_file(path)))["classes"])


@contextmanager
def model_errors(path: Path) -> Iterator[None]:
    """Turns errors of a model file into one sentence."""
    try:
        yield
    except OSError as error:
        raise UserError(f"Cannot read {path} ({error.strerror}): check the file, then try again.") from error
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{path} is damaged, or not a fedseal model ({type(error).__name__}).") from error


def _own_network(config: Path) -> Path | None:
    """The file of your own network that a run's configuration names; None for a built-in one."""
    try:
        found = split_path(tomllib.loads(read_file(config).decode())["model"]["name"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found[0] if found else None


def _check_network(path: Path, name: str, network: str | os.PathLike[str] | None, expected: str) -> Path:
    """The file of your own network, if it is the one that was trained."""
    if network is None:
        raise UserError(f"{path} has a network of your own: give its file {name} with --network.")
    if hash_source(Path(network)) != expected:
        raise UserError(f"{network} differs from the {name} that trained {path}: give that file.")
    return Path(network)


def trained_weights(model: Network | FrozenNetwork) -> weights.Tensors:
    """The weights that training has changed: with `model.freeze`, those of the last layer."""
    return weights.get_weights(model.head if isinstance(model, FrozenNetwork) else model)
