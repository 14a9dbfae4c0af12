"""The server's connection to its clients: Flower's SuperLink, and an engine over it.

The SuperLink runs as a child process. The round loop stays in the user's process, which takes the server's
task from the SuperLink as Flower's SuperExec would.
"""

import logging
import os
import secrets
import ssl
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
from flwr.app import ConfigRecord, Message, MessageType
from flwr.cli.build import build_fab_from_files
from flwr.common.serde import fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest, UnregisterNodeRequest
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity

from fedseal.config.config import Config
from fedseal.deploy import expiry, keys
from fedseal.deploy.certificates import LOOPBACK
from fedseal.deploy.grid import SafeGrid
from fedseal.deploy.guard import admit_clients
from fedseal.deploy.programs import Notify, SuperLink, flower_home, guard_file
from fedseal.deploy.revocation import Keys, KeyWatch
from fedseal.engines.flower.engine import GONE, ClientRegistry, FlowerEngine, flower_errors, size_limit
from fedseal.engines.flower.task import END_OF_RUN, make_task, nonce, pack
from fedseal.errors import UserError
from fedseal.run_setup import RunSetup
from fedseal.storage.run_folder import checkpoint_file, find_finished
from fedseal.system.files import write_atomic
from fedseal.system.machine import versions
from fedseal.system.ports import check_port

log = logging.getLogger("fedseal")

START_SECONDS = 120.0  # for the SuperLink to start
END_SECONDS = 40.0  # for clients to learn that the run has ended; one that was killed can return after 30
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # and how this machine reaches such a server itself

COMPONENTS = {
    "serverapp": "fedseal.engines.flower.simulation:simulate",
    "clientapp": "fedseal.engines.flower.client_app:app",
}


@dataclass(frozen=True)
class Endpoint:
    """The address on which the SuperLink listens, and its folder of keys; without keys it is open to all."""

    host: str
    port: int
    keys: Path | None

    @property
    def local_address(self) -> str:
        """The address by which this machine reaches the SuperLink."""
        host = ANY_ADDRESS.get(self.host, self.host)
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    @property
    def ca_certificate(self) -> bytes | None:
        return (self.keys / "ca.crt").read_bytes() if self.keys else None

    def options(self) -> list[str]:
        """The SuperLink's options."""
        address = ["--host", self.host, "--port", str(self.port)]
        if self.keys is None:
            return [*address, "--insecure"]
        files = {"--ssl-ca-certfile": "ca.crt", "--ssl-certfile": "server.crt", "--ssl-keyfile": "server.key"}
        tls = [word for option, name in files.items() for word in (option, str((self.keys / name).resolve()))]
        return [*address, *tls, "--enable-supernode-auth"]

    def check(self) -> None:
        """Raises if the port is in use, or if the certificate is not valid now and for the host."""
        if self.keys:
            hosts = keys.certified_hosts(self.keys)
            expiry.check_dates(self.keys)
            keys.check_secrets(self.keys)
            if self.host not in (*ANY_ADDRESS, *hosts):
                raise UserError(
                    f"The certificate in {self.keys} is not valid for {self.host}: create keys in a new"
                    f" folder with 'fedseal keys init NEW --host {self.host}', and give each client its new"
                    " key."
                )
        check_port(self.host, self.port)

    def warn(self) -> None:
        """Warns if a certificate or key expires soon, or if no other machine will accept the certificate."""
        if self.keys and (warning := expiry.warn_of_expiry(self.keys)):
            log.warning("%s", warning)
        for warning in expiry.warn_of_clients(self.keys) if self.keys else ():
            log.warning("%s", warning)
        if not self.keys or self.host not in ANY_ADDRESS:
            return
        if set(keys.certified_hosts(self.keys)) <= set(LOOPBACK):
            log.warning(
                "the certificate in %s is for localhost only, so clients on other machines will refuse it:"
                " create keys in a new folder with 'fedseal keys init NEW --host HOST'",
                self.keys,
            )


