"""Your own Python files: `FILE.py:name` in a configuration.

A file is loaded only if you name it, never because another machine or a model file asks for it.
"""

import hashlib
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from importlib.abc import SourceLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

from fedseal.errors import UserError
from fedseal.system.files import read_file

_pinned: dict[Path, str] = {}  # files whose text does not change for this process
_loaded: set[str] = set()
_FILE_AND_NAME = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_]\w*)")


def split_path(text: str) -> tuple[Path, str] | None:
    """The file and the name in `FILE.py:name`; None for any other text."""
    match = _FILE_AND_NAME.fullmatch(text)
    return (Path(match["file"]), match["name"]) if match else None


def make_absolute(text: str) -> str:
    """`FILE.py:name` with an absolute path; any other text as it is."""
    found = split_path(text)
    return f"{found[0].resolve()}:{found[1]}" if found else text


def source_hash(text: str) -> str:
    """A hash of the file in `FILE.py:name`; empty for any other text."""
    found = split_path(text)
    return hash_source(found[0]) if found else ""


def hash_source(path: Path) -> str:
    """A hash of a Python file."""
    return hashlib.sha256(_read(path).encode()).hexdigest()


def load_own(path: Path, name: str) -> Any:
    """The object of that name in a Python file; None if the file does not define it."""
    return getattr(_load(path, _read(path)), name, None)


def read_texts(*names: str) -> dict[Path, str]:
    """The texts of the files in `FILE.py:name`; other names are ignored."""
    return {found[0]: _read(found[0]) for name in names if (found := split_path(name))}


def pin(texts: Mapping[Path, str]) -> None:
    """From now on, files have these texts in this process."""
    _pinned.update(texts)


@contextmanager
def pinned(*names: str) -> Iterator[None]:
    """Keeps the files in `FILE.py:name` as they are now, so that you may edit them while a run goes on."""
    before = dict(_pinned)
    pin(read_texts(*names))
    try:
        yield
    finally:
        _pinned.clear()
        pin(before)


def find_line(error: BaseException) -> str:
    """The last line of your own files that an error passed through; empty if there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in _loaded]
    return f"{frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name}" if frames else ""


def _read(path: Path) -> str:
    if path in _pinned:
        return _pinned[path]
    try:
        return read_file(path).decode()
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a null character in the name
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"Cannot read the Python file {path} ({reason}).") from error


class _Loader(SourceLoader):
    """Imports exactly the text that was hashed, and leaves no compiled file beside it."""

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.text = path, text

    def get_filename(self, fullname: str) -> str:
        return str(self.path)

    def get_data(self, path: str | bytes) -> bytes:
        return self.text.encode()


@lru_cache
def _load(path: Path, text: str) -> Any:
    unique = f"fedseal_own_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    loader = _Loader(path, text)
    spec = spec_from_loader(unique, loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[unique] = module  # pydantic resolves annotations there
    _loaded.add(str(path))
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UserError(f"Cannot load {path} ({type(error).__name__}: {error}).") from error
    return module
