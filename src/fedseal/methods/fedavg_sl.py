"""FedAvg-SL: FedAvg (McMahan et al. 2017, arXiv 1602.05629) with labelled clients, the upper bound.

This is the only method that sees the clients' labels. As in standard FedAvg, the server has no training step
unless `server_step` asks for one; then only the clients' labels distinguish it from the other methods.
Clients augment weakly, as Server-SL does.

With `adjust`, a client does not teach its class mix to the global model (Menon et al. 2021; in federated
learning FedLC, Zhang et al. 2022). For skewed clients this is a much higher upper bound.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import one_hot

from fedseal.core import LabelledParticipant, Packet, Participant, Round, Server
from fedseal.label_shift import PSEUDO_COUNT, adjusted_loss
from fedseal.learn import fit, labelled_batches, learning_rate, train_supervised
from fedseal.methods.fedavg import FedAvg
from fedseal.weights import Tensors


class FedAvgSL(FedAvg):
    """The `[fedavg-sl]` section."""

    needs_client_labels: ClassVar[bool] = True
    strong_views: ClassVar[bool] = False

    server_step: bool = Field(False, description="also train on the server's labels in every round")
    adjust: float = Field(
        0.0, ge=0, le=1, description="1: the loss leaves out the client's class mix; 0: it does not"
    )

    def server_round(self, current: Round, state: Packet, server: Server) -> tuple[Packet, dict[int, Packet]]:
        if self.server_step:
            return super().server_round(current, state, server)
        request = Packet({"model": state.tensors["average"]}, {"t": current.t, "train": True})
        return state, dict.fromkeys(current.cohort, request)

    def train_client(self, client: Participant, request: Packet) -> tuple[Tensors, dict[str, int]]:
        start, t = request.tensors["model"], int(request.scalars["t"])
        if not isinstance(client, LabelledParticipant):
            raise TypeError(f"{client.name} has no labels, which FedAvg-SL needs")
        if self.adjust == 0:
            return train_supervised(client, start, t), {}
        counts = one_hot(client.data.labels, client.classes).sum(dim=0) + PSEUDO_COUNT
        mix, even = counts / counts.sum(), torch.full_like(counts, 1 / client.classes)

        def loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
            return adjusted_loss(model(images), labels, even, mix, self.adjust)

        epochs, generator = client.training.epochs, client.rng(t, "supervised")
        batches = labelled_batches(client, client.data, epochs, generator, "weak")
        return fit(client, start, batches, loss, learning_rate(client, t)), {}

    def collect(self, current: Round, state: Packet, replies: Mapping[int, Packet], server: Server) -> Packet:
        after = super().collect(current, state, replies, server)
        if self.server_step:
            return after
        average = after.tensors["average"]
        return Packet({"model": average, "average": average})
