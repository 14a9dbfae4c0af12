"""The methods by name. Adding one is adding a file and a line here; one's own need no line.

A method of one's own is a class in any file: `method = "my_file.py:MyMethod"` (docs/new-method.md).
"""

import hashlib
import inspect
import re
import sys
from functools import lru_cache
from importlib.abc import SourceLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import fedseal.machine  # noqa: F401 - before a file of one's own can compute
from fedseal.core import Method
from fedseal.errors import UserError
from fedseal.methods.fedavg_fixmatch import FedAvgFixMatch
from fedseal.methods.fedavg_sl import FedAvgSL
from fedseal.methods.fedavg_uda import FedAvgUDA
from fedseal.methods.fedmatch import FedMatch
from fedseal.methods.fedrgd import FedRGD
from fedseal.methods.fedseal import FedSEAL
from fedseal.methods.semifl import SemiFL
from fedseal.methods.server_sl import ServerSL

METHODS: dict[str, type[Method]] = {
    "fedseal": FedSEAL,
    "server-sl": ServerSL,
    "fedavg-sl": FedAvgSL,
    "fedavg-fixmatch": FedAvgFixMatch,
    "fedavg-uda": FedAvgUDA,
    "fedmatch": FedMatch,
    "fedrgd": FedRGD,
    "semifl": SemiFL,
}

OWN = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_]\w*)")


def find(method: str) -> type[Method]:
    """A method's class by the word in the configuration: a name, or FILE.py:Class."""
    if method in METHODS:
        return METHODS[method]
    path, name = _parts(method)
    return _load(path, _read(path), name)


def section(method: str) -> str:
    """The name of a method's section in the configuration: its own name, or that of its class."""
    return method if method in METHODS else _parts(method)[1]


def absolute(method: str) -> str:
    """The same method, wherever one is."""
    if not OWN.fullmatch(method):
        return method
    path, name = _parts(method)
    return f"{path.resolve()}:{name}"


def code(method: str) -> str:
    """A hash of the file that a method of one's own is in; empty for the others."""
    return "" if method in METHODS else hashlib.sha256(_read(_parts(method)[0]).encode()).hexdigest()


def _parts(method: str) -> tuple[Path, str]:
    match = OWN.fullmatch(method)
    if match is None:
        raise UserError(f"method must be one of {', '.join(METHODS)}, or FILE.py:Class, not {method!r}.")
    return Path(match["file"]), match["name"]


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise UserError(f"The method's file {path} cannot be read ({reason}).") from error


class _Loader(SourceLoader):
    """Imports the very text that was read and hashed, and leaves no compiled file beside the user's."""

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
    sys.modules[unique] = module  # where pydantic looks up what annotations name
    try:
        loader.exec_module(module)
    except Exception as error:
        raise UserError(f"{path} cannot be loaded ({type(error).__name__}: {error}).") from error
    found = getattr(module, name, None)
    if not isinstance(found, type) or not issubclass(found, Method):
        raise UserError(f"{path} has no class {name} that is a fedseal.core.Method.")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise UserError(f"{name} in {path} lacks {missing}: a method needs all of them.")
    return found
