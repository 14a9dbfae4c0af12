"""`fedseal join`: what a client says about its own options and about the server that it reaches."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import Command, draw

pytest.importorskip("flwr")

import uvicorn
from deployment import create_keys_at, free_port
from flwr.app import ConfigRecord, Message, MessageType
from flwr.supercore.task_identity import TaskIdentity

from fedseal.core import Packet
from fedseal.data.folder_cache import NoImageError
from fedseal.deploy import client as client_module
from fedseal.deploy import keys
from fedseal.deploy.client import Client, describe_round, public_reason
from fedseal.deploy.connection import Connection
from fedseal.deploy.obstacles import same_key
from fedseal.engines.flower.client_app import TaskRefusedError
from fedseal.engines.flower.consent import Consent, Limits
from fedseal.engines.flower.task import END_OF_RUN, pack
from fedseal.errors import UserError
from fedseal.system.files import write_atomic


@contextmanager
def listening(*statuses: int, folder: Path | None = None, host: str = "127.0.0.1") -> Iterator[int]:
    """The SuperLink's web server, with the certificate in a folder of keys; yields the port.

    It answers with one status after another; the last one repeats.
    """
    left = list(statuses)

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        status = left.pop(0) if len(left) > 1 else left[0]
        headers = [(b"fedseal-version", b"7.8.9")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
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


def connect(port: int, key: Path | None, *, host: str = "127.0.0.1", wait: float = 60) -> list[str]:
    """Connects to the server, and returns what the user is told."""
    messages: list[str] = []
    client_key = keys.read_client_key(key) if key else None
    with Connection(f"{host}:{port}", client_key, wait, messages.append) as connection:
        connection.connect()
    return messages


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return keys.create_keys(tmp_path / "keys", [], ["north"])[0]


def test_the_server_is_waited_for_until_it_is_ready(key: Path, tmp_path: Path) -> None:
    with listening(503, 503, 200, folder=tmp_path / "keys") as port:
        messages = connect(port, key)
    waiting = f"the server at 127.0.0.1:{port} does not answer: waiting for it up to 60 seconds"
    assert messages == [waiting, f"joined 127.0.0.1:{port}"]


@pytest.mark.parametrize(
    ("status", "reason"),
    [(403, "key is not registered"), (404, "is not a fedseal server")],
)
def test_a_client_is_refused(status: int, reason: str, key: Path, tmp_path: Path) -> None:
    with listening(status, folder=tmp_path / "keys") as port, pytest.raises(UserError, match=reason):
        connect(port, key)


@pytest.mark.parametrize(
    ("status", "message", "reason"),
    [
        (401, "clocks agree. Trying again for up to 60 seconds", "clocks agree"),
        (412, "another connected client with this key: stop the other", "add-client"),
    ],
)
def test_a_wrong_clock_and_an_earlier_connection_are_waited_for(
    status: int, message: str, reason: str, key: Path, tmp_path: Path
) -> None:
    with listening(status, status, 200, folder=tmp_path / "keys") as port:
        messages = connect(port, key)
    assert len(messages) == 2 and message in messages[0]
    with listening(status, folder=tmp_path / "keys") as port, pytest.raises(UserError, match=reason):
        connect(port, key, wait=0)


def test_another_connection_with_the_same_key_is_not_waited_for_long() -> None:
    assert same_key("server", 600).seconds == 35  # a client that was killed is gone after 30
    assert same_key("server", 10).seconds == 10


def test_a_server_of_another_version_is_refused(key: Path, tmp_path: Path) -> None:
    with listening(426, folder=tmp_path / "keys") as port, pytest.raises(UserError) as caught:
        connect(port, key)
    assert "has fedseal 7.8.9" in str(caught.value) and r"install fedseal 7.8.* on" in str(caught.value)


def test_a_certificate_of_another_ca_is_refused(key: Path, tmp_path: Path) -> None:
    keys.create_keys(tmp_path / "other", [], [])
    with listening(200, folder=tmp_path / "other") as port, pytest.raises(UserError) as caught:
        connect(port, key)
    assert "not the server that this key is for" in str(caught.value)


def test_a_certificate_outside_its_dates_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fedseal: Command
) -> None:
    draw(tmp_path / "photos" / "a.png", "circle", np.random.default_rng(0))
    options = ("--images", tmp_path / "photos", "--memory", tmp_path / "memory", "--wait", 0)
    for days, reason in ((-4000, "has expired"), (10, "is not valid yet")):
        key = create_keys_at(timedelta(days=days), tmp_path / reason, monkeypatch)
        with listening(200, folder=tmp_path / reason) as port:
            answer = fedseal("join", f"127.0.0.1:{port}", "--key", key, *options)
        answer.refuses(
            f"The certificate of 127.0.0.1:{port} {reason}", "this machine's clock", "renew DIR --ca"
        )


def test_an_expired_certificate_of_the_server_alone_is_waited_for(key: Path, tmp_path: Path) -> None:
    """The clients' files stay valid, because the CA's certificate is."""
    keys.renew_server(tmp_path / "keys", days=0)
    messages: list[str] = []
    with listening(200, folder=tmp_path / "keys") as port:
        connection = Connection(f"127.0.0.1:{port}", keys.read_client_key(key), 1.5, messages.append)
        with pytest.raises(UserError) as caught:
            connection.connect()
    assert "has expired" in str(caught.value) and "'fedseal keys renew DIR' on the server" in str(
        caught.value
    )
    assert messages == [f"{caught.value} Trying again for up to 1.5 seconds"]


def test_a_certificate_for_another_host_is_refused(key: Path, tmp_path: Path) -> None:
    with (
        listening(200, folder=tmp_path / "keys", host="127.0.0.2") as port,
        pytest.raises(UserError) as caught,
    ):
        connect(port, key, host="127.0.0.2")
    assert "not the server that this key is for" in str(caught.value) and "127.0.0.2'" in str(caught.value)


def test_a_server_without_tls_is_refused(key: Path) -> None:
    with listening(200) as port, pytest.raises(UserError, match="does not use TLS"):
        connect(port, key)


def test_a_server_with_tls_is_not_joined_without_a_key(key: Path, tmp_path: Path) -> None:
    with listening(200, folder=tmp_path / "keys") as port, pytest.raises(UserError, match="give --key"):
        connect(port, None)


def test_a_server_that_ends_during_the_handshake_is_waited_for(key: Path) -> None:
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
        connection = Connection(f"127.0.0.1:{port}", keys.read_client_key(key), 1, messages.append)
        with pytest.raises(UserError, match="No server answered"):
            connection.connect()
        thread.join()
    assert messages == [f"the server at 127.0.0.1:{port} does not answer: waiting for it up to 1 seconds"]


def test_errors_of_a_client(key: Path, fedseal: Command, tmp_path: Path) -> None:
    photos, junk = tmp_path / "photos", tmp_path / "junk"
    draw(photos / "a.png", "circle", np.random.default_rng(0))
    junk.mkdir()
    join = ("--images", photos, "--key", key, "--memory", tmp_path / "memory", "--wait", 0)
    fedseal("join", "server", *join).refuses("HOST:PORT", "'server'")
    fedseal("join", "a..b:8000", *join).refuses("HOST:PORT", "'a..b:8000'")
    fedseal("join", "localhost:1", "--images", tmp_path / "none", "--key", key).refuses("There is no folder")
    fedseal("join", "localhost:1", "--images", tmp_path, "--key", tmp_path / "keys/ca.crt").refuses(
        "not a client's key"
    )
    fedseal("join", "localhost:1", "--images", photos, "--key", key, "--memory", key).refuses("Cannot write")
    refused = ("join", "localhost:1", "--images", junk, "--key", key, "--memory", tmp_path / "never")
    fedseal(*refused).refuses(f"{junk} has no images (it is empty)", "give the folder")
    (junk / "notes.txt").write_text("not an image")
    fedseal(*refused).refuses(f"{junk} has no images (none of its 1 files is a readable image)")
    assert not (tmp_path / "never").exists()
    if not torch.cuda.is_available():
        fedseal("join", "localhost:1", *join, "--device", "cuda").refuses(
            "--device is 'cuda'", "no such device"
        )
    fedseal("join", f"127.0.0.1:{free_port()}", *join).refuses("No server answered", "check host and port")


def test_the_server_is_told_a_reason_without_private_text(tmp_path: Path) -> None:
    (tmp_path / "secret").touch()
    with pytest.raises(UserError) as full:
        write_atomic(tmp_path / "secret" / "file", "text")
    assert "secret" in str(full.value)
    for error, reason in (
        (full.value, "it cannot read or write a file (File exists)"),
        (
            PermissionError(13, "Permission denied", "secret.png"),
            "it cannot read or write a file (Permission",
        ),
        (NoImageError("secret has no images"), "it has no readable image"),
        (MemoryError("secret"), "it is out of memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "it is out of memory"),
        (TaskRefusedError("the server has fedseal 9.0.0"), "the server has fedseal 9.0.0"),
        (ValueError("secret"), "ValueError, see the client's own output"),
    ):
        told = public_reason(error)
        assert told.startswith(reason) and "secret" not in told


def test_the_final_model_does_not_escape_the_clients_limits(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is kept, but not used. Whatever fails there, the client ends as usual."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    record = pack((copy / "model.safetensors").read_bytes())
    record[END_OF_RUN] = ConfigRecord({"client": "north"})
    message, messages = Message(record, 7, MessageType.QUERY), list[str]()
    (tmp_path / "memory").mkdir()
    for limits in ({"size": 27}, {"classes": 2}, {}):
        consent = Consent(limits=Limits(**limits))
        client = Client("a:1", tmp_path, tmp_path / "memory", "north", None, consent=consent)
        if not limits:
            monkeypatch.setattr(client_module, "load", lambda *_: [].remove(1))
        client._keep_model(message, messages.append)
    assert "accepts at most 27 for the height and width of images" in messages[0]
    assert "accepts at most 2 for the number of classes" in messages[1]
    assert messages[2].startswith("the class mix was not estimated: ValueError: list.remove")
    assert [path.name for path in (tmp_path / "memory").iterdir()] == ["model.safetensors"]


def test_a_round_is_described_in_one_line() -> None:
    request = Packet(scalars={"t": 3, "train": False}).to_bytes()
    reply = Packet({"model": {}}, {"t": 3, "positive": 7}).to_bytes()
    line = describe_round(request, reply, 0.25)
    assert line.startswith("round 3: received 0.1 kB, updated its memory in 0.2 s, sends 0.1 kB: ")
    assert line.endswith("model (0 tensors), t = 3, positive = 7")
