"""A run, or several beside each other, as one HTML file to look at: no network, no script."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedseal import charts, paper
from fedseal.charts import Floats, Points
from fedseal.config import Config, load_config
from fedseal.core import Packet
from fedseal.data.pool import Federation, Ints
from fedseal.data.sources import SOURCES
from fedseal.errors import UserError
from fedseal.files import write_atomic
from fedseal.learn import predict
from fedseal.methods.fedseal import FedSEAL
from fedseal.model_file import load
from fedseal.observers import read_events
from fedseal.sites import Sites, images_are_elsewhere
from fedseal.weights import Tensors, save

BINS = 10  # of the calibration
EXAMPLES = 12  # images of each fate
FATES = {
    "positive": "learnt as this class (D⁺)",
    "negative": "learnt as not another (D⁻)",
    "unused": "not used",
}
NAMES = {
    "test_accuracy": "test, wᵗ",
    "average_accuracy": "test, w̄",
    "official_accuracy": "official test set, wᵗ",
    "validation_accuracy": "validation, wᵗ",
    "average_validation_accuracy": "validation, w̄",
}
MODELS = {"model": "wᵗ, after the server's step", "average": "w̄, the clients' average"}


@dataclass(frozen=True)
class Run:
    """A finished run, as its folder has it."""

    folder: Path
    config: Config
    summary: Mapping[str, Any]
    events: Sequence[Mapping[str, Any]]  # of rounds
    baseline: Sequence[Mapping[str, Any]] = field(default_factory=list)  # of Server-SL on the same split

    @staticmethod
    def read(folder: Path) -> "Run":
        try:
            summary = json.loads((folder / "summary.json").read_text("utf-8"))
            summary["labels"]["total"], summary["clients"], summary["validation_accuracy"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{folder} is no finished run: its summary.json is missing or damaged."
            ) from error
        events = rounds(folder)
        if not events:
            raise UserError(f"{folder / 'events.jsonl'} is missing or damaged: there is nothing to show.")
        return Run(folder, load_config(folder / "config.toml"), summary, events, rounds(folder / "server-sl"))

    @property
    def name(self) -> str:
        return f"{self.config.method}, seed {self.config.seed}"

    @property
    def judged(self) -> str:
        """The accuracy that the run is judged by, and whose it is."""
        key = "test" if "test_accuracy" in self.summary else "validation"
        found = self.summary[f"{key}_accuracy"]["mean_last_10"]
        return f"{key} {found:.2%}, {MODELS[self.summary['evaluate']]}"

    @property
    def classes(self) -> Sequence[str]:
        """Their names, or numbers where only measurements were kept."""
        if (self.folder / "model.safetensors").exists():
            return load(self.folder).classes
        known = SOURCES.get(self.config.data.source)
        return known.classes if known else [str(m) for m in range(len(self.events[-1]["tau"]))]

    def measured(self, key: str) -> dict[str, float]:
        """A number's last, mean of the last ten, and best on validation: wᵗ's unless w̄'s is asked for."""
        found: dict[str, float] = self.summary.get(f"model_{key}", self.summary.get(key, {}))
        return found

    def line(self, key: str) -> Points:
        """One number by round."""
        return [(event["t"], event[key]) for event in self.events if key in event]


def rounds(folder: Path) -> list[dict[str, Any]]:
    """What the rounds of a run were like; none if there is no run."""
    return [event for event in read_events(folder / "events.jsonl") if event["event"] == "round"]


def left_out(summary: Mapping[str, Any]) -> str:
    """How many replies of which clients were not used, to read."""
    return ", ".join(f"{number} of {name}" for name, number in summary.get("left_out", {}).items())


def write(folder: Path, sites: Sites | None, memories: Mapping[str, bytes], path: Path | None = None) -> Path:
    """The report of one run, into its folder if nothing else is said. `memories` are what the clients
    remember; without `sites` (images or model are not at hand) it shows numbers alone."""
    run = Run.read(folder)
    sections = [*overview(run), *inside(run)]
    sections += looking(run, sites, memories) if sites else []
    path = path or folder / "report.html"
    write_atomic(path, page(f"{run.name}: {run.config.data.source}", [*sections, *repeating(run)]))
    return path


