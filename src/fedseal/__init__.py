"""Semi-supervised federated learning with the labels at the server."""

from fedseal.api import Classifier, Result, evaluate, load, train
from fedseal.config import Config, load_config
from fedseal.errors import UserError

__all__ = ["Classifier", "Config", "Result", "UserError", "evaluate", "load", "load_config", "train"]
