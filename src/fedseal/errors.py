"""Errors that are meant for users."""

import re
from typing import ClassVar


class UserError(Exception):
    """One clear sentence that names the file, key or client and says what to do."""

    exit_code: ClassVar[int] = 2

    def __str__(self) -> str:
        """One line that every terminal can show, whatever names of files are in it."""
        text = super().__str__().encode("utf-8", "backslashreplace").decode()
        return re.sub(r"[\x00-\x1f\x7f-\x9f]", lambda found: repr(found[0])[1:-1], text)


class FolderInUseError(UserError):
    """Another process is training in the folder: try again later."""

    exit_code: ClassVar[int] = 3
