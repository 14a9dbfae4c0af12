"""The command reproduce: the tables and figures of the paper, and further tables."""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import progress as bars
from rich.table import Column
from rich.table import Table as Grid

from fedseal.cli.common import JsonLogs, Log, console, continue_by, escape
from fedseal.errors import UserError
from fedseal.system.lazy import LazyModule
from fedseal.system.logs import about, progress_log, set_up_logs
from fedseal.system.logs import log as messages
from fedseal.system.progress import RateLimit

if TYPE_CHECKING:
    from fedseal.reproduce import cells, estimate, figures, measure, run_cells, store
    from fedseal.reproduce.cells import Cell, Scale, Table
    from fedseal.reproduce.run_cells import CellsProgress
    from fedseal.reproduce.store import ResultStore
    from fedseal.system import machine
else:
    cells = LazyModule("fedseal.reproduce.cells")
    estimate = LazyModule("fedseal.reproduce.estimate")
    figures = LazyModule("fedseal.reproduce.figures")
    measure = LazyModule("fedseal.reproduce.measure")
    run_cells = LazyModule("fedseal.reproduce.run_cells")
    store = LazyModule("fedseal.reproduce.store")
    machine = LazyModule("fedseal.system.machine")


@continue_by(lambda: "Continue with the same command.")
def reproduce(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A name from --list.")] = None,
    seeds: Annotated[
        int, typer.Option(metavar="N", help="Run seeds 0 to N − 1. Figures show seed 0.", min=1, max=1000)
    ] = 1,
    scale: Annotated[
        str,
        typer.Option(
            metavar="SCALE",
            help="paper; reduced: fewer rounds and smaller networks; smoke: seconds per cell, for a try.",
        ),
    ] = "paper",
    jobs: Annotated[
        int, typer.Option(metavar="N", help="Cells to run at the same time, at most one per core.", min=1)
    ] = 1,
    only: Annotated[
        str, typer.Option(metavar="TEXT", help="Run only cells whose name contains TEXT, e.g. dir-0.3.")
    ] = "",
    list_: Annotated[
        bool, typer.Option("--list", help="List all tables and figures, the cells run, and the time left.")
    ] = False,
    renew: Annotated[
        bool,
        typer.Option(
            "--renew", help="Also run cells again whose result is from a version that rounds differently."
        ),
    ] = False,
    no_run: Annotated[
        bool, typer.Option("--no-run", help="Show the results so far and run nothing.")
    ] = False,
    verify: Annotated[
        str | None,
        typer.Option(
            metavar="CELL", help="Run a measured cell again and compare every number of every round."
        ),
    ] = None,
    results: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the measured cells.")] = Path(
        "results"
    ),
    work: Annotated[Path, typer.Option(metavar="DIR", help="Folder in which cells are run.")] = Path(
        "runs/reproduce"
    ),
    log: Log = None,
    json_logs: JsonLogs = False,
) -> None:
    """Reproduce a table or figure, of the paper or of docs/results.md.

    A cell is one row, column and seed. Cells that have not been measured are run; then the table shows our
    numbers beside the paper's. Stop the command at any time with Ctrl-C: the same command continues.
    """
    set_up_logs(long=True, file=log, json_lines=json_logs)
    console.quiet = json_logs  # no tables
    if scale not in ("paper", "reduced", "smoke"):
        raise UserError(f"--scale is '{scale}', but must be paper, reduced or smoke.")
    size: Scale = scale  # type: ignore[assignment]
    kept = store.ResultStore(results)
    if list_:
        _list(kept, seeds, size)
        return
    if name is None:
        raise UserError("Give the name of a table or figure; 'fedseal reproduce --list' shows them.")
    table = cells.find_table(name)
    if table.figure and seeds > 1:
        raise UserError(f"{name} is a figure, which shows seed 0: leave out --seeds.")
    if verify is not None:
        _verify(cells.find_cell(table, verify, size), kept, work / f"verify-{name}-{verify}")
        return
    wanted = [cell for cell in table.cells(seeds, size) if only in cell.name]
    if not wanted:
        example = table.cells(1, size)[0].name
        raise UserError(f"No cell of {name} has '{only}' in its name: a cell is called {example}.")
    jobs = min(jobs, machine.cores())
    missing = [cell for cell in wanted if kept.is_missing(cell, renew=renew)]
    if missing and not no_run:
        left = f"{len(missing)} of {len(wanted)} cells to run, {_format_time(missing)}, into {results}"
        messages.info("%s", left)
    failed = 0 if no_run else _run(run_cells.run_cells(wanted, kept, work, jobs, renew=renew))
    if table.figure:
        path = figures.draw_figure(table, kept, size)
        text = str(path) if path else "not drawn, because some of its cells have not been run"
        console.print(escape(f"{table.title}: {text}"), soft_wrap=True)
    else:
        _show(table, kept, seeds, size)
    if table.note:
        console.print(escape(table.note))
    if failed:
        raise UserError(
            f"{failed} of {len(wanted)} cells failed; the reasons are above, the others are kept."
        )


