"""Malicious clients against rules of averaging: `python -m bench.attacks` writes results/bench/attacks.json.

Every run starts from the same bootstrapped model of its setting and seed. The accuracy is that of w^t on the
clients' test images, the mean of the last five rounds. A run that is there already is not run again.

Runs share work: where two of them send a client the same model, for example because a rule leaves the same
forged updates out, the client's honest reply is computed once. A malicious client whose forged weights do not
depend on what it learned learns nothing.
"""

import argparse
import hashlib
import statistics
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from bench.page import RESULTS, Found, measured_on, read, save, write_page
from fedseal.config.load import load_config
from fedseal.core import Packet, Reply, derive_seed
from fedseal.data.federation import load_federation
from fedseal.data.pool import Federation
from fedseal.engines.attack import forge, malicious_clients
from fedseal.engines.client import ClientResult, SimulatedClients
from fedseal.errors import UserError
from fedseal.learn import accuracy, predict
from fedseal.rounds import Progress, RoundDone, rounds
from fedseal.run_setup import RunSetup
from fedseal.system.environment import set_up_process
from fedseal.system.machine import threads

LAST = 5  # rounds
REMEMBERED = 3000  # honest replies, about 1 GB
COMMON = {"engine.workers": 1, "engine.min_replies": 0}
FEW_LABELS = {"data.labels": 200, "client.lr": 0.02, "client.decay": 1.0}
SETTINGS: dict[str, dict[str, Any]] = {  # all rules
    "A": {"client.epochs": 1, "rounds": 10},
    "B": {"client.epochs": 1, "rounds": 12} | FEW_LABELS,
}
LONG_SETTINGS: dict[str, dict[str, Any]] = {  # the default rule
    "A5": {"client.epochs": 5, "rounds": 12},
    "B5": {"client.epochs": 5, "rounds": 18} | FEW_LABELS,
}
BATCH_NORM: dict[str, dict[str, Any]] = {"N": SETTINGS["A"] | {"model.norm": "batch"}}  # statistics alone
MAIN_SETTINGS = SETTINGS | LONG_SETTINGS
RULES: dict[str, dict[str, Any]] = {
    "mean": {"aggregate.gate": 0},
    "mean, gate": {"aggregate.gate": 3},
    "clip": {"aggregate.rule": "clip", "aggregate.gate": 0},
    "median": {"aggregate.rule": "median", "aggregate.gate": 0},
    "trimmed mean": {"aggregate.rule": "trimmed-mean", "aggregate.gate": 0},
    "multi-krum": {"aggregate.rule": "multi-krum", "aggregate.gate": 0},
    "fltrust": {"aggregate.rule": "fltrust", "aggregate.gate": 0},
}
DEFAULT = "mean, gate"
ATTACKS: dict[str, dict[str, Any]] = {
    "scale × 50": {"simulate.attack": "scale", "simulate.strength": 50},
    "sign flip × 10": {"simulate.attack": "sign-flip", "simulate.strength": 10},
    "sign flip × 2.5": {"simulate.attack": "sign-flip", "simulate.strength": 2.5},
    "sign flip × 1": {"simulate.attack": "sign-flip", "simulate.strength": 1},
    "noise × 10": {"simulate.attack": "noise", "simulate.strength": 10},
    "zeros": {"simulate.attack": "zeros"},
    "huge": {"simulate.attack": "huge"},
    "class swap × 10": {"simulate.attack": "class-swap", "simulate.strength": 10},
    "class swap × 2.5": {"simulate.attack": "class-swap", "simulate.strength": 2.5},
    "class swap × 1": {"simulate.attack": "class-swap", "simulate.strength": 1},
    "nan": {"simulate.attack": "nan"},
}
NEAR_GATE: dict[str, dict[str, Any]] = {  # the default rule: about as long as it lets through
    "sign flip × 1.5": {"simulate.attack": "sign-flip", "simulate.strength": 1.5},
    "class swap × 2": {"simulate.attack": "class-swap", "simulate.strength": 2},
}
STATISTICS: dict[str, dict[str, Any]] = {"statistics": {"simulate.attack": "statistics"}}
LEARN_NOTHING = ("zeros", "huge", "nan")  # attacks
SEEDS = 3
Key = tuple[str, int, str, str, int]  # setting, seed, rule, attack, malicious clients


