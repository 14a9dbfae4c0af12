"""The paper's tables and figures: what they consist of.

A table is a file in this folder: a preset, what each column and row changes in it, and the paper's numbers.
One combination of row, column and seed is a cell.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from typing import Any, Literal

from fedseal.config import Config, load_config
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
        """What it is called on the command line and under `results/`."""
        return f"{slug(self.row)}-{slug(self.column)}-seed{self.seed}"

    @property
    def changes(self) -> dict[str, Any]:
        """What it changes in the table's preset."""
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
    """A table or a figure of the paper."""

    name: str
    title: str
    preset: str
    rows: Mapping[str, dict[str, Any]]
    columns: Mapping[str, dict[str, Any]]
    reduced: dict[str, Any]  # what the reduced scale changes; what a row changes counts more
    reduced_rows: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # and these most
    paper: Mapping[str, list[float]] = field(default_factory=dict)  # per cent, in the columns' order
    figure: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def reductions(self) -> str:
        """What the reduced scale changes, to read."""
        rows = {"": self.reduced} | {f"{row}: ": changes for row, changes in self.reduced_rows.items()}
        texts = {k: ", ".join(f"`{key} = {value}`" for key, value in v.items()) for k, v in rows.items()}
        return "; ".join(row + text for row, text in texts.items()).replace("True", "true")

    def cells(self, seeds: int, scale: Scale) -> list[Cell]:
        """All of them, the rows one after another within each seed."""
        places = [(s, r, c) for s in range(seeds) for r in self.rows for c in self.columns]
        return [Cell(self, row, column, seed, scale) for seed, row, column in places]


def tables() -> dict[str, Table]:
    """All tables and figures by name."""
    folder = resources.files("fedseal.tables")
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    names = [file.name.removesuffix(".toml") for file in reversed(files)]
    return {n: Table(n, **tomllib.loads((folder / f"{n}.toml").read_text("utf-8"))) for n in names}


def find_table(name: str) -> Table:
    """A table by its name."""
    known = tables()
    if name not in known:
        raise UserError(f"There is no table or figure '{name}'; there are {', '.join(known)}.")
    return known[name]


def slug(text: str) -> str:
    """A text as part of a file's name."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower().replace("θ", "theta")).strip("-")


def find_cell(table: Table, name: str, scale: Scale) -> Cell:
    """A cell by its name, of any seed."""
    found = re.search(r"-seed(\d+)$", name)
    seed = int(found[1]) if found else 0
    cells = [Cell(table, row, column, seed, scale) for row in table.rows for column in table.columns]
    names = [cell.name for cell in cells]
    if name not in names:
        raise UserError(f"There is no cell '{name}' in {table.name}; there are {', '.join(names)}.")
    return cells[names.index(name)]


def folder_name(table: Table, scale: Scale) -> str:
    """Reduced results never lie among those of the paper's scale."""
    return table.name if scale == "paper" else f"{table.name}-{scale}"
