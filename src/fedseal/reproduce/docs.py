"""Writes the tables and the figure in README and docs from the results under `results/`.

    python -m fedseal.reproduce.docs

A table is written between its two marks, <!-- results NAME --> and <!-- end -->. NAME is one of `WRITERS`, or
the name of a table. The figures are `docs/accuracy.svg`, `docs/class-mix.svg` and `docs/privacy.svg`.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import mean

from fedseal.errors import UserError
from fedseal.reproduce import evidence, privacy
from fedseal.reproduce.cells import Scale, Table, find_table, folder_name, load_tables
from fedseal.reproduce.figures import draw_methods, draw_mixes, draw_privacy
from fedseal.reproduce.measure import (
    Measured,
    margins_and_gaps,
    measure,
    measure_images,
    on_common_seeds,
    outdated_note,
    to_markdown,
)
from fedseal.reproduce.store import ResultStore
from fedseal.system.files import write_atomic

MARKED = re.compile(r"(<!-- results (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
PAGES = (
    "README.md",
    *(
        f"docs/{name}.md"
        for name in ("results", "evidence", "paper-map", "label-shift", "privacy", "benchmarks")
    ),
)
FIGURE, MIXES, PRIVACY = (Path(f"docs/{name}.svg") for name in ("accuracy", "class-mix", "privacy"))


BOUNDS = {"Server-SL": "the server's labels alone", "FedAvg-SL, adjusted": "all clients' labels are known"}


def write_tuned(store: ResultStore) -> str:
    """What to use: fedshift, the bounds, and the best other method, on Fashion-MNIST with LeNet.

    The best one has the highest client accuracy over all columns.
    """
    table = find_table("table-fmnist-lenet-tuned")
    kinds = ("client", "official", "test")
    client, official, test = (
        on_common_seeds(measure(table, store, store.seeds, "paper", images=kind)) for kind in kinds
    )
    means = {
        row: mean(mean(place.ours.values()) for place in places.values())
        for row, places in client.items()
        if all(place.ours for place in places.values()) and row not in (*BOUNDS, "FedAvg-SL", "fedshift")
    }
    if not means:
        return "Not run."
    best = max(means, key=lambda row: means[row])
    low, high = BOUNDS
    titles = {low: BOUNDS[low], best: "the best other method on average", "fedshift": "", high: BOUNDS[high]}
    first, *columns = client[best]
    head = ["", f"client accuracy, {first}", *columns, "official, Dir 0.3", "plain, Dir 0.3"]
    rows = [
        [
            f"{row}: {title}" if title else f"**{row}**",
            *(place.ours_text() for place in client[row].values()),
            *(found[row]["Dir 0.3"].ours_text() for found in (official, test)),
        ]
        for row, title in titles.items()
    ]
    return to_markdown([head, *rows])


PAPERS_METHODS = ("Server-SL", "FedAvg-FixMatch", "FedAvg-UDA", "FedSEAL", "FedAvg-SL")


def write_methods(store: ResultStore) -> str:
    """The accuracies of the paper's methods on Fashion-MNIST with LeNet."""
    table = find_table("table-fmnist-lenet")
    measured = measure(table, store, store.seeds, "paper", "model")
    measured = {row: measured[row] for row in PAPERS_METHODS}
    blocks = write_blocks(table, measured, "accuracy of wᵗ, %")
    return "\n\n".join([next(blocks), *([next(blocks)] if outdated_note(measured) else [])])


def write_state(store: ResultStore) -> str:
    """Which tables and figures have been run, at which scale and with how many seeds."""
    rows = [["name", "what", "cells run, seed 0", "seeds 1 and 2", "reduced scale, seed 0"]]
    scales: tuple[tuple[Scale, tuple[int, ...]], ...] = (
        ("paper", (0,)),
        ("paper", (1, 2)),
        ("reduced", (0,)),
    )
    for table in load_tables().values():
        counts = []
        for scale, seeds in scales:
            cells = [cell for cell in table.cells(3, scale) if cell.seed in seeds]
            done = sum(store.find(cell) is not None for cell in cells) if has_runs(table, scale, store) else 0
            counts.append(f"{done} of {len(cells)}" if done else "–")
        rows.append([f"`{table.name}`", table.title, *counts])
    return to_markdown(rows)


