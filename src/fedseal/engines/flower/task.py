"""What a client is told besides its packet, and the Flower records that carry both."""

import secrets
from pathlib import Path
from typing import Any, Literal

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from pydantic import Field

from fedseal.config.config import Config, parse
from fedseal.config.sections import MAX_SIZE, Settings
from fedseal.methods.loader import section_name
from fedseal.run_setup import RunSetup
from fedseal.system.machine import versions
from fedseal.system.own_code import source_hash

END_OF_RUN = "end-of-run"  # the record in a server's last message to a client
LABEL_COUNTS = "label-counts"  # the record with the label statistics of a simulated client


class ClientTask(Settings):
    """Everything a client needs to take part, except for the packet.

    Every request carries it, so a client can be restarted at any time.
    """

    run: str  # distinguishes runs in a client's memory folder
    client: str  # the client's name
    version: str  # the server's version of fedseal
    classes: int = Field(ge=1)
    channels: Literal[1, 3]
    size: int = Field(ge=1, le=MAX_SIZE)
    config: dict[str, Any]
    arithmetic: str  # the server's, so that all compute alike
    method_hash: str = ""  # of the file of your own method; empty for a built-in method
    network_hash: str = ""  # of the file of your own network; empty for a built-in network
    backbone_hash: str = ""  # of the frozen weights, which are not sent
    counts: bool = False  # whether the server asks for counts of images
    memory_folder: str = ""  # of simulated clients only

    def parse_config(self) -> Config:
        return parse(self.config, "the server's configuration")


def make_task(setup: RunSetup, run: str, *, memory_folder: str = "") -> ClientTask:
    """A task without a client's name; it contains only settings that clients use.

    Simulated clients have a `memory_folder`. They load the data themselves, so they also get those settings.
    """
    pool, raw, method = setup.federation.pool, setup.config.to_dict(), setup.config.method
    config = {key: raw[key] for key in ("method", "seed", "model", "augment", "client", section_name(method))}
    config["augment"] = {"flip": pool.flips} | raw["augment"]
    if setup.config.privacy.mode != "none":  # a client of an older version refuses it
        config["privacy"] = raw["privacy"]
    if memory_folder:
        config |= {key: raw[key] for key in ("data", "engine", "simulate")}
    else:
        # Clients do not learn the server's paths.
        config["method"] = Path(method).name
        config["model"] = raw["model"] | {key: Path(raw["model"][key]).name for key in ("name", "weights")}
    return ClientTask(
        run=run,
        client="",
        version=versions()["fedseal"],
        classes=len(pool.classes),
        channels=pool.pixels.shape[1],
        size=pool.pixels.shape[2],
        config=config,
        arithmetic=setup.config.engine.arithmetic,
        method_hash=source_hash(method),
        network_hash=source_hash(setup.config.model.name),
        backbone_hash=setup.features.backbone if setup.features else "",
        counts=setup.config.engine.asks_for_counts,
        memory_folder=memory_folder,
    )


def pack(packet: bytes, task: ClientTask | None = None) -> RecordDict:
    """A Flower record with the bytes of a packet, as one array, and a task."""
    array = Array("uint8", (len(packet),), "packet", packet)
    record = RecordDict({"packet": ArrayRecord({"packet": array})})
    if task is not None:
        record["task"] = ConfigRecord({"task": task.model_dump_json(), "nonce": nonce()})
    return record


def nonce() -> str:
    """Makes a message's record unique.

    Flower names an object by a hash of its content. A client that can predict the name of another client's
    record could announce an object of that name first, and the other client would lose its message.
    """
    return secrets.token_hex(16)


def unpack(record: RecordDict) -> bytes:
    """The bytes of the packet in a record."""
    return record.array_records["packet"]["packet"].data


def unpack_task(record: RecordDict) -> ClientTask:
    """The task in a record."""
    return ClientTask.model_validate_json(str(record.config_records["task"]["task"]))
