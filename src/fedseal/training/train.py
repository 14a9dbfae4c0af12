"""Trains: from a configuration to a run folder."""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from fedseal.config.config import Config, did_you_mean, parse
from fedseal.config.load import load_config
from fedseal.core import Engine, Packet, Server
from fedseal.data.federation import load_federation
from fedseal.data.pool import Federation
from fedseal.engines import ENGINES
from fedseal.engines.memory_store import MemoryStore
from fedseal.errors import UserError, printable
from fedseal.learn import needs_two_images
from fedseal.methods import METHODS
from fedseal.methods.loader import section_name
from fedseal.report.write import write_report
from fedseal.rounds import LAST_ROUNDS, is_evaluated, rounds
from fedseal.run_setup import RunSetup
from fedseal.storage.accuracies import summarize
from fedseal.storage.checkpoint import open_checkpoint
from fedseal.storage.events_file import read_rounds_until
from fedseal.storage.model_file import save_model
from fedseal.storage.privacy_ledger import Ledger, open_ledger
from fedseal.storage.run_folder import (
    Result,
    checkpoint_file,
    checkpoint_fingerprint,
    claim_folder,
    default_folder,
    find_finished,
    read_expelled,
)
from fedseal.system.environment import set_up_process, used_arithmetic
from fedseal.system.files import lock_run, write_atomic
from fedseal.system.lazy import LazyModule, import_object
from fedseal.system.logs import about, log, progress_log
from fedseal.system.machine import threads, versions
from fedseal.system.own_code import pinned
from fedseal.system.processes import defer_interrupts
from fedseal.training.evaluate import Evaluator
from fedseal.training.observers import (
    Checkpoints,
    EventLog,
    Observer,
    ProgressBar,
    RunLog,
    TensorBoard,
)

secure = LazyModule("fedseal.engines.secure_engine")  # it needs Flower

StartEngine = Callable[[RunSetup, MemoryStore], Engine]


def train(
    source: str | os.PathLike[str] | Config,
    *,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    quiet: bool = True,
    observers: Sequence[Observer] = (),
    options: Mapping[str, Any] | None = None,
    **top_level: Any,
) -> Result:
    """Trains a preset, a TOML file or a `Config`, and leaves a run folder.

    Top-level keys are given by name (`rounds=20`, `seed=1`), others as `options={"fedseal.theta": 0.05}`.
    Each of `observers` receives every event of the run (docs/observers.md).
    """
    changes = {**(options or {}), **top_level}
    if not isinstance(source, Config):
        config = load_config(source, changes)
    elif changes:
        raise UserError("A Config takes no further keys: change it first, or give the name of a preset.")
    else:
        config = source
    folder = Path(out) if out else default_folder(source, config)
    return run_training(config, folder, resume=resume, console=Console(quiet=quiet), observers=observers)


def run_training(
    config: Config,
    folder: Path,
    *,
    resume: bool,
    console: Console,
    observers: Sequence[Observer] = (),
    load_images: Callable[[], Federation] | None = None,
    start_engine: StartEngine | None = None,
    open_files: Sequence[Path | None] = (),
) -> Result:
    """Trains into a folder; a finished run is not run again.

    Without `load_images` and `start_engine`, data and engine are those of the configuration. `open_files` may
    be in a new folder already.
    """
    with ExitStack() as stack:
        for observer in observers:
            stack.callback(observer.close)
        stack.enter_context(pinned(config.method, config.model.name))
        set_up_process(config.engine.arithmetic)
        start_engine = start_engine or find_engine(config.engine.name)
        config = claim_folder(folder, config, resume, open_files)
        if (finished := find_finished(folder, config)) is not None:
            return finished
        started = time.perf_counter()
        load_images = load_images or partial(
            load_federation, config.data, config.seed, progress=not console.quiet
        )
        federation = load_images()
        check_data(config, federation)
        if config.secure.enabled:
            secure.check(config, len(federation.clients))
        setup = RunSetup(config, federation).with_features(progress=not console.quiet)
        server = setup.server()
        if server.model.loaded:
            console.print(printable(server.model.loaded), markup=False, soft_wrap=True)
        config.selected_method().check(server)
        check_batches(config, federation, server)
        ledger = open_ledger(folder, config, len(federation.clients))
        with lock_run(folder), threads(config.server.threads):
            result = _train(setup, server, folder, console, observers, start_engine, started, ledger)
        extra = about("result", accuracy=result.accuracy, folder=str(folder))
        progress_log.info(
            "finished: accuracy %.2f %%, run folder %s", 100 * result.accuracy, folder, extra=extra
        )
        return result


