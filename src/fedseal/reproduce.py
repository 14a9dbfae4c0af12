"""The paper's tables and figures: what has been run of them, and the rest of it run.

What has been measured lies under `results/`, and is found by its configuration: a cell that stands in two
tables is run once. A run of more rounds serves for fewer, since its first rounds are the same.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import IO, Any

from fedseal import estimate
from fedseal.api import Result
from fedseal.config import Config, load_config
from fedseal.engines.local import DIED
from fedseal.errors import UserError
from fedseal.files import IN_USE, cannot_write, held, in_use, write_atomic
from fedseal.machine import cores
from fedseal.observers import read_events, round_events
from fedseal.processes import PARENT
from fedseal.tables import Cell, Scale, Table, folder_name

KEPT = ("config.toml", "events.jsonl", "summary.json")
SAME = ("0.1.0",)  # versions of fedseal with the numbers of this one; one that changes any stands alone


class Library:
    """What has been measured: runs under `results/`, found by configuration and version."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: dict[str, list[Result]] = {}
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} is no folder: measured cells are kept in one.")
        with held(folder, alone=False):
            self._read()

    def _read(self) -> None:
        for path in sorted(self.folder.rglob("summary.json")):
            if path.parent.name.startswith("."):  # another process is taking it in just now, or was killed
                continue
            try:
                summary = json.loads(path.read_text("utf-8"))
                made_with, _, config = summary["versions"]["fedseal"], summary["rounds"], _config(path.parent)
            except (ValueError, KeyError, TypeError, UserError) as error:
                raise UserError(f"{path.parent} is damaged: delete it to run the cell again.") from error
            if made_with in SAME:
                self.runs.setdefault(identity(config), []).append(Result(path.parent, summary))

    def find(self, cell: Cell) -> Result | None:
        """A run of the cell's configuration with as many rounds or more."""
        runs = self.runs.get(identity(cell.config), [])
        return next((run for run in runs if run.summary["rounds"] >= cell.config.rounds), None)

    def accuracy(self, cell: Cell, judged: str = "") -> float | None:
        """Mean of the last ten rounds, in per cent, of the model that the run is judged by or of another."""
        found = self.find(cell)
        return None if found is None else 100 * found.accuracy_after(cell.config.rounds, judged)

    def keep(self, cell: Cell, run: Path) -> Result:
        """Takes a finished run in, whole or not at all."""
        round_events(run, cell.config.rounds)
        for event in read_events(run / "events.jsonl"):
            if event["event"] == "left-out" and event["reason"] == DIED:
                raise UserError(
                    f"{event['client']} was left out in round {event['t']}, since {DIED}: delete {run},"
                    " and run it again with more memory to spare."
                )
        place = self.folder / folder_name(cell.table, cell.scale) / cell.name
        place.parent.mkdir(parents=True, exist_ok=True)
        with (
            held(self.folder, alone=True),
            tempfile.TemporaryDirectory(dir=place.parent, prefix=".") as work,
        ):
            new = Path(work) / ".new"
            new.mkdir()
            for name in KEPT:
                shutil.copy(run / name, new)
            if place.exists():
                place.rename(Path(work) / ".old")
            new.rename(place)
        result = Result(place, json.loads((place / "summary.json").read_text("utf-8")))
        self.runs.setdefault(identity(cell.config), []).append(result)
        return result


def identity(config: Config) -> str:
    """What a measured run is found by: all that decides its result but the last bit, which threads do."""
    server = config.server.model_copy(update={"threads": 1})
    return config.model_copy(update={"server": server}).fingerprint(ignore=["rounds"])


@dataclass
class Job:
    """A cell that is being run in a process of its own, which ends with this one."""

    cell: Cell
    folder: Path
    process: "subprocess.Popen[str]"
    said: IO[str]  # what it writes to standard error

    @property
    def error(self) -> str:
        """Why it ended, in a line."""
        if self.process.returncode < 0:
            return f"it was killed by {signal.Signals(-self.process.returncode).name} (out of memory?)"
        self.said.seek(0)
        return (self.said.read().strip().splitlines() or ["it said nothing"])[-1]


def start(cell: Cell, folder: Path, workers: int, **more: Any) -> Job:
    """Goes on with a cell where it was stopped; `more` are further keys."""
    changes = cell.changes | more
    keys = [word for key, value in changes.items() for word in ("--set", f"{key}={toml(value)}")]
    words = ["train", cell.table.preset, *keys, "--out", str(folder), "--resume", "--quiet"]
    said = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - a pipe could fill up
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "fedseal", *words, "--workers", str(workers)],
        env=os.environ | {PARENT: str(os.getpid())},
        stdout=subprocess.DEVNULL,
        stderr=said,
        text=True,
    )
    return Job(cell, folder, process, said)


