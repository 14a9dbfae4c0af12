"""What differential privacy costs: accuracy against ε, with few and with many clients (docs/privacy.md).

    python -m fedseal.reproduce.privacy results/privacy.json

The same images are split over few or many clients, which train for one round: with fedshift, and for
comparison with their labels. Their updates are the same at every ε, so clients are simulated once per seed,
and only clipping and noise are repeated. What is in the file already is not measured again.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from fedseal.config.config import Config
from fedseal.config.load import load_config
from fedseal.core import Packet, Round
from fedseal.data.federation import load_federation
from fedseal.engines.client import SimulatedClients
from fedseal.privacy import add_update, clipped, needed_noise, noisy_mean, update_of
from fedseal.run_setup import RunSetup
from fedseal.system.environment import set_up_process, used_arithmetic
from fedseal.system.files import write_atomic
from fedseal.system.machine import threads, versions
from fedseal.system.progress import progress_bar
from fedseal.training.evaluate import Evaluator
from fedseal.weights import Tensors

PRESET, SEEDS, DELTA = "fmnist-fedshift", (0, 1, 2), 1e-5
SETTINGS: dict[str, Any] = {
    "rounds": 1,
    "cohort": 0,
    "data.labels": 100,
    "data.test_per_client": 0,
    "data.held_out_test": 3000,
    "bootstrap.epochs": 200,
    "fedshift.teachers": 3,
    "fedshift.mix": False,
    "fedshift.momentum": 0.0,
    "fedshift.keep": 0.0,
    "fedavg-sl.adjust": 1.0,
}
FEW: dict[str, Any] = {"data.clients": 10, "data.images_per_client": 1200, "client.lr": 0.01}
MANY: dict[str, Any] = {
    "data.clients": 1000,
    "data.images_per_client": 12,
    "client.lr": 0.03,
    "client.epochs": 5,
}
RUNS = {
    "fedshift, 10 clients": FEW | {"method": "fedshift"},
    "fedshift, 1,000 clients": MANY | {"method": "fedshift"},
    "FedAvg-SL, 10 clients": FEW | {"method": "fedavg-sl"},
    "FedAvg-SL, 1,000 clients": MANY | {"method": "fedavg-sl"},
}
EPSILONS = {name: float(name) for name in ("0.1", "0.3", "1", "3", "10", "30")}
CLIPS = (0.1, 0.3, 1.0)
DRAWS = 3  # of the noise
NO_NOISE, WITHOUT = "∞", "without clients"

Accuracies = dict[str, float]  # on "test" and "validation" images, in %


class OneRound:
    """The first round of a federation: its server, and the sum of its clients' clipped updates."""

    def __init__(self, config: Config) -> None:
        setup = RunSetup(config, load_federation(config.data, config.seed))
        self.server, self.method = setup.server(), config.selected_method()
        self.clients, self.evaluate = len(setup.federation.clients), Evaluator(setup, self.server)
        self.round = Round(1, tuple(range(self.clients)), range(self.clients))
        state = self.method.initial_state(self.server)
        for step in self.method.prepare(state, self.server):
            state = step.state
        self.state, requests = self.method.server_round(self.round, state, self.server)
        self.sent, self.totals = requests[0].tensors["model"], dict[float, Tensors]()
        simulated = SimulatedClients(setup)
        for k in range(self.clients):
            trained = simulated.run(k, requests[k], b"").reply.tensors["model"]
            update = update_of(trained, self.sent)
            for clip in CLIPS:
                before = self.totals.get(clip, dict.fromkeys(update, torch.zeros(())))
                self.totals[clip] = {n: before[n] + v for n, v in clipped(update, clip).items()}

    def after(self, clip: float, noise: float) -> Accuracies:
        """Accuracies of w̄ after the round; a clip of 0 is a round without clients."""
        updates = [self.totals[clip]] if clip else []
        update = noisy_mean(updates, self.sent, noise * clip, self.clients)
        reply = Packet({"model": add_update(self.sent, update)}, {"t": 1})
        state = self.method.collect(self.round, self.state, {0: reply}, self.server)
        found = self.evaluate.measure(state.tensors["average"])
        return {images: 100 * found[f"{images}_accuracy"] for images in ("test", "validation")}


def measure(config: Config) -> dict[str, Any]:
    """Accuracies without clients, and by ε and clip: one for each draw of the noise."""
    one_round = OneRound(config)
    found: dict[str, Any] = {WITHOUT: one_round.after(0.0, 0.0)}
    found[NO_NOISE] = {str(clip): [one_round.after(clip, 0.0)] for clip in CLIPS}
    for name, epsilon in EPSILONS.items():
        noise = needed_noise(epsilon, 1, DELTA)
        found[name] = {str(clip): [one_round.after(clip, noise) for _ in range(DRAWS)] for clip in CLIPS}
    return found


@dataclass(frozen=True)
class Point:
    """Test accuracy in %: mean and deviation over seeds (None for one seed), and the clip, if any."""

    mean: float
    deviation: float | None
    clip: str = ""

    def text(self) -> str:
        return f"{self.mean:.1f}" + ("" if self.deviation is None else f" ± {self.deviation:.1f}")


def read(path: Path) -> dict[str, dict[str, Point]]:
    """What the file says, by run and ε; the clip of an ε is the best one on validation."""
    if not path.exists():
        return {}
    points: dict[str, dict[str, Point]] = {}
    for run, by_seed in json.loads(path.read_text("utf-8"))["runs"].items():
        seeds = list(by_seed.values())
        points[run] = {WITHOUT: summarize([found[WITHOUT]["test"] for found in seeds])}
        for name in (*EPSILONS, NO_NOISE):
            by_clip = {clip: [found[name][clip] for found in seeds] for clip in seeds[0][name]}
            best = max(by_clip, key=lambda clip: mean(accuracies(by_clip[clip], "validation")))
            points[run][name] = summarize(accuracies(by_clip[best], "test"), best)
    return points


def accuracies(runs: list[list[Accuracies]], images: str) -> list[float]:
    """For each seed, the mean over the draws of the noise."""
    return [mean(draw[images] for draw in draws) for draws in runs]


def summarize(values: list[float], clip: str = "") -> Point:
    """The mean and the standard deviation of the seeds' values."""
    return Point(mean(values), stdev(values) if len(values) > 1 else None, clip)


def main(path: Path) -> None:
    """Measures all runs and seeds that the file lacks."""
    set_up_process("portable")
    content: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    results = content.setdefault("runs", {})
    missing = [(run, seed) for seed in SEEDS for run in RUNS if str(seed) not in results.get(run, {})]
    with threads(1), progress_bar("privacy", len(missing)) as advance:
        for run, seed in missing:
            config = load_config(PRESET, {**SETTINGS, **RUNS[run], "seed": seed})
            results.setdefault(run, {})[str(seed)] = measure(config)
            content |= {"preset": PRESET, "settings": SETTINGS, "settings_by_run": RUNS, "delta": DELTA}
            content |= {"arithmetic": used_arithmetic(), "versions": versions()}
            write_atomic(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
            advance(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
