"""Finds a method by name, or loads your own from a file: `method = "my_file.py:MyMethod"`."""

import hashlib
import inspect
import re
import sys
from functools import lru_cache
from importlib.abc import SourceLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

from fedseal.core import Method
from fedseal.errors import UserError
from fedseal.methods import METHODS

FILE_AND_CLASS = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_]\w*)")


def find_method(method: str) -> type[Method]:
    """The class for a name in `METHODS`, or for FILE.py:Class."""
    if method in METHODS:
        return METHODS[method]
    path, name = _split(method)
    return _load(path, _read(path), name)


def section_name(method: str) -> str:
    """The name of a method's section in the configuration: its own name, or that of its class."""
    return method if method in METHODS else _split(method)[1]


def absolute_method(method: str) -> str:
    """The same method with an absolute path, if it is a file."""
    if not FILE_AND_CLASS.fullmatch(method):
        return method
    path, name = _split(method)
    return f"{path.resolve()}:{name}"


def source_hash(method: str) -> str:
    """A hash of the file of your own method; empty for a built-in method."""
    return "" if method in METHODS else hashlib.sha256(_read(_split(method)[0]).encode()).hexdigest()


def _split(method: str) -> tuple[Path, str]:
    match = FILE_AND_CLASS.fullmatch(method)
    if match is None:
        raise UserError(f"method must be one of {', '.join(METHODS)}, or FILE.py:Class, not {method!r}.")
    return Path(match["file"]), match["name"]


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"Cannot read the method's file {path} ({reason}).") from error


class _Loader(SourceLoader):
    """Imports exactly the text that was hashed, and leaves no compiled file beside it."""

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.text = path, text

    def get_filename(self, fullname: str) -> str:
        return str(self.path)

    def get_data(self, path: str | bytes) -> bytes:
        return self.text.encode()


@lru_cache
def _load(path: Path, text: str, name: str) -> type[Method]:
    unique = f"fedseal_own_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    loader = _Loader(path, text)
    spec = spec_from_loader(unique, loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[unique] = module  # pydantic resolves annotations there
    try:
        loader.exec_module(module)
    except Exception as error:
        raise UserError(f"Cannot load {path} ({type(error).__name__}: {error}).") from error
    found = getattr(module, name, None)
    if not isinstance(found, type) or not issubclass(found, Method):
        raise UserError(f"{path} defines no class {name} that inherits from fedseal.core.Method.")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise UserError(f"{name} in {path} must also define {missing}.")
    return found
