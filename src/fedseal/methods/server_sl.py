"""Server-SL: supervised learning on the server's labels alone, the lower bound every result is read against.

Without augmentation ("Server-SL w/o DA" in the paper's CIFAR-10 table) it is the same with
`server.augment = "none"`.
"""

from collections.abc import Mapping
from typing import ClassVar

from fedseal import weights
from fedseal.core import Method, Packet, Round, Site
from fedseal.learn import train_supervised


class ServerSL(Method):
    """No client is asked for anything."""

    asks_clients: ClassVar[bool] = False
    strong_views: ClassVar[bool] = False

    def start(self, server: Site) -> Packet:
        return Packet({"model": weights.save(server.model)})

    def server_round(self, round: Round, state: Packet, server: Site) -> tuple[Packet, dict[int, Packet]]:
        return Packet({"model": train_supervised(server, state.tensors["model"], round.t)}), {}

    def client_round(self, request: Packet, memory: Packet, client: Site) -> tuple[Packet, Packet]:
        return Packet(), memory

    def collect(self, round: Round, state: Packet, replies: Mapping[int, Packet], server: Site) -> Packet:
        return state
