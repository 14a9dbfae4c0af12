"""A client's part of a round, for all engines."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedseal.core import Method, Packet, Participant, derive_seed
from fedseal.data.pool import Ints
from fedseal.engines import memory as memories
from fedseal.engines.attack import forge, malicious_clients
from fedseal.errors import UserError
from fedseal.models import Network
from fedseal.run_setup import RunSetup
from fedseal.system.lazy import LazyModule
from fedseal.system.machine import threads

secure_client = LazyModule("fedseal.engines.secure_client")  # it needs Flower


@dataclass(frozen=True)
class ClientResult:
    """What a client's part of a round leaves: the reply, the client's new memory, and label statistics."""

    reply: Packet
    memory: bytes
    label_counts: dict[str, int]


class SimulatedClients:
    """Runs any client of a simulated federation, one after another, with one network."""

    def __init__(self, setup: RunSetup) -> None:
        self.setup = setup
        self.model: Network = setup.network()
        self.method = setup.config.selected_method()
        config, clients = setup.config, len(setup.federation.clients)
        self.malicious = malicious_clients(config.simulate, clients, config.seed)

    def run(self, k: int, request: Packet, memory: bytes) -> ClientResult:
        """Client k's part of a round. It depends on nothing but the arguments."""
        audit = LabelAudit()
        client = self.setup.client(k, self.model, audit.record)
        counts = self.setup.config.engine.asks_for_counts
        reply, memory = run_client(self.method, client, request, memory, images_change=False, counts=counts)
        if k in self.malicious:
            seed = derive_seed(client.seed, client.name, request.scalars["t"], "attack")
            names, group = self.model.state_dict(), self.method.uploads
            reply = forge(reply, request, group, names, self.setup.config.simulate, seed)
        return ClientResult(reply, memory, audit.count_correct(self.setup.true_labels(k)))


def run_client(
    method: Method, client: Participant, request: Packet, memory: bytes, *, images_change: bool, counts: bool
) -> tuple[Packet, bytes]:
    """The method's step at a client, between reading the client's memory and writing it.

    `images_change` says that images may be added or removed between rounds; the memory's rows then follow
    the images by their content. `counts` says that the reply may have counts of images. With secure
    aggregation, a request is one phase of a round.
    """
    if "secure" in request.scalars:
        train = partial(run_client, method, client, images_change=images_change, counts=True)
        reply, written = secure_client.answer(method, train, request, memory, counts=counts)
        return reply, written
    known, client = (
        memories.align(memory, request, client) if images_change else (memories.read(memory), client)
    )
    with threads(client.training.threads), client.seeded(int(request.scalars["t"])):
        found: object = method.client_round(request, known, client)
    if not isinstance(found, tuple) or len(found) != 2 or not all(isinstance(p, Packet) for p in found):
        raise UserError(f"{type(method).__name__}: client_round must return two packets, reply and memory.")
    reply, remembered = found
    reply = _uploaded(method, client, request, reply)
    if not counts:
        reply = reply.without_counts(method.nonzero_counts)
    return reply, memories.write(remembered, client.data.pixels if images_change else None)


def _uploaded(method: Method, client: Participant, request: Packet, reply: Packet) -> Packet:
    """The reply with what the aggregation makes of the trained weights, and without what it forbids."""
    group = method.uploads
    if not client.aggregation.counts:
        kept = {name: values for name, values in reply.tensors.items() if name == group}
        reply = Packet(kept, {"t": request.scalars["t"]})
    if group not in reply.tensors:
        return reply
    upload = client.aggregation.upload(reply.tensors[group], request.tensors[group])
    return replace(reply, tensors={**reply.tensors, group: upload})


class LabelAudit:
    """Records the labels that a method gives to a client's images, and counts the correct ones afterwards.

    So a simulation knows how many labels are correct, while the method has no access to the true ones.
    """

    def __init__(self) -> None:
        self._given: list[tuple[str, Tensor, Tensor, bool]] = []

    def record(self, name: str, rows: Tensor, labels: Tensor, *, complementary: bool = False) -> None:
        """The client's `record_labels`."""
        self._given.append((name, rows, labels, complementary))

    def count_correct(self, true_labels: Ints) -> dict[str, int]:
        """By name: labels whose truth is known, and correct ones among them."""
        counts: Counter[str] = Counter()
        for name, rows, labels, complementary in self._given:
            truth = torch.from_numpy(np.asarray(true_labels))[rows]
            known = truth >= 0
            right = (truth != labels) if complementary else (truth == labels)
            counts[f"{name}_known"] += int(known.sum())
            counts[f"{name}_right"] += int((right & known).sum())
        return dict(counts)
