"""Observers of a run: events file, TensorBoard, checkpoints, log, progress bar.

To add one, write a class with `__call__(event)` and `close()`: docs/observers.md.
"""

import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard.writer import SummaryWriter

from fedseal.core import Packet, PreparationStep
from fedseal.engines.memory_store import MemoryStore
from fedseal.replies import is_reserved
from fedseal.rounds import ClientDone, Event, LeftOut, RoundDone
from fedseal.rounds import Progress as RunProgress
from fedseal.storage.accuracies import PREFIXES, judged_by
from fedseal.storage.checkpoint import Checkpoint
from fedseal.storage.events_file import format_line, format_lines, read_events, read_rounds_until
from fedseal.system.files import cannot_write, sync_folder, write_atomic
from fedseal.system.logs import about, log, progress_log
from fedseal.system.progress import RateLimit, format_duration

PREPARATION_SECONDS = 2.0  # between two checkpoints before round 1


class Observer(Protocol):
    """Receives every event, in order."""

    def __call__(self, event: Event) -> None: ...

    def close(self) -> None: ...


class EventLog:
    """Writes `events.jsonl`, one JSON object per line. A resumed run continues after its checkpoint."""

    def __init__(self, path: Path, resumed_from: int) -> None:
        self.path = path
        read_rounds_until(path.parent, resumed_from)  # refuses a file that lacks a round
        kept = [event for event in read_events(path) if event["t"] <= resumed_from]
        text, self.checksum = format_lines(kept)
        write_atomic(path, text)
        sync_folder(path.parent)

    def __call__(self, event: Event) -> None:
        if isinstance(event, RoundDone):
            self._add(event.metrics)
        elif isinstance(event, LeftOut):
            about = {"event": "left-out", "t": event.t, "client": event.client}
            self._add(about | {"reason": event.problem.reason, "worker_died": event.problem.worker_died})

    def _add(self, event: dict[str, Any]) -> None:
        line, self.checksum = format_line(event, self.checksum)
        try:
            with self.path.open("a") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())  # a checkpoint of the round must not outlive its line
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def close(self) -> None: ...


class Checkpoints:
    """Saves a checkpoint every few rounds and after the last round; before round 1, every few seconds."""

    def __init__(
        self,
        path: Path,
        memories: MemoryStore,
        every: int,
        rounds: int,
        seconds: Callable[[], float],
    ) -> None:
        self.path, self.memories, self.seconds = path, memories, seconds
        self.every, self.rounds = every, rounds
        self.saved = -math.inf  # when the last preparation step was saved; a step may take milliseconds

    def __call__(self, event: Event) -> None:
        if isinstance(event, PreparationStep):
            if event.done == event.total or time.monotonic() - self.saved >= PREPARATION_SECONDS:
                self._save(0, event.state)
                self.saved = time.monotonic()
        elif isinstance(event, RoundDone) and (event.t % self.every == 0 or event.t == self.rounds):
            self._save(event.t, event.state)

    def _save(self, t: int, state: Packet) -> None:
        Checkpoint(RunProgress(t, state), self.seconds()).save(self.path, self.memories)

    def close(self) -> None: ...


class RunLog:
    """Logs rounds and left-out clients. Rounds that follow each other quickly share a line."""

    def __init__(self, rounds: int, titles: Mapping[str, str], judged: str = "model") -> None:
        self.rounds, self.titles, self.judged = rounds, titles, judged
        self.steps_limit, self.rounds_limit = RateLimit(), RateLimit()
        self.clock = TimeLeft(rounds)

    def __call__(self, event: Event) -> None:
        if isinstance(event, LeftOut):
            extra = about("left-out", round=event.t, client=event.client, reason=event.problem.reason)
            log.warning(
                "round %d: %s is left out: %s", event.t, event.client, event.problem.reason, extra=extra
            )
        elif isinstance(event, PreparationStep):
            if self.steps_limit.allows():
                extra = about("preparation", done=event.done, total=event.total)
                progress_log.info("%s: %d of %d", event.what, event.done, event.total, extra=extra)
        elif isinstance(event, RoundDone):
            left = self.clock.after(event.metrics)
            if self.rounds_limit.allows(always=event.t == self.rounds):
                self._log_round(event, left)

    def _log_round(self, event: RoundDone, left: float) -> None:
        words = f"round {event.t} of {self.rounds}"
        words += f", {format_duration(left)} left" if event.t < self.rounds else ""
        numbers = {k: v for k, v in event.metrics.items() if isinstance(v, int | float) and k != "t"}
        known = {"round": event.t, "rounds": self.rounds, "seconds_left": round(left, 1)}
        extra = about("round", **(known | numbers | known))  # a method may call its numbers as it likes
        progress_log.info("%s: %s", words, status(event.metrics, self.titles, self.judged), extra=extra)

    def close(self) -> None: ...


