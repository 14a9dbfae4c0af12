"""`fedseal join`: a client on its own machine.

Flower's SuperNode runs as a child process and talks to the server. This process takes the client's tasks
from the SuperNode, as Flower's SuperExec would, and answers them with the installed fedseal. So it never
runs code that comes over the network, and nothing has to be restarted between rounds.
"""

import base64
import secrets
import socket
import ssl
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
from flwr.app import Context, Error, Message, MessageType
from flwr.common.constant import ErrorCode, SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from fedseal.core import Packet
from fedseal.deploy.keys import ClientKey
from fedseal.deploy.programs import (
    Notify,
    Program,
    flower_home,
    secret_file,
    task_interceptors,
    version_interceptor,
)
from fedseal.engines.flower import client_app
from fedseal.engines.flower.engine import one_line
from fedseal.engines.flower.task import END_OF_RUN, unpack
from fedseal.errors import UserError

DELIVERY_SECONDS = 4.0  # for the SuperNode to deliver the last answer


@dataclass(frozen=True)
class Client:
    """A client on this machine: its images, its memory, its key, and the server's address."""

    server: str
    images: Path
    memory: Path
    name: str
    key: ClientKey | None  # None: no TLS and no authentication
    method: Path | None = None  # a copy of the file of the server's own method

    def join(self, wait: float, notify: Notify) -> None:
        """Takes part until the run ends. While the server is away, waits for it up to `wait` seconds."""
        secret = secrets.token_bytes(32)
        with flower_home(secret) as home:
            while True:
                self.wait_for_server(wait, notify)
                port = _free_port()
                with Program(
                    "supernode", self._options(home, port), home, self.memory / "flower.log"
                ) as node:
                    notify(f"joined {self.server}")
                    if self._answer_until_end(node, f"127.0.0.1:{port}", secret, notify):
                        notify("the run has ended")
                        return
                notify(f"the connection is lost (see {node.log}): trying again")
                time.sleep(2)

    def wait_for_server(self, seconds: float, notify: Notify) -> None:
        """Returns when the server accepts this client; raises if it refuses, or does not answer in time."""
        end, waiting = time.monotonic() + seconds, False
        verify = ssl.create_default_context(cadata=self.key.ca_certificate.decode()) if self.key else True
        headers = {"flwr-public-key": base64.b64encode(self.key.public).decode()} if self.key else {}
        with httpx.Client(verify=verify, trust_env=False, headers=headers) as client:
            while not self._is_accepted(client):
                if time.monotonic() > end:
                    raise UserError(
                        f"No server answered at {self.server} in {seconds:g} seconds: check host and port."
                    )
                if not waiting:
                    notify(f"waiting for the server at {self.server}")
                    waiting = True
                time.sleep(1)

    def _is_accepted(self, client: httpx.Client) -> bool:
        """False if the server is not ready yet; raises if it never will be."""
        try:
            status = client.get(f"http{'s' if self.key else ''}://{self.server}/v1/fleet/").status_code
        except httpx.ConnectError as error:
            tls_error = _find_tls_error(error)
            if isinstance(tls_error, ssl.SSLCertVerificationError):
                raise UserError(
                    f"{self.server} is not the server that this key is for: its certificate is from another"
                    f" CA or for another host ({one_line(tls_error.verify_message)})."
                ) from error
            if tls_error is not None and not isinstance(tls_error, ssl.SSLEOFError):  # EOF: it has just ended
                raise UserError(f"{self.server} does not use TLS: is it a fedseal server?") from error
            return False
        except httpx.RemoteProtocolError as error:
            if self.key is None:
                raise UserError(
                    f"{self.server} does not answer without TLS: leave out --insecure and give --key."
                ) from error
            return False
        except httpx.TransportError:
            return False
        except (httpx.InvalidURL, UnicodeError) as error:
            raise UserError(f"'{self.server}' is not a valid address: give HOST:PORT.") from error
        if status == 403:
            raise UserError(f"{self.server} refuses this client: its key is not registered there.")
        return status != 503

    def _options(self, home: Path, port: int) -> list[str]:
        """The SuperNode's options; only this machine uses its port."""
        options = ["--superlink", self.server, "--isolation", "process", "--port", str(port)]
        options += ["--superexec-auth-secret-file", str(secret_file(home))]
        if self.key is None:
            return [*options, "--insecure"]
        (home / "ca.crt").write_bytes(self.key.ca_certificate)
        options += ["--root-certificates", str(home / "ca.crt")]
        return [*options, "--auth-supernode-private-key", str(self.key.file.resolve())]

    def _answer_until_end(self, node: Program, address: str, secret: bytes, notify: Notify) -> bool:
        """Answers the server's requests. Returns True if the run has ended, False if the SuperNode has."""
        wanted = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
        with RuntimeHttpClient.from_server_address(address, True, None, task_interceptors(secret)) as client:
            while not node.ended():
                try:
                    task = client.AcquireTask(wanted)
                    if task.token and self._answer(address, task.token, notify):
                        return True
                except httpx.TransportError:  # the SuperNode is starting or ending
                    pass
                except Exception as error:  # the server sends the request again
                    notify(f"a request was lost ({type(error).__name__})")
                time.sleep(0.1)
        return False

    def _answer(self, address: str, token: str, notify: Notify) -> bool:
        """Does one task, as Flower's ClientApp process would. Returns True if it was the last one."""
        with RuntimeHttpClient.from_server_address(
            address, True, None, [version_interceptor("flwr-clientapp"), RuntimeTokenHttpInterceptor(token)]
        ) as client:
            heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
            heartbeat.start()
            try:
                message, context, _, _ = pull_task_input(client)
                reply = self._reply(message, context, notify)
                push_message(client, reply, context)
            finally:
                heartbeat.stop()
            push_task_output(client, context, SubStatus.COMPLETED, "")
        if END_OF_RUN not in message.content.config_records:
            return False
        time.sleep(DELIVERY_SECONDS)
        return True

    def _reply(self, message: Message, context: Context, notify: Notify) -> Message:
        """The reply to a request. The server is told only the class of an error; the user sees its text."""
        context.node_config = {
            "client": self.name,
            "images": str(self.images.resolve()),
            "memory": str(self.memory.resolve()),
            "method": str(self.method.resolve()) if self.method else "",
        }
        start = time.monotonic()
        try:
            reply = client_app.app(message, context)
        except Exception as error:
            notify(f"failed: {one_line(str(error))}")
            reason = str(error) if isinstance(error, client_app.TaskRefusedError) else type(error).__name__
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
        if message.metadata.message_type == MessageType.TRAIN:
            seconds = time.monotonic() - start
            notify(describe_round(unpack(message.content), unpack(reply.content), seconds))
        return reply


def describe_round(request: bytes, reply: bytes, seconds: float) -> str:
    """One line about a round: what was received, what was done, what is sent."""
    received, sent = Packet.from_bytes(request), Packet.from_bytes(reply)
    action = "trained" if received.trains else "updated its memory"
    tensors = [f"{name} ({len(group)} tensors)" for name, group in sent.tensors.items()]
    scalars = [f"{name} = {value}" for name, value in sent.scalars.items()]
    return (
        f"round {received.scalars.get('t', '?')}: received {_format_size(len(request))}, {action} in"
        f" {seconds:.1f} s, sends {_format_size(len(reply))}: {', '.join(tensors + scalars)}"
    )


def _format_size(size: int) -> str:
    return f"{size / 1e6:.2f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _find_tls_error(error: BaseException | None) -> ssl.SSLError | None:
    """The TLS error that caused another error, or None."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error
