"""A run's folder: its name, whether it is free, its clients, and the result of a finished run."""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from fedseal.config.config import Config
from fedseal.config.load import default_method, load_config
from fedseal.errors import UserError
from fedseal.methods.loader import section_name
from fedseal.run_setup import RunSetup
from fedseal.storage.accuracies import accuracy_name, judged_by, summarize
from fedseal.storage.events_file import read_rounds_until
from fedseal.storage.summary import read_summary_file
from fedseal.system.files import make_private, read_file, write_atomic
from fedseal.system.machine import cores

T = TypeVar("T")


@dataclass(frozen=True)
class Result:
    """A finished run."""

    folder: Path
    summary: dict[str, Any]

    @property
    def accuracy(self) -> float:
        """Mean over the last ten rounds, of the model that `evaluate` names, on the test images (on
        validation if there are none)."""
        return float(self.summary[judged_by(self.summary, self.summary["evaluate"])]["mean_last_10"])

    def accuracy_after(self, t: int, model: str = "") -> float:
        """The same as if the run had ended after t rounds, or had been judged by another model ("average").

        With `evaluate_every` > 1, only the evaluated ones of the ten rounds count.
        """
        measured = summarize(read_rounds_until(self.folder, t))
        return float(measured[judged_by(measured, model or self.summary["evaluate"])]["mean_last_10"])

    def accuracy_on(self, images: str, t: int) -> float | None:
        """The same on "client", "official" or other images (accuracies.py); None if it was not measured."""
        measured = summarize(read_rounds_until(self.folder, t))
        names = [accuracy_name(model, images) for model in (self.summary["evaluate"], "model")]
        found = next((measured[name] for name in names if name in measured), None)
        return None if found is None else float(found["mean_last_10"])


def default_folder(source: str | os.PathLike[str] | Config, config: Config, suffix: str = "") -> Path:
    """runs/PRESET-seedN; with another method than the preset's, runs/PRESET-METHOD-seedN."""
    method = section_name(config.method)
    if isinstance(source, Config):
        name = method
    else:
        same = default_method(source) == config.method
        name = Path(source).stem if same else f"{Path(source).stem}-{method}"
    return Path("runs") / f"{name}{suffix}-seed{config.seed}"


def checkpoint_file(folder: Path) -> Path:
    """Where a run's checkpoint is."""
    return folder / "checkpoint" / "state.safetensors"


def checkpoint_fingerprint(setup: RunSetup) -> str:
    """Identifies the run to which a checkpoint belongs."""
    return f"{setup.config.fingerprint(ignore=['rounds'])}-{setup.federation.fingerprint}"


def claim_folder(
    folder: Path, config: Config, resume: bool, open_files: Sequence[Path | None] = ()
) -> Config:
    """Checks that a folder is free for a run, or holds the same run if it is to be resumed.

    A free folder may hold `open_files`, which this command has just opened: its log or a store of MLflow.
    Returns the configuration with `server.threads` set: as in the run so far, or one per core.
    """
    written, lock = folder / "config.toml", folder / "checkpoint" / "lock"
    try:
        outputs = (folder / "events.jsonl", folder / "summary.json", checkpoint_file(folder))
        begun = any(path.exists() for path in outputs)
        if not folder.exists() or not any(folder.iterdir()):
            return config.with_threads(cores())
        if not begun and lock.exists():  # a start that failed before round 1
            return config.with_threads(cores())
        opened = [file.resolve() for file in open_files if file is not None]
        if all(any(file.is_relative_to(path.resolve()) for file in opened) for path in folder.iterdir()):
            make_private(folder)  # as a new run folder is
            return config.with_threads(cores())
    except OSError as error:
        raise UserError(
            f"{folder} cannot be a run folder ({error.strerror}): choose another --out."
        ) from error
    if not written.exists():
        raise UserError(f"{folder} holds other files and no run: choose another --out.")
    if not resume:
        raise UserError(
            f"{folder} already holds a run: add --resume to continue it, or choose another --out."
        )
    former = load_config(written)
    if former.engine.arithmetic != config.engine.arithmetic:
        raise UserError(
            f"{folder} holds a run with engine.arithmetic = '{former.engine.arithmetic}', which changes the"
            " last bits: resume it with the same, or choose another --out."
        )
    config = config.with_threads(former.server.threads)
    if former.fingerprint(ignore=["rounds"]) != config.fingerprint(ignore=["rounds"]):
        raise UserError(
            f"{folder} holds a run with another configuration: resume it with {written}, or choose another"
            " --out."
        )
    return config


def read_clients(folder: Path) -> set[str]:
    """The clients with which a deployed run began; empty if it has no checkpoint yet."""
    path = folder / "clients.json"
    if not path.exists() or not checkpoint_file(folder).exists():
        return set()
    return set(_read_json(path, TypeAdapter(list[str])))


def write_clients(folder: Path, names: Sequence[str]) -> None:
    """Keeps the names of a run's clients, because later keys are not part of it."""
    write_atomic(folder / "clients.json", json.dumps(names, indent=1, ensure_ascii=False) + "\n")


def read_expelled(folder: Path) -> dict[str, int]:
    """The clients that were expelled from a run, each with the first round without it."""
    path = folder / "expelled.json"
    return _read_json(path, TypeAdapter(dict[str, int])) if path.exists() else {}


def _read_json(path: Path, form: TypeAdapter[T]) -> T:
    try:
        return form.validate_json(read_file(path))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is damaged: restore it, or start the run again in another --out.") from error


def expel_clients(folder: Path, names: Iterable[str], first: int) -> dict[str, int]:
    """Expels clients from a run, from a round on. Returns all that have been expelled."""
    before = read_expelled(folder)
    after = dict.fromkeys(names, first) | before
    if after != before:
        write_atomic(folder / "expelled.json", json.dumps(after, indent=1, ensure_ascii=False) + "\n")
    return after


def find_finished(folder: Path, config: Config) -> Result | None:
    """The result of a run that has finished all rounds and written all files."""
    path = folder / "summary.json"
    if not all((folder / name).exists() for name in ("summary.json", "model.safetensors", "report.html")):
        return None
    try:
        summary = read_summary_file(path)
    except (OSError, ValueError):  # damaged: it is written again from the last checkpoint
        return None
    if summary["rounds"] != config.rounds:
        return None
    if (own := config.own_files()) and summary["config"] != config.fingerprint():
        raise UserError(
            f"{folder} was trained before {' or '.join(own)} was changed: restore the file, or choose another"
            " --out."
        )
    return Result(folder, summary)


def require_run(folder: Path) -> None:
    """Refuses a folder without a run."""
    if not (folder / "config.toml").exists():
        raise UserError(f"{folder} is not a run folder: it has no config.toml.")


def read_summary(folder: Path) -> dict[str, Any]:
    """The summary of a finished run."""
    path = folder / "summary.json"
    try:
        return read_summary_file(path)
    except (FileNotFoundError, ValueError) as error:
        raise UserError(f"{path} is missing or damaged: finish the run with --resume.") from error
    except OSError as error:
        raise UserError(f"Cannot read {path} ({error.strerror}): check the file, then try again.") from error
