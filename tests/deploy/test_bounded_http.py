"""Idle connections do not use up the server's files."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("flwr")

import uvicorn
from uvicorn.server import ServerState

from fedseal.deploy import bounded_http
from fedseal.deploy.bounded_http import BoundedProtocol
from fedseal.deploy.flower_program import SAFE

HEADERS = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n"


async def application(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await asyncio.sleep(1.5)  # longer than a connection may be idle
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/large":
        await send({"type": "http.response.body", "body": bytes(50_000_000), "more_body": True})
    await send({"type": "http.response.body", "body": b"done"})


@asynccontextmanager
async def serving() -> AsyncIterator[int]:
    """The port of a server with the options of the SuperLink."""
    config = uvicorn.Config(application, log_level="error", **SAFE)  # type: ignore[arg-type]
    config.load()
    state, loop = ServerState(), asyncio.get_running_loop()
    server = await loop.create_server(lambda: BoundedProtocol(config, state, {}), "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def answers(*requests: bytes) -> list[bytes]:
    """What a server answers to requests on simultaneous connections, until it closes them."""

    async def ask(request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        try:
            return await asyncio.wait_for(reader.read(), 60)
        except ConnectionResetError:
            return b""
        finally:
            writer.close()

    async with serving() as port:
        return await asyncio.gather(*map(ask, requests))


def test_a_connection_without_a_request_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_http, "IDLE_SECONDS", 0.5)
    whole = HEADERS + b"Connection: close\r\n\r\n1234"
    *idle, served = asyncio.run(answers(b"", HEADERS, HEADERS + b"\r\n12", whole))
    assert idle == [b"", b"", b""]
    assert b"done" in served
    assert not bounded_http.connections


def test_an_address_has_a_limited_number_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_http, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(bounded_http, "LOCAL", ())
    whole = HEADERS + b"Connection: close\r\n\r\n1234"
    assert sorted(map(bool, asyncio.run(answers(whole, whole, whole)))) == [False, True, True]


def test_a_client_that_does_not_read_its_answer_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_http, "IDLE_SECONDS", 0.5)

    async def ask() -> None:
        async with serving() as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1000)
            writer.write(HEADERS.replace(b"/", b"/large", 1) + b"\r\n1234")
            await asyncio.sleep(1)
            assert bounded_http.connections
            async with asyncio.timeout(60):
                while bounded_http.connections:
                    await asyncio.sleep(0.1)
            writer.close()

    asyncio.run(ask())


def test_an_upgrade_does_not_escape_the_count() -> None:
    """Of connections to an address; uvicorn would hand it over to another protocol."""
    upgrade = (
        b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: a\r\n"
    )
    request = b"GET / HTTP/1.1\r\nHost: a\r\n" + upgrade + b"\r\n"
    closing = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    assert b"done" in asyncio.run(answers(request + closing))[0]
    assert not bounded_http.connections
