"""Malicious clients against rules of averaging: `python -m bench.attacks` writes results/bench/attacks.json.

Every run starts from the same bootstrapped model of its setting and seed. The accuracy is that of w^t on the
clients' test images, the mean of the last five rounds. A run that is there already is not run again.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

from bench.page import write_block
from fedseal import weights
from fedseal.config.load import load_config
from fedseal.core import Packet
from fedseal.data.federation import load_federation
from fedseal.data.pool import Federation
from fedseal.engines.local import LocalEngine
from fedseal.errors import UserError
from fedseal.rounds import Progress, RoundDone, rounds
from fedseal.run_setup import RunSetup
from fedseal.system.environment import set_up_process
from fedseal.system.files import write_atomic
from fedseal.system.machine import cores, threads, versions
from fedseal.training.evaluate import Evaluator

RESULTS = Path("results/bench/attacks.json")
LAST = 5  # rounds
COMMON = {"client.epochs": 1, "engine.workers": 1, "engine.min_replies": 0}
SETTINGS: dict[str, dict[str, Any]] = {
    "A": {"rounds": 10},
    "B": {"rounds": 12, "data.labels": 200, "client.lr": 0.02, "client.decay": 1.0},
}
RULES: dict[str, dict[str, Any]] = {
    "mean": {"aggregate.gate": 0},
    "mean, gate": {"aggregate.gate": 3},
    "clip": {"aggregate.rule": "clip", "aggregate.gate": 0},
    "median": {"aggregate.rule": "median", "aggregate.gate": 0},
    "trimmed mean": {"aggregate.rule": "trimmed-mean", "aggregate.gate": 0},
    "multi-krum": {"aggregate.rule": "multi-krum", "aggregate.gate": 0},
    "fltrust": {"aggregate.rule": "fltrust", "aggregate.gate": 0},
}
COMPARED = ("mean", "mean, gate")  # these with one, two and three malicious clients
DEFAULT = "mean, gate"  # and this one with three seeds
ATTACKS: dict[str, dict[str, Any]] = {
    "scale × 50": {"simulate.attack": "scale", "simulate.strength": 50},
    "sign flip × 10": {"simulate.attack": "sign-flip", "simulate.strength": 10},
    "sign flip × 1": {"simulate.attack": "sign-flip", "simulate.strength": 1},
    "noise × 10": {"simulate.attack": "noise", "simulate.strength": 10},
    "zeros": {"simulate.attack": "zeros"},
    "huge": {"simulate.attack": "huge"},
    "class swap × 10": {"simulate.attack": "class-swap", "simulate.strength": 10},
    "class swap × 1": {"simulate.attack": "class-swap", "simulate.strength": 1},
    "nan": {"simulate.attack": "nan"},
}
SEEDS = 3
Key = tuple[str, int, str, str, int]  # setting, seed, rule, attack, malicious clients


def keys() -> Iterator[Key]:
    """All runs, the most important ones first."""
    for seed in range(SEEDS):
        for setting in SETTINGS:
            yield setting, seed, "mean", "none", 0
            yield setting, seed, DEFAULT, "none", 0
            yield from ((setting, seed, DEFAULT, attack, 2) for attack in ATTACKS)
    for setting, rule in product(SETTINGS, RULES):
        yield setting, 0, rule, "none", 0
        yield from ((setting, 0, rule, attack, 2) for attack in ATTACKS)
    for number, setting, rule, attack in product((1, 3), SETTINGS, COMPARED, ATTACKS):
        yield setting, 0, rule, attack, number


class Start:
    """The data and the bootstrapped state of a setting and a seed."""

    def __init__(self, setting: str, seed: int) -> None:
        self.options = COMMON | SETTINGS[setting] | {"seed": seed}
        config = load_config("fmnist-lenet", self.options)
        set_up_process(config.engine.arithmetic)
        self.federation: Federation = load_federation(config.data, config.seed)
        setup = RunSetup(config, self.federation)
        server, method = setup.server(), config.selected_method()
        self.state = method.initial_state(server)
        with threads(1):
            for step in method.prepare(self.state, server):
                self.state = step.state

    def run(self, rule: str, attack: str, number: int) -> float | None:
        """The accuracy in per cent; None if the run ends early."""
        options = self.options | RULES[rule] | ATTACKS.get(attack, {}) | {"simulate.malicious": number}
        setup = RunSetup(load_config("fmnist-lenet", options), self.federation)
        server, names = setup.server(), self.federation.names
        evaluate = Evaluator(setup, server, mix_images=1)
        found: list[float] = []
        with threads(1):
            try:
                engine, start = LocalEngine(setup), Progress(0, self.state)
                for event in rounds(setup.config, server, engine, names, lambda state: {}, start):
                    if isinstance(event, RoundDone) and event.t > setup.config.rounds - LAST:
                        found.append(100 * self.accuracy(evaluate, event.state))
            except UserError:
                return None
        return round(statistics.mean(found), 2)

    def accuracy(self, evaluate: Evaluator, state: Packet) -> float:
        model: weights.Tensors = state.tensors["model"]
        return evaluate.measure(model)["test_accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="runs whose name contains this text")
    only = parser.parse_args().only
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"runs": {}}
    starts: dict[tuple[str, int], Start] = {}
    for key in keys():
        name = "/".join(map(str, key))
        if name in found["runs"] or only not in name:
            continue
        setting, seed, rule, attack, number = key
        if (setting, seed) not in starts:
            starts[setting, seed] = Start(setting, seed)
        found["runs"][name] = value = starts[setting, seed].run(rule, attack, number)
        print(f"{name}: {value}", flush=True)
        found |= {"date": str(date.today()), "versions": versions(), "cores": cores()}
        write_atomic(RESULTS, json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    write_block("attacks", tables(found))


def tables(found: dict[str, Any]) -> list[str]:
    """The results as tables in Markdown."""
    runs = found["runs"]

    def show(setting: str, rule: str, attack: str, number: int, seeds: int = 1) -> str:
        names = [f"{setting}/{seed}/{rule}/{attack}/{number}" for seed in range(seeds)]
        if not all(name in runs for name in names):
            return "–"
        values = [runs[name] for name in names]
        return "ends" if None in values else f"{statistics.mean(values):.1f}"

    done = {tuple(name.split("/")[:3]) for name in runs if not name.endswith("/none/0")}
    lines: list[str] = []
    for setting in SETTINGS:
        rules = [rule for rule in RULES if (setting, "0", rule) in done]
        lines += [
            f"| {setting}: two of ten malicious | {' | '.join(rules)} |",
            "|---|" + "---:|" * len(rules),
        ]
        for attack, number in [("none", 0), *((attack, 2) for attack in ATTACKS)]:
            cells = [show(setting, rule, attack, number) for rule in rules]
            lines.append(f"| {attack} | {' | '.join(cells)} |")
        lines.append("")
    if any(name.endswith("/3") for name in runs):
        heads = [f"{setting}, {number} of 10" for setting in SETTINGS for number in (1, 2, 3)]
        lines += [f"| mean / mean with gate | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]
        for attack in ATTACKS:
            pairs = [
                " / ".join(show(setting, rule, attack, number) for rule in COMPARED)
                for setting in SETTINGS
                for number in (1, 2, 3)
            ]
            lines.append(f"| {attack} | {' | '.join(pairs)} |")
    if any(name.split("/")[1] == str(SEEDS - 1) for name in runs):
        lines += by_seeds(show)
    missing = sum("/".join(map(str, key)) not in runs for key in set(keys()))
    rest = f" {missing} of {len(set(keys()))} runs have not been made." if missing else ""
    return [*lines, f"Seed 0. Measured on {found['date']} with fedseal {found['versions']['fedseal']}.{rest}"]


def by_seeds(show: Callable[..., str]) -> list[str]:
    """The default rule, mean of all seeds."""
    lines = ["", "| mean with gate, three seeds | A | B |", "|---|---:|---:|"]
    plain = [show(setting, "mean", "none", 0, SEEDS) for setting in SETTINGS]
    lines.append(f"| none, mean without gate | {' | '.join(plain)} |")
    for attack, number in [("none", 0), *((attack, 2) for attack in ATTACKS)]:
        cells = [show(setting, DEFAULT, attack, number, SEEDS) for setting in SETTINGS]
        lines.append(f"| {attack}{', two of ten' if number else ''} | {' | '.join(cells)} |")
    return [*lines, ""]


if __name__ == "__main__":
    main()
