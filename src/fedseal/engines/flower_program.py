"""Starts one of Flower's own programs, as a process that ends with the one that started it.

    python -m fedseal.engines.flower_program superlink|supernode OPTIONS...

The SuperLink gets a guard: by itself it would let anybody who reaches its port start runs, register keys and
take over the server's part, since one port serves clients and operators alike.
"""

import base64
import json
import os
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from fedseal.processes import end_with_parent

GUARD = "FEDSEAL_GUARD"  # names the guard's file in the environment
LARGEST = 64_000_000  # bytes of one HTTP request; Flower cuts arrays into pieces of 5 MB

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guard:
    """Lets clients with a registered key at the clients' part of the SuperLink, and nobody at the rest but
    processes of the same machine. It reads the keys from a file that appears when all is ready."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 200 if scope["type"] == "lifespan" else self.judge(scope)
        if status == 200:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    def judge(self, scope: Scope) -> int:
        """The HTTP status of a refusal, or 200."""
        headers = dict(scope["headers"])
        if scope["path"].startswith("/v1/fleet/"):
            if int(headers.get(b"content-length", b"0")) > LARGEST or b"transfer-encoding" in headers:
                return 413
            return self.known(headers.get(b"flwr-public-key", b""))
        here = scope["client"][0] if scope.get("client") else ""
        local = here in ("127.0.0.1", "::1") or here == (scope.get("server") or [None])[0]
        return 200 if local else 404

    def known(self, key: bytes) -> int:
        """503 as long as nothing is ready, 403 for a key that is not registered."""
        try:
            keys = json.loads(Path(os.environ[GUARD]).read_text("utf-8"))
        except FileNotFoundError:
            return 503
        return 200 if keys is None or key.decode("latin-1") in keys else 403


def open_guard(path: Path, keys: list[bytes] | None) -> None:
    """Lets clients in from now on: those with one of these keys, or all for None."""
    text = json.dumps(None if keys is None else [base64.b64encode(key).decode() for key in keys])
    work = path.with_suffix(".new")
    work.write_text(text, "utf-8")
    work.replace(path)


def main() -> None:
    """Runs Flower's program by the name of the first argument."""
    end_with_parent()
    kind = sys.argv.pop(1)
    if kind == "superlink":
        from flwr.superlink import extensions
        from flwr.superlink.cli.flower_superlink import flower_superlink
        from starlette.middleware import Middleware

        extensions.get_middleware = lambda: (Middleware(Guard),)
        flower_superlink()
    else:
        from flwr.supernode.cli.flower_supernode import flower_supernode

        flower_supernode()


if __name__ == "__main__":
    main()
