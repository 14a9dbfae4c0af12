"""`fedseal join`: what a client says about its own options and about the server that it reaches."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from conftest import Command

pytest.importorskip("flwr")

import uvicorn
from deployment import free_port

from fedseal.core import Packet
from fedseal.deploy import keys
from fedseal.deploy.client import Client, describe_round
from fedseal.errors import UserError


@contextmanager
def listening(*statuses: int, folder: Path | None = None, host: str = "127.0.0.1") -> Iterator[int]:
    """The SuperLink's web server, with the certificate in a folder of keys; yields the port.

    It answers with one status after another; the last one repeats.
    """
    left = list(statuses)

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        status = left.pop(0) if len(left) > 1 else left[0]
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    options: dict[str, Any] = {"lifespan": "off", "ws": "none", "log_level": "critical"}
    if folder:
        options |= {"ssl_certfile": folder / "server.crt", "ssl_keyfile": folder / "server.key"}
    server = uvicorn.Server(uvicorn.Config(answer, **options))
    with socket.create_server((host, 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield int(listener.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join()


def client(tmp_path: Path, server: str, key: Path | None) -> Client:
    return Client(server, tmp_path, tmp_path / "memory", "north", keys.read_client_key(key) if key else None)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return keys.create_keys(tmp_path / "keys", [], ["north"])[0]


def test_the_server_is_waited_for_until_it_is_ready(key: Path, tmp_path: Path) -> None:
    messages: list[str] = []
    with listening(503, 503, 200, folder=tmp_path / "keys") as port:
        client(tmp_path, f"127.0.0.1:{port}", key).wait_for_server(60, messages.append)
    assert messages == [f"waiting for the server at 127.0.0.1:{port}"]


def test_an_unregistered_key_is_refused(key: Path, tmp_path: Path) -> None:
    with (
        listening(403, folder=tmp_path / "keys") as port,
        pytest.raises(UserError, match="not registered"),
    ):
        client(tmp_path, f"127.0.0.1:{port}", key).wait_for_server(60, print)


def test_a_certificate_of_another_ca_is_refused(key: Path, tmp_path: Path) -> None:
    keys.create_keys(tmp_path / "other", [], [])
    with listening(200, folder=tmp_path / "other") as port, pytest.raises(UserError) as caught:
        client(tmp_path, f"127.0.0.1:{port}", key).wait_for_server(60, print)
    assert "not the server that this key is for" in str(caught.value)


def test_a_certificate_for_another_host_is_refused(key: Path, tmp_path: Path) -> None:
    with (
        listening(200, folder=tmp_path / "keys", host="127.0.0.2") as port,
        pytest.raises(UserError) as caught,
    ):
        client(tmp_path, f"127.0.0.2:{port}", key).wait_for_server(60, print)
    assert "not the server that this key is for" in str(caught.value) and "127.0.0.2'" in str(caught.value)


def test_a_server_without_tls_is_refused(key: Path, tmp_path: Path) -> None:
    with listening(200) as port, pytest.raises(UserError, match="does not use TLS"):
        client(tmp_path, f"127.0.0.1:{port}", key).wait_for_server(60, print)


def test_a_server_with_tls_is_not_joined_without_a_key(key: Path, tmp_path: Path) -> None:
    with listening(200, folder=tmp_path / "keys") as port, pytest.raises(UserError, match="give --key"):
        client(tmp_path, f"127.0.0.1:{port}", None).wait_for_server(60, print)


def test_a_server_that_ends_during_the_handshake_is_waited_for(key: Path, tmp_path: Path) -> None:
    messages: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def end() -> None:
            connection, _ = listener.accept()
            connection.recv(65536)  # the client's hello
            connection.close()
            listener.close()

        thread = threading.Thread(target=end)
        thread.start()
        with pytest.raises(UserError, match="No server answered"):
            client(tmp_path, f"127.0.0.1:{port}", key).wait_for_server(1, messages.append)
        thread.join()
    assert messages == [f"waiting for the server at 127.0.0.1:{port}"]


def test_errors_of_a_client(key: Path, fedseal: Command, tmp_path: Path) -> None:
    join = ("--images", tmp_path, "--key", key, "--memory", tmp_path / "memory", "--wait", 0)
    fedseal("join", "server", *join).refuses("HOST:PORT", "'server'")
    fedseal("join", "a..b:8000", *join).refuses("HOST:PORT", "'a..b:8000'")
    fedseal("join", "localhost:1", "--images", tmp_path / "none", "--key", key).refuses("There is no folder")
    fedseal("join", "localhost:1", "--images", tmp_path, "--key", tmp_path / "keys/ca.crt").refuses(
        "not a client's key"
    )
    fedseal("join", f"127.0.0.1:{free_port()}", *join).refuses("No server answered", "check host and port")


def test_a_round_is_described_in_one_line() -> None:
    request = Packet(scalars={"t": 3, "train": False}).to_bytes()
    reply = Packet({"model": {}}, {"t": 3, "positive": 7}).to_bytes()
    line = describe_round(request, reply, 0.25)
    assert line.startswith("round 3: received 0.1 kB, updated its memory in 0.2 s, sends 0.1 kB: ")
    assert line.endswith("model (0 tensors), t = 3, positive = 7")
