"""The server's half of the Flower engine: a ServerApp that hands its Grid to the round loop.

The round loop stays in the main thread of the process that the user started, so that progress, errors and
Ctrl-C are the same whatever the engine is. Flower's simulation runs beside it in a thread.
"""

import logging
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from queue import Queue

from fedseal.engines.flower import FlowerEngine, Roll, job_of  # before Flower itself, which it silences

# isort: split
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from fedseal.engines import flower_client
from fedseal.errors import UserError
from fedseal.machine import cores
from fedseal.sites import Sites

START = 300.0  # seconds that a simulation may take until all of its clients are there


class Handover:
    """A ServerApp that gives its Grid away, and ends when it is told to."""

    def __init__(self) -> None:
        self.grid: Queue[Grid | BaseException] = Queue()
        self.done = threading.Event()
        self.app = ServerApp()
        self.app.main()(self.main)

    def main(self, grid: Grid, context: Context) -> None:
        """What Flower calls."""
        self.grid.put(grid)
        self.done.wait()


def simulate(sites: Sites, memories: Mapping[str, bytes]) -> FlowerEngine:
    """An engine on Flower's simulation (Ray). It ends with the engine's `close`.

    The clients' memories lie in a temporary folder; the run's checkpoint keeps them, as the local engine's.
    """
    folder = tempfile.TemporaryDirectory(prefix="fedseal-")
    for k, memory in memories.items():
        (Path(folder.name) / k).write_bytes(memory)
    clients, settings = len(sites.federation.names), sites.config.engine
    workers = min(settings.workers or cores(), clients)
    handover = Handover()

    def work() -> None:
        logging.getLogger("flwr").setLevel(logging.ERROR)
        try:
            run_simulation(
                handover.app,
                flower_client.app,
                num_supernodes=clients,
                backend_config={
                    "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                    "init_args": {"num_cpus": workers, "logging_level": "error", "log_to_driver": False},
                },
            )
        except BaseException as error:
            handover.grid.put(error)

    thread = threading.Thread(target=work, name="flower-simulation", daemon=True)

    def close() -> None:
        handover.done.set()
        thread.join(timeout=60)
        folder.cleanup()

    def remembered() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in Path(folder.name).iterdir() if path.name.isdigit()}

    def check() -> None:
        if not thread.is_alive():
            raise UserError("Flower's simulation ended before the run did: go on with --resume.")

    thread.start()
    grid = handover.grid.get()
    if isinstance(grid, BaseException):
        close()
        raise UserError(f"Flower's simulation did not start: {grid}.") from grid
    job = job_of(sites, "simulation", data=True).model_copy(update={"memory": folder.name})
    numbers = tuple(map(str, range(clients)))
    engine = FlowerEngine(
        grid, Roll(grid, numbers), numbers, job, deadline=None, check=check, memories=remembered, close=close
    )
    try:
        engine.roll.wait(clients, START)
    except BaseException:
        close()
        raise
    return engine
