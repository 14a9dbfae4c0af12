"""The guard in front of Flower's SuperLink.

A SuperLink serves clients and operators on one port. Without the guard, anyone who reaches the port could
start runs, register keys and act as the server. The guard also refuses unsuitable versions of fedseal.
"""

import base64
import json
import os
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from fedseal.system.version import compatible, fedseal_version

GUARD_FILE = "FEDSEAL_GUARD"  # environment variable with the path of the file of accepted keys
MAX_REQUEST_BYTES = 64_000_000  # of one HTTP request; Flower splits arrays into chunks of 5 MB
VERSION_HEADER = "fedseal-version"  # of clients' requests, and of the answer that refuses a version
MAX_REFUSED = 100  # clients with an unsuitable version that the server is told about

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guard:
    """ASGI middleware: clients need a registered key, and all other paths accept this machine only."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.refused: set[str] = set()  # of which the server has been told

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 200 if scope["type"] == "lifespan" else self.check(scope)
        if status == 200:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(VERSION_HEADER.encode(), fedseal_version().encode())] if status == 426 else []
            await send({"type": "http.response.start", "status": status, "headers": headers})
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
            key = headers.get(b"flwr-public-key", b"").decode("latin-1")
            return self.check_client(key, headers.get(VERSION_HEADER.encode(), b"").decode("latin-1"))
        sender = scope["client"][0] if scope.get("client") else ""
        local = sender in ("127.0.0.1", "::1") or sender == (scope.get("server") or [None])[0]
        return 200 if local else 404

    def check_client(self, key: str, version: str) -> int:
        """503 while the server is starting, 403 for an unknown key, 426 for an unsuitable version, or 200."""
        path = Path(os.environ[GUARD_FILE])
        try:
            names = json.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            return 503
        if names is not None and key not in names:
            return 403
        if compatible(version):
            return 200
        known = version if re.fullmatch(r"[\w.+-]{1,40}", version) else "of an unknown version"
        line = f"{names[key] if names else 'a client'} has fedseal {known}\n"
        if line not in self.refused and len(self.refused) < MAX_REFUSED:
            self.refused.add(line)
            with refused_file(path).open("a", encoding="utf-8") as file:
                file.write(line)
        return 426


def refused_file(guard_file: Path) -> Path:
    """Where the guard tells the server which clients it refused because of their version, one per line."""
    return guard_file.with_name("refused.txt")


def admit_clients(path: Path, names: Mapping[bytes, str] | None) -> None:
    """Admits clients from now on: those with one of these keys, or everyone if `names` is None."""
    listed = None if names is None else {base64.b64encode(key).decode(): name for key, name in names.items()}
    work = path.with_suffix(".new")
    work.write_text(json.dumps(listed), "utf-8")
    work.replace(path)