def _train(
    setup: RunSetup,
    server: Server,
    folder: Path,
    console: Console,
    further: Sequence[Observer],
    start_engine: StartEngine,
    started: float,
    ledger: Ledger | None,
) -> Result:
    """Continues from the last checkpoint, if there is one, to the last round."""
    config, method = setup.config, setup.config.selected_method()
    saved = checkpoint_file(folder)
    with ExitStack() as stack:
        resumed, memories = open_checkpoint(saved, checkpoint_fingerprint(setup))
        stack.callback(memories.close)
        done = resumed.progress.t if resumed else 0
        if done > config.rounds:
            raise UserError(
                f"{folder} already has {done} rounds, but rounds is {config.rounds}: raise it, or choose"
                " another --out."
            )
        if ledger:
            ledger.check(done)
        check_evaluated(folder, done, config)
        write_atomic(folder / "config.toml", config.to_toml())

        def seconds() -> float:
            return time.perf_counter() - started + (resumed.seconds if resumed else 0.0)

        if resumed and done == config.rounds:  # stopped between its last round and its last file
            return _finish(folder, setup, resumed.progress.state, memories, seconds(), ledger)
        engine = start_engine(setup, memories)
        stack.callback(engine.close)
        if config.secure.enabled:
            engine = secure.SecureEngine(engine, method, config.secure)
        observers: list[Observer] = [
            EventLog(folder / "events.jsonl", done),
            TensorBoard(folder / "tensorboard", done),
            Checkpoints(saved, memories, config.engine.checkpoint_every, config.rounds, seconds),
            RunLog(config.rounds, method.titles, config.evaluate),
        ]
        if (console.is_terminal or console.is_jupyter) and not console.quiet:
            shown = (console, method.titles, config.evaluate)
            observers.append(ProgressBar(config.method, config.rounds, done, *shown))
        for observer in observers:
            stack.callback(observer.close)
        first, number = done + 1, len(engine.clients)
        extra = about("start", method=config.method, round=first, rounds=config.rounds, clients=number)
        words = "%s: rounds %d to %d with %d clients, into %s"
        progress_log.info(words, config.method, first, config.rounds, number, folder, extra=extra)
        progress, evaluate = resumed.progress if resumed else None, Evaluator(setup, server)
        state = progress.state if progress else Packet()
        spend = ledger.spend if ledger else None
        for event in rounds(config, server, engine, setup.federation.names, evaluate, progress, spend):
            with defer_interrupts():
                for observer in (*observers, *further):
                    observer(event)
            state = getattr(event, "state", state)
        # Before the engine closes, which can take long with clients on other machines.
        return _finish(folder, setup, state, memories, seconds(), ledger)


def find_engine(name: str) -> StartEngine:
    """The engine for `engine.name`."""
    if name not in ENGINES:
        raise UserError(f"'engine.name' is '{name}'{did_you_mean(name, ENGINES)}.")
    engine: StartEngine = import_object(ENGINES[name])
    return engine


def check_batches(config: Config, federation: Federation, server: Server) -> None:
    """Refuses batches of one image, and names clients with one image, if BatchNorm cannot learn from one."""
    if not needs_two_images(server):
        return
    for key, size in (("server.batch", config.server.batch), ("client.batch", config.client.batch)):
        if size == 1:
            raise UserError(f"{key} is 1, but BatchNorm in {config.model.name} needs two images: raise it.")
    for name, rows in zip(federation.names, federation.clients, strict=True):
        if len(rows) == 1:
            log.warning(
                "client '%s' has one image, but BatchNorm in %s needs two: it learns nothing",
                *(name, config.model.name),
            )


