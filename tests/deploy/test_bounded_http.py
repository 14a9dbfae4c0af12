"""Idle connections do not use up the server's files."""

import asyncio

import pytest

pytest.importorskip("flwr")

import uvicorn
from uvicorn.server import ServerState

from fedseal.deploy import bounded_http
from fedseal.deploy.bounded_http import BoundedProtocol

HEADERS = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n"


async def application(scope: object, receive: object, send: object) -> None:
    await receive()  # type: ignore[operator]
    await asyncio.sleep(1.5)  # longer than a connection may be idle
    await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[operator]
    await send({"type": "http.response.body", "body": b"done"})  # type: ignore[operator]


async def answers(*requests: bytes) -> list[bytes]:
    """What a server answers to requests on simultaneous connections, until it closes them."""
    config = uvicorn.Config(application, log_level="error")  # type: ignore[arg-type]
    config.load()
    state, loop = ServerState(), asyncio.get_running_loop()
    server = await loop.create_server(lambda: BoundedProtocol(config, state, {}), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    async def ask(request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        try:
            return await asyncio.wait_for(reader.read(), 60)
        except ConnectionResetError:
            return b""
        finally:
            writer.close()

    found = await asyncio.gather(*map(ask, requests))
    server.close()
    return found


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
