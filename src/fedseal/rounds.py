"""The round loop: drives any method on any engine, and yields events."""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedseal import weights
from fedseal.config.config import Config
from fedseal.config.sections import DEFAULT_GATE
from fedseal.core import (
    Engine,
    Method,
    Metrics,
    Packet,
    PreparationStep,
    Problem,
    Reply,
    Round,
    Server,
    derive_seed,
)
from fedseal.errors import UserError
from fedseal.replies import check_reply, correct_rates, is_reserved, released, total_counts, traffic

LAST_ROUNDS = 10  # a run's accuracy is the mean over its last rounds, since single rounds fluctuate


@dataclass(frozen=True)
class ClientDone:
    """A client's reply has arrived, or was given up."""

    t: int
    client: str
    done: int
    total: int


@dataclass(frozen=True)
class LeftOut:
    """A client's reply cannot be used in this round."""

    t: int
    client: str
    problem: Problem


@dataclass(frozen=True)
class RoundDone:
    """A round has ended. `metrics` is its line in `events.jsonl`."""

    t: int
    metrics: dict[str, Any]
    state: Packet


Event = PreparationStep | ClientDone | LeftOut | RoundDone


@dataclass(frozen=True)
class Progress:
    """Where a run continues: the last finished round (0 before the first), and the state after it."""

    t: int
    state: Packet


def rounds(
    config: Config,
    server: Server,
    engine: Engine,
    names: Sequence[str],
    evaluate: Callable[[Packet], dict[str, float]],
    resume: Progress | None = None,
    spend: Callable[[int, Sequence[int]], dict[str, float]] | None = None,
) -> Iterator[Event]:
    """Runs the configured method round after round; `names` are the clients' names.

    `spend` hears of each round and the clients asked to train before they are asked. It returns numbers for
    the round's event: ε with differential privacy.
    """
    method = config.selected_method()
    state = resume.state if resume else _initial_state(config, server)
    first = resume.t + 1 if resume else 1
    for step in prepare_steps(method, state, server) if first == 1 else ():
        state = step.state
        yield step
    for t in range(first, config.rounds + 1):
        clock = Clock()
        cohort = sample_cohort(config.seed, t, engine.clients, config.cohort)
        current = Round(t, cohort, engine.clients)

        # Step 1: supervised learning at the server.
        with server.seeded(t, "server_round"):
            found = method.server_round(current, state, server)
        state, requests = check_server_round(found, current, config)
        check_finite(state, t, config)
        trained = [k for k, request in requests.items() if request.trains]
        spent = spend(t, trained) if spend else {}
        clock.lap("server")

        # Steps 2 to 4: the model goes out, clients train, their models come back.
        replies: dict[int, Reply] = {}
        left_out: list[int] = []
        for done, reply in enumerate(engine.exchange(requests), start=1):
            problem = reply.problem or check_reply(reply.packet, requests[reply.client], method)
            if problem is not None:
                left_out.append(reply.client)
                yield LeftOut(t, names[reply.client], problem)
            else:
                replies[reply.client] = reply
            yield ClientDone(t, names[reply.client], done, len(requests))
        for k, why in find_outliers(method.uploads, requests, replies, server, t).items():
            del replies[k]
            left_out.append(k)
            yield LeftOut(t, names[k], Problem(why))
        check_enough(sum(k in replies for k in trained), len(trained), t, config)
        packets = {k: replies[k].packet for k in sorted(replies)}
        seen = released(packets, requests, server.aggregation, method.uploads)
        with server.seeded(t, "collect"):
            state = check_state(method.collect(current, state, seen, server), "collect", config)
        clock.lap("clients")

        metrics: dict[str, Any] = {"event": "round", "t": t}
        if is_evaluated(t, config):
            metrics |= evaluate(state)
        clock.lap("evaluation")
        usable = replies.values()
        metrics |= traffic(usable) | total_counts(usable) | correct_rates(usable)
        metrics |= check_metrics(method.metrics(state), config)
        metrics |= spent
        metrics |= {"left_out": [names[k] for k in sorted(left_out)], "seconds": clock.laps}
        yield RoundDone(t, metrics, state)


def _initial_state(config: Config, server: Server) -> Packet:
    with server.seeded(0, "initial_state"):
        state = config.selected_method().initial_state(server)
    return check_state(state, "initial_state", config)


