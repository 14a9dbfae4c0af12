"""The tables and figures of the paper, further tables, and the runs of which they consist.

A table is a file in `tables/`: a preset, the settings that each column and row changes, and the paper's
numbers. A combination of row, column and seed is a cell.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from typing import Any, Literal

from fedseal.config.config import Config
from fedseal.config.load import load_config
from fedseal.errors import UserError

Scale = Literal["paper", "reduced", "smoke"]
SMOKE = {
    "rounds": 2,
    "cohort": 0,
    "data.clients": 3,
    "data.images_per_client": 40,
    "data.labels": 50,
    "data.validation": 20,
    "data.test_per_client": 0,
    "data.held_out_test": 60,
    "model.width": 4,
    "server.epochs": 1,
    "client.epochs": 1,
}


@dataclass(frozen=True)
class Cell:
    """One run of a table."""

    table: "Table"
    row: str
    column: str
    seed: int
    scale: Scale

    @property
    def name(self) -> str:
        """Its name on the command line and under `results/`."""
        return f"{slug(self.row)}-{slug(self.column)}-seed{self.seed}"

    @property
    def changes(self) -> dict[str, Any]:
        """The settings that differ from the table's preset."""
        table = self.table
        column, row = table.columns[self.column], table.rows[self.row]
        match self.scale:
            case "paper":
                changes = column | row
            case "reduced":
                changes = column | table.reduced | row | table.reduced_rows.get(self.row, {})
            case "smoke":
                changes = column | {"fedseal.bootstrap_epochs": 1} | row | SMOKE
        return changes | {"seed": self.seed}

    @cached_property
    def config(self) -> Config:
        return load_config(self.table.preset, self.changes)


@dataclass(frozen=True)
class Table:
    """A table or a figure, of the paper or beyond it."""

    name: str
    title: str
    preset: str
    rows: Mapping[str, dict[str, Any]]
    columns: Mapping[str, dict[str, Any]]
    reduced: dict[str, Any]  # changes at the reduced scale; those of a row take precedence
    reduced_rows: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # and these over both
    paper: Mapping[str, list[float]] = field(default_factory=dict)  # in %, in the order of the columns
    figure: Mapping[str, Any] = field(default_factory=dict)
    accuracies: tuple[str, ...] = ()  # of a table that is not in the paper: keys of measure.IMAGES
    note: str = ""

    @property
    def reductions(self) -> str:
        """The changes at the reduced scale as Markdown."""
        rows = {"": self.reduced} | {f"{row}: ": changes for row, changes in self.reduced_rows.items()}
        texts = {k: ", ".join(f"`{key} = {value}`" for key, value in v.items()) for k, v in rows.items()}
        return "; ".join(row + text for row, text in texts.items()).replace("True", "true")

    def cells(self, seeds: int, scale: Scale) -> list[Cell]:
        """All cells of seeds 0 to seeds − 1: seed by seed, and row by row within a seed."""
        places = [(s, r, c) for s in range(seeds) for r in self.rows for c in self.columns]
        return [Cell(self, row, column, seed, scale) for seed, row, column in places]


def load_tables() -> dict[str, Table]:
    """All tables and figures by name; tables come first."""
    folder = resources.files("fedseal.reproduce") / "tables"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    names = [file.name.removesuffix(".toml") for file in reversed(files)]
    return {n: Table(n, **tomllib.loads((folder / f"{n}.toml").read_text("utf-8"))) for n in names}


def find_table(name: str) -> Table:
    """A table by its name."""
    known = load_tables()
    if name not in known:
        raise UserError(f"There is no table or figure '{name}': choose from {', '.join(known)}.")
    return known[name]


def find_cell(table: Table, name: str, scale: Scale) -> Cell:
    """A cell of any seed by its name."""
    found = re.search(r"-seed(\d+)$", name)
    seed = int(found[1]) if found else 0
    cells = {
        cell.name: cell
        for cell in (Cell(table, r, c, seed, scale) for r in table.rows for c in table.columns)
    }
    if name not in cells:
        raise UserError(f"{table.name} has no cell '{name}': choose from {', '.join(cells)}.")
    return cells[name]


def slug(text: str) -> str:
    """A text as part of a file name."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower().replace("θ", "theta")).strip("-")


def folder_name(table: Table, scale: Scale) -> str:
    """The folder of a table's results; each scale has its own."""
    return table.name if scale == "paper" else f"{table.name}-{scale}"
