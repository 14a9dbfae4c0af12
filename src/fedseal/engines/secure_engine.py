"""Secure aggregation over any engine (see fedseal/secure.py): the server's side.

A round has four exchanges instead of one. What comes out has the usual form: one reply per client in the sum,
each with the average model, whose mean is that model to the bit. The first reply has all counts. So neither
methods nor the round loop know of it.
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from fedseal import secure
from fedseal.config.config import Config
from fedseal.config.sections import SecureSettings
from fedseal.core import Engine, Method, Packet, Problem, Reply, Scalar
from fedseal.engines.secure_client import (
    CLIENTS,
    CLIP,
    GROUP,
    KEYS,
    LISTEN,
    NAMES,
    PHASE,
    REASONS,
    REFUSED,
    SHARES,
    UNMASK,
    UPLOAD,
)
from fedseal.errors import UserError
from fedseal.replies import MAX_COUNT, is_count_name, is_reserved
from fedseal.weights import Tensors, same_layout

log = logging.getLogger("fedseal")

T = TypeVar("T")


def check(config: Config, clients: int) -> None:
    """Refuses what cannot work with masked uploads, before anything is written."""
    method, asked = config.selected_method(), config.cohort or clients
    if method.needs_single_replies:
        raise UserError(
            f"{config.method} needs the replies of single clients, which secure aggregation hides: set"
            " secure.enabled to false, or use another method."
        )
    if method.also_uploads:
        raise UserError(
            f"{config.method} uploads {', '.join(method.also_uploads)} beside its model, which secure"
            " aggregation does not add up: set secure.enabled to false, or use another method."
        )
    if config.aggregate.rule != "mean":
        raise UserError(
            f'aggregate.rule = "{config.aggregate.rule}" compares single uploads, which secure aggregation'
            ' hides: use "mean", or set secure.enabled to false.'
        )
    if config.simulate.malicious:
        raise UserError(
            "simulate.malicious changes uploads, which secure aggregation masks before: set it to 0, or set"
            " secure.enabled to false."
        )
    if asked > secure.MAX_CLIENTS:
        raise UserError(
            f"Secure aggregation takes at most {secure.MAX_CLIENTS:,} clients in a round: lower cohort."
        )
    if method.uses_clients and asked < max(2, config.secure.threshold):
        raise UserError(
            f"Secure aggregation needs at least {max(2, config.secure.threshold)} clients in a round"
            f" (secure.threshold), but there are {asked}: use more clients, or set secure.enabled to false."
        )


class SecureEngine:
    """Runs the phases of secure aggregation over another engine."""

    def __init__(self, engine: Engine, method: Method, settings: SecureSettings) -> None:
        self.close = engine.close
        self._engine, self._method, self._settings = engine, method, settings

    @property
    def clients(self) -> Sequence[int]:
        """Those of the other engine, which may expel some while the run goes on."""
        return self._engine.clients

    def exchange(self, requests: Mapping[int, Packet]) -> Iterator[Reply]:
        """Yields problems at the end of a phase, and usable replies at the end of the last one."""
        training = {k: request for k, request in requests.items() if request.trains}
        listening = _extended({k: p for k, p in requests.items() if not p.trains}, {}, {PHASE: LISTEN})
        if not training:
            yield from self._engine.exchange(listening)
            return
        sent = self._common_model(training)
        threshold = self._settings.threshold or max(2, -(-2 * len(training) // 3))
        phases = _Phases(self._engine, int(next(iter(training.values())).scalars["t"]), training, threshold)

        # Phase 1: public keys.
        request = Packet(scalars={PHASE: KEYS, "round": phases.t})
        keys = phases.ask(dict.fromkeys(training, request), _read_keys)
        yield from phases.report(keys)
        clients = sorted(keys)
        masks = {k: keys[k][1] for k in clients}

        # Phase 2: shares of the clients' secrets, encrypted for each other.
        lists = {
            "clients": torch.tensor(clients),
            "ciphers": secure.to_rows([keys[k][0] for k in clients]),
            "masks": secure.to_rows([*masks.values()]),
        }
        request = Packet({GROUP: lists}, {PHASE: SHARES, "round": phases.t, "threshold": threshold})
        sealed = phases.ask(dict.fromkeys(clients, request), lambda reply: _read_sealed(reply, clients))
        yield from phases.report(sealed)
        peers = sorted(sealed)

        # Phase 3: training, and masked uploads. Clients that do not train are asked now, too.
        scale = secure.FixedPoint(self._settings.clip, len(training))
        sums = _Sums(sum(sent[name].numel() for name in secure.summed_names(sent)))
        asked = _extended(
            {k: training[k] for k in peers},
            {"peers": torch.tensor(peers)},
            {PHASE: UPLOAD, CLIP: scale.clip, CLIENTS: scale.clients},
        )
        phases.ask(asked, sums.add, listening)
        uploaded, names, total = sums.combined()
        phases.drop(sums.others(uploaded), "its counts have other names than those of the others")
        yield from phases.report(uploaded)

        # Phase 4: shares of the secrets that unmask the sum. Clients that drop out now are in the sum.
        left = torch.tensor(sorted(uploaded))
        unmasking = {
            k: Packet(
                {GROUP: {"uploaded": left, "sealed": secure.to_rows([sealed[j][k] for j in peers])}},
                {PHASE: UNMASK, "round": phases.t},
            )
            for k in sorted(uploaded)
        }
        shares = phases.ask(unmasking, lambda reply: _read_shares(reply, clients, peers, uploaded))
        if len(shares) < threshold:
            yield from phases.report(shares)
        opened = [shares[k] for k in sorted(shares)[:threshold]]

        try:
            vector = _unmask(total, opened, uploaded, masks)
            update = scale.decode(vector[: sums.length])
            took_part, clipped, *counts = secure.decode_counts(vector[sums.length :])
            if took_part > len(uploaded):
                raise ValueError("it has more clients than uploaded")
        except ValueError as error:
            raise UserError(
                f"Round {phases.t}: the masked sum makes no sense ({error}), because a client sent a wrong"
                " upload or wrong shares: continue with --resume."
            ) from None
        if clipped:
            log.warning(
                "round %d: %d values of the clients' updates were clipped to ±%g: raise secure.clip",
                *(phases.t, clipped, scale.clip),
            )
        model = secure.apply_update(sent, update / took_part) if took_part else sent
        if sums.complete and max(counts, default=0) < MAX_COUNT:
            first = dict(zip(names, counts[: len(names)], strict=True))
            others = dict.fromkeys(names, 0)
        else:
            first = others = {"counts": False, **dict.fromkeys(self._method.nonzero_counts, took_part > 0)}
        for place, k in enumerate(sorted(uploaded)):
            packet = Packet({self._method.uploads: model}, {"t": phases.t, **(others if place else first)})
            yield Reply(k, packet, phases.down[k], phases.up[k], uploaded[k])

    def _common_model(self, requests: Mapping[int, Packet]) -> Tensors:
        """The model that all clients are sent: updates of different models have no meaningful sum."""
        first, *others = (request.tensors[self._method.uploads] for request in requests.values())
        for other in others:
            if other is not first and not (
                same_layout(other, first) and all(torch.equal(other[name], first[name]) for name in first)
            ):
                raise UserError(
                    "The method sends different models to clients, whose updates cannot be added up: set"
                    " secure.enabled to false."
                )
        return first


class _Phases:
    """The exchanges of one round: who is still there, how many bytes were sent, what is to be handed on."""

    def __init__(self, engine: Engine, t: int, asked: Collection[int], threshold: int) -> None:
        self.t, self.threshold, self.asked = t, threshold, len(asked)
        self.down, self.up = Counter[int](), Counter[int]()
        self._engine, self._ready = engine, list[Reply]()

    def ask(
        self,
        requests: Mapping[int, Packet],
        read: Callable[[Reply], T],
        others: Mapping[int, Packet] | None = None,
    ) -> dict[int, T]:
        """What `read` makes of the clients' replies. Replies to `others` are handed on unread."""
        found: dict[int, T] = {}
        for reply in self._engine.exchange({**requests, **(others or {})}):
            k = reply.client
            if k not in requests:
                self._ready.append(reply)
                continue
            self.down[k] += reply.down
            self.up[k] += reply.up
            if reply.problem is not None:
                self._out(k, reply.problem)
            elif (code := reply.packet.scalars.get(REFUSED)) is not None:
                self._out(k, Problem(REASONS.get(str(code), "it refused a phase of secure aggregation")))
            else:
                try:
                    found[k] = read(reply)
                except Exception as error:  # a client can send anything; the round continues without it
                    self._out(k, Problem(f"its reply cannot be read ({type(error).__name__})"))
        return found

    def drop(self, clients: Sequence[int], reason: str) -> None:
        """Leaves out clients for a common reason."""
        for k in clients:
            self._out(k, Problem(reason))

    def report(self, left: Mapping[int, Any]) -> Iterator[Reply]:
        """Hands on what is ready; raises if too few clients are left."""
        ready, self._ready = self._ready, []
        yield from ready
        if len(left) < self.threshold:
            raise UserError(
                f"Round {self.t}: only {len(left)} of {self.asked} clients stayed in secure aggregation, but"
                f" it needs {self.threshold} (secure.threshold): continue with --resume when they are back."
            )

    def _out(self, k: int, problem: Problem) -> None:
        self._ready.append(Reply(k, Packet(), self.down[k], self.up[k], problem=problem))