def connect(
    setup: RunSetup,
    folder: Path,
    endpoint: Endpoint,
    *,
    expelled: Collection[str],
    expel: Callable[[list[str]], None],
    clients: int,
    wait: float,
    notify: Notify,
) -> FlowerEngine:
    """Starts the SuperLink and waits until this number of clients has connected.

    Clients that were expelled, or whose keys have expired, are refused.

    `expel` is told the clients whose keys are revoked later. The engine's `close` ends everything that was
    started.
    """
    logging.getLogger("flwr").setLevel(logging.ERROR)  # its warnings are no JSON, and `superlink.check` tells
    names = setup.federation.names
    registered = admitted = None
    if endpoint.keys:
        known = keys.read_registered(endpoint.keys).items()
        registered = {key: name for name, key in known if name in names and name not in expelled}
        expired = expiry.explain_expired(endpoint.keys, expiry.client_expiries(endpoint.keys))
        admitted = {key: name for key, name in registered.items() if name not in expired}
    stack = ExitStack()
    try:
        endpoint.check()
        bypass_proxy(endpoint.local_address.rpartition(":")[0].strip("[]"))
        secret = secrets.token_bytes(32)
        home = stack.enter_context(flower_home())
        options = [*endpoint.options(), "--isolation", "process"]
        superlink = stack.enter_context(SuperLink(options, secret, home, folder / "flower.log"))
        wait_until_healthy(superlink, endpoint)
        with flower_errors():
            nodes = start_run(endpoint, list(admitted or ()))
            grid = take_server_task(endpoint, secret, stack)
        # If it was killed, requests to it are not repeated for minutes.
        grid._retry_invoker.should_giveup = lambda error: superlink.process.poll() is not None
        limit = upload_limit(setup)
        admit_clients(guard_file(home), admitted, limit)
        notify(f"listening on {endpoint.host}:{endpoint.port}")
        endpoint.warn()
        registry = ClientRegistry(grid, set(names) - set(expelled), registered)
        if endpoint.keys:

            def admit(keys: Keys) -> None:
                admit_clients(guard_file(home), keys, limit)
                with open_control(endpoint) as control:
                    register_keys(control, keys, nodes)

            stack.enter_context(KeyWatch(endpoint.keys, registry, admit, expel))
        connected = registry.wait_for_clients(
            *(clients, wait, lambda number: notify(f"{number} of {clients} clients are connected")),
            check=superlink.check,
        )
        notify(f"the run starts with {', '.join(sorted(connected))}")
        engine = FlowerEngine(
            grid,
            registry,
            names,
            make_task(setup, run_id(folder)),
            deadline=setup.config.engine.deadline,
            expelled=expelled,
            check=superlink.check,
            close=stack.close,
        )
        stack.callback(announce_end, engine, folder, setup.config, notify)
        return engine
    except BaseException:
        stack.close()
        raise


def bypass_proxy(host: str) -> None:
    """Otherwise Flower reaches the SuperLink on this machine through the proxy of the environment."""
    known = os.environ.get("no_proxy", os.environ.get("NO_PROXY", ""))
    if host not in known.split(","):
        os.environ["no_proxy"] = f"{known},{host}".lstrip(",")


def upload_limit(setup: RunSetup) -> int:
    """The bytes that a client may upload in a round.

    It is twice what the server accepts as a reply, so that the server can say that a reply is too large.
    """
    return 2 * size_limit(sum(value.nbytes for value in setup.network().state_dict().values()))


def run_id(folder: Path) -> str:
    """Identifies a run to its clients. It stays the same when a run is resumed, not when it is restarted."""
    checkpoint = checkpoint_file(folder)
    path = checkpoint.with_name("run-id")
    if not path.exists() or not checkpoint.exists():
        write_atomic(path, secrets.token_hex(16))
    return path.read_text("utf-8")


def wait_until_healthy(superlink: SuperLink, endpoint: Endpoint) -> None:
    """Returns when the SuperLink answers."""
    certificate = endpoint.ca_certificate
    verify = ssl.create_default_context(cadata=certificate.decode()) if certificate else True
    url = f"http{'s' if certificate else ''}://{endpoint.local_address}/health"
    end = time.monotonic() + START_SECONDS
    with httpx.Client(verify=verify, trust_env=False) as client:
        while time.monotonic() < end:
            superlink.check()
            with suppress(httpx.TransportError):
                if client.get(url).status_code == 200:
                    return
            time.sleep(0.1)
    raise UserError(
        f"Flower's SuperLink did not start within {START_SECONDS:g} seconds: see the end of {superlink.log}."
    )


