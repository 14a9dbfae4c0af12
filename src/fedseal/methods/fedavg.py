"""FedAvg with a server that learns, too: what the compared methods have in common.

The server trains the clients' average on its labels (as in FedSEAL's step 1) and sends it to the cohort; the
cohort's models are averaged uniformly. What a client does is the method's own.
"""

from abc import abstractmethod
from collections.abc import Mapping

from fedseal import weights
from fedseal.core import Method, Packet, Round, Site
from fedseal.learn import train_supervised
from fedseal.weights import Tensors


class FedAvg(Method):
    """Methods whose client trains from the global model alone and remembers nothing."""

    def start(self, server: Site) -> Packet:
        w = weights.save(server.model)
        return Packet({"model": w, "average": w})

    def server_round(self, round: Round, state: Packet, server: Site) -> tuple[Packet, dict[int, Packet]]:
        w = train_supervised(server, state.tensors["average"], round.t, stream="rounds")
        request = Packet({"model": w}, {"t": round.t, "train": True})
        return Packet({"model": w}), dict.fromkeys(round.cohort, request)

    def client_round(self, request: Packet, memory: Packet, client: Site) -> tuple[Packet, Packet]:
        t = int(request.scalars["t"])
        w, counts = self.train_client(client, request.tensors["model"], t)
        return Packet({"model": w}, {"t": t, **counts}), memory

    @abstractmethod
    def train_client(self, client: Site, start: Tensors, t: int) -> tuple[Tensors, dict[str, int]]:
        """A client's model of round t, from the global model, and what the client counts."""

    def collect(self, round: Round, state: Packet, replies: Mapping[int, Packet], server: Site) -> Packet:
        models = {k: reply.tensors["model"] for k, reply in replies.items()}
        average = weights.average(models) if models else state.tensors["model"]
        return Packet({**state.tensors, "average": average})
