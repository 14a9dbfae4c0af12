"""A stranger, and a client with a key, try to fill the server's disk and memory."""

import os
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


def send_long_urls(port: int, number: int, size: int) -> set[bytes]:
    """Sends requests with long URLs over TLS, without a key. Returns the statuses of the answers."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    statuses = set()
    for _ in range(number):
        with (
            socket.create_connection(("127.0.0.1", port)) as plain,
            context.wrap_socket(plain) as connection,
        ):
            connection.sendall(b"GET /" + b"x" * size + b" HTTP/1.1\r\nHost: a\r\n\r\n")
            statuses.add(connection.recv(12))
    return statuses


def test_neither_a_stranger_nor_a_client_fills_disk_or_memory(
    processes: Processes,  # noqa: F811
    images: Path,  # noqa: F811
) -> None:
    deployment = Deployment(processes, images, ["north"], rounds=1)
    server = deployment.serve()
    wait_until(lambda: "listening" in server.output, server)
    [superlink] = children(server.process.pid)
    assert send_long_urls(processes.port, 100, 10_000) == {b"HTTP/1.1 414"}  # 1 MB
    assert send_long_urls(processes.port, 20, 50_000) <= {b"HTTP/1.1 400", b"HTTP/1.1 414"}  # 1 MB
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

        arrays = {str(i): Array("uint8", (4,), "packet", b"%4d" % i) for i in range(5000)}
        refuses(RecordDict({"many": ArrayRecord(arrays)}), 413)
        refuses(pack(os.urandom(100_000_000)), 413)
        refuses(pack(bytes(10_000)), 409)  # another reply to the same request
        grown = memory(superlink) - before
    assert grown < 30, f"the SuperLink's memory has grown by {grown:.0f} MB"
    assert server.process.poll() is None
