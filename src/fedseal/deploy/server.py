"""`fedseal serve`: trains with clients on other machines."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from fedseal.config.config import Config, parse
from fedseal.config.sections import DataSettings
from fedseal.data.folders import DEFAULT_CHANNELS, DEFAULT_SIZE, read_labelled
from fedseal.data.pool import Federation, Pool, join_parts
from fedseal.data.splits import split_server
from fedseal.deploy.superlink import Endpoint, connect
from fedseal.engines.flower.engine import FlowerEngine
from fedseal.engines.memory_store import MemoryStore
from fedseal.errors import UserError
from fedseal.run_setup import RunSetup
from fedseal.storage.accuracies import averaged_over
from fedseal.storage.run_folder import Result, expel_clients, write_clients
from fedseal.system.logs import log
from fedseal.training.observers import Observer
from fedseal.training.train import run_training


@dataclass(frozen=True)
class LabelledFolders:
    """The server's images; each folder has one subfolder per class."""

    labels: Path
    validation: Path | None = None
    test: Path | None = None

    def read(self, data: DataSettings) -> Pool:
        """All images as one pool, in the same order as in `fedseal train`."""
        size, channels = data.size or DEFAULT_SIZE, data.channels or DEFAULT_CHANNELS
        server = read_labelled(self.labels, size=size, channels=channels)
        parts = {"server": server}
        for name, folder in (("validation", self.validation), ("test", self.test)):
            if folder is not None:
                parts[name] = read_labelled(folder, server.classes, size=size, channels=channels)
        return join_parts("folders", parts, server.classes)


def serve(
    config: Config,
    folder: Path,
    endpoint: Endpoint,
    images: LabelledFolders,
    names: Sequence[str],
    *,
    clients: int,
    wait: float,
    resume: bool,
    without: Sequence[str] = (),
    console: Console,
    observers: Sequence[Observer] = (),
    open_files: Sequence[Path | None] = (),
) -> Result:
    """Trains with the named clients and leaves the same run folder as `fedseal train`.

    The run starts when this number of clients has connected. It fails if that takes more than `wait` seconds.
    A resumed run goes on `without` some clients, and without those that were expelled before.
    """
    endpoint.check()
    if config.selected_method().needs_client_labels:
        raise UserError(f"{config.method} needs the clients' labels: use another method, or 'fedseal train'.")
    if config.simulate.malicious:
        raise UserError("simulate.malicious is for 'fedseal train' only: set it to 0.")
    if why := without_gate(config):
        log.warning("updates far longer than the others are not left out, because %s", why)
    config = deployed_config(config, images.labels)
    federation = split_server(images.read(config.data), config.data, config.seed, names)

    def start_engine(setup: RunSetup, memories: MemoryStore) -> FlowerEngine:
        write_clients(folder, names)
        expelled = expel_clients(folder, without, memories.t + 1)
        for name, first in expelled.items():
            log.warning("%s is expelled: it takes no part from round %d on", name, first)

        def expel(names: list[str]) -> None:
            expel_clients(folder, names, memories.t + 1)

        return connect(
            setup,
            folder,
            endpoint,
            expelled=expelled,
            expel=expel,
            clients=clients,
            wait=wait,
            notify=log.info,
        )

    result = run_training(
        config,
        folder,
        resume=resume,
        console=console,
        observers=observers,
        load_images=lambda: federation,
        start_engine=start_engine,
        open_files=open_files,
    )
    log.info(f"{describe_accuracy(result, federation)}, run folder: {folder}")
    return result


def describe_accuracy(result: Result, federation: Federation) -> str:
    """A run's accuracy, with the images and rounds over which it is a mean."""
    kind = "test" if "test" in federation.tests else "validation"
    number = len(federation.tests.get("test", federation.validation))
    mean = averaged_over(result.summary["rounds"])
    return f"accuracy {result.accuracy:.2%} on {number:,} {kind} images, {mean}"


def without_gate(config: Config) -> str:
    """Why no update is left out for its length; empty if some can be."""
    if config.secure.enabled:
        return "secure aggregation hides single updates"
    if config.privacy.mode == "central":
        return "central privacy clips them instead"
    return "" if config.aggregate.gate else "aggregate.gate is 0"


def deployed_config(config: Config, labels: Path) -> Config:
    """The configuration with the server's folder as its data.

    A checkpoint follows every round, because clients remember only their last round. The server asks for no
    counts, unless the configuration says so.
    """
    raw = config.to_dict()
    kept = ("size", "channels", "validation") if config.data.source == "folders" else ("size", "channels")
    settings = {key: raw["data"][key] for key in kept}
    raw["data"] = {"source": "folders", "path": str(labels.resolve()), **settings}
    raw["engine"] = {"counts": False} | raw["engine"] | {"checkpoint_every": 1}
    return parse(raw, "the configuration")