def keys() -> list[Key]:
    """All runs, the most important ones first."""
    clean = product(MAIN_SETTINGS, range(SEEDS), ("mean", DEFAULT), ("none",), (0,))
    claim = product(MAIN_SETTINGS, range(SEEDS), (DEFAULT,), ATTACKS, (2, 1))
    near = product(MAIN_SETTINGS, range(SEEDS), (DEFAULT,), NEAR_GATE, (2,))
    rules = product(SETTINGS, (0,), RULES, ATTACKS, (2, 3, 1))
    forged = product(BATCH_NORM, range(SEEDS), ("mean", DEFAULT), STATISTICS, (1, 2))
    normal = product(BATCH_NORM, range(SEEDS), ("mean", DEFAULT), ("none",), (0,))
    found = [*clean, *claim, *near, *normal, *forged, *product(SETTINGS, (0,), RULES, ("none",), (0,))]
    found += sorted(rules, key=lambda key: (key[4] != 2, key[2] not in ("mean", DEFAULT)))
    found += product(SETTINGS, range(1, SEEDS), RULES, ("none",), (0,))
    for number, seed in product((2, 3, 1), range(1, SEEDS)):
        found += product(SETTINGS, (seed,), RULES, ATTACKS, (number,))
    return list(dict.fromkeys(found))


class HonestReplies:
    """What clients would send if they were honest, remembered over the runs of one start."""

    def __init__(self, setup: RunSetup) -> None:
        self._clients = SimulatedClients(setup)
        self._known: OrderedDict[tuple[int, bytes, bytes], ClientResult] = OrderedDict()

    def get(self, k: int, request: Packet, digest: bytes, memory: bytes) -> ClientResult:
        key = k, digest, hashlib.sha256(memory).digest()
        if key not in self._known:
            self._known[key] = self._clients.run(k, request, memory)
        self._known.move_to_end(key)
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return self._known[key]


class SharingEngine:
    """An engine whose honest replies come from `HonestReplies`; it forges those of malicious clients."""

    def __init__(self, setup: RunSetup, honest: HonestReplies) -> None:
        self.clients = range(len(setup.federation.clients))
        self._setup, self._honest = setup, honest
        self._memories = dict.fromkeys(self.clients, b"")
        self._uploads = setup.config.selected_method().uploads
        self._names = list(setup.network().state_dict())
        self._malicious = malicious_clients(setup.config.simulate, len(self.clients), setup.config.seed)

    def exchange(self, requests: Mapping[int, Packet]) -> Iterator[Reply]:
        t, simulate = next(iter(requests.values())).scalars["t"], self._setup.config.simulate
        digests = {id(p): hashlib.sha256(p.to_bytes()).digest() for p in requests.values()}
        for k, request in requests.items():
            if k in self._malicious and simulate.attack in LEARN_NOTHING:
                reply = Packet({self._uploads: request.tensors[self._uploads]}, {"t": t})
            else:
                result = self._honest.get(k, request, digests[id(request)], self._memories[k])
                self._memories[k], reply = result.memory, result.reply
            if k in self._malicious:
                seed = derive_seed(self._setup.config.seed, self._setup.federation.names[k], t, "attack")
                reply = forge(reply, request, self._uploads, self._names, simulate, seed)
            yield Reply(k, reply)

    def close(self) -> None:
        self._memories.clear()


