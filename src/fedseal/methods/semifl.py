"""SemiFL (Diao, Ding, Tarokh 2022, arXiv 2106.01432): alternate training.

The server fine-tunes the clients' average on its labels *before* sending it out. A client labels its images
once, on receipt, and keeps those labels through all of its epochs. It learns them on strong views of its
confident images, and on mixtures of those with any of its images (mixup). A client without confident images
is left out of the average.

Differences from the original:
- BatchNorm statistics come from the server's labelled images only (the original's `sbn = 0`); the original's
  default pools the clients' images.
- Learning rates, epochs, batches and decay come from the configuration; the original uses a learning rate of
  0.03 with a cosine schedule.
- Gradients are clipped at the clients only; the original clips those of the server's step as well.
"""

from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedseal import weights
from fedseal.aggregate import momentum_step
from fedseal.core import Packet, Participant, Round, Server
from fedseal.learn import Batch, fit, learning_rate, predict_logits
from fedseal.losses import mixup_loss
from fedseal.methods.class_mix import DESCRIPTION, find_adapter, with_calibration
from fedseal.methods.fedavg import FedAvg
from fedseal.paper import positive_loss
from fedseal.weights import Tensors


class SemiFL(FedAvg):
    """The `[semifl]` section."""

    nonzero_counts: ClassVar[tuple[str, ...]] = ("confident",)
    titles: ClassVar[Mapping[str, str]] = {"confident": "confident images"}
    explanations: ClassVar[Mapping[str, str]] = {
        "confident": "confident images: client images that the global model labels with a confidence of at"
        " least the threshold. Clients learn from these images.",
    }

    threshold: float = Field(0.95, ge=0, le=1, description="minimum confidence of a pseudo-label")
    beta: float = Field(0.75, gt=0, description="mixup: the mixing weight is drawn from Beta(β, β)")
    mix_weight: float = Field(1.0, ge=0, description="weight of the mixup loss")
    momentum: float = Field(0.5, ge=0, lt=1, description="momentum of the server's averaging")
    clip: float = Field(1.0, gt=0, description="maximum norm of a client's gradient")
    mix: bool = Field(False, description=DESCRIPTION)

    def server_round(self, current: Round, state: Packet, server: Server) -> tuple[Packet, dict[int, Packet]]:
        after, requests = super().server_round(current, state, server)
        w = static_batch_norm(server, after.tensors["model"])
        requests = dict.fromkeys(requests, Packet({"model": w}, {"t": current.t, "train": True}))
        kept = {k: v for k, v in state.tensors.items() if k == "velocity"}
        after = Packet({"model": w, **kept})
        return after, with_calibration(requests, server) if self.mix else requests

    def train_client(self, client: Participant, request: Packet) -> tuple[Tensors, dict[str, int]]:
        start, t, adapt = request.tensors["model"], int(request.scalars["t"]), find_adapter(request, client)
        confidence, labels = adapt(predict_logits(client, start, client.data)).softmax(dim=1).max(dim=1)
        confident = (confidence >= self.threshold).nonzero().squeeze(1)
        client.record_labels("confident", confident, labels[confident])
        if not len(confident):
            return start, {"confident": 0}

        def loss(model: nn.Module, images: Tensor, y: Tensor, other: Tensor, share: Tensor) -> Tensor:
            strong, mixed = model(images).split(len(y))
            return positive_loss(strong, y) + self.mix_weight * mixup_loss(mixed, y, other, share)

        batches = self.client_batches(client, t, confident, labels)
        w = fit(client, start, batches, loss, learning_rate(client, t), clip=self.clip)
        return w, {"confident": len(confident)}

    def client_batches(
        self, client: Participant, t: int, confident: Tensor, labels: Tensor
    ) -> Iterator[Batch]:
        """Mini-batches: strong views and mixtures, labels, labels of the mixed-in images, mixing weight."""
        pixels, size, generator = client.data.pixels, client.training.batch, client.rng(t, "batches")
        n = len(confident)
        for _ in range(client.training.epochs):
            rows = confident[torch.randperm(n, generator=generator)]
            others = torch.randint(len(pixels), (n,), generator=generator)
            strong = client.augment.strong(pixels[rows], generator)
            weak, mixed_in = (client.augment.weak(pixels[r], generator).float() for r in (rows, others))
            shares = beta(self.beta, -(-n // size), generator)
            each = shares.repeat_interleave(size)[:n].view(-1, *[1] * (pixels.dim() - 1))
            mixed = each * weak + (1 - each) * mixed_in
            parts = (
                v.to(client.device).split(size) for v in (strong.float(), mixed, labels[rows], labels[others])
            )
            for (a, b, y, other), share in zip(zip(*parts, strict=True), shares, strict=True):
                yield torch.cat([a, b]), y, other, share

    def takes_part(self, reply: Packet) -> bool:
        return bool(reply.scalars.get("confident", 1))

    def collect(self, current: Round, state: Packet, replies: Mapping[int, Packet], server: Server) -> Packet:
        w = state.tensors["model"]
        models = {k: reply.tensors["model"] for k, reply in replies.items() if self.takes_part(reply)}
        if not models:
            return Packet({**state.tensors, "average": w})
        combined = server.aggregation.combine(models, w, current.t)
        average, velocity = momentum_step(w, combined, state.tensors.get("velocity"), self.momentum)
        return Packet({"model": w, "average": average, "velocity": velocity})


def beta(parameter: float, n: int, generator: torch.Generator) -> Tensor:
    """n draws from Beta(parameter, parameter)."""
    seed = int(torch.randint(2**62, (), generator=generator))
    return torch.from_numpy(np.random.default_rng(seed).beta(parameter, parameter, n)).float()


def static_batch_norm(server: Server, w: Tensors) -> Tensors:
    """The weights with BatchNorm statistics recomputed over the server's labelled images."""
    norms = [m for m in server.model.modules() if isinstance(m, _BatchNorm)]
    if not norms:
        return w
    weights.set_weights(server.model, w)
    usual = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain mean over batches
    server.model.train()
    with torch.no_grad():
        for images in server.data.pixels.split(max(server.training.batch, 2)):
            if len(images) > 1:
                server.model(images.to(server.device))
    for norm, momentum in zip(norms, usual, strict=True):
        norm.momentum = momentum
    return weights.get_weights(server.model)
