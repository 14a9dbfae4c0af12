"""Finds a method by name, or loads your own from a file: `method = "my_file.py:MyMethod"`."""

import inspect
from pathlib import Path

from fedseal.core import Method
from fedseal.errors import UserError
from fedseal.methods import METHODS
from fedseal.system import own_code


def find_method(method: str) -> type[Method]:
    """The class for a name in `METHODS`, or for FILE.py:Class."""
    if method in METHODS:
        return METHODS[method]
    path, name = _split(method)
    found = own_code.load_own(path, name)
    if not isinstance(found, type) or not issubclass(found, Method):
        raise UserError(f"{path} defines no class {name} that inherits from fedseal.core.Method.")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise UserError(f"{name} in {path} must also define {missing}.")
    return found


def section_name(method: str) -> str:
    """The name of a method's section in the configuration: its own name, or that of its class."""
    return method if method in METHODS else _split(method)[1]


def _split(method: str) -> tuple[Path, str]:
    found = own_code.split_path(method)
    if found is None:
        raise UserError(f"method must be one of {', '.join(METHODS)}, or FILE.py:Class, not {method!r}.")
    return found
