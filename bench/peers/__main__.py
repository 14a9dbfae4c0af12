"""fedseal and other federated-learning frameworks on the same work, side by side on this machine.

FedAvg with LeNet on Fashion-MNIST: 10 clients with 1,200 images each, all of them in every round, 5 local
epochs, batches of 32, plain SGD, no augmentation, no evaluation. The contestants take turns, so that other
work on the machine slows down all of them alike. Only a full measurement is written to `results` and `docs`.

    python -m bench.peers [--rounds N] [--turns N] [--only NAME...]
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.page import Found, grid, measured_on, save, write_page
from bench.peers.work import BATCH, EPOCHS, LR, LeNet
from fedseal.config.config import Config
from fedseal.config.load import load_config
from fedseal.data.federation import load_federation
from fedseal.run_setup import RunSetup
from fedseal.system.machine import versions

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OURS, PEERS = Path(sys.executable), ROOT / ".venv-peers" / "bin" / "python"
ROUNDS, TURNS, TIME_LIMIT = 4, 3, 600
TEST_IMAGES = 10_000
ACCURACY_RANGE = 0.03  # between contestants: each shuffles in its own way

SETTINGS = {
    "method": f"{HERE / 'plain_fedavg.py'}:PlainFedAvg",
    "cohort": 0,
    "data.partition": "iid",
    "data.test_per_client": 0,
    "data.held_out_test": 10,  # the last ten rounds are always evaluated: on few images it costs nothing
    "data.validation": 10,
    "client.epochs": EPOCHS,
    "client.batch": BATCH,
    "client.lr": LR,
    "client.decay": 1.0,
    "client.momentum": 0.0,
}


@dataclass(frozen=True)
class Contestant:
    """A script of this folder, the Python that runs it, and its last arguments."""

    name: str
    script: str
    python: Path
    processes: int
    arguments: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)


ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
FLOWER = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # Ray would run its workers at low priority
}
CONTESTANTS = (
    Contestant("fedseal", "run_fedseal.py", OURS, 2),
    Contestant("Flower + Ray, usual", "run_flower.py", OURS, 2, ("usual",), ONE_THREAD | FLOWER),
    Contestant("Flower + Ray, tuned", "run_flower.py", OURS, 2, ("tuned",), ONE_THREAD | FLOWER),
    Contestant("pfl, usual", "run_pfl.py", PEERS, 1, ("usual",), ONE_THREAD),
    Contestant("pfl, tuned", "run_pfl.py", PEERS, 2, ("tuned",), ONE_THREAD),
    Contestant("FedLab, usual", "run_fedlab.py", PEERS, 1, ("usual",), ONE_THREAD),
    Contestant("FedLab, tuned", "run_fedlab.py", PEERS, 2, ("tuned",), ONE_THREAD),
    Contestant("bare PyTorch loop", "run_limit.py", OURS, 2, variables=ONE_THREAD),
)


@dataclass(frozen=True)
class Turn:
    """One run of a contestant."""

    rounds: list[float]  # seconds
    wall: float  # seconds of the whole process
    accuracy: float
    busy: float  # the share of the machine that other programs used before it


def write_work(config: Config, path: Path) -> tuple[Tensor, Tensor]:
    """Writes what the contestants start from: fedseal's split, initial weights and normalisation.

    Returns the images and labels of a test set that no client has.
    """
    setup = RunSetup(config, load_federation(config.data, config.seed))
    federation, network = setup.federation, setup.network()
    clients = [setup.labelled_images(rows) for rows in federation.clients]
    content = {
        "images": torch.stack([client.pixels for client in clients]),
        "labels": torch.stack([client.labels for client in clients]),
        "mean": network.mean.clone(),
        "std": network.std.clone(),
        **{name: value.contiguous() for name, value in network.body.state_dict().items()},
    }
    save_file(content, path)
    used = np.concatenate([federation.labelled, *federation.clients])
    unused = np.setdiff1d(np.arange(len(federation.pool.labels)), used)
    rows = np.random.default_rng(0).choice(unused, TEST_IMAGES, replace=False)
    test = setup.labelled_images(rows)
    return (test.pixels - network.mean) / network.std, test.labels


def run(contestant: Contestant, work: Path, rounds: int, folder: Path, test: tuple[Tensor, Tensor]) -> Turn:
    """Runs a contestant in its own process and checks the model that it made."""
    if contestant.name == "fedseal":
        arguments = [str(folder), f"rounds={rounds}", *(f"{k}={v}" for k, v in SETTINGS.items())]
        model = folder / "model.safetensors"
    else:
        model = folder.with_suffix(".safetensors")
        arguments = [str(work), str(model), str(rounds), *contestant.arguments]
    variables = {"FLWR_HOME": str(work.with_name("flower")), **contestant.variables}
    busy = busy_share()
    with tempfile.TemporaryFile("w+") as errors:
        start = time.perf_counter()
        process = subprocess.Popen(
            [contestant.python, HERE / contestant.script, *arguments],
            env=os.environ | variables,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
        try:
            code = process.wait(TIME_LIMIT)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
            raise
        wall = time.perf_counter() - start
        errors.seek(0)
        if code != 0:
            raise RuntimeError(f"{contestant.name} failed:\n{errors.read()[-3000:]}")
    seconds = json.loads(model.with_suffix(".json").read_text())["seconds"]
    if len(seconds) != rounds:
        raise RuntimeError(f"{contestant.name} ran {len(seconds)} rounds instead of {rounds}")
    return Turn(seconds, wall, accuracy(model, *test), busy)


def busy_share(seconds: float = 1.0) -> float:
    """The share of all cores that is in use, measured for a moment."""

    def ticks() -> tuple[int, int]:
        numbers = [int(word) for word in Path("/proc/stat").read_text().split(maxsplit=9)[1:9]]
        return sum(numbers) - numbers[3] - numbers[4], sum(numbers)

    used, total = ticks()
    time.sleep(seconds)
    used_after, total_after = ticks()
    return (used_after - used) / (total_after - total)


@torch.inference_mode()
def accuracy(model: Path, images: Tensor, labels: Tensor) -> float:
    """The test accuracy of a saved model."""
    network = LeNet()
    names = network.state_dict().keys()
    weights = {name.removeprefix("body."): value for name, value in load_file(model).items()}
    network.load_state_dict({name: weights[name] for name in names})
    return float((network(images).argmax(dim=1) == labels).double().mean())


def summarize(turns: list[Turn]) -> dict[str, Any]:
    """Medians over the turns; a steady round is one after the first."""
    steady = [seconds for turn in turns for seconds in turn.rounds[1:] or turn.rounds]
    return {
        "steady_round": round(statistics.median(steady), 3),
        "first_round": round(statistics.median(turn.rounds[0] for turn in turns), 3),
        "wall": round(statistics.median(turn.wall for turn in turns), 3),
        "accuracy": round(statistics.median(turn.accuracy for turn in turns), 4),
        "rounds": [[round(seconds, 3) for seconds in turn.rounds] for turn in turns],
        "walls": [round(turn.wall, 3) for turn in turns],
        "busy_before": [round(turn.busy, 2) for turn in turns],
    }


HEADER = ("", "processes", "round", "first", "whole run", "round ÷ ours", "run ÷ ours", "accuracy")
# Least ratios of what is usual to fedseal.
TARGETS = (
    ("steady_round", "Flower", 1.25),
    ("steady_round", "pfl", 1.8),
    ("steady_round", "FedLab", 2.0),
    ("wall", "Flower", 2.5),
)


def compare(summaries: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The targets and the measured ratios."""
    found = []
    for what, peer, target in TARGETS:
        usual = next(row for name, row in summaries.items() if name.startswith(peer) and "usual" in name)
        ratio = round(usual[what] / summaries["fedseal"][what], 2)
        found.append(
            {"what": what, "peer": peer, "ratio": ratio, "target": target, "reached": ratio >= target}
        )
    return found