def compare(folders: Sequence[Path], path: Path) -> None:
    """The report of several runs."""
    runs = [Run.read(folder) for folder in folders]
    alike = len({run.folder.name for run in runs}) < len(runs)
    names = [f"{run.name} ({run.folder if alike else run.folder.name})" for run in runs]
    keys = [key for key in NAMES if any(run.line(key) for run in runs)]
    rows = [["run", "rounds", "judged by", *(NAMES[key] for key in keys), "split"]]
    for run, name in zip(runs, names, strict=True):
        means = [run.measured(key).get("mean_last_10") for key in keys]
        shown = ["–" if value is None else f"{value:.2%}" for value in means]
        rows.append([name, str(run.summary["rounds"]), run.judged, *shown, str(run.summary["split"])])
    sections = [section("Accuracy", table(rows) + "<p>Mean of the last ten rounds.</p>")]
    if len({run.summary["split"] for run in runs}) > 1:
        sections.append(
            "<p class=warning>These runs are on different splits: compare margins, not numbers.</p>"
        )
    for key in keys:
        series = {name: run.line(key) for run, name in zip(runs, names, strict=True)}
        sections.append(section(f"By round: {NAMES[key]}", charts.lines(series, percent=True)))
    rates = {
        f"{name}, {kind}": run.line(f"{kind}_correct")
        for run, name in zip(runs, names, strict=True)
        for kind in ("positive", "negative")
    }
    if any(rates.values()):
        sections.append(section("Right labels in D⁺ and D⁻", charts.lines(rates, percent=True)))
    for run in runs:
        sections += repeating(run)
    write_atomic(path, page("Comparison", sections))


def overview(run: Run) -> list[str]:
    """The numbers, and accuracy by round."""
    summary, labels = run.summary, run.summary["labels"]
    rows = [["", "last ten rounds", "last round", "best on validation"]]
    for key, name in NAMES.items():
        if found := run.measured(key):
            cells = [f"{found[kind]:.2%}" for kind in ("mean_last_10", "last", "best_on_validation")]
            rows.append([name, *cells])
    facts = (
        f"{summary['rounds']} rounds, {summary['clients']} clients, {labels['total']} labels"
        f" ({labels['training']} to train on, {labels['validation']} for validation),"
        f" {summary['seconds'] / 60:.1f} minutes, split {summary['split']}"
    )
    if missed := left_out(summary):
        facts += f"; replies left out: {missed}"
    series = {name: run.line(key) for key, name in NAMES.items() if run.line(key)}
    key = "test_accuracy" if run.line("test_accuracy") else "validation_accuracy"
    if run.baseline:
        last = run.summary["rounds"]
        series["Server-SL, " + NAMES[key]] = [
            (e["t"], e[key]) for e in run.baseline if key in e and e["t"] <= last
        ]
    return [
        section("Accuracy", f"<p>{escape(facts)}</p><p>Judged by: {escape(run.judged)}.</p>" + table(rows)),
        section("Accuracy by round", charts.lines(series, percent=True)),
    ]


def inside(run: Run) -> list[str]:
    """What the method did: thresholds, sizes and correct rates of the sets."""
    found = []
    taus = [(event["t"], event["tau"]) for event in run.events if "tau" in event]
    if taus:
        series = {name: [(t, tau[m]) for t, tau in taus] for m, name in enumerate(run.classes)}
        found.append(section("Thresholds τ by class", charts.lines(series)))
    sizes = {
        name: run.line(key)
        for key, name in (("positive", "|D⁺|"), ("negative", "|D⁻|"), ("confident", "confident"))
    }
    if any(sizes.values()):
        found.append(section("Images that clients learn from", charts.lines(sizes)))
    rates = {
        "right in D⁺": run.line("positive_correct"),
        "right in D⁻": run.line("negative_correct"),
        "right among the confident": run.line("confident_correct"),
    }
    if any(rates.values()):
        found.append(section("Right labels", charts.lines(rates, percent=True)))
    return found


def looking(run: Run, sites: Sites, memories: Mapping[str, bytes]) -> list[str]:
    """What takes the images: class mix, confusion, calibration, examples."""
    federation, model = sites.federation, save(load(run.folder).model)
    where = "test" if "test" in federation.tests else "validation"
    images = sites.images(federation.tests.get("test", federation.validation), labels=True)
    assert images.labels is not None
    probs, labels = predict(sites.server(), model, images).numpy(), images.labels.numpy()
    classes = federation.pool.classes
    matrix = charts.matrix(confusion(probs, labels), classes, classes, "is ↓  seen as →")
    share, right, error = calibration(probs, labels)
    chart = charts.reliability(np.arange(1, BINS + 1) / BINS, share, right)
    text = f"<p>Expected calibration error {error:.1%}; mean confidence {probs.max(axis=1).mean():.1%}.</p>"
    found = [
        section(f"Confusion on the {where} images", matrix),
        section(f"Calibration on the {where} images", chart + text),
    ]
    if any(len(rows) for rows in federation.clients):
        found = [class_mix(federation), *found, examples(run, sites, memories, model)]
    return found


def confusion(probs: Floats, labels: Ints) -> Floats:
    """How many images of each class (rows) are seen as each class (columns)."""
    counts = np.zeros((probs.shape[1], probs.shape[1]))
    np.add.at(counts, (labels, probs.argmax(axis=1)), 1)
    return counts


