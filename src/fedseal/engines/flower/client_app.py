"""The client's side of the Flower engine: a ClientApp that answers the server's requests.

Only the client's memory file lasts, so the app may be restarted before any request. Images and network are
kept between requests for speed.
"""

import hashlib
import re
import tomllib
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedseal.config.config import Config, parse
from fedseal.config.sections import ModelSettings
from fedseal.core import Packet
from fedseal.data.cache import files_state
from fedseal.data.federation import load_federation
from fedseal.data.folders import read_client
from fedseal.data.pool import Federation, Pool
from fedseal.engines.client import SimulatedClients, run_client
from fedseal.engines.flower.consent import Consent
from fedseal.engines.flower.task import LABEL_COUNTS, ClientTask, pack, unpack, unpack_task
from fedseal.engines.memory import MemoryFile
from fedseal.engines.secure_client import PHASE, WITHOUT_TRAINING, answer_without_training
from fedseal.errors import UserError
from fedseal.features import Features
from fedseal.methods import METHODS
from fedseal.models import MODELS, Network, build_network, weight_bytes
from fedseal.run_setup import RunSetup
from fedseal.system.environment import set_up_process
from fedseal.system.files import sync_folder
from fedseal.system.own_code import hash_source, source_hash
from fedseal.system.version import compatible, fedseal_version, needed_version

app = ClientApp()


@dataclass(frozen=True)
class OwnFiles:
    """A client's copies of the server's own files. Nothing else is loaded."""

    method: str = ""
    network: str = ""
    weights: str = ""  # of a frozen network


NO_FILES, DEFAULT_CONSENT = OwnFiles(), Consent()


class TaskRefusedError(UserError):
    """Why a client refuses a task. The server is told the text."""


