"""The guard in front of Flower's SuperLink.

A SuperLink serves clients and operators on one port. Without the guard, anyone who reaches the port could
start runs, register keys and act as the server.
"""

import base64
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

GUARD_FILE = "FEDSEAL_GUARD"  # environment variable with the path of the file of accepted keys
MAX_REQUEST_BYTES = 64_000_000  # of one HTTP request; Flower splits arrays into chunks of 5 MB

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guard:
    """ASGI middleware: clients need a registered key, and all other paths accept this machine only."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 200 if scope["type"] == "lifespan" else self.check(scope)
        if status == 200:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    def check(self, scope: Scope) -> int:
        """The HTTP status of the refusal, or 200."""
        headers = dict(scope["headers"])
        if scope["path"].startswith("/v1/fleet/"):
            if (
                int(headers.get(b"content-length", b"0")) > MAX_REQUEST_BYTES
                or b"transfer-encoding" in headers
            ):
                return 413
            return self.check_key(headers.get(b"flwr-public-key", b""))
        sender = scope["client"][0] if scope.get("client") else ""
        local = sender in ("127.0.0.1", "::1") or sender == (scope.get("server") or [None])[0]
        return 200 if local else 404

    def check_key(self, key: bytes) -> int:
        """503 while the server is starting, 403 for a key that is not registered, or 200."""
        try:
            keys = json.loads(Path(os.environ[GUARD_FILE]).read_text("utf-8"))
        except FileNotFoundError:
            return 503
        return 200 if keys is None or key.decode("latin-1") in keys else 403


def admit_clients(path: Path, keys: list[bytes] | None) -> None:
    """Admits clients from now on: those with one of these keys, or everyone if `keys` is None."""
    text = json.dumps(None if keys is None else [base64.b64encode(key).decode() for key in keys])
    work = path.with_suffix(".new")
    work.write_text(text, "utf-8")
    work.replace(path)
