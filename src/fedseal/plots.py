"""Pictures, by matplotlib."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import matplotlib.ticker
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedseal.data.pool import Federation
from fedseal.files import write_atomic
from fedseal.run import LAST

matplotlib.rcParams["svg.hashsalt"] = "fedseal"  # the same picture is the same file


def class_mix(federation: Federation, path: Path) -> None:
    """A bar a client, a colour a class: how many images of each class every client has."""
    pool = federation.pool
    counts = np.array([np.bincount(pool.labels[r], minlength=len(pool.classes)) for r in federation.clients])
    figure, axes = plt.subplots(figsize=(8, 1.5 + 0.22 * min(len(counts), 100)), layout="constrained")
    start = np.zeros(len(counts))
    for number, name in enumerate(pool.classes):
        colour = plt.get_cmap("tab10" if len(pool.classes) <= 10 else "tab20")(number % 20)
        axes.barh(federation.names, counts[:, number], left=start, label=name, color=colour)
        start += counts[:, number]
    axes.invert_yaxis()
    axes.set_xlabel("images")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


Series = Mapping[str, Sequence[tuple[float, float]]]


def line_chart(series: Series, title: str, y: str, paths: Sequence[Path]) -> None:
    """A line for each series, by round; of a long one the mean of the last ten rounds is drawn over it."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    long = any(len(points) >= 5 * LAST for points in series.values())
    for number, (name, points) in enumerate(series.items()):
        rounds, values = [x for x, _ in points], [value for _, value in points]
        if long:
            axes.plot(rounds, values, color=f"C{number}", linewidth=0.8, alpha=0.35)
            values = [mean(values[max(end - LAST, 0) : end]) for end in range(1, len(values) + 1)]
        axes.plot(rounds, values, color=f"C{number}", label=name, linewidth=1.4)
    axes.set(title=title, xlabel=f"round (bold: mean of the last {LAST})" if long else "round", ylabel=y)
    axes.legend(frameon=False)
    _save(figure, axes, paths)


def bar_chart(series: Series, title: str, y: str, paths: Sequence[Path]) -> None:
    """A bar for each class, series side by side."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for number, (name, points) in enumerate(series.items()):
        width = 0.8 / len(series)
        places = [x + (number - (len(series) - 1) / 2) * width for x, _ in points]
        axes.bar(places, [value for _, value in points], width, label=name)
    axes.set(title=title, xlabel="class", ylabel=y)
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    _save(figure, axes, paths)


def _save(figure: Figure, axes: Axes, paths: Sequence[Path]) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    for path in paths:
        kind, file = path.suffix.removeprefix("."), io.BytesIO()
        figure.savefig(file, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
        write_atomic(path, file.getvalue())
    plt.close(figure)
