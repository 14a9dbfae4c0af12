"""The command line of the paper's tables and figures."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import progress as bars
from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid

from fedseal.errors import UserError
from fedseal.later import Later

if TYPE_CHECKING:
    from fedseal import estimate, machine, tables
    from fedseal import reproduce as lib
else:
    lib, machine, estimate, tables = map(Later, ("reproduce", "machine", "estimate", "tables"))

console = Console(highlight=False)


def reproduce(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A table or figure; see --list.")] = None,
    seeds: Annotated[int, typer.Option(metavar="N", help="Seeds 0 to N − 1.", min=1)] = 1,
    scale: Annotated[
        str, typer.Option(metavar="SCALE", help="paper, reduced (marked as such everywhere) or smoke.")
    ] = "paper",
    jobs: Annotated[int, typer.Option(metavar="N", help="Cells at once, at most one per core.", min=1)] = 1,
    only: Annotated[
        str, typer.Option(metavar="TEXT", help="Run only cells with this in their name, such as dir-0.3.")
    ] = "",
    list_: Annotated[
        bool, typer.Option("--list", help="What there is, its state, and the time left.")
    ] = False,
    no_run: Annotated[bool, typer.Option("--no-run", help="Show what there is; run nothing.")] = False,
    verify: Annotated[
        str | None, typer.Option(metavar="CELL", help="Run a measured cell again, and compare every round.")
    ] = None,
    results: Annotated[Path, typer.Option(metavar="DIR", help="Where measured cells are kept.")] = Path(
        "results"
    ),
    work: Annotated[Path, typer.Option(metavar="DIR", help="Where cells are run.")] = Path("runs/reproduce"),
) -> None:
    """Make a table or figure of the paper: run the cells that are missing, show ours beside the paper's.

    It can be stopped at any time; the next time it goes on from there.
    """
    if scale not in ("paper", "reduced", "smoke"):
        raise UserError(f"--scale is paper, reduced or smoke, not '{scale}'.")
    size: tables.Scale = scale  # type: ignore[assignment]
    library = lib.Library(results)
    if list_:
        _list(library, seeds, size)
        return
    if name is None:
        raise UserError("Give the name of a table or figure; 'fedseal reproduce --list' shows them.")
    table = tables.find_table(name)
    if table.figure and seeds > 1:
        raise UserError(f"{name} is a figure, which shows seed 0: leave --seeds out.")
    if verify is not None:
        _verify(tables.find_cell(table, verify, size), library, work / f"verify-{name}-{verify}")
        return
    cells = [cell for cell in table.cells(seeds, size) if only in cell.name]
    if not cells:
        raise UserError(
            f"No cell of {name} has '{only}' in its name: there is {table.cells(1, size)[0].name}."
        )
    jobs = min(jobs, machine.cores())
    missing = [cell for cell in cells if library.find(cell) is None]
    if missing and not no_run:
        console.print(
            escape(f"{len(missing)} of {len(cells)} cells to run, {_left(missing)}, into {results}"),
            soft_wrap=True,
        )
    failed = 0 if no_run else _run(lib.run_cells(cells, library, work, jobs))
    if table.figure:
        path = lib.draw(table, library, size)
        where = str(path) if path else "not all of its cells have been run"
        console.print(escape(f"{table.title}: {where}"), soft_wrap=True)
    else:
        _show(table, library, seeds, size)
    if table.note:
        console.print(escape(table.note))
    if failed:
        raise UserError(f"{failed} of {len(cells)} cells failed, as said above; the others are kept.")


def _verify(cell: "tables.Cell", library: "lib.Library", work: Path) -> None:
    """Runs a cell in a folder of its own, which stays unless all is the same."""
    if any((work / "results").rglob("summary.json")):  # of a comparison that failed
        shutil.rmtree(work)
    again = lib.Library(work / "results")
    if _run(lib.run_again(cell, library, again, work)):
        raise UserError(f"{cell.name} could not be run again.")
    try:
        console.print(escape(lib.compared(cell, library, again)))
    except UserError as error:
        raise UserError(f"{error} The new one is in {work}.") from error
    shutil.rmtree(work)


def _run(states: "Iterator[lib.Progress]") -> int:
    """Shows progress, a line for each cell that has ended, and gives how many failed."""
    said: set[str] = set()
    failed = 0
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.TaskProgressColumn(),
        bars.TimeElapsedColumn(),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=console, transient=True, speed_estimate_period=3600) as bar:
        task = bar.add_task("starting", total=None)
        for state in states:
            now = ", ".join(f"{name}, round {rounds}" for name, rounds in state.running.items())
            bar.update(task, completed=state.done, total=state.total, description=escape(now))
            for name, text in {**state.ended, **state.failed}.items():
                if name not in said:
                    console.print(f"{escape(name)}: {escape(text)}", soft_wrap=True)
                    said.add(name)
            failed = len(state.failed)
    return failed


def _show(table: "tables.Table", library: "lib.Library", seeds: int, scale: "tables.Scale") -> None:
    measured = lib.measure(table, library, seeds, scale)
    mark = "" if scale == "paper" else f", {scale.upper()} SCALE: not comparable with the paper's numbers"
    console.print(
        _grid(
            f"{table.title}{mark}: accuracy in per cent, last ten rounds (paper)",
            {row: {c: m.text() for c, m in columns.items()} for row, columns in measured.items()},
        )
    )
    further = lib.readings(measured)
    if further:
        console.print(_grid("Margin over Server-SL (paper), gap recovered (paper)", further))
    if scale == "reduced":
        console.print(escape(f"Reduced: {table.reductions.replace('`', '')}."))


def _grid(title: str, rows: dict[str, dict[str, str]]) -> Grid:
    grid = Grid("", title=escape(title), title_justify="left")
    for column in next(iter(rows.values())):
        grid.add_column(escape(column), justify="right")
    for row, columns in rows.items():
        grid.add_row(escape(row), *map(escape, columns.values()))
    return grid


def _list(library: "lib.Library", seeds: int, scale: "tables.Scale") -> None:
    grid = Grid("name", "what", "cells run", "time left", box=None, header_style="bold")
    with console.status("timing the networks"):
        for table in tables.tables().values():
            cells = table.cells(seeds, scale)
            missing = [cell for cell in cells if library.find(cell) is None]
            left = _left(missing) if missing else ""
            grid.add_row(table.name, escape(table.title), f"{len(cells) - len(missing)}/{len(cells)}", left)
    console.print(grid)
    console.print(f"scale: {scale}; times are estimated for this machine, {machine.cores()} cores")


def _left(missing: "list[tables.Cell]") -> str:
    """How long cells may take on this machine, to read."""
    minutes = sum(estimate.seconds(cell.config) for cell in missing) / 60
    if minutes < 100:
        return f"≈ {minutes:.0f} min" if minutes >= 1 else "< 1 min"
    return f"≈ {minutes / 60:.0f} h" if minutes < 60 * 48 else f"≈ {minutes / 60 / 24:.0f} days"