def prepare_steps(method: Method, state: Packet, server: Server) -> Iterator[PreparationStep]:
    """The method's steps before round 1, each seeded by the state before it, as it is after a resume."""
    steps: Iterator[PreparationStep | None] = iter(method.prepare(state, server))
    while True:
        with server.seeded(0, f"prepare {hashlib.sha256(state.to_bytes()).hexdigest()}"):
            step = next(steps, None)
        if step is None:
            return
        state = step.state
        yield step


def is_evaluated(t: int, config: Config) -> bool:
    """Whether accuracies are measured after round t."""
    return t % config.evaluate_every == 0 or t > config.rounds - LAST_ROUNDS


def sample_cohort(seed: int, t: int, clients: Sequence[int], size: int) -> tuple[int, ...]:
    """K^t: the clients sampled in round t; all of them for size 0, or if there are no more."""
    if size == 0 or size >= len(clients):
        return tuple(clients)
    chosen = np.random.default_rng(derive_seed(seed, "cohort", t)).choice(len(clients), size, replace=False)
    return tuple(clients[i] for i in sorted(chosen.tolist()))


def find_outliers(
    group: str, requests: Mapping[int, Packet], replies: Mapping[int, Reply], server: Server, t: int
) -> dict[int, str]:
    """The clients whose trained weights do not fit those of the others, and why."""
    uploads = {k: replies[k].packet.tensors[group] for k in sorted(replies) if requests[k].trains}
    with server.seeded(t, "screen"):
        return server.aggregation.screen(uploads, {k: requests[k].tensors[group] for k in uploads}, t)


def check_finite(state: Packet, t: int, config: Config) -> None:
    """Stops a run that has diverged."""
    if not all(weights.all_finite(group) for group in state.tensors.values()):
        raise UserError(
            f"Round {t}: the server's model has NaN or infinite weights. The learning rate may be too high:"
            f" lower server.lr ({config.server.lr}) or client.lr ({config.client.lr}). Or a client sends"
            f" forged weights: set aggregate.gate ({config.aggregate.gate:g}) to {DEFAULT_GATE:g}."
        )


def check_enough(usable: int, asked: int, t: int, config: Config) -> None:
    """Stops a run if too few of the clients that were asked to train sent a usable reply."""
    needed = config.engine.min_replies
    if needed is None:
        needed = asked // 2 + 1 if asked > 2 else 1
    if usable < min(needed, asked):
        raise UserError(
            f"Round {t}: only {usable} of {asked} clients sent a usable reply, but a round needs {needed}"
            " (engine.min_replies): continue with --resume when they are back."
        )


def check_state(state: object, step: str, config: Config) -> Packet:
    """Refuses what is no state of a run."""
    if not isinstance(state, Packet) or "model" not in state.tensors:
        raise UserError(f"{config.method}: {step} must return a Packet with the group 'model' as the state.")
    return state


def check_server_round(found: object, current: Round, config: Config) -> tuple[Packet, Mapping[int, Packet]]:
    """Refuses what is not a state and requests."""
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], Mapping):
        raise UserError(f"{config.method}: server_round must return the state, and requests by client.")
    state, requests = found
    everyone = current.everyone if isinstance(current.everyone, range) else set(current.everyone)
    for k, request in requests.items():
        if k not in everyone or not isinstance(request, Packet) or "t" not in request.scalars:
            raise UserError(
                f"{config.method}: server_round must return a Packet with the scalar 't' for each client that"
                f" it asks, but not for client {k!r}."
            )
    return check_state(state, "server_round", config), requests


def check_metrics(metrics: object, config: Config) -> Metrics:
    """Refuses a method's metrics that do not fit into an event."""
    if not isinstance(metrics, Mapping):
        raise UserError(f"{config.method}: metrics must return numbers by name, not {metrics!r}.")
    for name, value in metrics.items():
        if not isinstance(name, str) or is_reserved(name):
            raise UserError(f"{config.method}: the metric name {name!r} is reserved, choose another one.")
        numbers = value if isinstance(value, list) else [value]
        if not all(isinstance(number, int | float) for number in numbers):
            raise UserError(
                f"{config.method}: the metric '{name}' is {value!r}, but must be a number, or a list of them."
            )
    return metrics


class Clock:
    """Seconds by step."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Ends a step."""
        now = time.perf_counter()
        self.laps[name] = round(now - self._last, 4)
        self._last = now
