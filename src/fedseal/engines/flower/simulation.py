"""The Flower engine on Flower's simulation, whose clients run in Ray's worker processes on this machine.

The round loop stays in the main thread, so progress, errors and Ctrl-C behave the same on every engine. The
simulation runs in another thread, and its ServerApp hands the Grid over to the round loop.
"""

import logging
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from queue import Queue
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from ray._private import ray_constants

from fedseal.core import Packet, Reply
from fedseal.engines.flower import client_app
from fedseal.engines.flower.engine import ClientRegistry, FlowerEngine
from fedseal.engines.flower.task import make_task
from fedseal.engines.memory_store import MemoryStore
from fedseal.errors import UserError
from fedseal.run_setup import RunSetup
from fedseal.system.machine import cores

START_SECONDS = 300.0  # for all simulated clients to connect
MAX_TEMPORARY_PATH = 25  # characters; Ray's sockets are about 80 characters below, and may have 107


class GridHandover:
    """A ServerApp that hands its Grid over, and ends when `done` is set."""

    def __init__(self) -> None:
        self.grid: Queue[Grid | BaseException] = Queue()
        self.done = threading.Event()
        self.app = ServerApp()
        self.app.main()(self.main)

    def main(self, grid: Grid, context: Context) -> None:
        """Called by Flower."""
        self.grid.put(grid)
        self.done.wait()


class SimulationEngine:
    """A Flower engine whose clients find their memories as files in a folder, and leave them there."""

    def __init__(self, engine: FlowerEngine, memories: MemoryStore, folder: Path) -> None:
        self.clients, self.close = engine.clients, engine.close
        self._engine, self._memories, self._folder = engine, memories, folder

    def exchange(self, requests: Mapping[int, Packet]) -> Iterator[Reply]:
        """Yields replies as they arrive; a client's memory changes only when its reply is here."""
        files = {k: self._folder / str(k) for k in requests}
        for k, file in files.items():
            if memory := self._memories.get(k):
                file.write_bytes(memory)
            else:
                file.unlink(missing_ok=True)
        for reply in self._engine.exchange(requests):
            if reply.problem is None:
                self._memories.put(reply.client, files[reply.client].read_bytes())
            files[reply.client].unlink(missing_ok=True)
            yield reply


def simulate(setup: RunSetup, memories: MemoryStore) -> SimulationEngine:
    """Starts Flower's simulation. The engine's `close` ends it."""
    clients = len(setup.federation.names)
    workers = min(setup.config.engine.workers or cores(), clients)
    folder, ray_folder = tempfile.TemporaryDirectory(prefix="fedseal-"), private_ray_folder()
    handover = GridHandover()

    def run() -> None:
        logging.getLogger("flwr").setLevel(logging.ERROR)
        try:
            run_simulation(
                handover.app,
                client_app.app,
                num_supernodes=clients,
                backend_config={
                    "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                    "init_args": ray_options(workers, ray_folder.name),
                },
            )
        except BaseException as error:
            handover.grid.put(error)

    thread = threading.Thread(target=run, name="flower-simulation", daemon=True)

    def close() -> None:
        handover.done.set()
        thread.join(timeout=60)
        folder.cleanup()
        ray_folder.cleanup()

    def check() -> None:
        if not thread.is_alive():
            raise UserError("Flower's simulation ended before the run did: continue with --resume.")

    thread.start()
    grid = handover.grid.get()
    if isinstance(grid, BaseException):
        close()
        raise UserError(f"Flower's simulation did not start: {grid}.") from grid
    names = tuple(map(str, range(clients)))
    engine = FlowerEngine(
        grid,
        ClientRegistry(grid, names),
        names,
        make_task(setup, "simulation", memory_folder=folder.name),
        deadline=None,
        check=check,
        close=close,
    )
    try:
        engine.registry.wait_for_clients(clients, START_SECONDS)
    except BaseException:
        close()
        raise
    return SimulationEngine(engine, memories, Path(folder.name))


def ray_options(workers: int, folder: str) -> dict[str, Any]:
    """How Ray is started, so that it listens on 127.0.0.1 only."""
    ray_constants.ENABLE_RAY_CLUSTER = False  # otherwise it uses an address that other machines reach
    options: dict[str, Any] = {"num_cpus": workers, "logging_level": "error", "log_to_driver": False}
    options |= {"_node_ip_address": "127.0.0.1", "_temp_dir": f"{folder}/r", "include_dashboard": False}
    return options


def private_ray_folder() -> "tempfile.TemporaryDirectory[str]":
    """A folder around that of Ray, which everybody may write to."""
    usual = tempfile.gettempdir()
    short = usual if len(usual) <= MAX_TEMPORARY_PATH else "/tmp"
    return tempfile.TemporaryDirectory(prefix="fs-", dir=short, ignore_cleanup_errors=True)
