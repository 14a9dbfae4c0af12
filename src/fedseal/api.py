"""The library's front door: train, evaluate, predict. The command line calls these and nothing else."""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from fedseal import report, weights
from fedseal.config import Config, load_config, method_of, parse
from fedseal.core import Engine, Packet, Site
from fedseal.data import sources
from fedseal.data.folders import read_labelled
from fedseal.data.pool import Federation
from fedseal.data.splits import DataSettings, split
from fedseal.engines.local import LocalEngine
from fedseal.errors import UserError
from fedseal.files import locked, write_atomic
from fedseal.learn import INFERENCE_BATCH, accuracy
from fedseal.machine import cores, threads, versions
from fedseal.methods import METHODS, section
from fedseal.model_file import load, save_model
from fedseal.observers import (
    Checkpoints,
    EventLog,
    Observer,
    ProgressBar,
    TensorBoard,
    Warnings,
    read_events,
    round_events,
)
from fedseal.processes import uninterrupted
from fedseal.run import LAST, Checkpoint, Examination, rounds
from fedseal.sites import Sites, images_are_elsewhere

StartEngine = Callable[[Sites, Mapping[str, bytes]], Engine]  # from the sites and the clients' memories


@dataclass(frozen=True)
class Result:
    """A finished run."""

    folder: Path
    summary: dict[str, Any]

    @property
    def accuracy(self) -> float:
        """Mean over the last ten rounds on the test set, or on validation where there is no test set."""
        return float(self.summary.get("test_accuracy", self.summary["validation_accuracy"])["mean_last_10"])

    def accuracy_after(self, t: int, judged: str = "") -> float:
        """The same as if the run had ended after t rounds, or been judged by the other model ("average").

        Of the ten rounds up to t those count that were evaluated, all with `evaluate_every = 1`.
        """
        measured = accuracies(round_events(self.folder, t), judged or self.summary["evaluate"])
        return float(measured.get("test_accuracy", measured["validation_accuracy"])["mean_last_10"])