class _Sums:
    """Adds up masked uploads as they arrive. Those with other counts have sums of their own."""

    def __init__(self, length: int) -> None:
        self.length = length  # of the update in a vector
        self._totals: dict[tuple[str, ...], secure.Vector] = {}
        self._clients: dict[tuple[str, ...], dict[int, Mapping[str, int]]] = {}

    def add(self, reply: Reply) -> None:
        names = tuple(map(str, json.loads(str(reply.packet.scalars[NAMES]))))
        tensor = reply.packet.tensors[GROUP]["vector"]
        length = self.length + secure.LIMBS * secure.COUNTS
        if tensor.dtype != torch.int32 or tensor.shape != (length,) or len(names) > secure.COUNTS - 2:
            raise ValueError("another upload than expected")
        if not all(is_count_name(name) and not is_reserved(name) for name in names):
            raise ValueError("invalid names")
        total = self._totals.setdefault(names, np.zeros(length, np.uint32))
        total += tensor.numpy().view(np.uint32)
        self._clients.setdefault(names, {})[reply.client] = reply.label_counts

    def combined(self) -> tuple[dict[int, Mapping[str, int]], tuple[str, ...], secure.Vector]:
        """The clients with the most frequent counts or none, with their label statistics; the counts; the
        sum."""
        sizes = {names: len(clients) for names, clients in self._clients.items() if names}
        chosen = max(sorted(sizes), key=lambda names: sizes[names], default=())
        clients: dict[int, Mapping[str, int]] = {}
        total = np.zeros(self.length + secure.LIMBS * secure.COUNTS, np.uint32)
        for names in {chosen, ()} & self._totals.keys():
            clients |= self._clients[names]
            total += self._totals[names]
        return clients, chosen, total

    @property
    def complete(self) -> bool:
        """True if no client keeps its counts to itself."""
        return () not in self._clients

    def others(self, chosen: Collection[int]) -> list[int]:
        """The clients that are not among the chosen ones."""
        return sorted(k for clients in self._clients.values() for k in clients if k not in chosen)