def check_data(config: Config, federation: Federation) -> None:
    """Refuses settings that do not fit the data."""
    clients = len(federation.clients)
    if config.cohort > clients:
        raise UserError(
            f"cohort is {config.cohort}, but there are {clients} clients: lower it, or set it to 0 for all."
        )
    if config.simulate.malicious > clients:
        raise UserError(
            f"simulate.malicious is {config.simulate.malicious}, but there are {clients} clients: lower it."
        )
    asked, rule = config.cohort or clients, config.aggregate.rule
    if rule == "multi-krum" and asked < 4:
        raise UserError(
            f"multi-krum compares at least 4 clients, but a round has {asked}: choose another aggregate.rule."
        )
    if rule == "fltrust" and config.server.epochs == 0:
        raise UserError("fltrust trusts the server's own update, but server.epochs is 0: raise it.")
    truth = federation.pool.labels
    if config.selected_method().needs_client_labels and any(
        (truth[rows] < 0).any() for rows in federation.clients
    ):
        raise UserError(f"{config.method} needs labels of the clients' images, but these have none.")
    if not len(federation.validation):
        raise UserError("data.validation is 0, but every run needs validation images: raise it.")
    side = min(federation.pool.pixels.shape[2:])
    if config.augment.shift >= side:
        raise UserError(
            f"augment.shift is {config.augment.shift}, but images are {side} pixels wide: lower it."
        )


def check_evaluated(folder: Path, done: int, config: Config) -> None:
    """Refuses another number of rounds for which accuracies of the first `done` rounds are missing."""
    for event in read_rounds_until(folder, done) if done else ():
        if is_evaluated(event["t"], config) and "validation_accuracy" not in event:
            raise UserError(
                f"{folder}: a run of {config.rounds} rounds needs accuracies of round {event['t']}, but"
                f" evaluate_every skipped it: set rounds to at least {done + LAST_ROUNDS}."
            )


def _finish(
    folder: Path,
    setup: RunSetup,
    state: Packet,
    memories: MemoryStore,
    seconds: float,
    ledger: Ledger | None,
) -> Result:
    """Writes the model, the summary and the report."""
    config = setup.config
    (folder / "report.html").unlink(missing_ok=True)  # of fewer rounds
    judged = config.evaluate if config.evaluate in state.tensors else "model"
    summary = _summarize_run(folder, setup, judged, seconds)
    result = Result(folder, summary | ({"privacy": ledger.summary()} if ledger else {}))
    save_model(folder / "model.safetensors", state.tensors[judged], setup)
    write_atomic(folder / "summary.json", json.dumps(result.summary, indent=2) + "\n")
    write_report(folder, setup, memories)
    return result


def _summarize_run(folder: Path, setup: RunSetup, judged: str, seconds: float) -> dict[str, Any]:
    """The content of `summary.json`."""
    config, federation = setup.config, setup.federation
    events = read_rounds_until(folder, config.rounds)
    return {
        "method": config.method,
        "evaluate": judged,
        "rounds": config.rounds,
        **summarize([event for event in events if is_evaluated(event["t"], config)]),
        "seed": config.seed,
        "split": federation.fingerprint,
        "config": config.fingerprint(),
        "labels": {
            "training": len(federation.labelled),
            "validation": len(federation.validation),
            "total": len(federation.labelled) + len(federation.validation),
        },
        "clients": len(federation.clients),
        **({"expelled": expelled} if (expelled := read_expelled(folder)) else {}),
        # replies by client
        "left_out": Counter(name for event in events for name in event.get("left_out", ())),
        "skipped_files": len(federation.pool.skipped),
        "seconds": round(seconds, 1),
        "arithmetic": used_arithmetic(),
        "versions": versions(),
    }


def server_only(config: Config) -> Config:
    """The baseline: Server-SL with as many supervised epochs as the method in total.

    With `[bootstrap]` it trains as that section says, evenly over the same rounds. Otherwise it has the same
    settings and more rounds, of which the first are those of a shorter run.
    """
    own_section = {section_name(config.method)} - METHODS.keys()
    raw = {k: v for k, v in config.to_dict().items() if k not in own_section}
    extra, rounds = config.selected_method().preparation_epochs(config.bootstrap), config.rounds
    if own := config.bootstrap.epochs:
        settings = config.bootstrap.model_dump(include={"lr", "augment"})
        epochs = config.server.epochs + -(-extra // rounds)
        decay = config.bootstrap.decay ** (own / rounds)  # the same rate in the end
        raw["server"] |= {**settings, "epochs": epochs, "decay": decay}
        return parse(raw | {"method": "server-sl"}, "baseline")
    rounds += -(-extra // max(config.server.epochs, 1))
    return parse(raw | {"method": "server-sl", "rounds": rounds, "evaluate_every": 1}, "baseline")
