"""Frozen networks: a backbone that is not trained, and its last layer, which is (`model.freeze`)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedseal.config.sections import ModelSettings
from fedseal.errors import UserError
from fedseal.models import Network, build_network


class Head(Network):
    """The last layer alone, as a network that takes features: what is trained with `model.freeze`.

    Features of augmented images may come with those of the image itself: [n, views, F]. The first view is
    that of the image.
    """

    def __init__(self, classes: int, mean: Sequence[float], std: Sequence[float], seed: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layer = nn.Linear(len(mean), classes)
        super().__init__(layer, mean, std)
        self.mean, self.std = self.mean.flatten(1), self.std.flatten(1)

    def forward(self, features: Tensor) -> Tensor:
        x = features[:, 0] if features.dim() == 3 else features
        logits: Tensor = self.body((x - self.mean) / self.std)
        return logits


class FrozenNetwork(nn.Module):
    """A backbone that was not trained and the head that was: takes images, as every network."""

    def __init__(self, backbone: Network, head: Head) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.backbone(images))
        return logits


def build_classifier(
    settings: ModelSettings,
    *,
    channels: int,
    size: int,
    classes: int,
    mean: Sequence[float],
    std: Sequence[float],
) -> Network | FrozenNetwork:
    """A network of the right shape for the weights of a trained model."""
    shape = settings.model_copy(update={"weights": ""})
    network = build_network(shape, channels=channels, size=size, classes=classes, mean=mean, std=std, seed=0)
    if not settings.freeze:
        return network
    blank = [0.0] * make_backbone(network)
    return FrozenNetwork(network, Head(classes, blank, blank, seed=0))


def make_backbone(network: Network) -> int:
    """Removes a network's last linear layer, in place. Returns the number of features that it takes."""
    linear = [name for name, layer in network.named_modules() if isinstance(layer, nn.Linear)]
    if not linear:
        raise UserError("model.freeze trains the last linear layer, but the network has none.")
    parent, _, name = linear[-1].rpartition(".")
    last = network.get_submodule(linear[-1])
    assert isinstance(last, nn.Linear)
    setattr(network.get_submodule(parent), name, nn.Identity())
    network.eval().requires_grad_(False)
    return last.in_features