class TimeLeft:
    """Estimates the remaining seconds of a run from its last rounds."""

    def __init__(self, rounds: int) -> None:
        self.rounds, self.last = rounds, deque[float](maxlen=10)

    def after(self, metrics: Mapping[str, Any]) -> float:
        """The estimate after a round with these metrics."""
        self.last.append(sum(metrics["seconds"].values()))
        return (self.rounds - int(metrics["t"])) * sum(self.last) / len(self.last)


class TensorBoard:
    """Writes all numbers of a round for TensorBoard."""

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
            for tag, value in tags(event.metrics).items():
                self.writer.add_scalar(tag, value, event.t)
        except OSError as error:
            raise cannot_write(self.folder, error) from error

    def close(self) -> None:
        with suppress(OSError):  # the numbers are also in events.jsonl
            self.writer.close()


def tags(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a round by TensorBoard tag; a list becomes one tag per class."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            found |= {f"{name}/{key}": number for key, number in value.items()}
        elif isinstance(value, int | float) and name != "t":
            group = (
                "accuracy" if name.endswith("accuracy") else "network" if name[:6] == "bytes_" else "method"
            )
            found[f"{'privacy' if name == 'epsilon' else group}/{name}"] = value
        elif isinstance(value, list) and not is_reserved(name):
            found |= {f"{name}/{number}": entry for number, entry in enumerate(value)}
    return found


class ProgressBar:
    """Shows progress in the terminal: round, accuracy, the method's own numbers, remaining time."""

    def __init__(
        self,
        title: str,
        rounds: int,
        done: int,
        console: Console,
        titles: Mapping[str, str],
        judged: str = "model",
    ) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(compact=True),
        )
        self.titles, self.judged = titles, judged
        self.progress = Progress(*columns, console=console)
        self.start_task = self.progress.add_task("", visible=False, status="")
        self.rounds_task = self.progress.add_task(
            title, total=rounds, completed=done, status="", visible=False
        )
        self.clients_task = self.progress.add_task("  clients", visible=False, status="")
        self.progress.start()

    def __call__(self, event: Event) -> None:
        if isinstance(event, PreparationStep):
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
            words = status(event.metrics, self.titles, self.judged)
            self.progress.update(self.rounds_task, completed=event.t, status=words, visible=True)

    def close(self) -> None:
        self.progress.stop()


def status(metrics: Mapping[str, Any], titles: Mapping[str, str], judged: str) -> str:
    """A round in a few words: accuracies of the model that is judged, then the method's own numbers."""
    name = judged_by(metrics, judged)
    prefix = PREFIXES["average"] if name.startswith(PREFIXES["average"]) else PREFIXES["model"]
    words = [
        f"{shown.removeprefix(prefix).removesuffix('_accuracy')} {metrics[shown]:.1%}"
        for shown in (name, f"{prefix}client_accuracy")
        if shown in metrics
    ]
    if "epsilon" in metrics:
        words.append(f"ε {metrics['epsilon']:.3g}")
    for name, value in metrics.items():
        if is_reserved(name) or not isinstance(value, int | float):
            continue
        rate = metrics.get(f"{name}_correct")
        number = f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
        correct = f" ({rate:.0%} correct)" if rate is not None else ""
        words.append(f"{titles.get(name, name.replace('_', ' '))} {number}{correct}")
    return " · ".join(words)
