"""The client's side of the Flower engine: a ClientApp that answers the server's requests.

Only the client's memory file lasts, so the app may be restarted before any request. Images and network are
kept between requests for speed.
"""

import hashlib
import re
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
from fedseal.data.folders import read_unlabelled
from fedseal.data.pool import Federation, Pool, join_parts
from fedseal.engines.client import SimulatedClients, run_client
from fedseal.engines.flower.task import LABEL_COUNTS, ClientTask, pack, unpack, unpack_task
from fedseal.engines.memory import MemoryFile
from fedseal.errors import UserError
from fedseal.methods import METHODS
from fedseal.methods.loader import source_hash
from fedseal.models import Network, build_network
from fedseal.run_setup import RunSetup
from fedseal.system.environment import set_up_process
from fedseal.system.machine import versions

app = ClientApp()


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
    images, memory = (Path(str(settings[name])) for name in ("images", "memory"))
    reply = run_deployed(task, request, images, memory, str(settings.get("method", "")))
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
    config = ClientTask.model_validate_json(task).parse_config()
    return SimulatedClients(RunSetup(config, load_federation(config.data, config.seed)))


def run_deployed(
    task: ClientTask, request: Packet, images: Path, memory: Path, method_file: str = ""
) -> Packet:
    """The reply of the client whose images are in a folder of this machine.

    `memory` is the folder of its memory files, and `method_file` its copy of the file of your own method.
    """
    version = versions()["fedseal"]
    if task.version != version:
        raise TaskRefusedError(
            f"the server has fedseal {task.version}, this client {version}: install the same version"
        )
    config = _client_config(task, method_file)
    if not re.fullmatch("[0-9a-f]{8,64}", task.run):  # it becomes a file name
        raise TaskRefusedError("the server's run has an invalid identifier")
    method = config.selected_method()
    if method.needs_client_labels:
        raise TaskRefusedError(f"{config.method} needs labels of this client's images, which have none")
    pool = _read_images(images, task)
    rows = np.arange(len(pool.labels))
    setup = RunSetup(config, Federation(pool, rows[:0], rows[:0], (rows,), (task.client,), {}))
    network = _network(config.model, task.channels, task.size, task.classes).to(setup.device)
    hashed_name = hashlib.blake2b(task.client.encode(), digest_size=8).hexdigest()  # safe as a file name
    file = MemoryFile(memory / f"{task.run}-{hashed_name}.safetensors")
    reply, remembered = run_client(method, setup.client(0, network), request, file.read(), images_change=True)
    file.write(remembered)
    return reply


def _client_config(task: ClientTask, method_file: str) -> Config:
    """The run's configuration. A method is loaded only from a file that the client's user has named."""
    name = str(task.config["method"])
    if name in METHODS:
        return task.parse_config()
    if not method_file:
        raise TaskRefusedError(
            f"the server uses the method {name}: join with --method and a copy of that file"
        )
    method = f"{method_file}:{name.rpartition(':')[2]}"
    if source_hash(method) != task.method_hash:
        raise TaskRefusedError(f"{Path(method_file).name} differs from the server's file: copy it again")
    return parse(task.config | {"method": method}, "the server's configuration")


def _read_images(folder: Path, task: ClientTask) -> Pool:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return _decode(folder, task.size, task.channels, task.classes, files_state(folder, files))


@lru_cache(1)
def _decode(folder: Path, size: int, channels: int, classes: int, state: str) -> Pool:
    """The images in a folder; decoded again when `state` shows that a file has changed."""
    images = read_unlabelled(folder, size=size, channels=channels, progress=False)
    return join_parts("client", {"client": images}, tuple(map(str, range(classes))))


@lru_cache(1)
def _network(settings: ModelSettings, channels: int, size: int, classes: int) -> Network:
    """A network of the right shape. Weights and normalisation come with each request."""
    blank = [0.0] * channels
    return build_network(
        settings, channels=channels, size=size, classes=classes, mean=blank, std=blank, seed=0
    )
