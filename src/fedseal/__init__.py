"""Semi-supervised federated learning with the labels at the server."""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fedseal.system.lazy import import_object

if TYPE_CHECKING:
    from fedseal.config.config import Config
    from fedseal.config.load import load_config
    from fedseal.core import PreparationStep
    from fedseal.errors import UserError
    from fedseal.rounds import ClientDone, Event, LeftOut, RoundDone
    from fedseal.storage.classifier import Classifier, Predictions
    from fedseal.storage.export import export
    from fedseal.storage.model_file import load
    from fedseal.storage.run_folder import Result
    from fedseal.training.evaluate import evaluate
    from fedseal.training.observers import Observer
    from fedseal.training.train import train

__all__ = [
    "Classifier",
    "ClientDone",
    "Config",
    "Event",
    "LeftOut",
    "Observer",
    "Predictions",
    "PreparationStep",
    "Result",
    "RoundDone",
    "UserError",
    "evaluate",
    "export",
    "load",
    "load_config",
    "train",
]

_PATHS = {
    "Classifier": "fedseal.storage.classifier:Classifier",
    "ClientDone": "fedseal.rounds:ClientDone",
    "Config": "fedseal.config.config:Config",
    "Event": "fedseal.rounds:Event",
    "LeftOut": "fedseal.rounds:LeftOut",
    "Observer": "fedseal.training.observers:Observer",
    "Predictions": "fedseal.storage.classifier:Predictions",
    "PreparationStep": "fedseal.core:PreparationStep",
    "Result": "fedseal.storage.run_folder:Result",
    "RoundDone": "fedseal.rounds:RoundDone",
    "UserError": "fedseal.errors:UserError",
    "evaluate": "fedseal.training.evaluate:evaluate",
    "export": "fedseal.storage.export:export",
    "load": "fedseal.storage.model_file:load",
    "load_config": "fedseal.config.load:load_config",
    "train": "fedseal.training.train:train",
}


def __getattr__(name: str) -> Any:
    """Imports on first use, since PyTorch takes seconds to load."""
    if name == "__version__":
        return version("fedseal")
    if name not in _PATHS:
        raise AttributeError(f"module 'fedseal' has no attribute {name!r}")
    return import_object(_PATHS[name])


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
