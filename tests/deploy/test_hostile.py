"""A stranger, and a client with a key, try to fill the server's disk and memory."""

import re
import socket
import ssl
from pathlib import Path

import httpx
import pytest

from conftest import children

pytest.importorskip("flwr")

from deployment import Deployment, Processes, images, processes, wait_until  # noqa: F401
from flwr.app import Array, ArrayRecord, Message, RecordDict

from fedseal.deploy import keys
from fedseal.deploy.connection import Connection
from fedseal.engines.flower.task import pack


def memory(process: int) -> float:
    """The resident memory of a process in MB."""
    [size] = re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    return int(size) / 1000


def send_long_urls(port: int, number: int) -> None:
    """Sends requests with URLs of 50 kB over TLS, without a key."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    for _ in range(number):
        with (
            socket.create_connection(("127.0.0.1", port)) as plain,
            context.wrap_socket(plain) as connection,
        ):
            connection.sendall(b"GET /" + b"x" * 50_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 414")


def test_neither_a_stranger_nor_a_client_fills_disk_or_memory(
    processes: Processes,  # noqa: F811
    images: Path,  # noqa: F811
) -> None:
    deployment = Deployment(processes, images, ["north"], rounds=1)
    server = deployment.serve()
    wait_until(lambda: "listening" in server.output, server)
    [superlink] = children(server.process.pid)
    send_long_urls(processes.port, 40)  # 2 MB
    assert (deployment.run / "flower.log").stat().st_size < 100_000

    key = keys.read_client_key(deployment.keys / "clients" / "north.key")
    with Connection(f"127.0.0.1:{processes.port}", key, 60, lambda message: None) as connection:
        connection.connect()
        request = connection.receive()
        before = memory(superlink)

        def refuses(reply: RecordDict, status: int) -> None:
            with pytest.raises(httpx.HTTPStatusError) as caught:
                connection.push(Message(reply, reply_to=request))
            assert caught.value.response.status_code == status

        nothing = Array("uint8", (0,), "packet", b"")
        refuses(RecordDict({"a": ArrayRecord({str(i): nothing for i in range(5000)})}), 413)  # a long list
        refuses(pack(bytes(600_000_000)), 413)
        refuses(pack(bytes(100_000_000)), 409)  # another reply to the same request
        grown = memory(superlink) - before
    assert grown < 30, f"the SuperLink's memory has grown by {grown:.0f} MB"
    assert server.process.poll() is None
