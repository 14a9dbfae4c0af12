"""`fedseal join`: what a client says about its own options and about the server that it reaches."""

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from conftest import Command

pytest.importorskip("flwr")

from deployment import free_port

from fedseal.core import Packet
from fedseal.deploy import keys
from fedseal.deploy.client import Client, describe_round
from fedseal.errors import UserError

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
REFUSED = OK.replace(b"200 OK", b"403 Forbidden")
STARTING = OK.replace(b"200 OK", b"503 Service Unavailable")


@contextmanager
def listening(answer: Callable[[socket.socket], None], host: str = "127.0.0.1") -> Iterator[int]:
    """Answers each connection in this way; yields the port."""
    with socket.create_server((host, 0)) as server:

        def accept() -> None:
            with suppress(OSError):  # the test has ended
                while True:
                    connection, _ = server.accept()
                    with connection, suppress(OSError):
                        answer(connection)

        thread = threading.Thread(target=accept)
        thread.start()
        yield int(server.getsockname()[1])
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def plain(*responses: bytes) -> Callable[[socket.socket], None]:
    """A server without TLS; the last response repeats."""
    left = list(responses)

    def answer(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(left.pop(0) if len(left) > 1 else left[0])

    return answer


def secure(folder: Path, *responses: bytes) -> Callable[[socket.socket], None]:
    """A server with the certificate in a folder of keys."""
    context, answer = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), plain(*responses)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")

    def secured(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as tls:
            answer(tls)

    return secured


def client(tmp_path: Path, server: str, key: Path | None) -> Client:
    return Client(server, tmp_path, tmp_path / "memory", "north", keys.read_client_key(key) if key else None)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return keys.create_keys(tmp_path / "keys", [], ["north"])[0]


def test_the_server_is_waited_for_until_it_is_ready(key: Path, tmp_path: Path) -> None:
    messages: list[str] = []
    with listening(secure(tmp_path / "keys", STARTING, STARTING, OK)) as port:
        client(tmp_path, f"127.0.0.1:{port}", key).wait_for_server(60, messages.append)
    assert messages == [f"waiting for the server at 127.0.0.1:{port}"]


def test_an_unregistered_key_is_refused(key: Path, tmp_path: Path) -> None:
    with (
        listening(secure(tmp_path / "keys", REFUSED)) as port,
        pytest.raises(UserError, match="not registered"),
    ):
        client(tmp_path, f"127.0.0.1:{port}", key).wait_for_server(60, print)


def test_a_certificate_of_another_ca_is_refused(key: Path, tmp_path: Path) -> None:
    keys.create_keys(tmp_path / "other", [], [])
    with listening(secure(tmp_path / "other", OK)) as port, pytest.raises(UserError) as caught:
        client(tmp_path, f"127.0.0.1:{port}", key).wait_for_server(60, print)
    assert "not the server that this key is for" in str(caught.value)


def test_a_certificate_for_another_host_is_refused(key: Path, tmp_path: Path) -> None:
    with listening(secure(tmp_path / "keys", OK), "127.0.0.2") as port, pytest.raises(UserError) as caught:
        client(tmp_path, f"127.0.0.2:{port}", key).wait_for_server(60, print)
    assert "not the server that this key is for" in str(caught.value) and "127.0.0.2'" in str(caught.value)


def test_a_server_without_tls_is_refused(key: Path, tmp_path: Path) -> None:
    with listening(plain(OK)) as port, pytest.raises(UserError, match="does not use TLS"):
        client(tmp_path, f"127.0.0.1:{port}", key).wait_for_server(60, print)


def test_a_server_with_tls_is_not_joined_without_a_key(key: Path, tmp_path: Path) -> None:
    with listening(secure(tmp_path / "keys", OK)) as port, pytest.raises(UserError, match="give --key"):
        client(tmp_path, f"127.0.0.1:{port}", None).wait_for_server(60, print)


def test_a_server_that_ends_during_the_handshake_is_waited_for(key: Path, tmp_path: Path) -> None:
    with listening(lambda connection: connection.recv(65536)) as port, pytest.raises(UserError) as caught:
        client(tmp_path, f"127.0.0.1:{port}", key).wait_for_server(0, print)
    assert "No server answered" in str(caught.value)


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