def _verify(cell: "Cell", kept: "ResultStore", work: Path) -> None:
    """Runs a cell in a new folder, which is deleted if all numbers agree."""
    if any((work / "results").rglob("summary.json")):  # of an earlier comparison that failed
        shutil.rmtree(work)
    repeated = store.ResultStore(work / "results")
    if _run(run_cells.run_again(cell, kept, repeated, work)):
        raise UserError(f"{cell.name} failed when it was run again; the reason is above.")
    try:
        console.print(escape(run_cells.compare(cell, kept, repeated)))
    except UserError as error:
        raise UserError(f"{error} The new run is in {work}.") from error
    shutil.rmtree(work)


def _run(states: "Iterator[CellsProgress]") -> int:
    """Shows progress and a line for each cell that has ended; returns the number of failed cells."""
    printed: set[str] = set()
    failed = 0
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.TaskProgressColumn(),
        bars.TimeElapsedColumn(),
        bars.TimeRemainingColumn(),
    )
    limit = RateLimit(30)
    with bars.Progress(*columns, console=console, transient=True, speed_estimate_period=3600) as bar:
        task = bar.add_task("starting", total=None)
        for state in states:
            now = ", ".join(f"{name}, round {rounds}" for name, rounds in state.running.items())
            bar.update(task, completed=state.done, total=state.total, description=escape(now))
            if now and limit.allows():
                share = state.done / state.total
                extra = about("cells", running=dict(state.running), share=round(share, 4))
                progress_log.info("%.0f %% done; %s", 100 * share, now, extra=extra)
            for name, text in {**state.finished, **state.failed}.items():
                if name not in printed:
                    level = logging.WARNING if name in state.failed else logging.INFO
                    messages.log(level, "%s: %s", name, text, extra=about("cell", cell=name))
                    printed.add(name)
            failed = len(state.failed)
    return failed


def _show(table: "Table", kept: "ResultStore", seeds: int, scale: "Scale") -> None:
    mark = "" if scale == "paper" else f", {scale.upper()} SCALE: not comparable with other scales"
    if table.accuracies:
        for what, rows in measure.measure_images(table, kept, seeds, scale):
            console.print(_grid(f"{table.title}{mark}: {what}, in %, mean of the last ten rounds", rows))
    else:
        _show_beside_paper(table, kept, seeds, scale, mark)
    if scale == "reduced":
        console.print(escape(f"Reduced: {table.reductions.replace('`', '')}."))


def _show_beside_paper(table: "Table", kept: "ResultStore", seeds: int, scale: "Scale", mark: str) -> None:
    measured = measure.measure(table, kept, seeds, scale)
    title = f"{table.title}{mark}: accuracy in %, mean of the last ten rounds (paper)"
    texts = {row: {c: place.text() for c, place in columns.items()} for row, columns in measured.items()}
    console.print(_grid(title, texts))
    if note := measure.outdated_note(measured):
        console.print(escape(note))
    if further := measure.margins_and_gaps(measured):
        console.print(_grid("Margin over Server-SL (paper), gap recovered (paper)", further))


def _grid(title: str, rows: dict[str, dict[str, str]]) -> Grid:
    grid = Grid("", title=escape(title), title_justify="left")
    for column in next(iter(rows.values())):
        grid.add_column(escape(column), justify="right")
    for row, columns in rows.items():
        grid.add_row(escape(row), *map(escape, columns.values()))
    return grid


def _list(kept: "ResultStore", seeds: int, scale: "Scale") -> None:
    heads = ("what", "cells run", "time left", "outdated (--renew)")
    grid = Grid(Column("name", no_wrap=True), *heads, box=None, header_style="bold")
    names: dict[str, list[str]] = {}  # of outdated cells
    with console.status("measuring the speed of the networks"):
        for table in cells.load_tables().values():
            all_cells = table.cells(seeds, scale)
            missing = [cell for cell in all_cells if kept.is_missing(cell)]
            outdated = [c for c in all_cells if c not in missing and kept.is_missing(c, renew=True)]
            done = f"{len(all_cells) - len(missing)}/{len(all_cells)}"
            left = _format_time(missing) if missing else ""
            again = f"{len(outdated)}, {_format_time(outdated)}" if outdated else ""
            grid.add_row(table.name, escape(table.title), done, left, again)
            names |= {table.name: [cell.name for cell in outdated]} if outdated else {}
    console.print(grid)
    for name, listed in names.items():
        console.print(escape(f"outdated in {name}: {', '.join(listed)}"), soft_wrap=True)
    console.print(f"scale: {scale}; times are rough estimates for this machine with {machine.cores()} cores")


def _format_time(missing: "list[Cell]") -> str:
    """The estimated time of these cells on this machine."""
    minutes = sum(estimate.seconds(cell.config) for cell in missing) / 60
    if minutes < 100:
        return f"≈ {minutes:.0f} min" if minutes >= 1 else "< 1 min"
    return f"≈ {minutes / 60:.0f} h" if minutes < 60 * 48 else f"≈ {minutes / 60 / 24:.0f} days"