def _extended(
    requests: Mapping[int, Packet], tensors: Tensors, scalars: Mapping[str, Scalar]
) -> dict[int, Packet]:
    """The requests with more content. What was one packet stays one, which engines serialise once."""
    group = {GROUP: tensors} if tensors else {}
    packets = {id(p): Packet({**p.tensors, **group}, {**p.scalars, **scalars}) for p in requests.values()}
    return {k: packets[id(packet)] for k, packet in requests.items()}


def _read_keys(reply: Reply) -> tuple[bytes, bytes]:
    """A client's public keys, for encryption and for masks."""
    group = reply.packet.tensors[GROUP]
    [cipher], [mask] = (secure.from_rows(group[name], 1, secure.PUBLIC_BYTES) for name in ("cipher", "mask"))
    return secure.check_public_key(cipher), secure.check_public_key(mask)


def _read_sealed(reply: Reply, clients: Sequence[int]) -> dict[int, bytes]:
    """A client's encrypted shares, one for each client."""
    rows = secure.from_rows(reply.packet.tensors[GROUP]["sealed"], len(clients), secure.SEALED_BYTES)
    return dict(zip(clients, rows, strict=True))


def _read_shares(
    reply: Reply, clients: Sequence[int], peers: Sequence[int], uploaded: Collection[int]
) -> dict[int, bytes]:
    """A client's shares of the others' secrets. Each begins with the client's place."""
    group, place = reply.packet.tensors[GROUP], clients.index(reply.client) + 1
    found: dict[int, bytes] = {}
    for name, length, there in (("seeds", secure.SEED_BYTES, True), ("keys", secure.KEY_BYTES, False)):
        owners = [k for k in peers if (k in uploaded) == there]
        rows = secure.from_rows(group[name], len(owners), secure.share_bytes(length) if owners else 0)
        found |= zip(owners, rows, strict=True)
    if any(int.from_bytes(share[:4], "little") != place for share in found.values()):
        raise ValueError("shares of another client")
    return found


def _unmask(
    total: secure.Vector,
    shares: Sequence[Mapping[int, bytes]],
    uploaded: Collection[int],
    masks: Mapping[int, bytes],
) -> secure.Vector:
    """The sum without masks, from clients' shares of the others' secrets."""
    secrets = {j: secure.join_shares([own[j] for own in shares]) for j in shares[0]}
    dropped = {j: secret for j, secret in secrets.items() if j not in uploaded}
    if any(secure.public_key(private) != masks[j] for j, private in dropped.items()):
        raise ValueError("shares do not fit together")
    return secure.unmask(total, {j: secrets[j] for j in sorted(uploaded)}, dropped, masks)
