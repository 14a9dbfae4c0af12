"""Runs Flower's SuperLink behind the guard, in a process that ends with its parent.

python -m fedseal.deploy.flower_program OPTIONS...
"""

from flwr.superlink import extensions
from flwr.superlink.cli.flower_superlink import flower_superlink
from starlette.middleware import Middleware

from fedseal.deploy.guard import Guard
from fedseal.system.processes import end_with_parent


def main() -> None:
    """Runs the SuperLink until it is stopped."""
    end_with_parent()
    extensions.get_middleware = lambda: (Middleware(Guard),)
    flower_superlink()


if __name__ == "__main__":
    main()
