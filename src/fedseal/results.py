"""The tables in README and docs, from the measured runs that lie under `results/`.

    python -m fedseal.results README.md docs/results.md docs/paper-map.md

writes each table between its two marks, <!-- results NAME --> and <!-- end -->: `seeds`, `methods`, `state`,
`evidence`, or the name of a table of the paper.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from fedseal.config import load_config
from fedseal.errors import UserError
from fedseal.files import write_atomic
from fedseal.observers import read_events
from fedseal.reproduce import Library, Measured, measure, readings
from fedseal.run import LAST
from fedseal.tables import Cell, Scale, Table, find_table, folder_name, tables

MARKED = re.compile(r"(<!-- results (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
MOST = 20  # seeds that are looked for


def seeds(library: Library) -> str:
    """FedSEAL's two models beside Server-SL for every seed of Fashion-MNIST, LeNet, Dirichlet 0.3.

    Both wᵗ and w̄ are always shown: which one is judged is a choice, and a reader should see what hangs on it.
    """
    table, column = find_table("table-fmnist-lenet"), "Dir 0.3"
    rows: list[tuple[str, list[float]]] = []
    for seed in range(MOST):
        method, alone = (
            library.find(Cell(table, r, column, seed, "paper")) for r in ("FedSEAL", "Server-SL")
        )
        if method is None or alone is None:
            continue
        both = [method.summary[key] for key in ("test_accuracy", "average_accuracy")]
        checked = [method.summary[key] for key in ("validation_accuracy", "average_validation_accuracy")]
        numbers = [alone.accuracy_after(method.summary["rounds"]), alone.accuracy]
        numbers += [float(measured["mean_last_10"]) for measured in (*both, *checked)]
        rows.append((str(seed), numbers))
        rounds, most = method.summary["rounds"], alone.summary["rounds"]
    if not rows:
        return "Not run."
    rows.append(("**mean**", [mean(column) for column in zip(*(row for _, row in rows), strict=True)]))
    head = ["seed", f"Server-SL, {rounds} rounds", f"Server-SL, {most} rounds"]
    head += ["FedSEAL wᵗ (validation)", "FedSEAL w̄ (validation)"]
    head += [f"margin over {rounds} rounds, wᵗ / w̄", f"margin over {most} rounds, wᵗ / w̄"]
    lines = []
    for label, (short, long, model, average, checked_model, checked_average) in rows:
        cells = [label, f"{short:.2%}", f"{long:.2%}"]
        cells += [f"{model:.2%} ({checked_model:.1%})", f"{average:.2%} ({checked_average:.1%})"]
        cells += [f"{100 * (model - base):+.2f} / {100 * (average - base):+.2f}" for base in (short, long)]
        lines.append(cells)
    below, above = (table.paper[row][list(table.columns).index(column)] for row in ("Server-SL", "FedSEAL"))
    lines.append(["paper", f"{below:.2f}%", "–", f"{above:.2f}%", "–", f"{above - below:+.2f}", "–"])
    return markdown([head, *lines])


def methods(library: Library) -> str:
    """All methods on Fashion-MNIST with LeNet: accuracies alone."""
    table = find_table("table-fmnist-lenet")
    return next(blocks(table, measure(table, library, MOST, "paper", "model"), "accuracy of wᵗ, %"))


def state(library: Library) -> str:
    """What of the paper has been run here, at which scale."""
    rows = [["name", "what", "cells run at the paper's scale", "at reduced scale"]]
    for table in tables().values():
        counts = []
        for scale in ("paper", "reduced"):
            cells = table.cells(1, scale)
            done = (
                sum(library.find(cell) is not None for cell in cells) if begun(table, scale, library) else 0
            )
            counts.append(f"{done} of {len(cells)}" if done else "not run")
        rows.append([f"`{table.name}`", table.title, *counts])
    return markdown(rows)


def begun(table: Table, scale: Scale, library: Library) -> bool:
    """False if a reduced table has no run of its own, even where some of the paper's scale would serve."""
    return scale == "paper" or (library.folder / folder_name(table, scale)).is_dir()


