"""The guard in front of Flower's SuperLink.

A SuperLink serves clients and operators on one port. Without the guard, anyone who reaches the port could
start runs, register keys and act as the server. A client could also fill the SuperLink's memory, which keeps
every upload until the server has fetched it. The guard refuses unsuitable versions of fedseal, too.
"""

import base64
import hashlib
import json
import os
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.proto.fleet_pb2 import PullMessagesResponse, PushMessagesRequest
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from fedseal.system.version import compatible, fedseal_version

GUARD_FILE = "FEDSEAL_GUARD"  # environment variable with the path of the file of accepted keys
VERSION_HEADER = "fedseal-version"  # of clients' requests, and of the answer that refuses a version
MAX_REFUSED = 100  # clients with an unsuitable version that the server is told about

MAX_URL_BYTES = 200
MAX_BODY_BYTES = 64_000  # of a request that carries no object; it can name about 900 objects
MAX_OBJECT_BYTES = 6_000_000  # Flower splits arrays into objects of 5 MB
OBJECT_NAME = re.compile("[0-9a-f]{64}")  # SHA-256
ANNOUNCEMENT_COST = 10  # the SuperLink keeps about ten times the bytes in which a client names its objects

FLEET = "/v1/fleet/"  # the part of the SuperLink for clients
FETCH, ANNOUNCE, UPLOAD = f"{FLEET}pull-messages", f"{FLEET}push-messages", f"{FLEET}push-object"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass
class Allowance:
    """What a client may upload in answer to the request that it has fetched last."""

    left: int = 0  # bytes
    request: str = ""  # its name
    reply: bytes = b""  # a hash of the announcement of its reply; it can be repeated, but not changed


class Guard:
    """ASGI middleware: clients need a registered key, and all other paths accept this machine only."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.refused: set[str] = set()  # of which the server has been told
        self.allowances: dict[str, Allowance] = {}  # by key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        status = self.check(scope)
        if status == 200 and scope["path"].startswith(FLEET):
            await self.serve_client(scope, receive, send)
        elif status == 200:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await refuse(send, status)

    def check(self, scope: Scope) -> int:
        """The HTTP status of the refusal, or 200."""
        headers = dict(scope["headers"])
        if len(scope.get("raw_path") or b"") + len(scope.get("query_string", b"")) > MAX_URL_BYTES:
            return 414
        if scope["path"].startswith(FLEET):
            if len(client_keys(scope)) > 1:
                return 400
            limit = MAX_OBJECT_BYTES if scope["path"] == UPLOAD else MAX_BODY_BYTES
            if body_size(scope) > limit or b"transfer-encoding" in headers:
                return 413
            version = headers.get(VERSION_HEADER.encode(), b"").decode("latin-1")
            return self.check_client(client_key(scope), version)
        sender = scope["client"][0] if scope.get("client") else ""
        local = sender in ("127.0.0.1", "::1") or sender == (scope.get("server") or [None])[0]
        return 200 if local else 404

    def check_client(self, key: str, version: str) -> int:
        """503 while the server is starting, 403 for an unknown key, 426 for an unsuitable version, or 200."""
        path = Path(os.environ[GUARD_FILE])
        try:
            names = json.loads(path.read_text("utf-8"))["names"]
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

    async def serve_client(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a client's request on if its allowance suffices.

        Bytes count only if the SuperLink accepts them.
        """
        if not is_signed(scope):
            await refuse(send, 401)
            return
        key, path, cost = client_key(scope), scope["path"], 0
        allowance = self.allowances.get(key, Allowance())
        if path == ANNOUNCE:
            body = await read_body(receive)
            receive, cost = replay(body, receive), ANNOUNCEMENT_COST * len(body)
            reply = hashlib.sha256(body).digest()
            if not is_one_reply(body, allowance.request) or allowance.reply not in (b"", reply):
                await refuse(send, 409)
                return
            allowance.reply = reply
        elif path == UPLOAD:
            cost = body_size(scope)
        if cost > allowance.left:
            await discard_body(receive)  # otherwise the client, which is still sending, misses the answer
            await refuse(send, 413)
            return
        allowance.left -= cost  # at once, because requests can be simultaneous
        accepted, fetched = False, b""

        async def watch(message: MutableMapping[str, Any]) -> None:
            nonlocal accepted, fetched
            if message["type"] == "http.response.start":
                accepted = message["status"] == 200
            elif accepted and path == FETCH:
                fetched += message.get("body", b"")
                if fetched and not message.get("more_body", False):  # it is empty if there is no request
                    self.allowances[key] = Allowance(read_upload_limit(), request_name(fetched))
            await send(message)

        try:
            await self.app(scope, receive, watch)
        finally:
            if not accepted:
                allowance.left += cost


