"""The measured results under `results/`.

A result is found by its configuration, so a cell that is part of two tables is run once. A run with more
rounds also answers for fewer, because its first rounds are the same.
"""

import json
import shutil
import tempfile
from pathlib import Path

from fedseal.config.config import Config
from fedseal.config.load import load_config
from fedseal.data.catalogue import PUBLISHED
from fedseal.errors import UserError
from fedseal.reproduce.cells import Cell, folder_name
from fedseal.storage.events_file import read_events, read_rounds_until
from fedseal.storage.run_folder import Result
from fedseal.system.files import lock_folder

KEPT_FILES = ("config.toml", "events.jsonl", "summary.json")
# This version of fedseal, then earlier ones whose results are shown as well.
KNOWN_VERSIONS = ("0.2.0", "0.1.0")
# Version 0.2.0 trains networks with one input channel in a faster memory layout, which rounds differently.
# So results of these versions are outdated for images with one channel, and valid for others.
OUTDATED_FOR_GREY = ("0.1.0",)


class ResultStore:
    """Measured runs in a folder, found by configuration and version."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: dict[str, list[Result]] = {}
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} is not a folder: choose another --results.")
        with lock_folder(folder, exclusive=False):
            self._read()

    def _read(self) -> None:
        for path in sorted(self.folder.rglob("summary.json")):
            if path.parent.name.startswith("."):  # left by a process that was killed while it added a run
                continue
            try:
                summary = json.loads(path.read_text("utf-8"))
                made_with, _ = summary["versions"]["fedseal"], summary["rounds"]
                config = load_config(path.parent / "config.toml")
            except (ValueError, KeyError, TypeError, UserError) as error:
                raise UserError(f"{path.parent} is damaged: delete it to run the cell again.") from error
            if made_with in KNOWN_VERSIONS:
                self.runs.setdefault(identity(config), []).append(Result(path.parent, summary))

    @property
    def seeds(self) -> int:
        """One more than the highest measured seed."""
        return 1 + max((run.summary["seed"] for runs in self.runs.values() for run in runs), default=-1)

    def find(self, cell: Cell) -> Result | None:
        """A run with the cell's configuration and at least as many rounds; an outdated one if need be."""
        runs = [
            r for r in self.runs.get(identity(cell.config), []) if r.summary["rounds"] >= cell.config.rounds
        ]
        return min(runs, key=lambda run: is_outdated(run, cell.config), default=None)

    def is_missing(self, cell: Cell, *, renew: bool = False) -> bool:
        """True if the cell has no result, or with `renew` only an outdated one."""
        found = self.find(cell)
        return found is None or (renew and is_outdated(found, cell.config))

    def accuracy(self, cell: Cell, model: str = "") -> float | None:
        """Mean of the last ten rounds, in %, of the model by which the run is judged or of another one."""
        found = self.find(cell)
        return None if found is None else 100 * found.accuracy_after(cell.config.rounds, model)

    def accuracy_on(self, cell: Cell, images: str) -> float | None:
        """The same on other images."""
        found = self.find(cell)
        value = None if found is None else found.accuracy_on(images, cell.config.rounds)
        return None if value is None else 100 * value

    def add(self, cell: Cell, run: Path) -> Result:
        """Copies a finished run into the store, completely or not at all."""
        read_rounds_until(run, cell.config.rounds)
        for event in read_events(run / "events.jsonl"):
            if event["event"] == "left-out" and event.get("worker_died", False):
                raise UserError(
                    f"The worker process of {event['client']} died in round {event['t']}, so the result is"
                    f" incomplete: delete {run} and run the cell again with more free memory."
                )
        place = self.folder / folder_name(cell.table, cell.scale) / cell.name
        place.parent.mkdir(parents=True, exist_ok=True)
        with (
            lock_folder(self.folder, exclusive=True),
            tempfile.TemporaryDirectory(dir=place.parent, prefix=".") as work,
        ):
            new = Path(work) / ".new"
            new.mkdir()
            for name in KEPT_FILES:
                shutil.copy(run / name, new)
            if place.exists():
                place.rename(Path(work) / ".old")
            new.rename(place)
        result = Result(place, json.loads((place / "summary.json").read_text("utf-8")))
        self.runs.setdefault(identity(cell.config), []).append(result)
        return result


def is_outdated(run: Result, config: Config) -> bool:
    """True if this version of fedseal would give other numbers, in the last bits at first."""
    dataset = PUBLISHED.get(config.data.source)
    channels = dataset.shape[0] if dataset else config.data.channels
    return channels == 1 and run.summary["versions"]["fedseal"] in OUTDATED_FOR_GREY


def identity(config: Config) -> str:
    """The key of a measured run: all that affects its result, except for the rounds.

    The number of threads, which affects only the last bit, is left out as well.
    """
    server = config.server.model_copy(update={"threads": 1})
    return config.model_copy(update={"server": server}).fingerprint(ignore=["rounds"])
