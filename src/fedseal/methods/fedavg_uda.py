"""FedAvg-UDA: FedAvg combined with UDA (Xie et al. 2020, arXiv 1904.12848).

Like FedAvg-FixMatch, but the target is the weak view's confidences, sharpened by a temperature of 0.4, and
the loss is the KL divergence. The FedSEAL paper masks at 0.9; UDA's own default is 0.8. UDA's training
signal annealing concerns labelled images, which clients do not have.
"""

from pydantic import Field
from torch import Tensor

from fedseal.losses import uda_loss
from fedseal.methods.fedavg_fixmatch import FedAvgFixMatch


class FedAvgUDA(FedAvgFixMatch):
    """The `[fedavg-uda]` section."""

    temperature: float = Field(0.4, gt=0, description="softmax temperature that sharpens the target")

    def unsupervised_loss(self, weak: Tensor, strong: Tensor) -> Tensor:
        return uda_loss(weak, strong, self.threshold, self.temperature)
