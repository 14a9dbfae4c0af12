"""The numbers of a table: accuracies, margins over Server-SL, and shares of the gap to FedAvg-SL."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import mean, stdev

from fedseal.reproduce.cells import Cell, Scale, Table
from fedseal.reproduce.store import OUTDATED_FOR_GREY, ResultStore


@dataclass(frozen=True)
class Measured:
    """A place in a table: our accuracy by seed and the paper's, in %."""

    ours: Mapping[int, float] = field(default_factory=dict)
    paper: float | None = None
    outdated: bool = False  # measured with a version that rounds differently

    def text(self) -> str:
        """Mean ± standard deviation over seeds, * if it is outdated, and the paper's number in brackets."""
        paper = "–" if self.paper is None else f"{self.paper:.2f}"
        return f"{self.ours_text()} ({paper})"

    def ours_text(self) -> str:
        """The same without the paper's number."""
        values = list(self.ours.values())
        if not values:
            return "not run"
        spread = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
        return f"{mean(values):.2f}{spread}{'*' * self.outdated}"


def measure(
    table: Table, store: ResultStore, seeds: int, scale: Scale, model: str = "", images: str = ""
) -> dict[str, dict[str, Measured]]:
    """A table by row and column; `model` as in `ResultStore.accuracy`, `images` as in `accuracy_on`."""
    result: dict[str, dict[str, Measured]] = {}
    for row in table.rows:
        for number, column in enumerate(table.columns):
            cells = [Cell(table, row, column, seed, scale) for seed in range(seeds)]
            values = {
                cell.seed: store.accuracy_on(cell, images) if images else store.accuracy(cell, model)
                for cell in cells
            }
            ours = {seed: value for seed, value in values.items() if value is not None}
            paper = table.paper[row][number] if row in table.paper else None
            outdated = any(store.is_missing(cell, renew=True) for cell in cells if cell.seed in ours)
            result.setdefault(row, {})[column] = Measured(ours, paper, outdated)
    return result


IMAGES = {
    "client": "client accuracy: clients' test images, with each client's own class mix",
    "test": "test accuracy: the same images, plain",
    "official": "official accuracy: the data set's own test images, plain",
    "validation": "validation accuracy",
}


def measure_images(
    table: Table, store: ResultStore, seeds: int, scale: Scale
) -> Iterator[tuple[str, dict[str, dict[str, str]]]]:
    """The accuracies of a table that is not in the paper: a title, and texts by row and column."""
    for images in table.accuracies:
        measured = on_common_seeds(measure(table, store, seeds, scale, images=images))
        texts = {row: {c: p.ours_text() for c, p in places.items()} for row, places in measured.items()}
        yield IMAGES[images], texts


def on_common_seeds(measured: Mapping[str, Mapping[str, Measured]]) -> dict[str, dict[str, Measured]]:
    """The same over the seeds that all measured places have, so that rows can be compared."""
    seeds = [set(place.ours) for places in measured.values() for place in places.values() if place.ours]
    common = set.intersection(*seeds) if seeds else set()
    return {
        row: {
            column: replace(place, ours={seed: value for seed, value in place.ours.items() if seed in common})
            for column, place in places.items()
        }
        for row, places in measured.items()
    }


def outdated_note(measured: Mapping[str, Mapping[str, Measured]]) -> str:
    """Explains the marks of outdated values; empty if there are none."""
    if not any(place.outdated for columns in measured.values() for place in columns.values()):
        return ""
    return f"* measured with fedseal {OUTDATED_FOR_GREY[-1]}, which rounds differently from this version"


def margin(method: Measured, low: Measured) -> str:
    """Points over Server-SL: the mean over the seeds that both have, and the paper's margin."""
    ours = [value - low.ours[seed] for seed, value in method.ours.items() if seed in low.ours]
    paper = "–" if method.paper is None or low.paper is None else f"{method.paper - low.paper:+.2f}"
    return f"{mean(ours):+.2f} ({paper})" if ours else f"– ({paper})"


def gap_recovered(method: Measured, low: Measured, high: Measured) -> str:
    """(method − Server-SL) / (FedAvg-SL − Server-SL): the share of the gain from labels at the clients that
    the method reaches without them.

    It is the mean over the seeds that all three have, with their number if the method has more seeds; then
    the paper's share.
    """
    common = [seed for seed in method.ours if seed in low.ours and seed in high.ours]
    gained, gap = (sum(one.ours[s] - low.ours[s] for s in common) for one in (method, high))
    paper = "–"
    if method.paper is not None and low.paper is not None and high.paper is not None:
        paper = f"{(method.paper - low.paper) / (high.paper - low.paper):.0%}"
    fewer = f" over {len(common)} of {len(method.ours)} seeds" if len(common) < len(method.ours) else ""
    return f"{gained / gap:.0%}{fewer} ({paper})" if gap > 0 else f"– ({paper})"


def margins_and_gaps(measured: Mapping[str, Mapping[str, Measured]]) -> dict[str, dict[str, str]]:
    """Margin over Server-SL and gap recovered, for all rows except the two bounds themselves.

    In a column where a method beats FedAvg-SL, FedAvg-SL is not an upper bound, and no gap is given.
    """
    low = measured.get("Server-SL")
    if low is None:
        return {}
    high = dict(measured.get("FedAvg-SL", dict.fromkeys(low, Measured())))
    methods = {row: places for row, places in measured.items() if row not in ("Server-SL", "FedAvg-SL")}
    for column, bound in high.items():
        for places in methods.values():
            if any(places[column].ours.get(seed, value) > value for seed, value in bound.ours.items()):
                high[column] = Measured({}, bound.paper)
    return {
        row: {
            column: f"{margin(place, low[column])}, {gap_recovered(place, low[column], high[column])}"
            for column, place in places.items()
        }
        for row, places in methods.items()
    }


def to_markdown(rows: list[list[str]]) -> str:
    """A table; the first row is its head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])
