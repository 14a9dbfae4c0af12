"""A real deployment, of which single HTTP messages between the client and Flower's SuperLink are changed."""

import random
import socket
import threading
import time
from pathlib import Path
from unittest import mock

import httpx
from fuzzing import SECONDS
from mutations import change_bytes
from peak_memory import MEMORY, peak

from fedseal.config.config import Config
from fedseal.core import Packet
from fedseal.data.federation import load_federation
from fedseal.deploy import client as client_module
from fedseal.deploy import connection, superlink
from fedseal.deploy.client import Client
from fedseal.deploy.guard import FLEET
from fedseal.engines.flower.engine import FlowerEngine
from fedseal.errors import UserError
from fedseal.run_setup import RunSetup

DEADLINE = 4.0  # seconds that a round waits for a client
WAIT = 60.0  # seconds that a client waits for the server
STATUSES = (200, 204, 301, 400, 401, 403, 404, 409, 412, 413, 418, 426, 429, 500, 502, 503, 504)


def change_request(request: httpx.Request, rng: random.Random) -> httpx.Request:
    """A client's request with another body, path, method or header. Its signature covers the time alone."""
    body, headers = request.content, dict(request.headers)
    method, path = request.method, request.url.path
    what = rng.choice(("body", "body", "body", "body", "random", "header", "path", "method"))
    if what == "body":
        body = change_bytes(body, rng)
    elif what == "random":
        body = rng.randbytes(rng.choice((0, 1, 100, 63_000, 70_000, 7_000_000)))
    elif what == "header":
        name = rng.choice(sorted(headers))
        value = rng.choice(("", "x", "-1", "é", "9" * 400, "x" * 5000, headers[name] * 2))
        headers[name] = value.encode("utf-8").decode("latin-1")
    elif what == "path":
        names = (
            "push-object",
            "push-messages",
            "pull-messages",
            "activate-node",
            "x",
            "..",
            "%00",
            "x" * 300,
        )
        path = FLEET + rng.choice(names)
    else:
        method = rng.choice(("GET", "PUT", "DELETE", "OPTIONS"))
    if what != "header":
        headers.pop("content-length", None)
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    url = request.url.copy_with(raw_path=path.encode())
    return httpx.Request(method, url, headers=encoded, content=body, extensions=request.extensions)


def change_answer(answer: httpx.Response, rng: random.Random) -> httpx.Response:
    """The server's answer with another status, body or encoding."""
    status, body, headers = answer.status_code, answer.read(), dict(answer.headers)
    what = rng.choice(("body", "body", "body", "random", "status", "encoding"))
    if what == "body":
        body = change_bytes(body, rng)
    elif what == "random":
        body = rng.randbytes(rng.choice((0, 1, 100, 7_000_000, 9_000_000)))
    elif what == "status":
        status = rng.choice(STATUSES)
    else:
        headers["content-encoding"] = rng.choice(("gzip", "deflate", "x"))
    headers.pop("content-length", None)
    return httpx.Response(status, headers=headers, stream=httpx.ByteStream(body))


class ClosedError(BaseException):
    """The test is over: nothing but the client's thread catches it."""


class ChangedNetwork(httpx.BaseTransport):
    """Carries a client's HTTP messages, and changes the next one if it is told to."""

    def __init__(self) -> None:
        self.inner = httpx.HTTPTransport(trust_env=False)
        self.at_server = self.closed = False
        self.left = 0  # messages up to the one that is changed; 0: none is
        self.rng = random.Random()
        self.lock = threading.Lock()  # heartbeats have a thread of their own

    def change_one(self, rng: random.Random, *, at_server: bool) -> None:
        """Changes one of the next requests that the server receives, or of the answers to the client."""
        with self.lock:
            self.rng, self.at_server, self.left = rng, at_server, rng.randint(1, 6)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if self.closed:
            heartbeat = threading.current_thread().name == "heartbeats"
            raise httpx.ConnectError("closed") if heartbeat else ClosedError
        with self.lock:
            chosen, self.left = self.left == 1, max(0, self.left - 1)
        if chosen and self.at_server:
            request.read()
            return self.inner.handle_request(change_request(request, self.rng))
        answer = self.inner.handle_request(request)
        return change_answer(answer, self.rng) if chosen else answer


class Deployment:
    """A SuperLink without TLS in its own process, and one client in a thread."""

    def __init__(self, config: Config, packet: Packet, client: Client, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.packet, self.network, self.ends = packet, ChangedNetwork(), list[BaseException]()
        self.client = Client(f"127.0.0.1:{port}", client.images, client.memory, client.name, None)
        network = self.network

        class ChangedConnection(connection.Connection):
            def __init__(self, *arguments: object) -> None:
                super().__init__(*arguments)  # type: ignore[arg-type]
                self._http._transport = network

        self.patches = [
            mock.patch.object(client_module, "Connection", ChangedConnection),
            mock.patch.object(connection, "RETRY_SECONDS", 0.1),
        ]
        for patch in self.patches:
            patch.start()
        self.start_client()
        changed = config.model_copy(
            update={"engine": config.engine.model_copy(update={"deadline": DEADLINE})}
        )
        self.engine: FlowerEngine = superlink.connect(
            RunSetup(changed, load_federation(config.data, config.seed)),
            folder,
            superlink.Endpoint("127.0.0.1", port, None),
            expelled=(),
            expel=lambda names: None,
            clients=1,
            wait=WAIT,
            notify=lambda text: None,
        )
        self.superlink = self.engine.check.__self__.process.pid  # type: ignore[attr-defined]
        self.memory = peak(self.superlink)

    def start_client(self) -> None:
        def join() -> None:
            try:
                self.client.join(WAIT, lambda text: None)
            except ClosedError:
                return
            except Exception as error:
                self.ends.append(error)

        self.thread = threading.Thread(target=join, daemon=True)
        self.thread.start()

    def exchange(self, rng: random.Random, *, at_server: bool) -> str:
        """Changes one message of a round, then repeats the round until the client answers it."""
        self.network.change_one(rng, at_server=at_server)
        end, rounds = time.monotonic() + SECONDS, 0
        while time.monotonic() < end:
            rounds += 1
            [reply] = self.engine.exchange({0: self.packet})
            if not self.thread.is_alive():
                [error] = self.ends or [SystemError("the client ended without an error")]
                if not isinstance(error, UserError):
                    raise error
                self.ends.clear()
                self.start_client()
                return "client ended with a sentence"
            if (grown := peak(self.superlink) - self.memory) > MEMORY:
                raise MemoryError(f"{grown / 1e6:.0f} MB in the SuperLink")
            if reply.problem is None:
                return "answered" if rounds == 1 else "answered in a later round"
        raise TimeoutError(f"no answer in {rounds} rounds")

    def close(self) -> None:
        self.network.closed = True
        self.thread.join(SECONDS)
        self.engine.close()
        for patch in self.patches:
            patch.stop()
