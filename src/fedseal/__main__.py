"""Entry point of `fedseal` and `python -m fedseal`: its import takes no time, that of the command line does."""

from fedseal.system.lazy import import_object
from fedseal.system.processes import leave_on_signals


def main() -> None:
    """Runs the command line."""
    leave_on_signals()
    import_object("fedseal.cli.main:main")()


if __name__ == "__main__":
    main()
