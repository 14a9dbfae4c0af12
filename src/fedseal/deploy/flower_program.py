"""Runs Flower's SuperLink behind the guard, in a process that ends with its parent.

python -m fedseal.deploy.flower_program OPTIONS...
"""

import os
import resource
import shutil
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import uvicorn
from flwr.superlink import extensions
from flwr.superlink.cli.flower_superlink import flower_superlink
from starlette.middleware import Middleware

from fedseal.deploy.bounded_http import BoundedProtocol
from fedseal.deploy.guard import Guard
from fedseal.system.processes import end_with_parent

# h11 limits the size of a request's URL and headers. WebSockets would escape the limits on connections. The
# access log would repeat each stranger's URL.
SAFE = {"http": BoundedProtocol, "ws": "none", "access_log": False}


def main() -> None:
    """Runs the SuperLink until it is stopped. If its parent was killed, it removes its own private folder."""
    end_with_parent(partial(shutil.rmtree, os.environ["FLWR_HOME"], ignore_errors=True))
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError):  # not on every system
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))  # each connection is a file
    extensions.get_middleware = lambda: (Middleware(Guard),)
    usual = uvicorn.run

    def run(**options: Any) -> None:
        tls = {"ssl_context_factory": require_tls_13} if options.get("ssl_certfile") else {}
        usual(**options | SAFE | tls)

    uvicorn.run = run  # type: ignore[assignment]
    flower_superlink()


def require_tls_13(config: uvicorn.Config, create: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    """uvicorn's usual settings, without TLS 1.2, which has weaker ciphers. All clients are fedseal's own."""
    context = create()
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


if __name__ == "__main__":
    main()
