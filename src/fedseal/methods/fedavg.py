"""FedAvg with a training server: the common part of most compared methods.

The server trains the clients' average on its labels, as in step 1 of FedSEAL, and sends it to the cohort.
The cohort's models are averaged uniformly. A subclass says how a client trains.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping

from fedseal import weights
from fedseal.config.sections import BootstrapSettings
from fedseal.core import Method, Packet, Participant, PreparationStep, Round, Server
from fedseal.learn import bootstrap, train_supervised
from fedseal.weights import Tensors


class FedAvg(Method):
    """Base of methods whose clients train from the global model and remember nothing."""

    def initial_state(self, server: Server) -> Packet:
        w = weights.get_weights(server.model)
        return Packet({"model": w, "average": w})

    def prepare(self, state: Packet, server: Server) -> Iterator[PreparationStep]:
        """Bootstrapping, if `[bootstrap]` asks for it."""
        done = int(state.scalars.get("bootstrapped", 0))
        for epochs, w in bootstrap(server, state.tensors["model"], done):
            state = Packet({"model": w, "average": w}, {"bootstrapped": epochs})
            yield PreparationStep("bootstrapping", epochs, server.bootstrap.epochs, state)

    def preparation_epochs(self, bootstrap: BootstrapSettings) -> int:
        return bootstrap.epochs

    def server_round(self, current: Round, state: Packet, server: Server) -> tuple[Packet, dict[int, Packet]]:
        w = train_supervised(server, state.tensors["average"], current.t, stream="rounds")
        request = Packet({"model": w}, {"t": current.t, "train": True})
        return Packet({"model": w}), dict.fromkeys(current.cohort, request)

    def client_round(self, request: Packet, memory: Packet, client: Participant) -> tuple[Packet, Packet]:
        w, counts = self.train_client(client, request)
        return Packet({"model": w}, {"t": int(request.scalars["t"]), **counts}), memory

    @abstractmethod
    def train_client(self, client: Participant, request: Packet) -> tuple[Tensors, dict[str, int]]:
        """A client's model of a round, trained from the global model, and the client's counts."""

    def collect(self, current: Round, state: Packet, replies: Mapping[int, Packet], server: Server) -> Packet:
        w, models = state.tensors["model"], {k: reply.tensors["model"] for k, reply in replies.items()}
        average = server.aggregation.combine(models, w, current.t) if models else w
        return Packet({**state.tensors, "average": average})
