"""Those who watch a run: the events file, TensorBoard, checkpoints, the progress bar."""

import json
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard.writer import SummaryWriter

from fedseal.core import Engine, Packet, Prepared
from fedseal.errors import UserError
from fedseal.files import cannot_write, write_atomic
from fedseal.run import Checkpoint, ClientDone, Event, LeftOut, RoundDone

log = logging.getLogger("fedseal")


class Observer(Protocol):
    """Is told every event, in order."""

    def __call__(self, event: Event) -> None: ...

    def close(self) -> None: ...


class EventLog:
    """`events.jsonl`: one JSON object a line. A resumed run goes on where its checkpoint was."""

    def __init__(self, path: Path, resumed_from: int) -> None:
        self.path = path
        kept = [event for event in read_events(path) if event["t"] <= resumed_from]
        write_atomic(path, "".join(json.dumps(event) + "\n" for event in kept))

    def __call__(self, event: Event) -> None:
        if isinstance(event, RoundDone):
            self._add(event.metrics)
        elif isinstance(event, LeftOut):
            self._add({"event": "left-out", "t": event.t, "client": event.client, "reason": event.reason})

    def _add(self, line: dict[str, Any]) -> None:
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def close(self) -> None: ...


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a run; a line that was cut off by a kill is left out."""
    events = []
    for line in path.read_text("utf-8", "replace").splitlines() if path.exists() else []:
        try:
            event = json.loads(line)
            event["event"], event["t"]
        except (ValueError, KeyError, TypeError):
            break
        events.append(event)
    return events


def round_events(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Rounds 1 to `rounds` of a run; refuses if one is missing."""
    path = folder / "events.jsonl"
    events = [event for event in read_events(path) if event["event"] == "round" and event["t"] <= rounds]
    if [event["t"] for event in events] != list(range(1, rounds + 1)):
        raise UserError(f"{path} is damaged, or lacks a round: delete {folder} to run it again.")
    return events


class Checkpoints:
    """Saves what it takes to go on: after each step before round 1, every so many rounds, and at the end."""

    def __init__(
        self,
        path: Path,
        engine: Engine,
        fingerprint: str,
        every: int,
        rounds: int,
        seconds: Callable[[], float],
    ) -> None:
        self.path, self.engine, self.fingerprint = path, engine, fingerprint
        self.every, self.rounds, self.seconds = every, rounds, seconds

    def __call__(self, event: Event) -> None:
        if isinstance(event, Prepared):
            self._save(0, event.state)
        elif isinstance(event, RoundDone) and (event.t % self.every == 0 or event.t == self.rounds):
            self._save(event.t, event.state)

    def _save(self, t: int, state: Packet) -> None:
        Checkpoint(t, state, self.engine.memories(), self.seconds()).save(self.path, self.fingerprint)

    def close(self) -> None: ...


class Warnings:
    """Tells the user what went wrong without ending the run."""

    def __call__(self, event: Event) -> None:
        if isinstance(event, LeftOut):
            log.warning("round %d: %s is left out: %s", event.t, event.client, event.reason)

    def close(self) -> None: ...


class TensorBoard:
    """The same numbers for TensorBoard."""

    def __init__(self, folder: Path, resumed_from: int) -> None:
        self.folder = folder
        try:
            self.writer = SummaryWriter(str(folder), purge_step=resumed_from + 1)
        except OSError as error:
            raise cannot_write(folder, error) from error

    def __call__(self, event: Event) -> None:
        if not isinstance(event, RoundDone):
            return
        try:
            self._add(event)
        except OSError as error:
            raise cannot_write(self.folder, error) from error

    def _add(self, event: RoundDone) -> None:
        for name, value in event.metrics.items():
            if name == "tau":
                for number, tau in enumerate(value):
                    self.writer.add_scalar(f"tau/{number}", tau, event.t)
            elif name == "seconds":
                for step, seconds in value.items():
                    self.writer.add_scalar(f"seconds/{step}", seconds, event.t)
            elif isinstance(value, int | float) and name != "t":
                folder = "accuracy" if "accuracy" in name else "clients"
                self.writer.add_scalar(f"{folder}/{name}", value, event.t)

    def close(self) -> None:
        with suppress(OSError):  # the numbers are in events.jsonl, too
            self.writer.close()


class ProgressBar:
    """Live progress in the terminal: round, accuracy, |D⁺| and |D⁻| with their correct rates, time left."""

    def __init__(self, title: str, rounds: int, done: int, console: Console) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(compact=True),
        )
        self.progress = Progress(*columns, console=console)
        self.start_task = self.progress.add_task("", visible=False, status="")
        self.rounds_task = self.progress.add_task(
            title, total=rounds, completed=done, status="", visible=False
        )
        self.clients_task = self.progress.add_task("  clients", visible=False, status="")

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *exception: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Prepared):
            self.progress.update(
                self.start_task,
                description=event.what,
                completed=event.done,
                total=event.total,
                visible=event.done < event.total,
            )
        elif isinstance(event, ClientDone):
            self.progress.update(
                self.clients_task, completed=event.done, total=event.total, visible=event.done < event.total
            )
        elif isinstance(event, RoundDone):
            self.progress.update(
                self.rounds_task, completed=event.t, status=status(event.metrics), visible=True
            )

    def close(self) -> None:
        self.progress.stop()


def status(metrics: dict[str, Any]) -> str:
    """One round in a few words."""
    words = []
    accuracy = metrics.get("test_accuracy", metrics.get("validation_accuracy", math.nan))
    if not math.isnan(accuracy):
        words.append(f"{'test' if 'test_accuracy' in metrics else 'validation'} {accuracy:.1%}")
    for name, sign in (("positive", "D⁺"), ("negative", "D⁻")):
        if name in metrics:
            rate = metrics.get(f"{name}_correct")
            words.append(f"{sign} {metrics[name]:,}" + (f" ({rate:.0%} right)" if rate is not None else ""))
    return " · ".join(words)
