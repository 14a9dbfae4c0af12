"""The cost of each method: seconds and bytes of a round of `fmnist-lenet`, side by side.

All methods start from the same model, trained on the labels for a while, so that clients find confident
images. The number of training steps in a round depends on that. Methods take turns, round by round.
"""

import statistics
from collections.abc import Iterator

from bench.page import Found, grid, measured_on, save, write_page
from fedseal import weights
from fedseal.config.config import Config
from fedseal.config.load import load_config
from fedseal.data.federation import load_federation
from fedseal.engines.local import LocalEngine
from fedseal.learn import train_supervised
from fedseal.methods import METHODS
from fedseal.rounds import RoundDone, rounds
from fedseal.run_setup import RunSetup
from fedseal.system.machine import threads

ROUNDS = 3  # the first, in which workers start, does not count
EPOCHS = 200  # of supervised learning beforehand


def run() -> list[tuple[str, float, str]]:
    """Writes results/bench/methods.json; it has no target."""
    base = make_config("fedseal")
    federation = load_federation(base.data, base.seed)
    with threads(base.server.threads):
        server = RunSetup(base, federation).server()
        start = train_supervised(server, weights.get_weights(server.model), 1, epochs=EPOCHS)
        engines, runs = [], dict[str, Iterator[RoundDone]]()
        for method in METHODS:
            setup = RunSetup(make_config(method), federation)
            server, engine = setup.server(), LocalEngine(setup)
            weights.set_weights(server.model, start)
            engines.append(engine)
            events = rounds(setup.config, server, engine, federation.names, lambda state: {})
            runs[method] = (event for event in events if isinstance(event, RoundDone))
        try:
            seen = [{method: next(run).metrics for method, run in runs.items()} for _ in range(ROUNDS)]
        finally:
            for engine in engines:
                engine.close()
    costs = {}
    for method in METHODS:
        metrics = [turn[method] for turn in seen[1:]]
        seconds = {
            step: round(statistics.mean(m["seconds"][step] for m in metrics), 3)
            for step in ("server", "clients")
        }
        costs[method] = seconds | {way: metrics[-1][way] for way in ("bytes_down", "bytes_up")}
    save("methods", {"methods": costs})
    return []


def table(found: Found) -> list[str]:
    """The table of docs/benchmarks.md."""
    head = ["method", "server", "clients", "to all clients", "from them"]
    rows = []
    for method, cost in found["methods"].items():
        seconds = [f"{cost[step]:.2f} s" for step in ("server", "clients")]
        megabytes = [f"{cost[way] / 1e6:.2f} MB" for way in ("bytes_down", "bytes_up")]
        rows.append([f"`{method}`", *seconds, *megabytes])
    return [*grid(head, rows), "", measured_on(found)]


def make_config(method: str) -> Config:
    changes = {
        "method": method,
        "rounds": ROUNDS,
        "evaluate_every": ROUNDS,
        "fedseal.bootstrap_epochs": 0,
        "bootstrap.epochs": 1 if method == "fedshift" else 0,  # its teachers cannot have none
        "fedmatch.helpers_every": ROUNDS,
    }
    return load_config("fmnist-lenet", changes)


if __name__ == "__main__":
    run()
    write_page()
