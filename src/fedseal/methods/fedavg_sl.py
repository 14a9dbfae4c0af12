"""FedAvg-SL: FedAvg (McMahan et al. 2017, arXiv 1602.05629) with labelled clients, the upper bound.

This is the only method that sees the clients' labels. As in standard FedAvg, the server has no training step
unless `server_step` asks for one; then only the clients' labels distinguish it from the other methods.
Clients augment weakly, as Server-SL does.
"""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from fedseal.core import LabelledParticipant, Packet, Participant, Round, Server
from fedseal.learn import train_supervised
from fedseal.methods.fedavg import FedAvg
from fedseal.weights import Tensors


class FedAvgSL(FedAvg):
    """The `[fedavg-sl]` section."""

    needs_client_labels: ClassVar[bool] = True
    strong_views: ClassVar[bool] = False

    server_step: bool = Field(False, description="also train on the server's labels in every round")

    def server_round(self, current: Round, state: Packet, server: Server) -> tuple[Packet, dict[int, Packet]]:
        if self.server_step:
            return super().server_round(current, state, server)
        request = Packet({"model": state.tensors["average"]}, {"t": current.t, "train": True})
        return state, dict.fromkeys(current.cohort, request)

    def train_client(self, client: Participant, start: Tensors, t: int) -> tuple[Tensors, dict[str, int]]:
        if not isinstance(client, LabelledParticipant):
            raise TypeError(f"{client.name} has no labels, which FedAvg-SL needs")
        return train_supervised(client, start, t), {}

    def collect(self, current: Round, state: Packet, replies: Mapping[int, Packet], server: Server) -> Packet:
        after = super().collect(current, state, replies, server)
        if self.server_step:
            return after
        average = after.tensors["average"]
        return Packet({"model": average, "average": average})
