"""Draws the figures of the paper, and the figure of the README, from measured results."""

import json
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from fedseal.reproduce import privacy
from fedseal.reproduce.cells import Cell, Scale, Table, find_table, folder_name
from fedseal.reproduce.measure import measure
from fedseal.reproduce.store import ResultStore
from fedseal.storage.events_file import read_rounds_until
from fedseal.system.files import write_atomic
from fedseal.system.lazy import LazyModule

if TYPE_CHECKING:
    from fedseal.report import plots
else:
    plots = LazyModule("fedseal.report.plots")  # matplotlib takes a second to load

SEEDS = 3  # of the figure of the class mix
# Rows of table-fmnist-lenet in the README's figure: colour, and a remark for the two bounds.
SHOWN_METHODS = {
    "FedAvg-SL": ("#555555", "clients' labels known"),
    "FedSEAL": ("#d55e00", ""),
    "FedAvg-FixMatch": ("#0072b2", ""),
    "FedAvg-UDA": ("#009e73", ""),
    "SemiFL": ("#cc79a7", ""),
    "Server-SL": ("#555555", "server's labels only"),
}


def draw_figure(table: Table, store: ResultStore, scale: Scale) -> Path | None:
    """Draws a figure as PNG and SVG, with its data as JSON beside them; None if a run is missing."""
    series: dict[str, list[tuple[float, float]]] = {}
    for cell in table.cells(1, scale):
        found = store.find(cell)
        if found is None:
            return None
        events = read_rounds_until(found.folder, cell.config.rounds)
        if "bars" in table.figure:
            series[cell.row] = list(enumerate(events[-1][table.figure["bars"]]))
        for key, name in table.figure.get("curves", {}).items():
            series[name or cell.row] = [(event["t"], event[key]) for event in events if key in event]
    path = store.folder / folder_name(table, scale) / "figure.png"
    draw = plots.bar_chart if "bars" in table.figure else plots.line_chart
    title = table.title if scale == "paper" else f"{table.title} ({scale} scale)"
    draw(series, title, table.figure["y"], [path, path.with_suffix(".svg")])
    write_atomic(path.with_suffix(".json"), json.dumps(series, indent=1, ensure_ascii=False) + "\n")
    return path


def draw_methods(store: ResultStore, path: Path) -> Path | None:
    """Draws the accuracy of w^t by round for several methods, seed 0; None if a run is missing."""
    table = find_table("table-fmnist-lenet")
    series: dict[str, list[tuple[float, float]]] = {}
    for row in SHOWN_METHODS:
        cell = Cell(table, row, "Dir 0.3", 0, "paper")
        found = store.find(cell)
        if found is None:
            return None
        events = read_rounds_until(found.folder, cell.config.rounds)
        series[row] = [(event["t"], 100 * event["test_accuracy"]) for event in events]
    styles = {
        row: plots.LineStyle(colour, dashed=bool(remark), remark=remark)
        for row, (colour, remark) in SHOWN_METHODS.items()
    }
    title = "Test accuracy by round: Fashion-MNIST, 500 labelled images at the server, 10 clients"
    plots.labelled_line_chart(series, styles, title, path)
    return path


# Rows of table-fmnist-lenet-tuned in the figure of the class mix: which accuracy, label and colour.
SHOWN_MIXES = (
    ("Server-SL", "test", "server's labels only", "#bbbbbb"),
    ("Server-SL", "client", "the same + class mix", "#0072b2"),
    ("fedshift", "client", "fedshift + class mix", "#d55e00"),
)


def draw_mixes(store: ResultStore, path: Path) -> Path | None:
    """Draws what the clients' class mixes are worth, as means over seeds; None if a run is missing."""
    table = find_table("table-fmnist-lenet-tuned")
    series, colours = dict[str, list[float]](), []
    for row, images, label, colour in SHOWN_MIXES:
        places = measure(table, store, SEEDS, "paper", images=images)[row].values()
        if any(len(place.ours) < SEEDS for place in places):
            return None
        series[label] = [mean(place.ours.values()) for place in places]
        colours.append(colour)
    title = "Accuracy on clients' images: Fashion-MNIST, 500 labels at the server, mean of 3 seeds"
    plots.grouped_bars(series, colours, list(table.columns), title, path)
    return path


def draw_privacy(store: ResultStore, path: Path) -> Path | None:
    """Draws accuracy against ε, with the deviation over seeds; None if it was not measured."""
    measured = privacy.read(store.folder / "privacy.json")
    if not measured:
        return None
    series = {
        run: [
            (name, point.mean, point.deviation or 0.0)
            for name, point in points.items()
            if name != privacy.WITHOUT
        ]
        for run, points in measured.items()
    }
    baseline = next(iter(measured.values()))[privacy.WITHOUT].mean
    title = "Test accuracy with differential privacy: Fashion-MNIST, 100 labels, 12,000 images at clients"
    plots.trade_off_chart(series, (privacy.WITHOUT, baseline), title, f"ε at δ = {privacy.DELTA:g}", path)
    return path