def toml(value: Any) -> str:
    """A value for `--set`."""
    return str(value).lower() if isinstance(value, bool) else json.dumps(value)


@dataclass(frozen=True)
class Progress:
    """How far all cells are."""

    done: float  # seconds, as estimated before
    total: float
    running: Mapping[str, int]  # cells and their rounds so far
    ended: Mapping[str, str]  # cells and their accuracy
    failed: Mapping[str, str]  # cells and their error


def run_cells(
    cells: Sequence[Cell], library: Library, work: Path, jobs: int, **more: Any
) -> Iterator[Progress]:
    """Runs what is missing, so many cells at once; a cell that fails does not stop the others.

    A cell is run in a folder called by its configuration, so that it goes on whichever table asks for it. One
    that another process runs there is waited for. `more` are further keys.
    """
    longest: dict[str, Cell] = {}  # of cells that differ in rounds alone, one serves for all
    for cell in cells:
        key = identity(cell.config)
        if key not in longest or cell.config.rounds > longest[key].config.rounds:
            longest[key] = cell
    queue = [cell for cell in longest.values() if library.find(cell) is None]
    try:
        library.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(library.folder, error) from error
    places = {c.name: work / SAME[0] / f"{identity(c.config)}-{c.config.rounds}" for c in queue}
    cost = {cell.name: estimate.seconds(cell.config) for cell in queue}
    done, ended, failed = 0.0, dict[str, str](), dict[str, str]()
    running: list[Job] = []
    try:
        while queue or running:
            elsewhere = [cell for cell in queue if in_use(places[cell.name])]
            for cell in [cell for cell in queue if cell not in elsewhere][: jobs - len(running)]:
                queue.remove(cell)
                running.append(start(cell, places[cell.name], max(cores() // jobs, 1), **more))
            for job in [job for job in running if job.process.poll() is not None]:
                running.remove(job)
                name = job.cell.name
                try:
                    if job.process.returncode != 0:
                        raise UserError(job.error)
                    ended[name] = f"{library.keep(job.cell, job.folder).accuracy:.2%}"
                except (UserError, OSError) as error:
                    if IN_USE in str(error):  # another process was faster
                        queue.append(job.cell)
                        continue
                    failed[name] = str(error)
                done += cost[name]
            now = [*(job.cell for job in running), *elsewhere]
            rounds = {cell.name: _rounds(places[cell.name]) for cell in now}
            part = sum(cost[cell.name] * rounds[cell.name] / cell.config.rounds for cell in now)
            yield Progress(done + part, sum(cost.values()), rounds, dict(ended), dict(failed))
            time.sleep(0.2 if running or queue else 0)
    finally:
        for job in running:
            job.process.terminate()
            job.process.wait()


@dataclass(frozen=True)
class Measured:
    """A place in a table: ours by seed, and the paper's, in per cent."""

    ours: Mapping[int, float] = field(default_factory=dict)
    paper: float | None = None

    def text(self) -> str:
        """Mean ± spread over seeds, and the paper's."""
        paper = "–" if self.paper is None else f"{self.paper:.2f}"
        values = list(self.ours.values())
        if not values:
            return f"not run ({paper})"
        spread = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
        return f"{mean(values):.2f}{spread} ({paper})"


def measure(
    table: Table, library: Library, seeds: int, scale: Scale, judged: str = ""
) -> dict[str, dict[str, Measured]]:
    """Rows of columns; `judged` as for `Library.accuracy`."""
    found: dict[str, dict[str, Measured]] = {}
    for row in table.rows:
        for number, column in enumerate(table.columns):
            values = {s: library.accuracy(Cell(table, row, column, s, scale), judged) for s in range(seeds)}
            ours = {seed: value for seed, value in values.items() if value is not None}
            paper = table.paper[row][number] if row in table.paper else None
            found.setdefault(row, {})[column] = Measured(ours, paper)
    return found


def margin(method: Measured, low: Measured) -> str:
    """Points over Server-SL, the mean over the seeds that both have; (the paper's)."""
    ours = [value - low.ours[seed] for seed, value in method.ours.items() if seed in low.ours]
    paper = "–" if method.paper is None or low.paper is None else f"{method.paper - low.paper:+.2f}"
    return f"{mean(ours):+.2f} ({paper})" if ours else f"– ({paper})"


def gap_recovered(method: Measured, low: Measured, high: Measured) -> str:
    """(method − Server-SL)/(FedAvg-SL − Server-SL): how much of what labels would gain is gained without.

    Means over the seeds that all three have, and how many that are if the method has more; (the paper's).
    """
    common = [seed for seed in method.ours if seed in low.ours and seed in high.ours]
    gained, gap = (sum(one.ours[s] - low.ours[s] for s in common) for one in (method, high))
    paper = "–"
    if method.paper is not None and low.paper is not None and high.paper is not None:
        paper = f"{(method.paper - low.paper) / (high.paper - low.paper):.0%}"
    fewer = f" over {len(common)} of {len(method.ours)} seeds" if len(common) < len(method.ours) else ""
    return f"{gained / gap:.0%}{fewer} ({paper})" if gap > 0 else f"– ({paper})"


def readings(measured: Mapping[str, Mapping[str, Measured]]) -> dict[str, dict[str, str]]:
    """For rows other than the bounds: margin over Server-SL and gap recovered, ours (the paper's).

    Where a method is above FedAvg-SL, that is no upper bound, and there is no gap to recover.
    """
    low = measured.get("Server-SL")
    if low is None:
        return {}
    high = dict(measured.get("FedAvg-SL", dict.fromkeys(low, Measured())))
    methods = {row: places for row, places in measured.items() if row not in ("Server-SL", "FedAvg-SL")}
    for column, bound in high.items():
        for places in methods.values():
            if any(places[column].ours.get(seed, value) > value for seed, value in bound.ours.items()):
                high[column] = Measured({}, bound.paper)
    return {
        row: {
            column: f"{margin(place, low[column])}, {gap_recovered(place, low[column], high[column])}"
            for column, place in places.items()
        }
        for row, places in methods.items()
    }


def draw(table: Table, library: Library, scale: Scale) -> Path | None:
    """A figure as PNG and SVG, with its data as JSON beside; None as long as a run is missing."""
    from fedseal.plots import bar_chart, line_chart

    series: dict[str, list[tuple[float, float]]] = {}
    for cell in table.cells(1, scale):
        found = library.find(cell)
        if found is None:
            return None
        events = round_events(found.folder, cell.config.rounds)
        if "bars" in table.figure:
            series[cell.row] = list(enumerate(events[-1][table.figure["bars"]]))
        for key, name in table.figure.get("curves", {}).items():
            series[name or cell.row] = [(event["t"], event[key]) for event in events if key in event]
    path = library.folder / folder_name(table, scale) / "figure.png"
    chart = bar_chart if "bars" in table.figure else line_chart
    marked = table.title if scale == "paper" else f"{table.title} ({scale} scale)"
    chart(series, marked, table.figure["y"], [path, path.with_suffix(".svg")])
    write_atomic(path.with_suffix(".json"), json.dumps(series, indent=1, ensure_ascii=False) + "\n")
    return path


def run_again(cell: Cell, library: Library, again: Library, work: Path) -> Iterator[Progress]:
    """Runs a measured cell once more, into another library."""
    known = library.find(cell)
    if known is None:
        raise UserError(
            f"{cell.name} has not been measured yet: --only {cell.name} --seeds {cell.seed + 1} runs it."
        )
    threads = _config(known.folder).server.threads
    yield from run_cells([cell], again, work, 1, **{"server.threads": threads})


def compared(cell: Cell, library: Library, again: Library) -> str:
    """Whether all numbers of every round of a cell are the same in two libraries."""
    known, new = library.find(cell), again.find(cell)
    assert known is not None and new is not None
    before, after = (numbers(run.folder, cell.config.rounds) for run in (known, new))
    differing = [t for t, (one, other) in enumerate(zip(before, after, strict=True), 1) if one != other]
    then, now = (100 * run.accuracy_after(cell.config.rounds) for run in (known, new))
    if differing:
        made_on, here = (run.summary["versions"].get("processor", "not recorded") for run in (known, new))
        why = f" Another processor rounds otherwise; then: {made_on}; now: {here}." if made_on != here else ""
        raise UserError(
            f"{cell.name} differs from {known.folder} from round {differing[0]} on; "
            f"last ten rounds: {then:.2f} %, now {now:.2f} %.{why}"
        )
    return f"{cell.name}: the same {len(before)} rounds, {then:.2f} %"


def numbers(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Every round of a run without its seconds."""
    return [{k: v for k, v in event.items() if k != "seconds"} for event in round_events(folder, rounds)]


def _rounds(folder: Path) -> int:
    """How many rounds a run has got to."""
    return sum(event["event"] == "round" for event in read_events(folder / "events.jsonl"))


def _config(folder: Path) -> Config:
    return load_config(folder / "config.toml")
