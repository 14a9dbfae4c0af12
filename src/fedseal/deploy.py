"""A server for clients on machines of their own: a SuperLink that they talk to, and the run beside it.

The SuperLink is Flower's. The run is in the process that the user started, which takes the server's task from
the SuperLink as Flower's SuperExec would.
"""

import os
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from fedseal.engines.flower import BYE, FlowerEngine, Roll, flower_errors, job_of  # silences Flower

# isort: split
import httpx
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.cli.build import build_fab_from_files
from flwr.common.serde import fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import (
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.protobuf.client import ProtobufClientInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from rich.console import Console

from fedseal import keys
from fedseal.api import Result, run
from fedseal.config import Config, parse
from fedseal.data.folders import join, read_labelled
from fedseal.data.pool import Pool
from fedseal.data.splits import DataSettings, split_server
from fedseal.engines.flower_program import GUARD, open_guard
from fedseal.engines.mailbox import Mailbox
from fedseal.errors import UserError
from fedseal.files import write_atomic
from fedseal.machine import versions
from fedseal.processes import PARENT
from fedseal.sites import Sites

START = 120.0  # seconds that one of Flower's programs may take to start
CLOSED = {  # ways around the guard, whatever this process' own environment says
    "FORWARDED_ALLOW_IPS": "",
    "FLWR_INTERNAL_GRPC_CONTROL_API": "0",
    "FLWR_INTERNAL_GRPC_FLEET_API": "0",
}

Tell = Callable[[str], None]


class Program:
    """One of Flower's programs, in a process that ends with this one."""

    def __init__(self, kind: str, options: Sequence[str], home: Path, log: Path) -> None:
        self.kind, self.log = kind, log
        about = {PARENT: str(os.getpid()), "FLWR_HOME": str(home), GUARD: str(home / "guard.json")} | CLOSED
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "fedseal.engines.flower_program", kind, *options],
                env={**os.environ, **about, "PATH": path},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,  # Ctrl-C is for this process, which ends its programs in order
            )

    def ended(self) -> bool:
        return self.process.poll() is not None

    def check(self) -> None:
        """Raises if the program has ended by itself."""
        if self.ended():
            raise UserError(f"Flower's {self.kind} has ended: see the end of {self.log}.")

    def stop(self) -> None:
        for number, seconds in ((signal.SIGTERM, 10), (signal.SIGKILL, 5)):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


@contextmanager
def home_of(secret: bytes) -> Iterator[Path]:
    """A folder of this user's alone for a program's files, with the secret by which tasks are taken."""
    with tempfile.TemporaryDirectory(prefix="fedseal-", ignore_cleanup_errors=True) as folder:
        (Path(folder) / "secret").write_bytes(secret)
        yield Path(folder)


def versioned(component: str) -> RuntimeVersionHttpInterceptor:
    """Tells Flower's programs by which version of Flower they are talked to."""
    return RuntimeVersionHttpInterceptor(component_name=component)


def task_taker(secret: bytes) -> list[ProtobufClientInterceptor]:
    """What it takes to be given tasks by one of Flower's programs."""
    method = "/flwr.proto.Runtime/AcquireTask"
    task = SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=[method])
    return [versioned("SuperExec"), task]


@dataclass(frozen=True)
class Where:
    """Where the SuperLink listens, and with which keys; without keys it is open to anybody."""

    host: str
    port: int
    keys: Path | None

    @property
    def here(self) -> str:
        """The address that this machine itself reaches it by."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    @property
    def root(self) -> bytes | None:
        return (self.keys / "ca.crt").read_bytes() if self.keys else None

    def options(self) -> list[str]:
        if self.keys is None:
            return ["--insecure"]
        files = {"--ssl-ca-certfile": "ca.crt", "--ssl-certfile": "server.crt", "--ssl-keyfile": "server.key"}
        words = [word for flag, name in files.items() for word in (flag, str((self.keys / name).resolve()))]
        return [*words, "--enable-supernode-auth"]

    def free(self) -> None:
        """Raises if the port is taken, or the certificate is not for this host."""
        if self.keys and self.host not in ("0.0.0.0", "::", *keys.certified(self.keys)):
            raise UserError(
                f"The certificate in {self.keys} is not for {self.host}: make keys in a new folder with"
                f" 'fedseal keys init NEW --host {self.host}', and give each client its new key."
            )
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((self.host, self.port))
        except OSError as error:
            raise UserError(
                f"Cannot listen on {self.host}:{self.port} ({error.strerror}): choose another --port."
            ) from error


def connect(sites: Sites, folder: Path, where: Where, number: int, wait: float, tell: Tell) -> FlowerEngine:
    """Starts the SuperLink and the run, and waits for the clients. Ends with the engine's `close`."""
    names = sites.federation.names
    known = {key: name for name, key in keys.registered(where.keys).items()} if where.keys else None
    stack = ExitStack()
    try:
        where.free()
        secret = secrets.token_bytes(32)
        home = stack.enter_context(home_of(secret))
        options = ["--host", where.host, "--port", str(where.port), "--isolation", "process"]
        options += ["--superexec-auth-secret-file", str(home / "secret"), *where.options()]
        link = stack.enter_context(Program("superlink", options, home, folder / "flower.log"))
        await_health(link, where)
        with flower_errors():
            start_run(where, list(known) if known else [])
            grid = take_server_task(where, secret, stack)
        open_guard(home / "guard.json", list(known) if known else None)
        tell(f"listening on {where.host}:{where.port}")
        roll = Roll(grid, names, known)
        there = roll.wait(number, wait, lambda n: tell(f"{n} of {number} clients are there"))
        tell(f"the run begins with {', '.join(sorted(there))}")
        job = job_of(sites, identity(folder / "checkpoint"), data=False)
        deadline = sites.config.engine.deadline
        engine = FlowerEngine(grid, roll, names, job, deadline=deadline, check=link.check, close=stack.close)
        stack.callback(lambda: dismiss(engine) if engine.t == sites.config.rounds else None)
        return engine
    except BaseException:
        stack.close()
        raise


