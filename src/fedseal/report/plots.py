"""Figures as PNG and SVG files, drawn with matplotlib."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from fedseal.data.pool import Federation
from fedseal.rounds import LAST_ROUNDS
from fedseal.system.files import write_atomic

Series = Mapping[str, Sequence[tuple[float, float]]]


def class_mix(federation: Federation, path: Path) -> None:
    """A bar per client: the number of its images of each class."""
    pool = federation.pool
    counts = np.array([np.bincount(pool.labels[r], minlength=len(pool.classes)) for r in federation.clients])
    figure = Figure(figsize=(8, 1.5 + 0.22 * min(len(counts), 100)), layout="constrained")
    axes = figure.subplots()
    colours = matplotlib.colormaps["tab10" if len(pool.classes) <= 10 else "tab20"]
    start = np.zeros(len(counts))
    for m, name in enumerate(pool.classes):
        axes.barh(federation.names, counts[:, m], left=start, label=name, color=colours(m % 20))
        start += counts[:, m]
    axes.invert_yaxis()
    axes.set_xlabel("images")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=150)


def line_chart(series: Series, title: str, y: str, paths: Sequence[Path]) -> None:
    """A line by round for each series; if one is long, bold lines show the mean of the last ten rounds."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    long = any(len(points) >= 5 * LAST_ROUNDS for points in series.values())
    for number, (name, points) in enumerate(series.items()):
        rounds, values = [x for x, _ in points], [value for _, value in points]
        if long:
            axes.plot(rounds, values, color=f"C{number}", linewidth=0.8, alpha=0.35)
            values = running_mean(values)
        axes.plot(rounds, values, color=f"C{number}", label=name, linewidth=1.4)
    axes.set(
        title=title, xlabel=f"round (bold: mean of the last {LAST_ROUNDS})" if long else "round", ylabel=y
    )
    axes.legend(frameon=False)
    _save(figure, axes, paths)


@dataclass(frozen=True)
class LineStyle:
    """How a line looks, and a remark below its label."""

    colour: str
    dashed: bool = False
    remark: str = ""


def labelled_line_chart(series: Series, styles: Mapping[str, LineStyle], title: str, path: Path) -> None:
    """A line by round for each series of percentages, labelled at its end with its name and last value.

    Thin lines show single rounds, bold lines the mean of the last ten rounds.
    """
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    ends = {}
    for name, points in series.items():
        colour, dashes = styles[name].colour, "--" if styles[name].dashed else "-"
        rounds, values = [x for x, _ in points], [value for _, value in points]
        means = running_mean(values)
        axes.plot(rounds, values, color=colour, linewidth=0.6, alpha=0.2)
        axes.plot(rounds, means, color=colour, linewidth=1.8, linestyle=dashes)
        ends[name] = means[-1]
    last = max(x for points in series.values() for x, _ in points)
    low, high = min(ends.values()), max(ends.values())
    bottom, top = low - 0.75 * (high - low), high + 0.1 * (high - low)  # early rounds are cut off
    axes.set(
        xlim=(1, last), ylim=(bottom, top), xlabel=f"round (bold: mean of the last {LAST_ROUNDS} rounds)"
    )
    axes.yaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(PercentFormatter(decimals=0))
    axes.set_title(title, loc="left", fontsize=11)
    for name, y in spread(ends, (top - bottom) / 12).items():
        colour, remark = styles[name].colour, styles[name].remark
        axes.annotate(
            f"{name} {ends[name]:.1f}%" + (f"\n{remark}" if remark else ""),
            xy=(last, ends[name]),
            xytext=(last * 1.04, y),
            color=colour,
            verticalalignment="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "relpos": (0, 0.5), "shrinkA": 2, "shrinkB": 0},
        )
    _save(figure, axes, [path])


def spread(values: Mapping[str, float], distance: float) -> dict[str, float]:
    """The values moved apart until neighbours keep this distance; their order stays."""
    names = sorted(values, key=lambda name: values[name])
    places = [values[name] for name in names]
    for _ in range(100):
        for i in range(1, len(places)):
            push = max(distance - (places[i] - places[i - 1]), 0) / 2
            places[i - 1] -= push
            places[i] += push
    return dict(zip(names, places, strict=True))


def bar_chart(series: Series, title: str, y: str, paths: Sequence[Path]) -> None:
    """A bar per class, with the series side by side."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(series)
    for number, (name, points) in enumerate(series.items()):
        places = [x + (number - (len(series) - 1) / 2) * width for x, _ in points]
        axes.bar(places, [value for _, value in points], width, label=name)
    axes.set(title=title, xlabel="class", ylabel=y)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _save(figure, axes, paths)


def trade_off_chart(
    series: Mapping[str, Sequence[tuple[str, float, float]]],
    baseline: tuple[str, float],
    title: str,
    x: str,
    path: Path,
) -> None:
    """A line for each series of percentages: place on the x axis, value, deviation; and a dashed baseline.

    The right half is the same, enlarged around the baseline.
    """
    figure = Figure(figsize=(9, 4), layout="constrained")
    places = list(dict.fromkeys(place for points in series.values() for place, _, _ in points))
    halves = figure.subplots(1, 2)
    for axes in halves:
        for number, (name, points) in enumerate(series.items()):
            numbers, values, deviations = zip(*((places.index(p), v, d) for p, v, d in points), strict=True)
            axes.errorbar(numbers, values, deviations, label=name, color=f"C{number}", marker="o", capsize=3)
        axes.axhline(baseline[1], color="black", linestyle="--", linewidth=1, label=baseline[0])
        axes.set(xticks=range(len(places)), xticklabels=places, xlabel=x)
        axes.yaxis.set_major_formatter(PercentFormatter(decimals=0))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
    top = max(value + deviation for points in series.values() for _, value, deviation in points)
    halves[1].set_ylim(2 * baseline[1] - top - 1, top + 1)
    figure.suptitle(title, fontsize=11)
    figure.legend(*halves[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    _save(figure, halves[0], [path])


def grouped_bars(
    series: Mapping[str, Sequence[float]],
    colours: Sequence[str],
    places: Sequence[str],
    title: str,
    path: Path,
) -> None:
    """Percentages side by side at each place, with the value above each bar; the axis is cut off below."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    width, values = 0.8 / len(series), [value for row in series.values() for value in row]
    for number, (name, row) in enumerate(series.items()):
        x = [i + (number - (len(series) - 1) / 2) * width for i in range(len(places))]
        bars = axes.bar(x, row, 0.92 * width, label=name, color=colours[number])
        axes.bar_label(bars, fmt="%.1f", fontsize=8)
    axes.set(ylim=(min(values) - 5, max(values) + 1.5), xticks=range(len(places)), xticklabels=places)
    axes.yaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10]))
    axes.set_title(title, loc="left", fontsize=11)
    axes.yaxis.set_major_formatter(PercentFormatter(decimals=0))
    figure.legend(loc="outside lower center", ncols=len(series), frameon=False)
    _save(figure, axes, [path])


def running_mean(values: Sequence[float]) -> list[float]:
    """At each round the mean of the last ten rounds, or of all rounds so far."""
    return [mean(values[max(end - LAST_ROUNDS, 0) : end]) for end in range(1, len(values) + 1)]


def _save(figure: Figure, axes: Axes, paths: Sequence[Path]) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    for path in paths:
        kind, file = path.suffix.removeprefix("."), io.BytesIO()
        # A fixed salt and no date: the same figure is the same file.
        with matplotlib.rc_context({"svg.hashsalt": "fedseal"}):
            figure.savefig(file, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
        write_atomic(path, file.getvalue())
