"""Modules that are loaded when they are first used: PyTorch takes seconds, and `--help` needs none of it."""

from importlib import import_module
from typing import Any


class Later:
    """Stands for a module of this package."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, key: str) -> Any:
        return getattr(import_module(f"fedseal.{self._name}"), key)
