"""The one error that users are meant to see."""


class UserError(Exception):
    """One clear sentence that names the culprit (file, key, client) and what to do; exit code 2."""