class Start:
    """The data and the bootstrapped state of a setting and a seed."""

    def __init__(self, setting: str, seed: int) -> None:
        self.options = COMMON | (MAIN_SETTINGS | BATCH_NORM)[setting] | {"seed": seed}
        config = load_config("fmnist-lenet", self.options)
        set_up_process(config.engine.arithmetic)
        self.federation: Federation = load_federation(config.data, config.seed)
        setup = RunSetup(config, self.federation)
        server, method = setup.server(), config.selected_method()
        self.state, self.honest = method.initial_state(server), HonestReplies(setup)
        with threads(1):
            for step in method.prepare(self.state, server):
                self.state = step.state

    def run(self, rule: str, attack: str, number: int) -> float | None:
        """The accuracy in per cent; None if the run ends early."""
        options = (
            self.options
            | RULES[rule]
            | (ATTACKS | NEAR_GATE | STATISTICS).get(attack, {})
            | {"simulate.malicious": number}
        )
        setup = RunSetup(load_config("fmnist-lenet", options), self.federation)
        server, names = setup.server(), self.federation.names
        images = setup.labelled_images(self.federation.tests["test"])
        found: list[float] = []
        with threads(1):
            try:
                engine, start = SharingEngine(setup, self.honest), Progress(0, self.state)
                for event in rounds(setup.config, server, engine, names, lambda state: {}, start):
                    if isinstance(event, RoundDone) and event.t > setup.config.rounds - LAST:
                        probs = predict(server, event.state.tensors["model"], images)
                        found.append(100 * accuracy(probs, images.labels))
            except UserError:
                return None
        return round(statistics.mean(found), 2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="runs whose name contains this text")
    only = parser.parse_args().only
    runs = read("attacks")["runs"] if (RESULTS / "attacks.json").exists() else {}
    starts: dict[tuple[str, int], Start] = {}
    for key in keys():
        name = "/".join(map(str, key))
        if name in runs or only not in name:
            continue
        setting, seed, rule, attack, number = key
        if (setting, seed) not in starts:
            starts[setting, seed] = Start(setting, seed)
        runs[name] = starts[setting, seed].run(rule, attack, number)
        print(f"{name}: {runs[name]}", flush=True)
        save("attacks", {"runs": runs})
    write_page()


def tables(found: Found) -> list[str]:
    """The tables of docs/benchmarks.md."""
    runs = found["runs"]

    def show(setting: str, rule: str, attack: str, number: int, seeds: Iterable[int] = (0,)) -> str:
        names = [f"{setting}/{seed}/{rule}/{attack}/{number}" for seed in seeds]
        if not all(name in runs for name in names):
            return "–"
        values = [runs[name] for name in names]
        return "ends" if None in values else f"{statistics.mean(values):.1f}"

    def rows(
        attacks: Iterable[str], numbers: Sequence[int], row: Callable[[str, int], list[str]]
    ) -> list[str]:
        places = [("none", 0), *((attack, number) for attack in attacks for number in numbers)]
        texts = [(attack, number, row(attack, number)) for attack, number in places]
        return [
            f"| {attack}{f', {number} of 10' if number and len(numbers) > 1 else ''} | {' | '.join(cells)} |"
            for attack, number, cells in texts
            if set(cells) != {"–"}
        ]

    lines = [
        f"| default rule, seeds 0–2 | {' | '.join(MAIN_SETTINGS)} |",
        "|---|" + "---:|" * len(MAIN_SETTINGS),
    ]
    plain = [show(setting, "mean", "none", 0, range(SEEDS)) for setting in MAIN_SETTINGS]
    lines.append(f"| none, without the gate | {' | '.join(plain)} |")
    tried = ATTACKS | NEAR_GATE
    lines += rows(tried, (1, 2), lambda a, n: [show(s, DEFAULT, a, n, range(SEEDS)) for s in MAIN_SETTINGS])
    rules = ["mean", DEFAULT]
    lines += ["", f"| N, seeds 0–2 | {' | '.join(rules)} |", "|---|---:|---:|"]
    lines += rows(STATISTICS, (1, 2), lambda a, n: [show("N", rule, a, n, range(SEEDS)) for rule in rules])
    for number, setting in product((2, 1, 3), SETTINGS):
        places = [*product(RULES, ("none",), (0,)), *product(RULES, ATTACKS, (number,))]
        complete = all(show(setting, *place, range(SEEDS)) != "–" for place in places)
        seeds, which = (range(SEEDS), "seeds 0–2") if complete else (range(1), "seed 0")
        head = f"{setting}: {number} of 10 malicious, {which}"
        lines += ["", f"| {head} | {' | '.join(RULES)} |", "|---|" + "---:|" * len(RULES)]
        lines += rows(
            ATTACKS, (number,), lambda a, n, s=setting, k=seeds: [show(s, r, a, n, k) for r in RULES]
        )
    missing = sum("/".join(map(str, key)) not in runs for key in keys())
    rest = f" {missing} of {len(keys())} runs have not been made." if missing else ""
    return [*lines, "", f"{measured_on(found)}{rest}"]


if __name__ == "__main__":
    main()
