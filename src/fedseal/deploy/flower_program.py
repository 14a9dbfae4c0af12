"""Runs one of Flower's programs in a process that ends with its parent; the SuperLink gets the guard.

python -m fedseal.deploy.flower_program superlink|supernode OPTIONS...
"""

import sys

from flwr.superlink import extensions
from flwr.superlink.cli.flower_superlink import flower_superlink
from flwr.supernode.cli.flower_supernode import flower_supernode
from starlette.middleware import Middleware

from fedseal.deploy.guard import Guard
from fedseal.system.processes import end_with_parent


def main() -> None:
    """Runs the program that the first argument names."""
    end_with_parent()
    if sys.argv.pop(1) == "superlink":
        extensions.get_middleware = lambda: (Middleware(Guard),)
        flower_superlink()
    else:
        flower_supernode()


if __name__ == "__main__":
    main()
