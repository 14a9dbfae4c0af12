"""FedAvg-SL: FedAvg (McMahan et al. 2017) with the clients' images taken as labelled, the upper bound.

The only method that may see clients' labels. The server has no step of its own, as in standard FedAvg, unless
it is asked for: then only the clients' labels tell it from the other methods. Clients augment weakly, as
Server-SL does.
"""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from fedseal.core import Packet, Round, Site
from fedseal.learn import train_supervised
from fedseal.methods.fedavg import FedAvg
from fedseal.weights import Tensors


class FedAvgSL(FedAvg):
    """The `[fedavg-sl]` section."""

    needs_client_labels: ClassVar[bool] = True
    strong_views: ClassVar[bool] = False

    # None rather than False: the configurations of what was measured before stay as they are.
    server_step: bool | None = Field(
        None, description="true: the server learns from its own labels in every round, too"
    )

    def server_round(self, round: Round, state: Packet, server: Site) -> tuple[Packet, dict[int, Packet]]:
        if self.server_step:
            return super().server_round(round, state, server)
        request = Packet({"model": state.tensors["average"]}, {"t": round.t, "train": True})
        return state, dict.fromkeys(round.cohort, request)

    def train_client(self, client: Site, start: Tensors, t: int) -> tuple[Tensors, dict[str, int]]:
        return train_supervised(client, start, t), {}

    def collect(self, round: Round, state: Packet, replies: Mapping[int, Packet], server: Site) -> Packet:
        after = super().collect(round, state, replies, server)
        if self.server_step:
            return after
        average = after.tensors["average"]
        return Packet({"model": average, "average": average})
