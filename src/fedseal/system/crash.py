"""Errors that no code has expected: one sentence for the user, and all details in a file."""

import os
import platform
import sys
import tempfile
import traceback
from importlib.metadata import version

from fedseal.system.own_code import find_line

EXIT_CODE = 70  # EX_SOFTWARE in sysexits.h

NOT_ENOUGH_MEMORY = "There is not enough memory: lower data.size, model.width, a batch size or workers."
OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "not enough memory")


def is_out_of_memory(error: BaseException) -> bool:
    """True if Python, NumPy or PyTorch could not get enough memory."""
    allocation = isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)
    return isinstance(error, MemoryError) or allocation


def describe_crash(error: BaseException) -> str:
    """One sentence for the user, which names a new file with the command and the traceback."""
    what = type(error).__name__
    if path := _write_details(error):
        return (
            f"An unexpected error ended the command ({what}). Please report it, with the details in {path}."
        )
    return f"An unexpected error ended the command ({what}), and its details could not be written."


def describe_own_error(error: BaseException) -> str:
    """One sentence about an error in your own method or network; empty if it came from elsewhere."""
    line = find_line(error)
    if not line:
        return ""
    path = _write_details(error)
    return f"{line}: {type(error).__name__}: {error}{f' (details in {path})' if path else ''}."


def _write_details(error: BaseException) -> str:
    """The name of a new file with the command and the traceback; empty if it cannot be written."""
    details = [
        f"fedseal {version('fedseal')}, Python {platform.python_version()}, {platform.platform()}",
        f"command: {sys.argv}",
        "".join(traceback.format_exception(error)),
    ]
    try:
        handle, path = tempfile.mkstemp(prefix="fedseal-error-", suffix=".log")
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write("\n".join(details))
    except OSError:
        return ""
    return path
