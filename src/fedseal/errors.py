"""Errors that are meant for users."""

import re
from typing import ClassVar

# Control characters, and characters that change the direction of text or start a line.
UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printable(text: object) -> str:
    """One line that every terminal can show: a name in it cannot move the cursor or forge another line."""
    safe = str(text).encode("utf-8", "backslashreplace").decode()
    return UNSAFE.sub(lambda found: repr(found[0])[1:-1], safe)


class UserError(Exception):
    """One clear sentence that names the file, key or client and says what to do."""

    exit_code: ClassVar[int] = 2

    def __str__(self) -> str:
        return printable(super().__str__())


class FolderInUseError(UserError):
    """Another process is training in the folder: try again later."""

    exit_code: ClassVar[int] = 3


class SuperLinkLostError(UserError):
    """Flower's SuperLink has ended, or does not answer: the same command with --resume starts it again."""

    exit_code: ClassVar[int] = 75  # EX_TEMPFAIL in sysexits.h
