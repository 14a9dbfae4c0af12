"""FedAvg-FixMatch: the plain combination of FedAvg and FixMatch (Sohn et al. 2020).

A client labels the weak view of each batch with the model that it is training, and learns that label on the
strong view where the confidence reaches the threshold: 0.9 as in the FedSEAL paper, not FixMatch's 0.95. It
differs from FixMatch in that labelled images are at the server alone, whose step is the supervised loss.
"""

from pydantic import Field
from torch import Tensor, nn, no_grad

from fedseal.core import Site
from fedseal.learn import fit, learning_rate, two_view_batches
from fedseal.losses import fixmatch_loss
from fedseal.methods.fedavg import FedAvg
from fedseal.weights import Tensors


class FedAvgFixMatch(FedAvg):
    """The `[fedavg-fixmatch]` section."""

    threshold: float = Field(0.9, ge=0, le=1, description="confidence from which a pseudo-label counts")

    def train_client(self, client: Site, start: Tensors, t: int) -> tuple[Tensors, dict[str, int]]:
        def loss(model: nn.Module, weak: Tensor, strong: Tensor) -> Tensor:
            with no_grad():
                seen = model(weak)
            return self.unsupervised(seen, model(strong))

        batches = two_view_batches(client, client.rng(t, "batches"))
        return fit(client, start, batches, loss, learning_rate(client, t)), {}

    def unsupervised(self, weak: Tensor, strong: Tensor) -> Tensor:
        """The loss of a batch from the logits of its two views."""
        return fixmatch_loss(weak, strong, self.threshold)
