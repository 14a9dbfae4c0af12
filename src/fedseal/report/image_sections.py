"""The sections of a report that need the images: class mix, confusion, calibration, examples."""

from html import escape
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from fedseal.core import Packet, Server
from fedseal.data.pool import Federation, Ints
from fedseal.engines import memory
from fedseal.engines.memory_store import MemoryStore
from fedseal.errors import UserError
from fedseal.learn import predict
from fedseal.report import charts
from fedseal.report.charts import Floats
from fedseal.report.page import notes, section, table
from fedseal.report.run import Run, own_metrics
from fedseal.run_setup import RunSetup
from fedseal.storage.model_file import load, trained_weights
from fedseal.weights import Tensors

BINS = 10  # of the calibration
EXAMPLES = 12  # images per group
SEARCHED = 200  # images of a client, if they have to be predicted to find the examples
MAX_CLIENTS = 30  # rows of the class mix


def image_sections(run: Run, setup: RunSetup, memories: MemoryStore) -> list[str]:
    """The run's model on the images; `memories` are those of the clients."""
    federation, server = setup.federation, setup.server()
    model = trained_weights(load(run.folder).model)
    name = "test" if "test" in federation.tests else "validation"
    images = setup.labelled_images(federation.tests.get("test", federation.validation))
    probs, labels = predict(server, model, images).numpy(), images.labels.numpy()
    classes = federation.pool.classes
    matrix = charts.matrix(confusion(probs, labels), classes, classes, "true ↓  predicted →")
    share, correct, error = calibration(probs, labels)
    chart = charts.reliability_chart(np.arange(1, BINS + 1) / BINS, share, correct)
    text = f"<p>Expected calibration error {error:.1%}, mean confidence {probs.max(axis=1).mean():.1%}.</p>"
    text += notes(["The model's confidence is right where a bar ends at the dashed line."])
    sections = [
        section(f"Confusion on the {name} images", matrix),
        section(f"Calibration on the {name} images", chart + text),
    ]
    if any(len(rows) for rows in federation.clients):
        sections = [class_mix(federation), *sections, examples(run, setup, server, model, memories)]
    return sections


def confusion(probs: Floats, labels: Ints) -> Floats:
    """Numbers of images by true class (row) and predicted class (column)."""
    counts = np.zeros((probs.shape[1], probs.shape[1]))
    np.add.at(counts, (labels, probs.argmax(axis=1)), 1)
    return counts


def calibration(probs: Floats, labels: Ints) -> tuple[Floats, Floats, float]:
    """By confidence bin: the share of images and the share of correct ones; and the expected error."""
    confidence, hits = probs.max(axis=1), probs.argmax(axis=1) == labels
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    number = np.bincount(bins, minlength=BINS)
    correct, mean = (np.bincount(bins, values, BINS) / np.maximum(number, 1) for values in (hits, confidence))
    share = number / len(confidence)
    return share, correct, float((share * np.abs(correct - mean)).sum())


def class_mix(federation: Federation) -> str:
    """The number of images of each class at each client, or in total if the classes are unknown."""
    pool, clients = federation.pool, len(federation.clients)
    shown = list(islice(zip(federation.names, federation.clients, strict=True), MAX_CLIENTS))
    if all((pool.labels[rows] >= 0).all() for _, rows in shown):
        values = [np.bincount(pool.labels[rows], minlength=len(pool.classes)) for _, rows in shown]
        chart = charts.matrix(np.array(values, float), [name for name, _ in shown], pool.classes, "client")
    else:
        chart = table([["client", "images"], *([name, str(len(rows))] for name, rows in shown)])
    if clients > len(shown):
        chart += f"<p>The first {len(shown)} of {clients} clients.</p>"
    return section("Client images", chart)


def examples(run: Run, setup: RunSetup, server: Server, model: Tensors, memories: MemoryStore) -> str:
    """Images of some clients with their labels, grouped by what the method uses them for."""
    federation, rng = setup.federation, np.random.default_rng(0)
    clients = rng.permutation(len(federation.clients))[:EXAMPLES].tolist()
    per_client = -(-EXAMPLES // len(clients))
    groups: dict[str, list[str]] = {}
    for k in clients:
        rows, remembered = federation.clients[k], memory.read(memories.get(k))
        if memory.PER_IMAGE not in remembered.tensors:
            rows = rng.permutation(rows)[:SEARCHED]
        confidences, masks = explain_labels(run, setup, server, model, rows, remembered)
        for title, mask in (masks or {"": torch.ones(len(rows), dtype=torch.bool)}).items():
            cards = groups.setdefault(title, [])
            for i in rng.permutation(np.flatnonzero(mask.numpy()))[:per_client].tolist():
                cards.append(card(federation, k, int(rows[i]), confidences[i]))
    content = [
        (f"<h3>{escape(title)}</h3>" if title else "") + f'<div class="cards">{"".join(cards)}</div>'
        for title, cards in groups.items()
        if cards
    ]
    return section("Client images with the labels that the method gives them", "".join(content))


def explain_labels(
    run: Run, setup: RunSetup, server: Server, model: Tensors, rows: Ints, remembered: Packet
) -> tuple[Tensor, dict[str, Tensor]]:
    """The confidences by which the method labels a client's images, and masks of what it uses them for."""
    try:
        confidences, masks = run.method.explain_labels(
            remembered,
            own_metrics(run.events[-1]),
            lambda: predict(server, model, setup.images(rows)),
        )
        if not all(isinstance(value, Tensor) for value in (confidences, *masks.values())):
            raise TypeError("explain_labels must return a tensor and tensors by title")
        return confidences, masks
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"The last round in {run.folder / 'events.jsonl'} does not fit {run.config.method}"
            f" ({type(error).__name__}: {error}): restore the file, or run it again."
        ) from error


def card(federation: Federation, k: int, row: int, confidences: Tensor) -> str:
    """An image with its label, in a green or red frame if the true label is known."""
    pool, label = federation.pool, int(confidences.argmax())
    truth = int(pool.labels[row])
    mark = "" if truth < 0 else "right" if truth == label else "wrong"
    lines = [f"<b>{escape(pool.classes[label])}</b>", f"confidence {float(confidences.max()):.0%}"]
    lines += [f"true: {escape(pool.classes[truth])}"] if mark == "wrong" else []
    lines.append(f"<small>{escape(federation.names[k])}</small>")
    caption = f"<figcaption>{'<br>'.join(lines)}</figcaption>"
    return f'<figure class="{mark}">{charts.picture(pool.pixels[row])}{caption}</figure>'