def calibration(probs: Floats, labels: Ints) -> tuple[Floats, Floats, float]:
    """By bins of confidence: the share of images, how many of them are seen right; and the expected error."""
    sure, right = probs.max(axis=1), probs.argmax(axis=1) == labels
    bins = np.minimum((sure * BINS).astype(int), BINS - 1)
    number = np.bincount(bins, minlength=BINS)
    hits, means = (np.bincount(bins, values, BINS) / np.maximum(number, 1) for values in (right, sure))
    share = number / len(sure)
    return share, hits, float((share * np.abs(hits - means)).sum())


def class_mix(federation: Federation) -> str:
    """How many images of each class the clients have, or how many in all where nobody knows."""
    pool, shown = federation.pool, list(zip(federation.names, federation.clients, strict=True))[:30]
    more = (
        f"<p>The first 30 of {len(federation.clients)} clients.</p>" if len(federation.clients) > 30 else ""
    )
    if all((pool.labels[rows] >= 0).all() for _, rows in shown):
        values = [np.bincount(pool.labels[rows], minlength=len(pool.classes)) for _, rows in shown]
        chart = charts.matrix(np.array(values, float), [name for name, _ in shown], pool.classes, "client")
    else:
        chart = table([["client", "images"], *([name, str(len(rows))] for name, rows in shown)])
    return section("The clients' images", chart + more)


def examples(run: Run, sites: Sites, memories: Mapping[str, bytes], model: Tensors) -> str:
    """Images of some clients with the label that they were given, how sure, and what became of them."""
    federation, method, rng = sites.federation, run.config.chosen(), np.random.default_rng(0)
    server, taus = sites.server(), [event["tau"] for event in run.events if "tau" in event]
    fated = isinstance(method, FedSEAL) and bool(taus)
    clients = rng.permutation(len(federation.clients))[:EXAMPLES].tolist()
    each = -(-EXAMPLES // len(clients))
    kept: dict[str, list[str]] = {fate: [] for fate in FATES}
    for k in clients:
        rows, memory = federation.clients[k], memories.get(str(k))
        remembered = Packet.from_bytes(memory).tensors.get("images", {}) if memory else {}
        mean = remembered["mean"] if "mean" in remembered else predict(server, model, sites.images(rows))
        fates = np.full(len(rows), "unused", dtype="U8")
        if isinstance(method, FedSEAL) and fated:
            tau = torch.tensor(taus[-1])
            fates[paper.positive_set(mean, tau).numpy()] = "positive"
            if method.negative:
                fates[paper.negative_set(mean, tau, method.theta).numpy()] = "negative"
        for fate, cards in kept.items():
            for i in rng.permutation(np.flatnonzero(fates == fate))[:each].tolist():
                cards.append(card(federation, k, int(rows[i]), mean[i]))
    groups = [
        (f"<h3>{escape(FATES[fate])}</h3>" if fated else "") + f'<div class="cards">{"".join(cards)}</div>'
        for fate, cards in kept.items()
        if cards
    ]
    return section("Images of the clients, and the labels that they were given", "".join(groups))


def card(federation: Federation, k: int, row: int, mean: torch.Tensor) -> str:
    """One image with its label; green or red around it where the truth is known."""
    pool, label = federation.pool, int(mean.argmax())
    truth = int(pool.labels[row])
    mark = "" if truth < 0 else "right" if truth == label else "wrong"
    lines = [f"<b>{escape(pool.classes[label])}</b>", f"{float(mean.max()):.0%} sure"]
    lines += [f"is {escape(pool.classes[truth])}"] if mark == "wrong" else []
    lines.append(f"<small>{escape(federation.names[k])}</small>")
    caption = f"<figcaption>{'<br>'.join(lines)}</figcaption>"
    return f'<figure class="{mark}">{charts.picture(pool.pixels[row])}{caption}</figure>'


def repeating(run: Run) -> list[str]:
    """The commands to repeat it, and the whole configuration."""
    repeat = ["fedseal", "train", str(run.folder / "config.toml"), "--out", "again"]
    measure = ["fedseal", "evaluate", str(run.folder)]
    elsewhere = images_are_elsewhere(run.config)
    commands = "\n".join(map(shlex.join, [[*measure, "--test", "DIR"]] if elsewhere else [repeat, measure]))
    versions = ", ".join(f"{name} {number}" for name, number in run.summary["versions"].items())
    text = (
        f"<pre>{escape(commands)}</pre><p>Made with {escape(versions)}.</p>"
        f"<details><summary>config.toml</summary><pre>{escape(run.config.to_toml())}</pre></details>"
    )
    return [section(f"Repeat: {run.name}", text)]


def section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def table(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:])
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def page(title: str, sections: Sequence[str]) -> str:
    style = (resources.files("fedseal") / "report.css").read_text("utf-8")
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        '<meta name=color-scheme content="light dark">'
        f"<title>{escape(title)}</title><style>{style}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n" + "\n".join(sections) + "\n</body></html>\n"
    )
