"""The Flower engine on Flower's simulation, whose clients run in Ray's worker processes on this machine.

The round loop stays in the main thread, so progress, errors and Ctrl-C behave the same on every engine. The
simulation runs in another thread, and its ServerApp hands the Grid over to the round loop.
"""

import logging
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from queue import Queue

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from fedseal.engines.flower import client_app
from fedseal.engines.flower.engine import ClientRegistry, FlowerEngine
from fedseal.engines.flower.task import make_task
from fedseal.errors import UserError
from fedseal.run_setup import RunSetup
from fedseal.system.machine import cores

START_SECONDS = 300.0  # for all simulated clients to connect


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


def simulate(setup: RunSetup, memories: Mapping[str, bytes]) -> FlowerEngine:
    """Starts Flower's simulation. The engine's `close` ends it.

    The clients' memories are in a temporary folder, from which `memories` reads them for the checkpoint.
    """
    folder = tempfile.TemporaryDirectory(prefix="fedseal-")
    for k, memory in memories.items():
        (Path(folder.name) / k).write_bytes(memory)
    clients = len(setup.federation.names)
    workers = min(setup.config.engine.workers or cores(), clients)
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
                    "init_args": {"num_cpus": workers, "logging_level": "error", "log_to_driver": False},
                },
            )
        except BaseException as error:
            handover.grid.put(error)

    thread = threading.Thread(target=run, name="flower-simulation", daemon=True)

    def close() -> None:
        handover.done.set()
        thread.join(timeout=60)
        folder.cleanup()

    def read_memories() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in Path(folder.name).iterdir() if path.name.isdigit()}

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
        memories=read_memories,
        close=close,
    )
    try:
        engine.registry.wait_for_clients(clients, START_SECONDS)
    except BaseException:
        close()
        raise
    return engine
