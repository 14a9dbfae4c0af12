"""Semi-supervised federated learning with the labels at the server."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedseal.api import Result, evaluate, train
    from fedseal.config import Config, load_config
    from fedseal.errors import UserError
    from fedseal.model_file import Classifier, load

__all__ = ["Classifier", "Config", "Result", "UserError", "evaluate", "load", "load_config", "train"]

_WHERE = {
    **dict.fromkeys(("Result", "evaluate", "train"), "api"),
    **dict.fromkeys(("Config", "load_config"), "config"),
    **dict.fromkeys(("Classifier", "load"), "model_file"),
    "UserError": "errors",
}


def __getattr__(name: str) -> Any:
    """Loads what is asked for, and PyTorch with it: Flower's own processes need neither."""
    if name not in _WHERE:
        raise AttributeError(f"module 'fedseal' has no attribute {name!r}")
    return getattr(import_module(f"fedseal.{_WHERE[name]}"), name)
