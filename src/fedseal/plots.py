"""Pictures, by matplotlib."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from fedseal.data.pool import Federation


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
