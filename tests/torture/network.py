"""Networks that can be cut, and a proxy that delivers messages late and twice, and loses answers."""

import asyncio
import random
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Self

SERVER = "10.78.0.1"


class Hosts:
    """A server and clients on a switch, each in a network namespace of its own."""

    def __init__(self, names: Sequence[str]) -> None:
        mark = uuid.uuid4().hex[:6]
        self.spaces = {name: f"torture-{mark}-{name}" for name in ("switch", "server", *names)}
        self._made = ExitStack()
        try:
            for space in self.spaces.values():
                _ip("netns", "add", space)
                self._made.callback(_ip, "netns", "delete", space)
                _ip("-n", space, "link", "set", "lo", "up")
            switch = self.spaces["switch"]
            _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", switch, "link", "set", "bridge", "up")
            for number, name in enumerate(("server", *names), start=1):
                peer = ("type", "veth", "peer", "name", name, "netns", switch)
                _ip("-n", self.spaces[name], "link", "add", "eth0", *peer)
                _ip("-n", switch, "link", "set", name, "master", "bridge", "up")
                _ip("-n", self.spaces[name], "addr", "add", f"10.78.0.{number}/24", "dev", "eth0")
                _ip("-n", self.spaces[name], "link", "set", "eth0", "up")
        except BaseException:
            self._made.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._made.close()

    @contextmanager
    def cut(self, name: str) -> Iterator[None]:
        """Inside the context, no packet reaches or leaves a host."""
        _ip("-n", self.spaces["switch"], "link", "set", name, "down")
        try:
            yield
        finally:
            _ip("-n", self.spaces["switch"], "link", "set", name, "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


# Messages that a network may repeat: a second delivery of the others would not be the sender's.
REPEATED = (b"/push-messages", b"/push-object", b"/confirm-message-received")
LATE_SECONDS = 3.0


class Proxy:
    """An HTTP proxy between a client and the server.

    It delivers some messages late, some twice, and breaks some connections after the server has got the
    message and before the client has the answer.
    """

    def __init__(self, port: int, rng: random.Random, report: Callable[[str, str], None]) -> None:
        self.target, self.rng, self.report, self.port = port, rng, report, 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        start = asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result()
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                message = await _read_message(reader)
                answer = await self._pass_on(message)
                if not answer:
                    break
                writer.write(answer)
                await writer.drain()
        writer.close()

    async def _pass_on(self, message: bytes) -> bytes:
        """The server's answer; empty if it is lost."""
        path = message.split(b" ", 2)[1]
        name = path.rsplit(b"/", 1)[-1].decode()
        what = self.rng.choices(("", "late", "twice", "answer lost"), (30, 3, 3, 1))[0]
        if what == "late":
            self.report("message late", name)
            await asyncio.sleep(self.rng.uniform(0, LATE_SECONDS))
        answer = await self._ask(message)
        if what == "twice" and path.endswith(REPEATED):
            self.report("message twice", name)
            await self._ask(message)
        if what == "answer lost":
            self.report("answer lost", name)
            return b""
        return answer

    async def _ask(self, message: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.target)
        try:
            writer.write(message)
            return await _read_message(reader)
        finally:
            writer.close()


async def _read_message(reader: asyncio.StreamReader) -> bytes:
    """An HTTP request or answer with its body."""
    head = await reader.readuntil(b"\r\n\r\n")
    lines = (line.partition(b":") for line in head.lower().split(b"\r\n"))
    headers = {name: value.strip() for name, _, value in lines}
    if headers.get(b"transfer-encoding") == b"chunked":  # a refusal, which has no body
        return head + await reader.readuntil(b"0\r\n\r\n")
    return head + await reader.readexactly(int(headers.get(b"content-length", b"0")))