async def refuse(send: Send, status: int) -> None:
    """Answers with a status only."""
    headers = [(VERSION_HEADER.encode(), fedseal_version().encode())] if status == 426 else []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def client_key(scope: Scope) -> str:
    return next(iter(client_keys(scope)), "")


def client_keys(scope: Scope) -> list[str]:
    """All keys that a request names. Flower checks its signature against the first one."""
    return [value.decode("latin-1") for name, value in scope["headers"] if name == b"flwr-public-key"]


def is_signed(scope: Scope) -> bool:
    """True if a request is signed with its key. The SuperLink also checks when it was signed.

    Otherwise whoever knows a client's public key could use up its allowance.
    """
    headers = dict(scope["headers"])
    try:
        key = bytes_to_public_key(base64.b64decode(client_key(scope)))
        signature = base64.b64decode(headers[b"flwr-signature"])
        return verify_signature(key, headers[b"flwr-timestamp"], signature)
    except (KeyError, ValueError, TypeError):
        return False


def body_size(scope: Scope) -> int:
    return int(dict(scope["headers"]).get(b"content-length", b"0"))


async def read_body(receive: Receive) -> bytes:
    """The body of a request, whose size has been checked."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


async def discard_body(receive: Receive) -> None:
    while (await receive()).get("more_body", False):
        pass


def replay(body: bytes, receive: Receive) -> Receive:
    """Makes the application receive a body that has been read already."""
    first = True

    async def receive_again() -> MutableMapping[str, Any]:
        nonlocal first
        if not first:
            return await receive()
        first = False
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again


def request_name(body: bytes) -> str:
    """The name of the request that the SuperLink sends to a client."""
    messages = PullMessagesResponse.FromString(body).messages_list
    return str(messages[0].metadata.message_id) if messages else ""


def is_one_reply(body: bytes, request: str) -> bool:
    """True if a client announces one reply to this request, and the SuperLink can forget the reply's objects.

    A late copy of the reply to an earlier request does not count.
    """
    try:
        announced = PushMessagesRequest.FromString(body)
    except DecodeError:
        return False
    messages, trees = announced.messages_list, announced.message_object_trees
    if not len(messages) == len(trees) == 1:
        return False
    about, names = messages[0].metadata, [part.object_id for part in iterate_object_tree(trees[0])]
    # The SuperLink would multiply, or never forget, what is below a name that comes twice.
    if len(set(names)) < len(names) or not all(OBJECT_NAME.fullmatch(name) for name in names):
        return False
    return bool(about.message_id == trees[0].object_id and about.reply_to_message_id == request != "")


def refused_file(guard_file: Path) -> Path:
    """Where the guard tells the server which clients it refused because of their version, one per line."""
    return guard_file.with_name("refused.txt")


def admit_clients(path: Path, names: Mapping[bytes, str] | None, upload_limit: int) -> None:
    """Admits clients from now on: those with one of these keys, or everyone if `names` is None.

    Each may upload this number of bytes in answer to a request.
    """
    listed = None if names is None else {base64.b64encode(key).decode(): name for key, name in names.items()}
    work = path.with_suffix(".new")
    work.write_text(json.dumps({"names": listed, "upload_limit": upload_limit}), "utf-8")
    work.replace(path)


def read_upload_limit() -> int:
    """The number of bytes that `admit_clients` has set."""
    return int(json.loads(Path(os.environ[GUARD_FILE]).read_text("utf-8"))["upload_limit"])
