"""What the Flower engine adds to a round: bytes in each direction, and seconds beyond training.

Clients have few images and train for no epoch, so a round is almost only communication: on the local engine,
on Flower's simulation, and in a deployment with TLS and authentication on loopback. Bytes are compared with
the size of the weights.
"""

import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image
from safetensors.torch import load_file

from bench.page import Found, grid, measured_on, save, write_page
from fedseal.deploy import keys
from fedseal.storage.events_file import read_events
from fedseal.training.train import train

CLIENTS = ("east", "north", "south")
MODELS = {"LeNet": "lenet", "ResNet-9": "resnet9"}
ROUNDS = 6  # the first one, in which everything is loaded, does not count
TIME_LIMIT = 600
SETTINGS = {
    "method": "fedseal",
    "rounds": ROUNDS,
    "data.size": 32,
    "data.channels": 3,
    "bootstrap.epochs": 0,
    "fedseal.bootstrap_epochs": 0,
    "server.epochs": 0,
    "client.epochs": 0,
    "evaluate_every": ROUNDS,
}


def run() -> list[tuple[str, float, str]]:
    """Rows of name, number and target: seconds of a deployed round, and bytes / bytes of the weights."""
    rows, found = [], dict[str, dict[str, list[float]]]()
    with tempfile.TemporaryDirectory(prefix="fedseal-bench-") as temporary:
        folder = Path(temporary)
        draw(folder / "images")
        keys.create_keys(folder / "keys", ["127.0.0.1"], CLIENTS)
        for title, model in MODELS.items():
            settings = SETTINGS | {"model.name": model}
            folders = {
                "local engine, one worker": trained(folder, settings, {"engine.workers": 1}),
                "Flower's simulation": trained(folder, settings, {"engine.name": "flower"}),
                "deployed on loopback, TLS": deployed(folder, settings),
            }
            found[title] = {engine: [*measure(out)] for engine, out in folders.items()}
            seconds, down, up = found[title]["deployed on loopback, TLS"]
            if model == "lenet":
                rows.append(
                    ("Round without training, deployed on loopback, LeNet: seconds", seconds, "<= 1.5")
                )
            saved = folders["deployed on loopback, TLS"] / "model.safetensors"
            weights = sum(v.nbytes for v in load_file(saved).values())
            rows.append(
                (f"Flower: bytes per direction / weights, {title}", (down + up) / 2 / weights, "<= 1.1")
            )
            for out in folders.values():
                shutil.rmtree(out)
    save("deployment", {"clients": len(CLIENTS), "seconds, bytes to and from a client": found})
    return rows


def table(found: Found) -> list[str]:
    """The table of docs/benchmarks.md."""
    models = found["seconds, bytes to and from a client"]
    engines = list(next(iter(models.values())))
    rows = []
    for model, by_engine in models.items():
        _, down, up = by_engine[engines[-1]]
        sizes = [f"{size / 1e6:.2f} MB" for size in (down, up)]
        rows.append([model, *sizes, *(f"{by_engine[engine][0]:.2f} s" for engine in engines)])
    return [*grid(["model", "to a client", "from it", *engines], rows), "", measured_on(found)]


def draw(root: Path) -> None:
    """Folders of noise: the content of the images does not matter here."""
    rng = np.random.default_rng(0)
    parts = [f"server/{label}" for label in "abc"] + [f"clients/{name}" for name in CLIENTS]
    for part in parts:
        (root / part).mkdir(parents=True)
        for i in range(12):
            noise = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(noise).save(root / part / f"{i}.png")


def trained(folder: Path, settings: Mapping[str, object], engine: Mapping[str, object]) -> Path:
    out = folder / "-".join(map(str, engine.values()))
    train("folders", out=out, options={**settings, **engine, "data.path": str(folder / "images")})
    return out


def deployed(folder: Path, settings: Mapping[str, object]) -> Path:
    out, port = folder / "deployed", free_port()
    shutil.rmtree(folder / "memory", ignore_errors=True)
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    commands = [
        *[["serve", "folders", *words, "--labels", folder / "images" / "server", "--keys", folder / "keys"]],
        *[["join", f"127.0.0.1:{port}", "--key", folder / "keys" / "clients" / f"{c}.key"] for c in CLIENTS],
    ]
    commands[0] += ["--port", port, "--out", out, "--quiet"]
    for command, name in zip(commands[1:], CLIENTS, strict=True):
        command += ["--images", folder / "images" / "clients" / name, "--memory", folder / "memory" / name]
    started = []
    try:
        for command in commands:
            started.append(
                subprocess.Popen(
                    [sys.executable, "-m", "fedseal", *map(str, command)],
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                    stdout=subprocess.DEVNULL,
                )
            )
        if started[0].wait(TIME_LIMIT) != 0:
            raise RuntimeError("the deployment failed")
    finally:
        for process in started[1:] if started and started[0].poll() == 0 else started:
            try:
                process.wait(20 if started[0].poll() == 0 else 0)
            except subprocess.TimeoutExpired:
                process.kill()  # its child processes end with it
                process.wait()
    return out


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure(out: Path) -> tuple[float, float, float]:
    """Median seconds of the clients' step, and bytes to and from each client."""
    events = read_events(out / "events.jsonl")[1:]
    assert len(events) == ROUNDS - 1, "a client was left out"
    seconds = statistics.median(event["seconds"]["clients"] for event in events)
    return seconds, events[-1]["bytes_down"] / len(CLIENTS), events[-1]["bytes_up"] / len(CLIENTS)


if __name__ == "__main__":
    for name, ratio, target in run():
        print(f"{name}: {ratio:.3f} ({target})")
    write_page()
