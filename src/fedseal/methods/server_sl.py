"""Server-SL: supervised learning on the server's labels alone, the lower bound.

"Server-SL w/o DA" in the paper's CIFAR-10 table is the same with `server.augment = "none"`.
"""

from collections.abc import Mapping
from typing import ClassVar

from fedseal import weights
from fedseal.core import Method, Packet, Participant, Round, Server
from fedseal.learn import train_supervised


class ServerSL(Method):
    """Sends no request to any client."""

    uses_clients: ClassVar[bool] = False
    strong_views: ClassVar[bool] = False

    def initial_state(self, server: Server) -> Packet:
        return Packet({"model": weights.get_weights(server.model)})

    def server_round(self, current: Round, state: Packet, server: Server) -> tuple[Packet, dict[int, Packet]]:
        return Packet({"model": train_supervised(server, state.tensors["model"], current.t)}), {}

    def client_round(self, request: Packet, memory: Packet, client: Participant) -> tuple[Packet, Packet]:
        return Packet(), memory

    def collect(self, current: Round, state: Packet, replies: Mapping[int, Packet], server: Server) -> Packet:
        return state
