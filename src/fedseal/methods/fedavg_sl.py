"""FedAvg-SL: FedAvg (McMahan et al. 2017) with the clients' images taken as labelled, the upper bound.

The only method that may see clients' labels. The server has no step of its own: standard FedAvg. Clients
augment weakly, as Server-SL does, so that only the labels make the difference.
"""

from collections.abc import Mapping
from typing import ClassVar

from fedseal.core import Packet, Round, Site
from fedseal.learn import train_supervised
from fedseal.methods.fedavg import FedAvg
from fedseal.weights import Tensors


class FedAvgSL(FedAvg):
    """No options of its own."""

    needs_client_labels: ClassVar[bool] = True
    strong_views: ClassVar[bool] = False

    def server_round(self, round: Round, state: Packet, server: Site) -> tuple[Packet, dict[int, Packet]]:
        request = Packet({"model": state.tensors["average"]}, {"t": round.t, "train": True})
        return state, dict.fromkeys(round.cohort, request)

    def train_client(self, client: Site, start: Tensors, t: int) -> tuple[Tensors, dict[str, int]]:
        return train_supervised(client, start, t), {}

    def collect(self, round: Round, state: Packet, replies: Mapping[int, Packet], server: Site) -> Packet:
        average = super().collect(round, state, replies, server).tensors["average"]
        return Packet({"model": average, "average": average})
