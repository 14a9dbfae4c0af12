"""How many images a client needs to estimate its class mix.

    python -m fedseal.reproduce.few_images results/few-images.json

A model is trained on the server's labels alone (the `[bootstrap]` of a preset). Each client then predicts its
test images with the class mix that it estimates from some of its unlabelled images.
"""

import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from fedseal.config.config import Config
from fedseal.config.load import load_config
from fedseal.data.federation import load_federation
from fedseal.learn import bootstrap
from fedseal.run_setup import RunSetup
from fedseal.system.environment import set_up_process, used_arithmetic
from fedseal.system.files import write_atomic
from fedseal.system.machine import threads, versions
from fedseal.system.progress import progress_bar
from fedseal.training.evaluate import Evaluator
from fedseal.weights import get_weights

PRESET, SEEDS = "fmnist-tuned", (0, 1, 2)
COLUMNS: dict[str, dict[str, Any]] = {
    "Dir 0.1": {"data.alpha": 0.1},
    "Dir 0.3": {"data.alpha": 0.3},
    "Dir 0.9": {"data.alpha": 0.9},
    "IID": {"data.partition": "iid"},
}
IMAGES = (20, 50, 200, 1200)


def measure(config: Config) -> dict[str, float]:
    """Accuracy in % on the clients' test images: plain, and with a mix from that many images."""
    setup = RunSetup(config, load_federation(config.data, config.seed)).with_features()
    server = setup.server()
    *_, (_, w) = bootstrap(server, get_weights(server.model))
    found = {n: Evaluator(setup, server, n).measure(w) for n in IMAGES}
    plain = {"plain": found[IMAGES[0]]["test_accuracy"]}
    return {k: 100 * v for k, v in (plain | {str(n): found[n]["client_accuracy"] for n in IMAGES}).items()}


def main(path: Path) -> None:
    """Measures all columns and seeds, and writes each value and the means over seeds."""
    set_up_process("portable")
    by_seed: dict[str, list[dict[str, float]]] = {column: [] for column in COLUMNS}
    with threads(1), progress_bar("class mixes", len(COLUMNS) * len(SEEDS)) as advance:
        for column, changes in COLUMNS.items():
            for seed in SEEDS:
                by_seed[column].append(measure(load_config(PRESET, {**changes, "seed": seed})))
                advance(1)
    rows = {column: {k: mean(one[k] for one in runs) for k in runs[0]} for column, runs in by_seed.items()}
    content = {"preset": PRESET, "seeds": SEEDS, "mean": rows, "by_seed": by_seed}
    content |= {"arithmetic": used_arithmetic(), "versions": versions()}
    write_atomic(path, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
