"""Files with secrets: private keys and passphrases."""

import os
import stat
import sys
from pathlib import Path

from fedseal.errors import UserError
from fedseal.system.files import read_file

MAX_BYTES = 65_536
DESCRIPTORS = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")  # of files that this process was started with


def read_secret(path: Path) -> bytes:
    """The content of a file that only its owner can read; "-" and /dev/fd/N read a pipe."""
    if str(path) == "-":
        return sys.stdin.buffer.read(MAX_BYTES)
    if str(path).startswith(DESCRIPTORS) and not path.is_file():
        with path.open("rb") as file:
            return file.read(MAX_BYTES)
    check_secret(path)
    return read_file(path)


def check_secret(path: Path) -> None:
    """Raises if the group or others may read or change a file."""
    if os.name == "posix" and stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise UserError(f"Other users may read or change {path}, which is secret: run 'chmod 600 {path}'.")