@app.query()
def send_name(message: Message, context: Context) -> Message:
    """The client's name, for servers that do not know it by its key."""
    settings = context.node_config
    name = str(settings.get("client", settings.get("partition-id")))
    return Message(RecordDict({"client": ConfigRecord({"name": name})}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """A client's part of a round."""
    task, settings = unpack_task(message.content), context.node_config
    simulated = "partition-id" in settings
    set_up_process(None if simulated else task.arithmetic)  # simulated: that of the server's process
    request = Packet.from_bytes(unpack(message.content))
    if simulated:
        reply, label_counts = run_simulated(task, request, int(str(settings["partition-id"])))
        record = pack(reply.to_bytes())
        record[LABEL_COUNTS] = ConfigRecord(dict(label_counts))
        return Message(record, reply_to=message)
    task = _with_own_choices(task, str(settings.get("device", "auto")), int(str(settings.get("threads", 0))))
    images, memory = (Path(str(settings[name])) for name in ("images", "memory"))
    files = OwnFiles(*(str(settings.get(name, "")) for name in ("method", "network", "weights")))
    consent = Consent.model_validate_json(str(settings.get("consent", "{}")))
    reply = run_deployed(task, request, images, memory, files, consent)
    return Message(pack(reply.to_bytes()), reply_to=message)


def run_simulated(task: ClientTask, request: Packet, k: int) -> tuple[Packet, dict[str, int]]:
    """The reply and the label statistics of client k of a simulation."""
    clients = _simulated_clients(task.model_copy(update={"client": ""}).model_dump_json())
    file = MemoryFile(Path(task.memory_folder) / str(k))
    result = clients.run(k, request, file.read())
    file.write(result.memory)
    return result.reply, result.label_counts


@lru_cache(1)
def _simulated_clients(task: str) -> SimulatedClients:
    known = ClientTask.model_validate_json(task)
    config = known.parse_config()
    hashes = {config.method: known.method_hash, config.model.name: known.network_hash}
    for name, expected in hashes.items():
        if source_hash(name) != expected:
            raise TaskRefusedError(f"{name} has changed since the run started: restore it")
    return SimulatedClients(RunSetup(config, load_federation(config.data, config.seed)).with_features())


def run_deployed(
    task: ClientTask,
    request: Packet,
    images: Path,
    memory: Path,
    files: OwnFiles = NO_FILES,
    consent: Consent = DEFAULT_CONSENT,
) -> Packet:
    """The reply of the client whose images are in a folder of this machine.

    `memory` is the folder of its memory files.
    """
    if not compatible(task.version):
        raise TaskRefusedError(
            f"the server has fedseal {task.version}, this client {fedseal_version()}: install fedseal"
            f" {needed_version(task.version)} at the client"
        )
    if refusal := consent.find_method_refusal(str(task.config["method"])):
        raise TaskRefusedError(refusal)
    config = _client_config(task, files)
    if refusal := consent.find_refusal(task, config):
        raise TaskRefusedError(refusal)
    if consent.masked and PHASE not in request.scalars:
        raise TaskRefusedError(
            "this client takes part only with secure aggregation: set secure.enabled on the server"
        )
    if not re.fullmatch("[0-9a-f]{8,64}", task.run):  # it becomes a file name
        raise TaskRefusedError("the server's run has an invalid identifier")
    method = config.selected_method()
    if method.needs_client_labels:
        raise TaskRefusedError(f"{config.method} needs labels of this client's images, which have none")
    hashed_name = hashlib.blake2b(task.client.encode(), digest_size=8).hexdigest()  # safe as a file name
    file = MemoryFile(memory / f"{task.run}-{hashed_name}.safetensors")
    if request.scalars.get(PHASE) in WITHOUT_TRAINING:
        reply, remembered = answer_without_training(request, file.read())
        file.write(remembered)
        return reply
    noisy = config.privacy.mode == "local" and PHASE not in request.scalars
    last = LastReply(file.path.with_name(f"{file.path.stem}-reply.safetensors"), request) if noisy else None
    if last and (sent := last.read()) is not None:
        return sent
    received = sum(value.nbytes for group in request.tensors.values() for value in group.values())
    if not config.model.freeze and weight_bytes(config.model, *shape(task)) > received:
        raise TaskRefusedError("the server's network is larger than the weights that it has sent")
    setup = _read_client(config, images, task)
    if setup.features and setup.features.backbone != task.backbone_hash:
        raise TaskRefusedError("the frozen weights differ from the server's: copy its --weights file again")
    network = (setup.network() if setup.features else _network(config.model, *shape(task))).to(setup.device)
    client, counts = setup.client(0, network), task.counts and consent.share_counts
    reply, remembered = run_client(method, client, request, file.read(), images_change=True, counts=counts)
    file.write(remembered)
    if last:
        last.write(reply)
    return reply


class LastReply:
    """A reply with the client's own noise. A request that comes again gets the same one.

    Each further noise on the same update would reveal more of it.
    """

    def __init__(self, path: Path, request: Packet) -> None:
        self.file = MemoryFile(path)
        self.request = hashlib.sha256(request.to_bytes()).hexdigest()

    def read(self) -> Packet | None:
        """The reply that was sent to the same request; None if there is none."""
        stored = self.file.read()
        packet = Packet.from_bytes(stored) if stored else Packet()
        scalars = dict(packet.scalars)
        return Packet(packet.tensors, scalars) if scalars.pop("request", "") == self.request else None

    def write(self, reply: Packet) -> None:
        self.file.write(Packet(reply.tensors, {**reply.scalars, "request": self.request}).to_bytes())
        sync_folder(self.file.path.parent)  # before it is sent


def _with_own_choices(task: ClientTask, device: str, threads: int) -> ClientTask:
    """The task with this machine's device, and its number of threads unless that is 0."""
    config = task.config | {"engine": {"device": device}}
    if threads:
        config["client"] = config["client"] | {"threads": threads}
    return task.model_copy(update={"config": config})


def _client_config(task: ClientTask, files: OwnFiles) -> Config:
    """The run's configuration. Code is loaded only from files that the client's user has named."""
    raw, model = dict(task.config), dict(task.config["model"])
    if raw["method"] not in METHODS:
        raw["method"] = _own_copy("method", str(raw["method"]), files.method, task.method_hash)
    if model["name"] not in MODELS:
        model["name"] = _own_copy("network", str(model["name"]), files.network, task.network_hash)
    if not model["freeze"]:
        model["weights"] = ""  # all weights come with each request
    elif model["weights"]:
        if not files.weights:
            raise TaskRefusedError(
                f"the server uses the weights {model['weights']}: join with --weights and a copy of that file"
            )
        model["weights"] = files.weights
    return parse(raw | {"model": model}, "the server's configuration")


def _own_copy(kind: str, wanted: str, file: str, expected: str) -> str:
    """FILE:name of the client's copy of a file of the server, if it is the same."""
    if not file:
        raise TaskRefusedError(
            f"the server uses the {kind} {wanted}: join with --{kind} and a copy of that file"
        )
    if hash_source(Path(file)) != expected:
        raise TaskRefusedError(f"its copy of the {kind} file differs from the server's: copy it again")
    return f"{file}:{wanted.rpartition(':')[2]}"


def _read_client(config: Config, folder: Path, task: ClientTask) -> RunSetup:
    """This client with its images, or with their features if the network is frozen."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    state = files_state(folder, files)
    pool = _decode(folder, *shape(task), state)
    rows = np.arange(len(pool.labels))
    setup = RunSetup(config, Federation(pool, rows[:0], rows[:0], (rows,), (task.client,), {}))
    return replace(setup, features=_features(config.to_toml(), folder, shape(task), state))


@lru_cache(1)
def _decode(folder: Path, channels: int, size: int, classes: int, state: str) -> Pool:
    """The images in a folder; read again when `state` shows that a file has changed."""
    return read_client(folder, tuple(map(str, range(classes))), size=size, channels=channels)


@lru_cache(1)
def _features(config: str, folder: Path, task_shape: tuple[int, int, int], state: str) -> Features | None:
    """The features of the images in a folder, if the network is frozen."""
    parsed, pool = (
        parse(tomllib.loads(config), "the server's configuration"),
        _decode(folder, *task_shape, state),
    )
    rows = np.arange(len(pool.labels))
    return RunSetup(parsed, Federation(pool, rows[:0], rows[:0], (rows,), ("",), {})).with_features().features


def shape(task: ClientTask) -> tuple[int, int, int]:
    """The shape of a task's network: channels, size and classes."""
    return task.channels, task.size, task.classes


@lru_cache(1)
def _network(settings: ModelSettings, channels: int, size: int, classes: int) -> Network:
    """A network of the right shape. Weights and normalisation come with each request."""
    blank = [0.0] * channels
    return build_network(
        settings, channels=channels, size=size, classes=classes, mean=blank, std=blank, seed=0
    )
