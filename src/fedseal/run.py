"""The only round loop, with checkpoint and resume."""

import json
import re
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedseal import weights
from fedseal.core import Engine, Images, Method, Packet, Prepared, Reply, Round, Site, derive_seed
from fedseal.errors import UserError
from fedseal.files import write_atomic
from fedseal.learn import accuracy, predict
from fedseal.sites import Sites

LAST = 10  # rounds that a run's accuracy is averaged over, since single rounds wander


@dataclass(frozen=True)
class ClientDone:
    """A client's reply has come in."""

    t: int
    done: int
    total: int


@dataclass(frozen=True)
class LeftOut:
    """A client's reply cannot be used in this round."""

    t: int
    client: str
    reason: str


@dataclass(frozen=True)
class RoundDone:
    """A round has ended. `metrics` is what `events.jsonl` shows of it."""

    t: int
    metrics: dict[str, Any]
    state: Packet


Event = Prepared | ClientDone | LeftOut | RoundDone


@dataclass(frozen=True)
class Checkpoint:
    """All that it takes to go on after a round; t = 0 is before the first."""

    t: int
    state: Packet
    memories: Mapping[str, bytes]
    seconds: float = 0.0

    def save(self, path: Path, fingerprint: str) -> None:
        """One file, there whole or not at all; `fingerprint` says to which run it belongs."""
        tensors = {f"state.{name}": group for name, group in self.state.tensors.items()}
        joined = bytearray().join(self.memories.values())  # one tensor: thousands of small ones take long
        sizes = [len(memory) for memory in self.memories.values()]
        tensors["memories"] = {
            "bytes": torch.frombuffer(joined, dtype=torch.uint8)
            if joined
            else torch.zeros(0, dtype=torch.uint8),
            "sizes": torch.tensor(sizes, dtype=torch.int64),
        }
        scalars = {f"state.{name}": value for name, value in self.state.scalars.items()}
        scalars |= {"t": self.t, "seconds": self.seconds, "fingerprint": fingerprint}
        scalars["clients"] = json.dumps(list(self.memories))
        write_atomic(path, Packet(tensors, scalars).to_bytes())

    @staticmethod
    def load(path: Path, fingerprint: str) -> "Checkpoint":
        """Refuses a damaged checkpoint, and one of another run."""
        try:
            packet = Packet.from_bytes(path.read_bytes())
            scalars, memories = packet.scalars, packet.tensors["memories"]
            parts = memories["bytes"].split(memories["sizes"].tolist())
            kept = {
                k: m.numpy().tobytes()
                for k, m in zip(json.loads(str(scalars["clients"])), parts, strict=True)
            }
            t, seconds, found = int(scalars["t"]), float(scalars["seconds"]), scalars["fingerprint"]
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}): see to it, and try again.") from error
        except Exception as error:
            raise UserError(
                f"{path} is damaged ({type(error).__name__}): delete it to start again."
            ) from error
        if found != fingerprint:
            raise UserError(
                f"{path} is of another configuration, other data or other clients: resume with the"
                " config.toml beside it and the same clients, or choose another --out."
            )
        state = Packet(
            {k.removeprefix("state."): v for k, v in packet.tensors.items() if k.startswith("state.")},
            {k.removeprefix("state."): v for k, v in scalars.items() if k.startswith("state.")},
        )
        return Checkpoint(t, state, kept, seconds)


def rounds(
    method: Method, server: Site, engine: Engine, sites: Sites, resume: Checkpoint | None = None
) -> Iterator[Event]:
    """Runs a method on an engine, round after round, and tells what happens."""
    config, examine = sites.config, Examination(sites)
    state = resume.state if resume else method.start(server)
    first = resume.t + 1 if resume else 1
    for step in method.prepare(state, server) if first == 1 else ():
        state = step.state
        yield step
    for t in range(first, config.rounds + 1):
        clock = Clock()
        round = Round(t, sample(config.seed, t, len(engine.clients), config.cohort), engine.clients)

        # Step 1: supervised learning at the server.
        state, requests = method.server_round(round, state, server)
        if not all(weights.finite(group) for group in state.tensors.values()):
            raise UserError(
                f"Round {t}: the server's model has NaN or infinite weights; most likely the learning"
                f" rate is too high: lower server.lr ({config.server.lr}) or client.lr ({config.client.lr})."
            )
        clock.lap("server")

        # Steps 2 to 4: the model goes out, clients learn, their models come back.
        replies: dict[int, Reply] = {}
        left_out: list[int] = []
        for done, reply in enumerate(engine.exchange(requests), start=1):
            problem = reply.problem or unusable(reply.packet, requests[reply.client], method.uploads)
            if problem:
                left_out.append(reply.client)
                yield LeftOut(t, sites.federation.names[reply.client], problem)
            else:
                replies[reply.client] = reply
            yield ClientDone(t, done, len(requests))
        asked = [k for k, request in requests.items() if request.scalars.get("train", True)]
        usable = sum(k in replies for k in asked)
        if usable < min(config.engine.min_replies, len(asked)):
            raise UserError(
                f"Round {t}: {usable} of {len(asked)} clients gave a usable reply, fewer than"
                f" engine.min_replies ({config.engine.min_replies}): go on with --resume when they are back."
            )
        packets = {k: replies[k].packet for k in sorted(replies)}
        state = method.collect(round, state, packets, server)
        clock.lap("clients")

        metrics: dict[str, Any] = {"event": "round", "t": t}
        if t % config.evaluate_every == 0 or t > config.rounds - LAST:
            metrics |= examine(server, state)
        clock.lap("evaluation")
        metrics |= traffic(replies.values()) | summed(packets) | correct_rates(replies.values())
        if "thresholds" in state.tensors:
            metrics["tau"] = state.tensors["thresholds"]["tau"].tolist()
        if "lambda" in state.scalars:
            metrics["lambda"] = state.scalars["lambda"]
        names = [sites.federation.names[k] for k in sorted(left_out)]
        metrics |= {"left_out": names, "seconds": clock.laps}
        yield RoundDone(t, metrics, state)


