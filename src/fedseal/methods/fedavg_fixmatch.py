"""FedAvg-FixMatch: FedAvg combined with FixMatch (Sohn et al. 2020, arXiv 2001.07685).

A client labels the weak view of each batch with the model that it is training. It learns that label on the
strong view if the confidence reaches the threshold: 0.9 as in the FedSEAL paper, not 0.95 as in FixMatch.
Unlike in FixMatch, labelled images are only at the server, whose step is the supervised loss.
"""

from pydantic import Field
from torch import Tensor, nn, no_grad

from fedseal.core import Packet, Participant, Round, Server
from fedseal.learn import fit, learning_rate, two_view_batches
from fedseal.losses import fixmatch_loss
from fedseal.methods.class_mix import DESCRIPTION, find_adapter, with_calibration
from fedseal.methods.fedavg import FedAvg
from fedseal.weights import Tensors


class FedAvgFixMatch(FedAvg):
    """The `[fedavg-fixmatch]` section."""

    threshold: float = Field(0.9, ge=0, le=1, description="minimum confidence of a pseudo-label")

    mix: bool = Field(False, description=DESCRIPTION)

    def server_round(self, current: Round, state: Packet, server: Server) -> tuple[Packet, dict[int, Packet]]:
        after, requests = super().server_round(current, state, server)
        return after, with_calibration(requests, server) if self.mix else requests

    def train_client(self, client: Participant, request: Packet) -> tuple[Tensors, dict[str, int]]:
        start, t, adapt = request.tensors["model"], int(request.scalars["t"]), find_adapter(request, client)

        def loss(model: nn.Module, weak: Tensor, strong: Tensor) -> Tensor:
            with no_grad():
                weak_logits = adapt(model(weak))
            return self.unsupervised_loss(weak_logits, model(strong))

        batches = two_view_batches(client, client.rng(t, "batches"))
        return fit(client, start, batches, loss, learning_rate(client, t)), {}

    def unsupervised_loss(self, weak: Tensor, strong: Tensor) -> Tensor:
        """The loss of a batch from the logits of its two views."""
        return fixmatch_loss(weak, strong, self.threshold)
