"""The overhead of a round: FedSEAL and FedAvg of preset `fmnist-lenet` against the limit.

The limit (`bench/limit.py`) makes the same training steps and predictions as the round just measured, in the
same batch sizes and with as many processes, in the fastest way found on this machine. The measured round is
`fedseal.rounds.rounds` on the local engine, with evaluation, events, TensorBoard and a checkpoint. FedAvg is
that of the comparison with peers: no augmentation, plain SGD, and next to no evaluation.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.limit import LimitRound, fastest_variant
from bench.peers import plain_fedavg
from fedseal.config.load import load_config
from fedseal.core import Packet, Reply
from fedseal.data.federation import load_federation
from fedseal.engines.local import LocalEngine
from fedseal.engines.memory_store import MemoryStore
from fedseal.rounds import Event, RoundDone, rounds
from fedseal.run_setup import RunSetup
from fedseal.system.environment import set_up_process
from fedseal.system.machine import cores, threads
from fedseal.training.evaluate import MIX_IMAGES, Evaluator
from fedseal.training.observers import Checkpoints, EventLog, Observer, TensorBoard

REPEATS = 7
FEDSEAL = {"fedseal.bootstrap_epochs": 100}  # enough for D⁺ and D⁻ of realistic sizes
FEDAVG = {
    "method": f"{Path(plain_fedavg.__file__)}:PlainFedAvg",
    "data.test_per_client": 0,
    "data.held_out_test": 10,  # the last ten rounds are always evaluated: on few images it costs nothing
    "data.validation": 10,
    "client.momentum": 0.0,
}

Laps = dict[str, float]


@dataclass(frozen=True)
class Work:
    """The training steps and predictions of a round: sizes of batches, and numbers of images."""

    server_steps: list[int]
    server_predictions: int
    clients: list[tuple[int, list[int]]]  # predictions and steps of each client
    evaluations: int  # images that the final models predict


def run(repeats: int = REPEATS) -> list[tuple[str, float, str]]:
    """Rows of name, measured ratio of seconds per round, and target."""
    rows = []
    for name, changes, target in (("FedSEAL", FEDSEAL, "<= 1.10"), ("FedAvg", FEDAVG, "<= 1.05")):
        ours, limits = compare(name, changes, repeats)
        rows.append((f"{name} round / limit, seconds", ours / limits, target))
    return rows


def compare(name: str, changes: Mapping[str, Any], repeats: int) -> tuple[float, float]:
    """Median seconds of our round and of the limit; they take turns, so that both meet the same noise."""
    config = load_config("fmnist-lenet", {**changes, "rounds": 1 + repeats}).with_threads(cores())
    set_up_process(config.engine.arithmetic)
    setup = RunSetup(config, load_federation(config.data, config.seed))
    server, ours, limits = setup.server(), list[Laps](), list[Laps]()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        stack.enter_context(threads(config.server.threads))
        memories = MemoryStore(Path(folder) / "memories.sqlite", "bench")
        stack.callback(memories.close)
        engine = Counting(setup, memories)
        stack.callback(engine.close)
        observers: list[Observer] = [
            EventLog(Path(folder) / "events.jsonl", 0),
            TensorBoard(Path(folder) / "tensorboard", 0),
            Checkpoints(Path(folder) / "state.safetensors", memories, 1, config.rounds, time.perf_counter),
        ]
        for observer in observers:
            stack.callback(observer.close)
        evaluate = Evaluator(setup, server)
        events = rounds(config, server, engine, setup.federation.names, evaluate)
        our_round(events, observers)  # also bootstraps and starts the workers
        limit = stack.enter_context(LimitRound(fastest_variant(), cores(), config.client.momentum))
        limit_round(limit, make_work(setup, engine.replies))
        for _ in range(repeats):
            ours.append(our_round(events, observers))
            limits.append(limit_round(limit, make_work(setup, engine.replies)))
            print(f"{name} round {ours[-1]['round']:.2f} s, limit {limits[-1]['round']:.2f} s", flush=True)
    for title, laps in ((name, ours), ("limit", limits)):
        medians = {lap: statistics.median(one.get(lap, 0.0) for one in laps) for lap in ours[0]}
        print(f"{title}: " + ", ".join(f"{lap} {seconds:.3f} s" for lap, seconds in medians.items()))
    seconds, least = (statistics.median(one["round"] for one in laps) for laps in (ours, limits))
    return seconds, least


class Counting(LocalEngine):
    """The local engine; it keeps the counts in the replies of a round."""

    def exchange(self, requests: Mapping[int, Packet]) -> Iterator[Reply]:
        self.replies: dict[int, dict[str, int]] = {}
        for reply in super().exchange(requests):
            self.replies[reply.client] = reply.packet.counts
            yield reply


def our_round(events: Iterator[Event], observers: list[Observer]) -> Laps:
    """Runs to the end of a round; returns seconds by step and of the whole round."""
    start = time.perf_counter()
    for event in events:
        for observer in observers:
            observer(event)
        if isinstance(event, RoundDone):
            total = time.perf_counter() - start
            laps: Laps = event.metrics["seconds"]
            return laps | {"observers": total - sum(laps.values()), "round": total}
    raise AssertionError("there are no more rounds")


def make_work(setup: RunSetup, replies: Mapping[int, Mapping[str, int]]) -> Work:
    """The steps and predictions of the round in which clients sent these counts."""
    config, federation = setup.config, setup.federation
    fedseal = config.method == "fedseal"
    clients = []
    for k, counts in replies.items():
        images = len(federation.clients[k])
        if fedseal:  # as `FedSEAL.client_batches` pairs D⁺ and D⁻
            sets = [counts["positive"], counts["negative"]]
            sizes = [sum(n > 0 for n in sets) * size for size in chunks(max(sets), config.client.batch)]
        else:
            sizes = chunks(images, config.client.batch)
        clients.append((images if fedseal else 0, config.client.epochs * sizes))
    steps = config.server.epochs * chunks(len(federation.labelled), config.server.batch)
    tested = len({row for rows in federation.tests.values() for row in rows.tolist()})
    for_mixes = sum(min(len(federation.clients[k]), MIX_IMAGES) for k in range(len(federation.client_tests)))
    return Work(
        server_steps=steps if fedseal else [],
        server_predictions=len(federation.validation) if fedseal else 0,
        clients=clients,
        evaluations=2 * (tested + len(federation.validation) + for_mixes),
    )


def limit_round(limit: LimitRound, work: Work) -> Laps:
    """Seconds of the limit by step and in total."""
    start = time.perf_counter()
    limit.parent.train(work.server_steps)
    limit.parent.predict(work.server_predictions)
    server = time.perf_counter()
    limit.clients(work.clients)
    clients = time.perf_counter()
    limit.parent.predict(work.evaluations)
    end = time.perf_counter()
    laps = {"server": server - start, "clients": clients - server, "evaluation": end - clients}
    return laps | {"round": end - start}


def chunks(n: int, size: int) -> list[int]:
    """Sizes of the batches of n images."""
    return [min(size, n - start) for start in range(0, n, size)]


if __name__ == "__main__":
    for name, ratio, target in run():
        print(f"{name}: {ratio:.2f} ({target})")