def table_rows(summaries: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    ours = summaries["fedseal"]
    processes = {contestant.name: contestant.processes for contestant in CONTESTANTS}
    return [
        (
            name,
            str(processes[name]),
            f"{row['steady_round']:.2f} s",
            f"{row['first_round']:.2f} s",
            f"{row['wall']:.1f} s",
            f"{row['steady_round'] / ours['steady_round']:.2f}",
            f"{row['wall'] / ours['wall']:.2f}",
            f"{row['accuracy']:.1%}",
        )
        for name, row in summaries.items()
    ]


def save_results(summaries: dict[str, dict[str, Any]]) -> None:
    """Writes results/bench/peers.json, with the versions of the frameworks."""
    found = metadata.distributions(path=[str(path) for path in PEERS.parents[1].glob("lib/*/site-packages")])
    packages = {name: metadata.version(name) for name in ("flwr", "ray")}
    packages |= {about.name: about.version for about in found if about.name in ("pfl", "fedlab")}
    save(
        "peers",
        {"versions": versions() | packages, "seconds": summaries, "targets": compare(summaries)},
    )


def table(found: Found) -> list[str]:
    """The table of docs/benchmarks.md."""
    rows = [[*row] for row in table_rows(found["seconds"])]
    packages = ("fedseal", "torch", "flwr", "ray", "fedlab", "pfl")
    return [*grid([*HEADER], rows), "", measured_on(found, packages)]


def main() -> None:
    names = [contestant.name for contestant in CONTESTANTS]
    parser = argparse.ArgumentParser(prog="python -m bench.peers")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    given = parser.parse_args()
    turns: dict[str, list[Turn]] = {name: [] for name in names if name in given.only}
    with tempfile.TemporaryDirectory(prefix="fedseal-peers-") as temporary:
        folder, work = Path(temporary), Path(temporary) / "work.safetensors"
        test = write_work(load_config("fmnist-lenet", {**SETTINGS, "rounds": given.rounds}), work)
        for turn in range(given.turns):
            for number, contestant in enumerate(CONTESTANTS):
                if contestant.name in turns:
                    done = run(contestant, work, given.rounds, folder / f"{turn}-{number}", test)
                    turns[contestant.name].append(done)
                    rounds = " ".join(f"{seconds:.2f}" for seconds in done.rounds)
                    about = f"whole run {done.wall:.1f} s, accuracy {done.accuracy:.1%}"
                    print(
                        f"{contestant.name}: rounds {rounds} s, {about} ({done.busy:.0%} busy before)",
                        flush=True,
                    )
    summaries = {name: summarize(done) for name, done in turns.items()}
    accuracies = [summary["accuracy"] for summary in summaries.values()]
    if max(accuracies) - min(accuracies) > ACCURACY_RANGE:
        raise RuntimeError(f"the contestants do not reach the same accuracy: {accuracies}")
    if "fedseal" in summaries:
        shown = Table(*HEADER, title=f"FedAvg, LeNet, {given.rounds} rounds")
        for row in table_rows(summaries):
            shown.add_row(*row)
        Console(width=110).print(shown)
    if given.only == names:
        for row in compare(summaries):
            mark = "ok" if row["reached"] else "miss"
            print(f"{row['peer']}, {row['what']}: {row['ratio']:.2f} (target {row['target']}) {mark}")
    if (given.rounds, given.turns, given.only) == (ROUNDS, TURNS, names):
        save_results(summaries)
        write_page()


if __name__ == "__main__":
    main()
