"""What secure aggregation adds to a round: bytes and CPU seconds, with clients that do not train.

All clients run one after the other in this process, so their seconds are given per client. Plain rounds are
measured beside it, on the same engine.
"""

import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from bench.page import Found, grid, measured_on, save, write_page
from fedseal.config.config import parse
from fedseal.config.sections import SecureSettings
from fedseal.core import Engine, Packet, Reply, Round
from fedseal.data.pool import Federation, Pool
from fedseal.engines.local import LocalEngine
from fedseal.engines.secure_engine import SecureEngine
from fedseal.run_setup import RunSetup

MODELS = {"LeNet": "lenet", "ResNet-9": "resnet9"}
CLIENTS = (4, 10, 50)
TARGETS = {"LeNet": "<= 1.05", "ResNet-9": "<= 1.01"}


class Timed:
    """An engine that counts the CPU seconds of its clients."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.clients, self.close, self.seconds = engine, engine.clients, engine.close, 0.0

    def exchange(self, requests: Mapping[int, Packet]) -> Iterator[Reply]:
        replies = self.engine.exchange(requests)
        while True:
            start = time.process_time()
            reply = next(replies, None)
            self.seconds += time.process_time() - start
            if reply is None:
                return
            yield reply


def federate(model: str, clients: int) -> RunSetup:
    """Clients with two images of noise each, which train for no epoch."""
    rows = np.arange(40 + 2 * clients)
    pixels = np.random.default_rng(0).integers(0, 256, (len(rows), 3, 32, 32), dtype=np.uint8)
    pool = Pool("noise", pixels, rows % 10, tuple("abcdefghij"), {"train": range(len(rows))}, flips=False)
    raw = {
        "method": "fedavg-fixmatch",
        "model": {"name": model},
        "data": {"clients": clients, "images_per_client": 2},
        "server": {"epochs": 0, "threads": 1},
        "client": {"epochs": 0},
        "engine": {"workers": 1},
    }
    own = tuple(rows[40:].reshape(clients, 2))
    names = tuple(map(str, range(clients)))
    return RunSetup(parse(raw, "secure"), Federation(pool, rows[:20], rows[20:40], own, names, {}))


def measure(
    setup: RunSetup, requests: Mapping[int, Packet], *, secure: bool, rounds: int
) -> dict[str, float]:
    """Bytes to and from a client, its CPU seconds, and those of the server: means over clients and rounds."""
    inner = Timed(LocalEngine(setup))
    engine: Engine = (
        SecureEngine(inner, setup.config.selected_method(), SecureSettings(enabled=True)) if secure else inner
    )
    list(engine.exchange(dict(list(requests.items())[:2])))  # everything is loaded
    inner.seconds, start = 0.0, time.process_time()
    for _ in range(rounds):
        replies = list(engine.exchange(requests))
        assert all(reply.problem is None for reply in replies)
    server = time.process_time() - start - inner.seconds
    engine.close()
    return {
        "down": float(np.mean([reply.down for reply in replies])),
        "up": float(np.mean([reply.up for reply in replies])),
        "client_seconds": inner.seconds / rounds / len(requests),
        "server_seconds": server / rounds,
    }


def run() -> list[tuple[str, float, str]]:
    """Rows of name, ratio and target: bytes with secure aggregation / without."""
    rows, cases = [], list[dict[str, Any]]()
    for title, model in MODELS.items():
        for clients in CLIENTS:
            setup = federate(model, clients)
            method, server = setup.config.selected_method(), setup.server()
            current = Round(1, tuple(range(clients)), range(clients))
            _, requests = method.server_round(current, method.initial_state(server), server)
            rounds = 1 if clients > 10 else 3
            plain, masked = (measure(setup, requests, secure=s, rounds=rounds) for s in (False, True))
            cases.append({"model": title, "clients": clients, "plain": plain, "secure": masked})
            ratio = (masked["down"] + masked["up"]) / (plain["down"] + plain["up"])
            if clients == 10:
                name = f"Secure aggregation / plain: bytes of a client, {title}, 10 clients"
                rows.append((name, ratio, TARGETS[title]))
    save("secure", {"cases": cases})
    return rows


def table(found: Found) -> list[str]:
    """The table of docs/benchmarks.md."""
    head = ["model", "clients", "MB to a client", "masked", "MB from it", "masked", "client", "masked"]
    rows = []
    for case in found["cases"]:
        plain, masked = case["plain"], case["secure"]
        sizes = [f"{value[way] / 1e6:.3f}" for way in ("down", "up") for value in (plain, masked)]
        seconds = [plain["client_seconds"], masked["client_seconds"], masked["server_seconds"]]
        rows.append([case["model"], str(case["clients"]), *sizes, *(f"{1000 * s:,.0f} ms" for s in seconds)])
    return [*grid([*head, "server, masked"], rows), "", measured_on(found)]


if __name__ == "__main__":
    for name, ratio, target in run():
        print(f"{name}: {ratio:.3f} ({target})")
    write_page()