def has_runs(table: Table, scale: Scale, store: ResultStore) -> bool:
    """False for a reduced table without runs of its own, even if runs of other tables fit its cells."""
    return scale == "paper" or (store.folder / folder_name(table, scale)).is_dir()


def write_few_images(store: ResultStore) -> str:
    """Client accuracy by the number of images from which a client estimates its class mix."""
    path = store.folder / "few-images.json"
    if not path.exists():
        return "Not run."
    rows = json.loads(path.read_text("utf-8"))["mean"]
    names = list(next(iter(rows.values())))
    head = ["", *(name if name == "plain" else f"mix from {name} images" for name in names)]
    return to_markdown(
        [head, *([place, *(f"{row[name]:.1f}" for name in names)] for place, row in rows.items())]
    )


def write_privacy(store: ResultStore, *, clips: bool = True) -> str:
    """Accuracy by ε with differential privacy, and the clip that was chosen for it."""
    measured = privacy.read(store.folder / "privacy.json")
    if not measured:
        return "Not run."
    first = next(iter(measured.values()))
    rows = [["test accuracy in %", *(name if name == privacy.WITHOUT else f"ε = {name}" for name in first)]]
    for run, points in measured.items():
        rows.append([run, *(point.text() for point in points.values())])
        if clips:
            rows.append(["clip", *(point.clip or "–" for point in points.values())])
    return to_markdown(rows)


def write_table(table: Table, store: ResultStore) -> str:
    """A table of the paper with our numbers, then margins and gaps; for both models and every scale run."""
    parts = []
    scales: tuple[Scale, ...] = ("paper", "reduced")
    for scale in scales:
        measured = measure(table, store, store.seeds, scale, "model") if has_runs(table, scale, store) else {}
        if not any(place.ours for columns in measured.values() for place in columns.values()):
            continue
        if table.accuracies:
            parts += write_images(table, store, scale)
            continue
        if scale == "reduced":
            parts.append(f"**Reduced scale** ({table.reductions}): not comparable with the paper's numbers.")
        parts += write_blocks(table, measured, "accuracy of wᵗ, %")
        parts += write_blocks(table, measure(table, store, store.seeds, scale, "average"), "accuracy of w̄, %")
    return "\n\n".join(parts) or "Not run."


def write_images(table: Table, store: ResultStore, scale: Scale = "paper") -> list[str]:
    """The accuracies that a table names, one after the other."""
    return [
        to_markdown([[title, *table.columns], *([row, *places.values()] for row, places in texts.items())])
        for title, texts in measure_images(table, store, store.seeds, scale)
    ]


def write_blocks(table: Table, measured: Mapping[str, Mapping[str, Measured]], what: str) -> Iterator[str]:
    """Accuracies, then margins and gaps."""
    rows = [[row, *(place.text() for place in columns.values())] for row, columns in measured.items()]
    yield to_markdown([[f"{what} (paper)", *table.columns], *rows])
    if note := outdated_note(measured):
        yield "\\" + note + "."
    if further := margins_and_gaps(measured):
        head = [f"{what}: margin (paper), gap recovered (paper)", *table.columns]
        yield to_markdown([head, *([row, *columns.values()] for row, columns in further.items())])


WRITERS: dict[str, Callable[[ResultStore], str]] = {
    "tuned": write_tuned,
    "methods": write_methods,
    "state": write_state,
    "few-images": write_few_images,
    "privacy": write_privacy,
    "privacy-accuracy": partial(write_privacy, clips=False),
    "seeds": evidence.write_seeds,
    "differences": evidence.write_differences,
    "official": evidence.write_official,
    "label-sets": evidence.write_label_sets,
    "readings": evidence.write_readings,
}


def refresh(text: str, store: ResultStore) -> str:
    """A page with new content between its marks."""

    def replace(match: "re.Match[str]") -> str:
        name = match[2]
        content = WRITERS[name](store) if name in WRITERS else write_table(find_table(name), store)
        return f"{match[1]}{content}\n{match[3]}"

    return MARKED.sub(replace, text)


def main() -> None:
    """Writes the tables in all pages, and the figures."""
    store = ResultStore(Path("results"))
    for page in map(Path, PAGES):
        write_atomic(page, refresh(page.read_text("utf-8"), store))
    draw_methods(store, FIGURE)
    draw_mixes(store, MIXES)
    draw_privacy(store, PRIVACY)


if __name__ == "__main__":
    try:
        main()
    except (UserError, OSError) as error:
        sys.exit(f"error: {error}")
