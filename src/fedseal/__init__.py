"""Semi-supervised federated learning with the labels at the server."""

from fedseal.api import Result, evaluate, train
from fedseal.config import Config, load_config
from fedseal.errors import UserError
from fedseal.model_file import Classifier, load

__all__ = ["Classifier", "Config", "Result", "UserError", "evaluate", "load", "load_config", "train"]
