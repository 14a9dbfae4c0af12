"""What each method costs: seconds and bytes of a round on preset `fmnist-lenet`, side by side.

All start from the same model, trained on the labels for a while, so that clients find confident images to
learn from; how many steps a round takes depends on that. Methods take turns, round by round.
"""

import statistics
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from fedseal import weights
from fedseal.api import deal
from fedseal.config import Config, load_config
from fedseal.engines.local import LocalEngine
from fedseal.learn import train_supervised
from fedseal.machine import threads
from fedseal.methods import METHODS
from fedseal.run import RoundDone, rounds
from fedseal.sites import Sites

ROUNDS = 3  # of which the first, when workers start, does not count
EPOCHS = 200  # of supervised learning before


def run() -> list[tuple[str, float, str]]:
    """Prints the table; there is no target to keep to."""
    base = config_of("fedseal")
    federation = deal(base.data, base.seed)
    with threads(base.server.threads):
        server = Sites(base, federation).server()
        start = train_supervised(server, weights.save(server.model), 1, epochs=EPOCHS)
        engines, runs = [], dict[str, Iterator[RoundDone]]()
        for method in METHODS:
            sites = Sites(config_of(method), federation)
            server, engine = sites.server(), LocalEngine(sites)
            weights.load(server.model, start)
            engines.append(engine)
            events = rounds(sites.config.chosen(), server, engine, sites)
            runs[method] = (event for event in events if isinstance(event, RoundDone))
        try:
            seen = [{method: next(run).metrics for method, run in runs.items()} for _ in range(ROUNDS)]
        finally:
            for engine in engines:
                engine.close()
    table = Table("method", title="A round of fmnist-lenet: 10 clients of 1,200 images, all sampled")
    for column in ("server, s", "clients, s", "MB down", "MB up"):
        table.add_column(column, justify="right")
    for method in METHODS:
        metrics = [turn[method] for turn in seen[1:]]
        seconds = [statistics.mean(m["seconds"][step] for m in metrics) for step in ("server", "clients")]
        megabytes = [metrics[-1][way] / 1e6 for way in ("bytes_down", "bytes_up")]
        table.add_row(method, *(f"{value:.2f}" for value in seconds + megabytes))
    Console().print(table)
    return []


def config_of(method: str) -> Config:
    changes = {"method": method, "rounds": ROUNDS, "fedseal.bootstrap_epochs": 0, "evaluate_every": ROUNDS}
    return load_config("fmnist-lenet", changes | {"fedmatch.helpers_every": ROUNDS})


if __name__ == "__main__":
    run()