def evidence(library: Library) -> str:
    """Other readings (`results/readings`) beside the defaults, after as many rounds of the same seed."""
    table = find_table("table-fmnist-lenet")
    head = [
        "reading",
        "seed",
        "rounds",
        "validation, wᵗ / w̄",
        "difference",
        "test, wᵗ / w̄",
        "difference",
        "D⁺ (right)",
    ]
    kinds = (
        ("validation_accuracy", "average_validation_accuracy"),
        ("test_accuracy", "average_accuracy"),
    )
    rows = [head]
    for path in sorted((library.folder / "readings").glob("*/config.toml")):
        config = load_config(path)
        cell = Cell(table, "FedSEAL", "Dir 0.3", config.seed, "paper")
        usual = library.find(cell)
        if usual is None:
            continue
        ours, theirs = (last_rounds(folder, config.rounds) for folder in (path.parent, usual.folder))
        keys = changed(cell.config.to_dict(), config.to_dict())
        pairs = []
        for kind in kinds:
            pairs.append(" / ".join(f"{ours[key]:.1%}" for key in kind))
            pairs.append(" / ".join(f"{100 * (ours[key] - theirs[key]):+.1f}" for key in kind))
        size = f"{ours['positive']:,.0f} ({ours['positive_correct']:.1%})" if ours["positive"] else "0"
        rows.append([keys, str(config.seed), str(config.rounds), *pairs, size])
    return markdown(rows)


def last_rounds(folder: Path, t: int) -> dict[str, float]:
    """The mean of every number over the ten rounds up to round t."""
    events = [
        e for e in read_events(folder / "events.jsonl") if e["event"] == "round" and t - LAST < e["t"] <= t
    ]
    numbers = [k for k, v in events[-1].items() if isinstance(v, int | float)]
    return {key: mean(event.get(key, 0) for event in events) for key in numbers}


def changed(usual: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The keys in which a configuration differs, rounds and engine left out."""
    found = []
    for name, value in other.items():
        if name in ("engine", "rounds"):
            continue
        if isinstance(value, dict):
            section = usual.get(name, {})
            found += [f"`{name}.{k} = {v!r}`" for k, v in value.items() if section.get(k) != v]
        elif usual.get(name) != value:
            found.append(f"`{name} = {value!r}`")
    return ", ".join(found).replace("True", "true").replace("False", "false") or "the defaults"


def comparison(table: Table, library: Library) -> str:
    """A table of the paper: ours (the paper's), below it margins and gaps; for both models of a round, and at
    each scale that was run."""
    parts = []
    scales: tuple[Scale, ...] = ("paper", "reduced")
    for scale in scales:
        measured = measure(table, library, MOST, scale, "model") if begun(table, scale, library) else {}
        if not any(place.ours for columns in measured.values() for place in columns.values()):
            continue
        if scale == "reduced":
            parts.append(f"**Reduced scale** ({table.reductions}): not comparable with the paper's numbers.")
        parts += blocks(table, measured, "accuracy of wᵗ, %")
        parts += blocks(table, measure(table, library, MOST, scale, "average"), "accuracy of w̄, %")
    return "\n\n".join(parts) or "Not run."


def blocks(table: Table, measured: Mapping[str, Mapping[str, Measured]], what: str) -> Iterator[str]:
    """Accuracies, then margins and gaps."""
    rows = [[row, *(place.text() for place in columns.values())] for row, columns in measured.items()]
    yield markdown([[f"{what} (paper)", *table.columns], *rows])
    if further := readings(measured):
        head = [f"{what}: margin (paper), gap recovered (paper)", *table.columns]
        yield markdown([head, *([row, *columns.values()] for row, columns in further.items())])


def markdown(rows: list[list[str]]) -> str:
    """A table; the first row is its head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def refresh(text: str, library: Library) -> str:
    """A page with what stands between its marks made anew."""

    def make(match: "re.Match[str]") -> str:
        name = match[2]
        makers = {"seeds": seeds, "methods": methods, "state": state, "evidence": evidence}
        content = makers[name](library) if name in makers else comparison(find_table(name), library)
        return f"{match[1]}{content}\n{match[3]}"

    return MARKED.sub(make, text)


if __name__ == "__main__":
    try:
        kept = Library(Path("results"))
        for page in map(Path, sys.argv[1:]):
            write_atomic(page, refresh(page.read_text("utf-8"), kept))
    except (UserError, OSError) as error:
        sys.exit(f"error: {error}")
