"""Runs the missing cells of a table, each in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fedseal.config.load import load_config
from fedseal.errors import FolderInUseError, UserError
from fedseal.reproduce import estimate
from fedseal.reproduce.cells import Cell
from fedseal.reproduce.store import KNOWN_VERSIONS, ResultStore, identity, is_outdated
from fedseal.storage.events_file import read_rounds, read_rounds_until
from fedseal.system.files import cannot_write, in_use
from fedseal.system.machine import cores
from fedseal.system.processes import PARENT


@dataclass
class RunningCell:
    """A cell and its process, which ends with this one."""

    cell: Cell
    folder: Path
    process: "subprocess.Popen[str]"
    stderr: IO[str]

    @property
    def error(self) -> str:
        """Why the process failed, in one line."""
        code = self.process.returncode
        if code < 0:
            return f"the process was killed by {signal.Signals(-code).name} (out of memory?)"
        self.stderr.seek(0)
        lines = self.stderr.read().strip().splitlines()
        return lines[-1] if lines else f"the process ended with exit code {code}"


@dataclass(frozen=True)
class CellsProgress:
    """The state of all cells that are to be run."""

    done: float  # seconds, by the estimate made at the start
    total: float
    running: Mapping[str, int]  # cells and the number of their finished rounds
    finished: Mapping[str, str]  # cells and their accuracy
    failed: Mapping[str, str]  # cells and their error


def run_cells(
    cells: Sequence[Cell],
    store: ResultStore,
    work: Path,
    jobs: int,
    *,
    renew: bool = False,
    changes: Mapping[str, Any] | None = None,
) -> Iterator[CellsProgress]:
    """Runs the missing cells, `jobs` at once, with `renew` also those with an outdated result.

    A cell that fails does not stop the others.

    The folder of a run below `work` is named after its configuration, so a stopped run continues no matter
    which table needs it. A cell that another process is running is waited for. `changes` are further keys.
    """
    queue = [cell for cell in longest_runs(cells) if store.is_missing(cell, renew=renew)]
    try:
        store.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(store.folder, error) from error
    folders = {cell.name: run_folder(cell, work) for cell in queue}
    cost = {cell.name: estimate.seconds(cell.config) for cell in queue}
    done, finished, failed = 0.0, dict[str, str](), dict[str, str]()
    running: list[RunningCell] = []
    try:
        while queue or running:
            elsewhere = [cell for cell in queue if in_use(folders[cell.name])]
            for cell in [cell for cell in queue if cell not in elsewhere][: jobs - len(running)]:
                queue.remove(cell)
                running.append(start(cell, folders[cell.name], max(cores() // jobs, 1), changes or {}))
            for ended in [item for item in running if item.process.poll() is not None]:
                running.remove(ended)
                cell, code = ended.cell, ended.process.returncode
                if code == FolderInUseError.exit_code:  # another process has started it in the meantime
                    queue.append(cell)
                    continue
                try:
                    if code != 0:
                        raise UserError(ended.error)
                    finished[cell.name] = f"{store.add(cell, ended.folder).accuracy:.2%}"
                except (UserError, OSError) as error:
                    failed[cell.name] = str(error)
                done += cost[cell.name]
            now = [*(item.cell for item in running), *elsewhere]
            rounds = {cell.name: count_rounds(folders[cell.name]) for cell in now}
            part = sum(cost[cell.name] * rounds[cell.name] / cell.config.rounds for cell in now)
            yield CellsProgress(done + part, sum(cost.values()), rounds, dict(finished), dict(failed))
            time.sleep(0.2 if running or queue else 0)
    finally:
        for item in running:
            item.process.terminate()
            item.process.wait()


def count_rounds(folder: Path) -> int:
    """The rounds that a run has finished. A damaged file is reported by the run itself."""
    try:
        return len(read_rounds(folder))
    except UserError:
        return 0


def longest_runs(cells: Iterable[Cell]) -> list[Cell]:
    """Of cells that differ only in their rounds, the longest: it answers for the others."""
    longest: dict[str, Cell] = {}
    for cell in cells:
        key = identity(cell.config)
        if key not in longest or cell.config.rounds > longest[key].config.rounds:
            longest[key] = cell
    return [*longest.values()]


def run_folder(cell: Cell, work: Path) -> Path:
    """The folder in which a cell is run."""
    return work / KNOWN_VERSIONS[0] / f"{identity(cell.config)}-{cell.config.rounds}"


def start(cell: Cell, folder: Path, workers: int, changes: Mapping[str, Any]) -> RunningCell:
    """Starts a cell, or continues it if it was stopped; `changes` are further keys."""
    keys = {**cell.changes, **changes}
    settings = [word for key, value in keys.items() for word in ("--set", f"{key}={to_toml(value)}")]
    words = ["train", cell.table.preset, *settings, "--out", str(folder), "--resume", "--quiet"]
    stderr = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - a pipe could fill up
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "fedseal", *words, "--workers", str(workers)],
        env=os.environ | {PARENT: str(os.getpid())},
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        text=True,
    )
    return RunningCell(cell, folder, process, stderr)


def to_toml(value: Any) -> str:
    """A value for `--set`."""
    return str(value).lower() if isinstance(value, bool) else json.dumps(value)


def run_again(cell: Cell, store: ResultStore, repeated: ResultStore, work: Path) -> Iterator[CellsProgress]:
    """Runs a measured cell once more, into another store, with the same number of server threads."""
    known = store.find(cell)
    if known is None:
        raise UserError(
            f"{cell.name} has not been measured yet: run it with --only {cell.name} --seeds {cell.seed + 1}."
        )
    if is_outdated(known, cell.config):
        made_with = known.summary["versions"]["fedseal"]
        raise UserError(
            f"{cell.name} was measured with fedseal {made_with}, which rounds differently: measure it again"
            f" with --only {cell.name} --renew."
        )
    threads = load_config(known.folder / "config.toml").server.threads
    yield from run_cells([cell], repeated, work, 1, changes={"server.threads": threads})


def compare(cell: Cell, store: ResultStore, repeated: ResultStore) -> str:
    """Confirms that all numbers of every round of a cell agree in two stores; an error if they do not."""
    before, after = store.find(cell), repeated.find(cell)
    assert before is not None and after is not None
    old, new = (read_numbers(run.folder, cell.config.rounds) for run in (before, after))
    differing = differing_rounds(old, new)
    then, now = (100 * run.accuracy_after(cell.config.rounds) for run in (before, after))
    if differing:
        made_on, here = (run.summary["versions"].get("processor", "not recorded") for run in (before, after))
        why = ""
        if made_on != here:
            why = f" The processors differ and may round differently: {made_on} then, {here} now."
        raise UserError(
            f"{cell.name} differs from {before.folder} from round {differing[0]} on; mean of the last ten"
            f" rounds: {then:.2f} %, now {now:.2f} %.{why}"
        )
    return f"{cell.name}: all {len(old)} rounds are identical, {then:.2f} %"


def differing_rounds(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[int]:
    """The rounds in which a number of the old run is another one in the new run.

    The new run may have more numbers: a later version measures more.
    """
    pairs = enumerate(zip(old, new, strict=True), 1)
    return [t for t, (one, other) in pairs if one != {name: other.get(name) for name in one}]


def read_numbers(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """All numbers of every round of a run, except for its seconds."""
    events = read_rounds_until(folder, rounds)
    return [{k: v for k, v in event.items() if k != "seconds"} for event in events]
