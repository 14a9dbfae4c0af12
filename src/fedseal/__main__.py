"""Entry point of `fedseal`: handles signals before the command line is imported, which takes a while."""

from fedseal.system.lazy import import_object
from fedseal.system.processes import leave_on_signals


def main() -> None:
    """Runs the command line."""
    leave_on_signals()
    import_object("fedseal.cli.main:main")()


if __name__ == "__main__":
    main()