def sample(seed: int, t: int, clients: int, cohort: int) -> tuple[int, ...]:
    """K^t: the clients sampled in round t, all of them for cohort = 0."""
    if cohort == 0 or cohort == clients:
        return tuple(range(clients))
    chosen = np.random.default_rng(derive_seed(seed, "cohort", t)).choice(clients, cohort, replace=False)
    return tuple(sorted(chosen.tolist()))


def unusable(reply: Packet, request: Packet, uploads: str = "model") -> str:
    """Why what a client sends cannot be used; empty if it can."""
    if len(counts(reply)) > MOST_COUNTS:
        return f"it counts {len(counts(reply))} things, more than {MOST_COUNTS}"
    for name, value in counts(reply).items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,39}", name):
            return "it counts something whose name is none (up to 40 letters, digits and '_')"
        if name in OWN or name.endswith(("accuracy", "_correct")):
            return f"it counts '{name}', which is not a client's to count"
        if not 0 <= value < 2**53:
            return f"its '{name}' is no number of images"
    if uploads not in reply.tensors:
        return "" if not request.scalars.get("train", True) else "its reply holds no model"
    came, sent = reply.tensors[uploads], request.tensors[uploads]
    if not weights.same_layout(came, sent):
        return "its model has other names, shapes or types than the one it was sent"
    if not all(weights.finite(group) for group in reply.tensors.values()):
        return "its model has NaN or infinite weights (client.lr too high?)"
    if any(name in sent and not torch.equal(came[name], sent[name]) for name in ("mean", "std")):
        return "its model normalises images otherwise than the one it was sent"
    if any(bool((value < 0).any()) for name, value in came.items() if name.endswith("running_var")):
        return "its model has negative variances"
    if weights.largest(came) > MOST_GROWTH * (1 + weights.largest(sent)):
        return f"its model has weights more than {MOST_GROWTH} times as large (client.lr too high?)"
    return ""


MOST_COUNTS = 20
MOST_GROWTH = 1000  # of the largest weight in a round: beyond that a client has diverged
OWN = {"event", "tau", "lambda", "bytes_down", "bytes_up", "left_out", "seconds"}  # names in an event


def counts(reply: Packet) -> dict[str, int]:
    """What a client counts: |D⁺| and |D⁻| of FedSEAL."""
    whole = {k: v for k, v in reply.scalars.items() if isinstance(v, int) and not isinstance(v, bool)}
    return {name: value for name, value in whole.items() if name != "t"}


class Examination:
    """Accuracies of the global model and of the clients' average, on every test set and on validation."""

    def __init__(self, sites: Sites) -> None:
        tests = sites.federation.tests
        rows = np.unique(np.concatenate([np.zeros(0, np.int64), *tests.values()]))
        self.images: Images = sites.images(rows, labels=True)  # an image in two test sets is looked at once
        self.tests = {
            name: torch.from_numpy(np.searchsorted(rows, test)) for name, test in tests.items() if len(test)
        }

    def __call__(self, server: Site, state: Packet) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for group, prefix in (("model", ""), ("average", "average_")):
            if group in state.tensors:
                result |= self.of(server, state.tensors[group], prefix)
        return result

    def of(self, server: Site, model: weights.Tensors, prefix: str = "") -> dict[str, float]:
        """`test_accuracy` and the like of one model, with `prefix` before each name."""
        assert server.validation is not None and server.validation.labels is not None
        probs = predict(server, model, self.images)
        assert self.images.labels is not None
        labels = self.images.labels
        result = {f"{prefix}{name}_accuracy": accuracy(probs[r], labels[r]) for name, r in self.tests.items()}
        if prefix:  # average_accuracy, average_official_accuracy, …
            result = {name.replace("_test_", "_"): value for name, value in result.items()}
        checked = predict(server, model, server.validation)
        return result | {f"{prefix}validation_accuracy": accuracy(checked, server.validation.labels)}


def traffic(replies: Collection[Reply]) -> dict[str, int]:
    """Bytes that went to the clients and came back."""
    return {"bytes_down": sum(r.down for r in replies), "bytes_up": sum(r.up for r in replies)}


def summed(packets: Mapping[int, Packet]) -> dict[str, int]:
    """What the clients count, added up."""
    total: Counter[str] = Counter()
    for packet in packets.values():
        total.update(counts(packet))
    return dict(total)


def correct_rates(replies: Collection[Reply]) -> dict[str, float]:
    """Shares of right labels, where a simulation knows the truth."""
    total: Counter[str] = Counter()
    for reply in replies:
        total.update(reply.diagnosis)
    names = [name.removesuffix("_known") for name in total if name.endswith("_known") and total[name]]
    return {f"{name}_correct": total[f"{name}_right"] / total[f"{name}_known"] for name in names}


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