def start_run(endpoint: Endpoint, public_keys: Sequence[bytes]) -> dict[bytes, int]:
    """Registers the clients' keys and starts a run at the SuperLink. Returns Flower's numbers of the clients.

    Flower requires an app bundle for that and sends it to the clients. Neither `serve` nor `join` loads it.
    """
    components = "\n".join(f'{name} = "{path}"' for name, path in COMPONENTS.items())
    app = f"""
[project]
name = "fedseal"
version = "{versions()["fedseal"]}"
dependencies = ["flwr"]
[tool.flwr.app]
publisher = "fedseal"
[tool.flwr.app.components]
{components}
"""
    bundle = build_fab_from_files({"pyproject.toml": app.encode()})[0]
    nodes = dict[bytes, int]()
    with open_control(endpoint) as control:
        register_keys(control, public_keys, nodes)
        control.StartRun(StartRunRequest(fab=fab_to_proto(Fab("", bundle, {}))))
    return nodes


def open_control(endpoint: Endpoint) -> ControlHttpClient:
    """The SuperLink's part for operators."""
    certificate = endpoint.ca_certificate
    version = RuntimeVersionHttpInterceptor("flwr CLI")
    return ControlHttpClient.from_server_address(
        endpoint.local_address, certificate is None, certificate, [version]
    )


def register_keys(control: ControlHttpClient, keys: Collection[bytes], nodes: dict[bytes, int]) -> None:
    """Makes the SuperLink accept exactly these keys. `nodes` has Flower's numbers of the registered ones."""
    for key in nodes.keys() - set(keys):
        control.UnregisterNode(UnregisterNodeRequest(node_id=nodes[key]))
        del nodes[key]
    for key in keys:
        if key not in nodes:
            nodes[key] = control.RegisterNode(RegisterNodeRequest(public_key=key)).node_id


def take_server_task(endpoint: Endpoint, secret: bytes, stack: ExitStack) -> SafeGrid:
    """Takes the run's ServerApp task from the SuperLink, and returns its Grid."""
    address, certificate = endpoint.local_address, endpoint.ca_certificate
    authorise = SuperExecAuthHttpInterceptor(
        master_secret=secret, protected_methods=["/flwr.proto.Runtime/AcquireTask"]
    )
    with RuntimeHttpClient.from_server_address(
        address, certificate is None, certificate, [RuntimeVersionHttpInterceptor("SuperExec"), authorise]
    ) as client:
        token = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])).token
    grid = SafeGrid(address, certificate is None, certificate, token=token)
    stack.callback(grid.close)
    grid._retry_invoker.max_time = START_SECONDS
    task = grid._runtime_client.PullTaskInput(PullTaskInputRequest())
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = task.task_id, task.run.run_id, 1
    grid.set_run(run_from_proto(task.run))
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(grid._runtime_client))
    heartbeat.start()
    stack.callback(heartbeat.stop)
    return grid


def announce_end(engine: FlowerEngine, folder: Path, config: Config, notify: Notify) -> None:
    """Tells the clients that the run has ended, so that they end as well, and gives them the model.

    A client that is away has some seconds to come back. Clients of a run that stopped early wait for it.
    """
    if find_finished(folder, config) is None:
        return
    model = (folder / "model.safetensors").read_bytes()

    def last_message(name: str, node: NodeInfo) -> Message:
        record = pack(model)
        record[END_OF_RUN] = ConfigRecord({"client": name, "nonce": nonce()})
        return Message(record, node.node_id, MessageType.QUERY, ttl=2 * END_SECONDS)

    left = engine.registry.seen - engine.registry.revoked
    sent = dict[str, str]()  # clients by message
    activations = dict[str, str]()  # when a client connected that was told
    start, silent = time.monotonic(), True
    with suppress(UserError), flower_errors():
        while left and time.monotonic() < start + END_SECONDS:
            if silent and time.monotonic() > start + END_SECONDS / 10:
                silent = False
                names = ", ".join(sorted(left))
                notify(f"waiting up to {END_SECONDS:g} seconds to tell {names} that the run has ended")
            for name, node in engine.registry.connected().items():
                if name in left and activations.get(name) != node.last_activated_at:
                    for message in filter(None, engine.grid.push_messages([last_message(name, node)])):
                        activations[name], sent[message] = node.last_activated_at, name
            for reply in engine.grid.pull_messages(list(sent)) if sent else ():
                name = sent.pop(reply.metadata.reply_to_message_id, "")
                if not reply.has_error() or reply.error.code not in GONE:
                    left.discard(name)
            time.sleep(0.1)
    if left:
        notify(f"not told that the run has ended: {', '.join(sorted(left))}")
