"""The tables of docs/evidence.md and docs/paper-map.md: runs compared with each other and with the paper."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from fedseal.config.load import load_config
from fedseal.reproduce.cells import Cell, find_table
from fedseal.reproduce.measure import Measured, measure, to_markdown
from fedseal.reproduce.store import ResultStore
from fedseal.rounds import LAST_ROUNDS
from fedseal.storage.accuracies import PREFIXES, accuracy_name
from fedseal.storage.events_file import read_rounds
from fedseal.storage.run_folder import Result

COMPARED = {"table-fmnist-lenet": "Fashion-MNIST", "table-svhn-lenet": "SVHN"}
# FedSEAL on Fashion-MNIST with LeNet at Dirichlet 0.3: what is special, table, row, column, seed.
FEDSEAL_RUNS = (
    *((f"seed {seed}", "table-fmnist-lenet", "FedSEAL", "Dir 0.3", seed) for seed in range(3)),
    ("1,000 labels", "table-fmnist-labels", "FedSEAL", "1,000 labels", 0),
    ("without the ensemble", "figure-self-ensemble", "without", "Dir 0.3", 0),
    ("random start", "figure-bootstrapping", "random start", "Dir 0.3", 0),
    *((f"θ = {theta}", "figure-theta", f"θ = {theta}", "Dir 0.3", 0) for theta in (0.1, 0.3, 0.5)),
)


def write_seeds(store: ResultStore) -> str:
    """Both models of FedSEAL, their validation accuracy, and Server-SL beside them, for every seed.

    Both models are shown, because the choice between them affects the conclusions.
    """
    seeds = [*measured_seeds(store)]
    if not seeds:
        return "Not run."
    rounds = seeds[0][1].summary["rounds"]
    more = min(alone.summary["rounds"] for _, _, alone in seeds)
    rows: list[tuple[str, list[float]]] = []
    for label, method, alone in seeds:
        names = [accuracy_name(model, images) for images in ("test", "validation") for model in PREFIXES]
        numbers = [alone.accuracy_after(t) for t in (rounds, more)]
        numbers += [float(method.summary[name]["mean_last_10"]) for name in names]
        rows.append((label, numbers))
    rows.append(("**mean**", [mean(column) for column in zip(*(row for _, row in rows), strict=True)]))
    head = ["seed", f"Server-SL, {rounds} rounds", f"Server-SL, {more} rounds"]
    head += ["FedSEAL wᵗ (validation)", "FedSEAL w̄ (validation)"]
    head += [f"margin over {rounds} rounds, wᵗ / w̄", f"margin over {more} rounds, wᵗ / w̄"]
    lines = []
    for label, (short, long, model, average, checked_model, checked_average) in rows:
        cells = [label, f"{short:.2%}", f"{long:.2%}"]
        cells += [f"{model:.2%} ({checked_model:.1%})", f"{average:.2%} ({checked_average:.1%})"]
        cells += [f"{100 * (model - base):+.2f} / {100 * (average - base):+.2f}" for base in (short, long)]
        lines.append(cells)
    below, above = paper_accuracies()
    lines.append(["paper", f"{below:.2f}%", "–", f"{above:.2f}%", "–", f"{above - below:+.2f}", "–"])
    return to_markdown([head, *lines])


def measured_seeds(store: ResultStore) -> Iterator[tuple[str, Result, Result]]:
    """Every measured seed of Fashion-MNIST, LeNet, Dirichlet 0.3, with FedSEAL and Server-SL."""
    table = find_table("table-fmnist-lenet")
    for seed in range(store.seeds):
        method, alone = (
            store.find(Cell(table, row, "Dir 0.3", seed, "paper")) for row in ("FedSEAL", "Server-SL")
        )
        if method is not None and alone is not None:
            yield str(seed), method, alone


def paper_accuracies() -> tuple[float, float]:
    """The paper's Server-SL and FedSEAL in the same setting."""
    table = find_table("table-fmnist-lenet")
    number = list(table.columns).index("Dir 0.3")
    return table.paper["Server-SL"][number], table.paper["FedSEAL"][number]


def write_differences(store: ResultStore) -> str:
    """Our accuracies of FixMatch and UDA, and FedSEAL's margin over Server-SL, minus the paper's."""
    names = ("FixMatch", "UDA", "margin of FedSEAL")
    rows = [["data, column", *(f"{name} {model}" for name in names for model in ("wᵗ", "w̄"))]]
    for name, data in COMPARED.items():
        table = find_table(name)
        both = [measure(table, store, store.seeds, "paper", model) for model in PREFIXES]
        for column in table.columns:
            methods = ("FedAvg-FixMatch", "FedAvg-UDA")
            numbers = [difference(measured[row][column]) for row in methods for measured in both]
            numbers += [difference(found["FedSEAL"][column], found["Server-SL"][column]) for found in both]
            rows.append([f"{data}, {column}", *numbers])
    return to_markdown(rows)


