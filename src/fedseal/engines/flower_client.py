"""The client's half of the Flower engine: a ClientApp that answers the server's requests.

All that lasts is the client's memory on disk, so that the app may be started anew for every request. Images
and network are kept for the next request only to be faster.
"""

import hashlib
import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from fedseal.engines.flower import Job, pack, unpack  # before Flower itself, which it silences

# isort: split
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedseal.api import deal
from fedseal.config import Config, parse
from fedseal.core import Images, Packet, Site
from fedseal.data import cache
from fedseal.data.folders import read_unlabelled
from fedseal.data.pool import Federation, Pool
from fedseal.errors import UserError
from fedseal.machine import threads, versions
from fedseal.memory import Memory
from fedseal.methods import METHODS, code
from fedseal.models import ModelSettings, Network, build
from fedseal.sites import Diagnosis, Sites

app = ClientApp()


class Refusal(UserError):
    """What a client will not do, and why: the server may read it."""


@app.query()
def tell_name(message: Message, context: Context) -> Message:
    """Who this is, where there is no key to know it by."""
    about = context.node_config
    name = str(about.get("client", about.get("partition-id")))
    return Message(RecordDict({"client": ConfigRecord({"name": name})}), reply_to=message)


@app.train()
def learn(message: Message, context: Context) -> Message:
    """One client's part of a round."""
    job = Job.model_validate_json(str(message.content.config_records["job"]["job"]))
    request, about = Packet.from_bytes(unpack(message.content)), context.node_config
    if "partition-id" not in about:
        images, memory = (Path(str(about[name])) for name in ("images", "memory"))
        reply = own(job, request, images, memory, str(about.get("method", "")))
        return Message(pack(reply.to_bytes()), reply_to=message)
    reply, counts = simulated(job, request, int(str(about["partition-id"])))
    record = pack(reply.to_bytes())
    record["diagnosis"] = ConfigRecord(dict(counts))
    return Message(record, reply_to=message)


def simulated(job: Job, request: Packet, k: int) -> tuple[Packet, dict[str, int]]:
    """Client k of a federation that this process deals itself; also counts right labels."""
    sites, model = federation_of(job.model_copy(update={"client": ""}).model_dump_json())
    diagnosis = Diagnosis()
    client = sites.client(k, model, diagnosis.note)
    reply = serve(sites, client, request, Memory(Path(job.memory) / str(k)))
    return reply, diagnosis.judged(sites.truth(k))


@lru_cache(1)
def federation_of(job: str) -> tuple[Sites, Network]:
    """The federation of a simulation, and one network for all of its clients."""
    config = Job.model_validate_json(job).settings()
    sites = Sites(config, deal(config.data, config.seed))
    return sites, sites.network()


def own(job: Job, request: Packet, images: Path, memory: Path, method: str = "") -> Packet:
    """The client whose images lie in a folder of this machine; `method`: its copy of a method's file."""
    here = versions()["fedseal"]
    if job.version != here:
        raise Refusal(f"the server has fedseal {job.version}, this client {here}: install the same one")
    config = settings_here(job, method)
    if not re.fullmatch("[0-9a-f]{8,64}", job.run):  # it becomes a file's name
        raise Refusal("the server gave its run no proper name")
    if config.chosen().needs_client_labels:
        raise Refusal(f"{config.method} needs labels of the clients' images, and there are none")
    pool = read_images(images, job.size, job.channels, job.classes)
    rows = np.arange(len(pool.labels))
    sites = Sites(config, Federation(pool, rows[:0], rows[:0], (rows,), (job.client,), {}))
    model = network_of(config.model, job.channels, job.size, job.classes).to(sites.device)
    client = sites.client(0, model)
    name = hashlib.blake2b(job.client.encode(), digest_size=8).hexdigest()  # as a file's name it is harmless
    return serve(sites, client, request, Memory(memory / f"{job.run}-{name}.safetensors"))


def settings_here(job: Job, method: str) -> Config:
    """The run's configuration. Code is loaded from the file that the client itself has named, if at all, and
    never from one that the server names."""
    name = str(job.config["method"])
    if name in METHODS:
        return job.settings()
    if not method:
        raise Refusal(f"the server runs {name}: join with --method and a copy of that file")
    here = f"{method}:{name.rpartition(':')[2]}"
    if code(here) != job.code:
        raise Refusal(f"{Path(method).name} is not the same file as the server's: get a copy of that")
    return parse(job.config | {"method": here}, "the server's configuration")


def read_images(folder: Path, size: int, channels: int, classes: int) -> Pool:
    """A client's own images, decoded again when a file has changed."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return decoded(folder, size, channels, classes, cache.fingerprint(folder, files))


@lru_cache(1)
def decoded(folder: Path, size: int, channels: int, classes: int, state: str) -> Pool:
    """The images of a folder in a certain state."""
    images = read_unlabelled(folder, size=size, channels=channels, progress=False)
    names, parts = tuple(map(str, range(classes))), {"client": range(len(images.labels))}
    return Pool("client", images.pixels, images.labels, names, parts, flips=False)


@lru_cache(1)
def network_of(settings: ModelSettings, channels: int, size: int, classes: int) -> Network:
    """A network of the right shape: its weights, and the normalisation, come with each request."""
    blank = [0.0] * channels
    return build(settings, channels=channels, size=size, classes=classes, mean=blank, std=blank, seed=0)


def serve(sites: Sites, client: Site, request: Packet, memory: Memory) -> Packet:
    """The method's step at a client, between reading its memory and writing it."""
    known, there = memory.read(client.data.pixels)
    asked_before = "t" in known.scalars and known.scalars["t"] == request.scalars.get("t")
    if asked_before and not bool(there.all()):
        # Images that are new since this round was first asked for take part from the next one on.
        client = replace(client, data=Images(client.data.pixels[there]))
        known, _ = memory.read(client.data.pixels)
    with threads(sites.config.client.threads):
        reply, remembered = sites.config.chosen().client_round(request, known, client)
    memory.write(remembered, client.data.pixels)
    return reply
