"""Errors that no code has expected: one sentence for the user, and all details in a file."""

import os
import platform
import sys
import tempfile
import traceback
from importlib.metadata import version

EXIT_CODE = 70  # EX_SOFTWARE in sysexits.h

OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "not enough memory")


def is_out_of_memory(error: BaseException) -> bool:
    """True if Python, NumPy or PyTorch could not get enough memory."""
    allocation = isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)
    return isinstance(error, MemoryError) or allocation


def describe_crash(error: BaseException) -> str:
    """One sentence for the user, which names a new file with the command and the traceback."""
    details = [
        f"fedseal {version('fedseal')}, Python {platform.python_version()}, {platform.platform()}",
        f"command: {sys.argv}",
        "".join(traceback.format_exception(error)),
    ]
    what = type(error).__name__
    try:
        handle, path = tempfile.mkstemp(prefix="fedseal-error-", suffix=".log")
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write("\n".join(details))
    except OSError:
        return f"An unexpected error ended the command ({what}), and its details could not be written."
    return f"An unexpected error ended the command ({what}). Please report it, with the details in {path}."
