"""A client on a machine of its own: a SuperNode that talks to the server, and the learning beside it.

The SuperNode is Flower's. What it brings is answered here, in the process that the user started, which
takes the client's tasks from it as Flower's SuperExec would. So no code that comes over the network is ever
run, and nothing has to be started anew for each round.
"""

import base64
import secrets
import socket
import ssl
import time
from dataclasses import dataclass
from pathlib import Path

from fedseal.engines.flower import BYE, one_line, unpack  # before Flower itself, which it silences

# isort: split
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
from fedseal.deploy import Program, Tell, home_of, task_taker, versioned
from fedseal.engines import flower_client
from fedseal.errors import UserError
from fedseal.keys import ClientKey


@dataclass(frozen=True)
class Client:
    """A client on this machine: its images, its memory, its key, and the server that it belongs to."""

    server: str
    images: Path
    memory: Path
    name: str
    key: ClientKey | None  # None: without TLS and authentication
    method: Path | None = None  # the file of a method that is not fedseal's

    def join(self, wait: float, tell: Tell) -> None:
        """Takes part until the run ends. A server that is gone is waited for."""
        secret = secrets.token_bytes(32)
        with home_of(secret) as home:
            while True:
                self.reach(wait, tell)
                with Program(
                    "supernode", options := self.options(home), home, self.memory / "flower.log"
                ) as node:
                    tell(f"joined {self.server}")
                    if self.work(node, options[options.index("--port") + 1], secret, tell):
                        tell("the run has ended")
                        return
                tell(f"the connection is lost (see {node.log}): trying again")
                time.sleep(2)

    def options(self, home: Path) -> list[str]:
        """Of the SuperNode, whose own port is for this machine alone."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        words = ["--superlink", self.server, "--isolation", "process", "--port", str(port)]
        words += ["--superexec-auth-secret-file", str(home / "secret")]
        if self.key is None:
            return [*words, "--insecure"]
        (home / "ca.crt").write_bytes(self.key.root)
        words += ["--root-certificates", str(home / "ca.crt")]
        return [*words, "--auth-supernode-private-key", str(self.key.file.resolve())]

    def reach(self, wait: float, tell: Tell) -> None:
        """Returns when the server answers and lets this client in; raises if it never will."""
        end, told = time.monotonic() + wait, False
        verify = ssl.create_default_context(cadata=self.key.root.decode()) if self.key else True
        headers = {"flwr-public-key": base64.b64encode(self.key.public).decode()} if self.key else {}
        url = f"http{'s' if self.key else ''}://{self.server}/v1/fleet/"
        with httpx.Client(verify=verify, trust_env=False, headers=headers) as client:
            while True:
                try:
                    status = client.get(url).status_code
                    if status == 403:
                        raise UserError(
                            f"{self.server} refuses this client: its key is not registered there."
                        )
                    if status != 503:
                        return
                except httpx.ConnectError as error:
                    if "certificate" in str(error).lower():
                        raise UserError(
                            f"{self.server} is not the server that this key is for: its certificate is not"
                            f" from the right CA, or for another host ({one_line(str(error))})."
                        ) from error
                    if "ssl" in str(error).lower():
                        raise UserError(
                            f"{self.server} does not speak TLS: is it a fedseal server?"
                        ) from error
                except httpx.RemoteProtocolError as error:
                    raise UserError(
                        f"{self.server} does not speak plain HTTP: leave --insecure out and give --key."
                    ) from error
                except (httpx.InvalidURL, UnicodeError) as error:
                    raise UserError(f"'{self.server}' is no address: give HOST:PORT.") from error
                except httpx.TransportError:
                    pass
                if time.monotonic() > end:
                    raise UserError(
                        f"No server answered at {self.server} for {wait:g} seconds: check address and port."
                    )
                if not told:
                    tell(f"waiting for the server at {self.server}")
                    told = True
                time.sleep(1)

    def work(self, node: Program, port: str, secret: bytes, tell: Tell) -> bool:
        """Answers what the SuperNode brings; True if the run has ended, False if the SuperNode has."""
        wanted, address = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]), f"127.0.0.1:{port}"
        with RuntimeHttpClient.from_server_address(address, True, None, task_taker(secret)) as client:
            while not node.ended():
                try:
                    found = client.AcquireTask(wanted)
                    if found.token and self.answer(address, found.token, tell):
                        return True
                except httpx.TransportError:  # the SuperNode starts, or ends
                    pass
                except Exception as error:  # whatever it is, the server asks again
                    tell(f"a request was lost ({type(error).__name__})")
                time.sleep(0.1)
        return False

    def answer(self, address: str, token: str, tell: Tell) -> bool:
        """Does one task of the SuperNode's, as its ClientApp would; True if it was the last."""
        with RuntimeHttpClient.from_server_address(
            address, True, None, [versioned("flwr-clientapp"), RuntimeTokenHttpInterceptor(token)]
        ) as client:
            heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
            heartbeat.start()
            try:
                message, context, _, _ = pull_task_input(client)
                reply = self.reply(message, context, tell)
                push_message(client, reply, context)
            finally:
                heartbeat.stop()
            push_task_output(client, context, SubStatus.COMPLETED, "")
        if BYE not in message.content.config_records:
            return False
        time.sleep(4)  # for the SuperNode to bring the answer away
        return True

    def reply(self, message: Message, context: Context, tell: Tell) -> Message:
        """The ClientApp's reply. What went wrong is told here; the server learns no more than its kind."""
        context.node_config = {
            "client": self.name,
            "images": str(self.images.resolve()),
            "memory": str(self.memory.resolve()),
            "method": str(self.method.resolve()) if self.method else "",
        }
        began = time.monotonic()
        try:
            reply = flower_client.app(message, context)
        except Exception as error:
            tell(f"failed: {one_line(str(error))}")
            reason = str(error) if isinstance(error, flower_client.Refusal) else type(error).__name__
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
        if message.metadata.message_type == MessageType.TRAIN:
            tell(report(unpack(message.content), unpack(reply.content), time.monotonic() - began))
        return reply


def report(request: bytes, reply: bytes, seconds: float) -> str:
    """A round in one line: what came, what was done, what is sent."""
    came, goes = Packet.from_bytes(request), Packet.from_bytes(reply)
    done = "trained" if came.scalars.get("train", True) else "listened"
    tensors = [f"{name} ({len(group)} tensors)" for name, group in goes.tensors.items()]
    scalars = [f"{name} = {value}" for name, value in goes.scalars.items()]
    return (
        f"round {came.scalars.get('t', '?')}: got {size(len(request))}, {done} in {seconds:.1f} s,"
        f" sends {size(len(reply))}: {', '.join(tensors + scalars)}"
    )


def size(number: int) -> str:
    """Bytes for the eye."""
    return f"{number / 1e6:.2f} MB" if number >= 1e5 else f"{number / 1e3:.1f} kB"