def train(
    source: str | os.PathLike[str] | Config,
    *,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    quiet: bool = True,
    set: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> Result:
    """Trains a preset, a TOML file or a `Config`, and leaves a run folder.

    Top-level keys can be given by name (`rounds=20`, `seed=1`), others with `set={"fedseal.theta": 0.05}`.
    """
    changes = {**(set or {}), **overrides}
    if isinstance(source, Config):
        config = source
        if changes:
            raise UserError("A Config is taken as it is: change it before, or give a preset's name.")
    else:
        config = load_config(source, changes)
    folder = Path(out) if out else run_folder(source, config)
    return run(config, folder, resume=resume, console=Console(quiet=quiet))


def run_folder(source: str | os.PathLike[str] | Config, config: Config, suffix: str = "") -> Path:
    """Where a run goes if nothing is said: called after the preset, and the method if it is another."""
    method = section(config.method)
    if isinstance(source, Config):
        name = method
    else:
        same = method_of(source) == config.method
        name = Path(source).stem if same else f"{Path(source).stem}-{method}"
    return Path("runs") / f"{name}{suffix}-seed{config.seed}"


def run(
    config: Config,
    folder: Path,
    *,
    resume: bool,
    console: Console,
    federation: Federation | None = None,
    start_engine: StartEngine | None = None,
) -> Result:
    """Trains as configured into a folder; a run that has ended already is not run again.

    Data and engine are as configured unless they are given.
    """
    config = claim(folder, config, resume)
    if (finished := _finished(folder, config)) is not None:
        return finished
    started = time.perf_counter()
    if federation is None:
        federation = deal(config.data, config.seed, quiet=console.quiet)
    check(config, federation)
    sites = Sites(config, federation)
    server = sites.server()
    config.chosen().check(server)
    with locked(folder):
        return _train(sites, server, folder, console, start_engine or engine_of(config), started)


def _train(
    sites: Sites, server: Site, folder: Path, console: Console, start_engine: StartEngine, started: float
) -> Result:
    """From the last checkpoint, if there is one, to the last round."""
    config = sites.config
    identity = _identity(sites)
    saved = folder / "checkpoint" / "state.safetensors"
    resumed = Checkpoint.load(saved, identity) if saved.exists() else None
    done = resumed.t if resumed else 0
    if done > config.rounds:
        raise UserError(
            f"{folder} has {done} rounds already, but rounds is {config.rounds}: raise it, or choose another"
            " --out."
        )
    write_atomic(folder / "config.toml", config.to_toml())

    def seconds() -> float:
        return time.perf_counter() - started + (resumed.seconds if resumed else 0.0)

    def finish(state: Packet, memories: Mapping[str, bytes]) -> Result:
        result = _finish(folder, sites, state, seconds())
        report.write(folder, sites, memories)
        return result

    if resumed and done == config.rounds:  # stopped between its last round and its last file
        with threads(config.server.threads):
            return finish(resumed.state, resumed.memories)
    with ExitStack() as stack:
        stack.enter_context(threads(config.server.threads))
        engine = start_engine(sites, resumed.memories if resumed else {})
        stack.callback(engine.close)
        observers: list[Observer] = [
            EventLog(folder / "events.jsonl", done),
            TensorBoard(folder / "tensorboard", done),
            Checkpoints(saved, engine, identity, config.engine.checkpoint_every, config.rounds, seconds),
            Warnings(),
        ]
        if not console.quiet:
            bar = stack.enter_context(ProgressBar(config.method, config.rounds, done, console))
            observers.append(bar)
        for observer in observers:
            stack.callback(observer.close)
        state = resumed.state if resumed else Packet()
        for event in rounds(config.chosen(), server, engine, sites, resumed):
            with uninterrupted():
                for observer in observers:
                    observer(event)
            state = getattr(event, "state", state)
        return finish(state, engine.memories())  # while clients elsewhere are still there: closing takes time


def engine_of(config: Config) -> StartEngine:
    """The engine by its name in the configuration."""
    if config.engine.name == "local":
        return LocalEngine
    try:
        from fedseal.engines.flower_server import simulate
    except ImportError as error:
        raise UserError(
            "The Flower engine is not installed: install fedseal with its extra 'flower'."
        ) from error
    return simulate


def claim(folder: Path, config: Config, resume: bool) -> Config:
    """Makes sure that a folder is free for this run, or holds this very run if it is to be resumed.

    Gives the configuration with the server's threads settled: those of the begun run, or one per core.
    """
    there, saved = folder / "config.toml", folder / "checkpoint"
    try:
        left = (folder / "events.jsonl", folder / "summary.json", saved / "state.safetensors")
        begun = any(path.exists() for path in left)
        if not folder.exists() or not any(folder.iterdir()):
            return config.with_threads(cores())
        if not begun and (saved / "lock").exists():  # of a start that came to nothing
            return config.with_threads(cores())
    except OSError as error:
        raise UserError(
            f"{folder} cannot be a run folder ({error.strerror}): choose another --out."
        ) from error
    if not there.exists():
        raise UserError(f"{folder} holds other files and no run: choose another --out.")
    if not resume:
        raise UserError(
            f"{folder} holds a run already: add --resume to go on with it, or choose another --out."
        )
    former = load_config(there)
    config = config.with_threads(former.server.threads)
    if former.fingerprint(ignore=["rounds"]) != config.fingerprint(ignore=["rounds"]):
        raise UserError(
            f"{folder} holds a run of another configuration: resume it with {there}, or choose another --out."
        )
    return config


def _finished(folder: Path, config: Config) -> Result | None:
    """The result of a run that has reached its last round already, and written all of its files."""
    path = folder / "summary.json"
    if not all((folder / name).exists() for name in ("summary.json", "model.safetensors", "report.html")):
        return None
    try:
        summary = json.loads(path.read_text("utf-8"))
        return Result(folder, summary) if summary["rounds"] == config.rounds else None
    except (ValueError, KeyError, TypeError):  # damaged: it is written anew from the last checkpoint
        return None


def deal(data: DataSettings, seed: int, *, quiet: bool = True) -> Federation:
    """Gets the images (from the cache if they are there) and deals them out."""
    path = Path(data.path) if data.path else None
    size, channels = (32, 3) if data.source == "folders" else (None, None)  # where nothing else is said
    pool = sources.load(
        data.source, path, size=data.size or size, channels=data.channels or channels, progress=not quiet
    )
    return split(pool, data, seed)


def check(config: Config, federation: Federation) -> None:
    """What only shows when configuration and data are seen together."""
    clients = len(federation.clients)
    if config.cohort > clients:
        raise UserError(
            f"cohort is {config.cohort}, but there are {clients} clients: lower it, or 0 for all."
        )
    truth = federation.pool.labels
    if config.chosen().needs_client_labels and any((truth[rows] < 0).any() for rows in federation.clients):
        raise UserError(f"{config.method} needs the labels of the clients' images, which have none here.")
    if not len(federation.validation):
        raise UserError("data.validation is 0, but thresholds and reports need some images: raise it.")
    side = min(federation.pool.pixels.shape[2:])
    if config.augment.shift >= side:
        raise UserError(
            f"augment.shift is {config.augment.shift}, but images are {side} pixels wide: lower it."
        )


def _finish(folder: Path, sites: Sites, state: Packet, seconds: float) -> Result:
    """Writes the model and the summary."""
    config, federation = sites.config, sites.federation
    events = [event for event in read_events(folder / "events.jsonl") if event["event"] == "round"]
    if not any("validation_accuracy" in event for event in events):
        raise UserError(
            f"{folder / 'events.jsonl'} is missing or damaged: delete {folder / 'checkpoint'} to start again."
        )
    chosen = config.evaluate if config.evaluate in state.tensors else "model"
    summary: dict[str, Any] = {
        "method": config.method,
        "evaluate": chosen,
        "rounds": config.rounds,
        **accuracies(events, chosen),
        "seed": config.seed,
        "split": federation.fingerprint,
        "config": config.fingerprint(),
        "labels": {
            "training": len(federation.labelled),
            "validation": len(federation.validation),
            "total": len(federation.labelled) + len(federation.validation),
        },
        "clients": len(federation.clients),
        "left_out": Counter(name for event in events for name in event["left_out"]),  # replies, by client
        "skipped_files": len(federation.pool.skipped),
        "seconds": round(seconds, 1),
        "versions": versions(),
    }
    save_model(folder / "model.safetensors", state.tensors[chosen], sites)
    write_atomic(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    return Result(folder, summary)


def accuracies(events: Sequence[Mapping[str, Any]], chosen: str) -> dict[str, dict[str, Any]]:
    """For every accuracy in the events: the last, the mean of the last ten, and that of the round which
    was best on validation (the first of them). `test_accuracy` is that of the model chosen to be judged."""
    seen = [event for event in events if "validation_accuracy" in event]
    ended = [event for event in seen if event["t"] > seen[-1]["t"] - LAST]
    names = [name for name in seen[-1] if name.endswith("accuracy")]
    result = {}
    for name in names:
        prefix = "average_" if name.startswith("average_") else ""
        best = max(seen, key=lambda event: (event[f"{prefix}validation_accuracy"], -event["t"]))
        result[name] = {
            "last": seen[-1][name],
            "mean_last_10": float(np.mean([event[name] for event in ended])),
            "best_on_validation": best[name],
            "best_round": best["t"],
        }
    if chosen == "average":
        result |= {
            "model_" + name: value for name, value in result.items() if not name.startswith("average_")
        }
        for name in [n for n in result if n.startswith("average_")]:
            plain = name.removeprefix("average_")
            result["test_accuracy" if plain == "accuracy" else plain] = result[name]
    return result


def evaluate(run: str | os.PathLike[str], test: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """Accuracies of a finished run's model, measured anew on the run's own split, or on a labelled folder."""
    folder = Path(run)
    if test is not None:
        classifier = load(folder)
        images = read_labelled(
            Path(test), classifier.classes, size=classifier.size, channels=classifier.channels, progress=False
        )
        chunks = torch.from_numpy(images.pixels).split(INFERENCE_BATCH)
        probs = torch.cat([classifier(chunk) for chunk in chunks])
        return {"test_accuracy": accuracy(probs, torch.from_numpy(images.labels))}
    if not (folder / "config.toml").exists():
        raise UserError(f"{folder} is no run folder: it has no config.toml.")
    config = load_config(folder / "config.toml")
    model = load(folder).model
    if images_are_elsewhere(config):
        raise UserError(f"The clients' images of the run in {folder} are not here: give --test DIR.")
    sites = Sites(config, deal(config.data, config.seed))
    if sites.federation.fingerprint != _split_of(folder):
        raise UserError(f"The data have changed since the run in {folder}: measure on the same images.")
    server: Site = sites.server()
    with threads(config.server.threads):
        return Examination(sites).of(server, weights.save(model))


def write_report(runs: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str] | None = None) -> Path:
    """The report of one run anew, `report.html` in its folder, or of several beside each other,
    `comparison.html` here; either into `out` if that is given."""
    folders = [Path(run) for run in runs]
    for folder in folders:
        if not (folder / "config.toml").exists():
            raise UserError(f"{folder} is no run folder: it has no config.toml.")
    path = Path(out) if out is not None else None
    if len(folders) > 1:
        path = path or Path("comparison.html")
        report.compare(folders, path)
        return path
    [folder] = folders
    config, saved = load_config(folder / "config.toml"), folder / "checkpoint" / "state.safetensors"
    if images_are_elsewhere(config) or not (folder / "model.safetensors").exists():
        return report.write(folder, None, {}, path)
    sites = Sites(config, deal(config.data, config.seed))
    kept = Checkpoint.load(saved, _identity(sites)).memories if saved.exists() else {}
    with threads(config.server.threads):
        return report.write(folder, sites, kept, path)


def _identity(sites: Sites) -> str:
    """What a checkpoint is known by."""
    return f"{sites.config.fingerprint(ignore=['rounds'])}-{sites.federation.fingerprint}"


def _split_of(folder: Path) -> str:
    path = folder / "summary.json"
    try:
        return str(json.loads(path.read_text("utf-8"))["split"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is missing or damaged: finish the run with --resume.") from error


def baseline(config: Config) -> Config:
    """Server-SL with everything else alike, and as many supervised epochs as the method has in all.

    Its first rounds are those of a shorter run, so that it can be read at any earlier round too.
    """
    before = getattr(config.chosen(), "bootstrap_epochs", 0)
    rounds = config.rounds + -(-before // max(config.server.epochs, 1))
    own = {section(config.method)} - METHODS.keys()
    raw = {k: v for k, v in config.to_dict().items() if k not in own}
    return parse(raw | {"method": "server-sl", "rounds": rounds, "evaluate_every": 1}, "baseline")