def identity(folder: Path) -> str:
    """What clients tell this run from others by: the same when it is resumed, not when it starts again."""
    path = folder / "run-id"
    if not path.exists() or not (folder / "state.safetensors").exists():
        write_atomic(path, secrets.token_hex(16))
    return path.read_text("utf-8")


def await_health(link: Program, where: Where) -> None:
    """Returns when the SuperLink answers."""
    verify = ssl.create_default_context(cadata=where.root.decode()) if where.root else True
    url, end = f"http{'s' if where.root else ''}://{where.here}/health", time.monotonic() + START
    with httpx.Client(verify=verify, trust_env=False) as client:
        while time.monotonic() < end:
            link.check()
            with suppress(httpx.TransportError):
                if client.get(url).status_code == 200:
                    return
            time.sleep(0.1)
    raise UserError(
        f"Flower's SuperLink did not start within {START:g} seconds: see whether memory is short."
    )


def start_run(where: Where, public_keys: Sequence[bytes]) -> None:
    """Registers the clients' keys, and starts a run at the SuperLink.

    Flower wants an app for that, and sends it around. `serve` and `join` do not load it.
    """
    app = f"""
[project]
name = "fedseal"
version = "{versions()["fedseal"]}"
dependencies = ["flwr"]
[tool.flwr.app]
publisher = "fedseal"
[tool.flwr.app.components]
serverapp = "fedseal.engines.flower_server:app"
clientapp = "fedseal.engines.flower_client:app"
"""
    fab = build_fab_from_files({"pyproject.toml": app.encode()})[0]
    with ControlHttpClient.from_server_address(
        where.here, where.root is None, where.root, [versioned("flwr CLI")]
    ) as control:
        for key in public_keys:
            control.RegisterNode(RegisterNodeRequest(public_key=key))
        control.StartRun(StartRunRequest(fab=fab_to_proto(Fab("", fab, {}))))


def take_server_task(where: Where, secret: bytes, stack: ExitStack) -> Mailbox:
    """Takes the run's ServerApp task; gives the Grid that it is to be done with."""
    with RuntimeHttpClient.from_server_address(
        where.here, where.root is None, where.root, task_taker(secret)
    ) as client:
        token = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])).token
    grid = Mailbox(where.here, where.root is None, where.root, token=token)
    stack.callback(grid.close)
    grid._retry_invoker.max_time = START
    task = grid._runtime_client.PullTaskInput(PullTaskInputRequest())
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = task.task_id, task.run.run_id, 1
    grid.set_run(run_from_proto(task.run))
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(grid._runtime_client))
    heartbeat.start()
    stack.callback(heartbeat.stop)
    return grid


def dismiss(engine: FlowerEngine) -> None:
    """Tells the clients that the run has ended, so that they may end, too."""
    words = RecordDict({BYE: ConfigRecord({BYE: True})})
    with suppress(UserError), flower_errors():
        nodes = engine.roll.present().values()
        messages = [Message(words, node.node_id, MessageType.QUERY, ttl=20) for node in nodes]
        waiting, end = {name for name in engine.grid.push_messages(messages) if name}, time.monotonic() + 10
        while waiting and time.monotonic() < end:
            for reply in engine.grid.pull_messages(list(waiting)):
                waiting.discard(reply.metadata.reply_to_message_id)
            time.sleep(0.1)


@dataclass(frozen=True)
class Labels:
    """The server's own images, a folder for each class."""

    labels: Path
    validation: Path | None = None
    test: Path | None = None

    def read(self, data: DataSettings) -> Pool:
        """As one pool, in the order that `train` has them in."""
        size, channels = data.size or 32, data.channels or 3
        server = read_labelled(self.labels, size=size, channels=channels)
        read = {"server": server}
        for name, folder in (("validation", self.validation), ("test", self.test)):
            if folder is not None:
                read[name] = read_labelled(folder, server.classes, size=size, channels=channels)
        return join("folders", read, server.classes)


def serve(
    config: Config,
    folder: Path,
    where: Where,
    labels: Labels,
    names: Sequence[str],
    *,
    number: int,
    wait: float,
    resume: bool,
    console: Console,
) -> Result:
    """Trains with clients elsewhere, and leaves the run folder that `train` leaves."""
    where.free()
    if config.chosen().needs_client_labels:
        raise UserError(f"{config.method} needs the clients' labels: choose another method, or simulate it.")
    config = with_labels(config, labels.labels)
    federation = split_server(labels.read(config.data), config.data, config.seed, names)
    tell = partial(console.print, markup=False, soft_wrap=True)

    def start(sites: Sites, memories: Mapping[str, bytes]) -> FlowerEngine:
        return connect(sites, folder, where, number, wait, tell)

    return run(config, folder, resume=resume, console=console, federation=federation, start_engine=start)


def with_labels(config: Config, labels: Path) -> Config:
    """The configuration with the server's own folder for its data, and a checkpoint after every round, since
    the clients remember the last round alone."""
    raw = config.to_dict()
    data, own = raw["data"], config.data.source == "folders"
    raw["data"] = {"source": "folders", "path": str(labels.resolve())}
    raw["data"] |= {key: data[key] for key in ("size", "channels", *(["validation"] if own else []))}
    raw["engine"]["checkpoint_every"] = 1
    return parse(raw, "the configuration")