def difference(ours: Measured, base: Measured | None = None) -> str:
    """Our accuracy minus the paper's, or our margin over `base` minus the paper's."""
    low = base or Measured(dict.fromkeys(ours.ours, 0.0), 0.0)
    values = [value - low.ours[seed] for seed, value in ours.ours.items() if seed in low.ours]
    if not values or ours.paper is None or low.paper is None:
        return "–"
    return f"{mean(values) - (ours.paper - low.paper):+.2f}"


def write_official(store: ResultStore) -> str:
    """Accuracies of w^t on Fashion-MNIST's official test images, seed 0."""
    table = find_table("table-fmnist-lenet")
    measured = measure(table, store, 1, "paper", images="official")
    rows = [[row, *(place.ours_text() for place in places.values())] for row, places in measured.items()]
    return to_markdown([["official test images, wᵗ, seed 0", *table.columns], *rows])


def write_label_sets(store: ResultStore) -> str:
    """How many images FedSEAL labels, how many labels are correct, and what it learns from them."""
    rows = [["run", "rounds", "wᵗ", "w̄", f"D⁺, first {LAST_ROUNDS} rounds", f"last {LAST_ROUNDS}"]]
    rows[0] += ["correct labels in D⁺", "in D⁻"]
    for title, name, row, column, seed in FEDSEAL_RUNS:
        cell = Cell(find_table(name), row, column, seed, "paper")
        run, rounds = store.find(cell), cell.config.rounds
        if run is None:
            continue
        first, last = (mean_of_last_rounds(run.folder, t) for t in (LAST_ROUNDS, rounds))
        accuracies = [f"{last[accuracy_name(model, 'test')]:.1%}" for model in PREFIXES]
        sizes = [f"{found['positive']:,.0f}" for found in (first, last)]
        shares = [f"{last[name]:.1%}" for name in ("positive_correct", "negative_correct")]
        rows.append([title, str(rounds), *accuracies, *sizes, *shares])
    return to_markdown(rows)


def write_readings(store: ResultStore) -> str:
    """Readings (`results/readings`) beside the defaults, after the same rounds of the same seed."""
    folder, table = store.folder / "readings", find_table("table-fmnist-lenet")
    rows = [["reading", "seed", "rounds"]]
    rows[0] += ["validation, wᵗ / w̄", "difference", "test, wᵗ / w̄", "difference", "D⁺ (right)"]
    for path in sorted(folder.glob("*/config.toml")):
        config = load_config(path)
        cell = Cell(table, "FedSEAL", "Dir 0.3", config.seed, "paper")
        default = folder / f"defaults-seed{config.seed}"
        ours, theirs = (mean_of_last_rounds(f, config.rounds) for f in (path.parent, default))
        pairs = []
        for images in ("validation", "test"):
            names = [accuracy_name(model, images) for model in PREFIXES]
            pairs.append(" / ".join(f"{ours[name]:.1%}" for name in names))
            pairs.append(" / ".join(f"{100 * (ours[name] - theirs[name]):+.1f}" for name in names))
        size = f"{ours['positive']:,.0f} ({ours['positive_correct']:.1%})" if ours["positive"] else "0"
        changes = list_changes(cell.config.to_dict(), config.to_dict())
        rows.append([changes, str(config.seed), str(config.rounds), *pairs, size])
    return to_markdown(rows)


def mean_of_last_rounds(folder: Path, t: int) -> dict[str, float]:
    """The mean of every number over the ten rounds up to round t."""
    events = [event for event in read_rounds(folder) if t - LAST_ROUNDS < event["t"] <= t]
    names = [name for name, value in events[-1].items() if isinstance(value, int | float)]
    return {name: mean(event.get(name, 0) for event in events) for name in names}


def list_changes(default: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The keys in which a configuration differs from another, except for rounds and engine."""
    found = []
    for name, value in other.items():
        if name in ("engine", "rounds"):
            continue
        if isinstance(value, dict):
            section = default.get(name, {})
            found += [f"`{name}.{k} = {v!r}`" for k, v in value.items() if section.get(k) != v]
        elif default.get(name) != value:
            found.append(f"`{name} = {value!r}`")
    return ", ".join(found).replace("True", "true").replace("False", "false") or "the defaults"
