"""This version of fedseal, and which other versions it works with. It imports nothing large."""

from importlib.metadata import version


def fedseal_version() -> str:
    return version("fedseal")


def compatible(other: str) -> bool:
    """True if a server and a client of these versions work together: major and minor number are equal."""
    return other.split(".")[:2] == fedseal_version().split(".")[:2]


def needed_version(other: str) -> str:
    """What to install to work together with another version, such as 0.2.*."""
    return ".".join([*other.split(".")[:2], "*"])
