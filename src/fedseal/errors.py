"""Errors that are meant for users."""

from typing import ClassVar


class UserError(Exception):
    """One clear sentence that names the file, key or client and says what to do."""

    exit_code: ClassVar[int] = 2


class FolderInUseError(UserError):
    """Another process is training in the folder: try again later."""

    exit_code: ClassVar[int] = 3
