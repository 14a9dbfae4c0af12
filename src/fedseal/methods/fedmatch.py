"""FedMatch (Jeong et al. 2021, arXiv 2006.12097), labels at the server: disjoint weights and inter-client
consistency.

The network's weights are σ + ψ. The server trains σ on its labels; clients train ψ with σ fixed, and only ψ
is sent back and averaged. Every tenth round a client also receives the ψ of its two nearest clients
("helpers"). It is drawn towards their predictions, and they vote with it on pseudo-labels. Clients are near
if their models' outputs for one fixed noise image are close.

With σ fixed, a step on ψ is the same step on w = σ + ψ. So w is trained here, and ψ = w − σ. Weight decay,
too, applies to w.

Differences from the original:
- Clients augment with this library's RandAugment. The server's step augments as `server.augment` says; the
  original does not augment there.
- Learning rates, momentum, epochs and batches come from the configuration. The weights of 10, on the
  server's loss and on ‖σ − ψ‖², are made for plain SGD and single epochs. With momentum 0.9, accuracy
  dropped from 50 to 2 per cent within the first ten rounds, so set both momenta to 0.
- As in the original's code, helpers serve only in the round in which they are sent.
- Networks with BatchNorm are refused.
"""

from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from fedseal import weights
from fedseal.core import Images, Method, Packet, Participant, Round, Server
from fedseal.errors import UserError
from fedseal.learn import Batch, fit, learning_rate, predict, train_supervised
from fedseal.losses import agreed_labels, consistency_loss
from fedseal.models import refuse_batch_norm
from fedseal.paper import positive_loss
from fedseal.system.logs import log
from fedseal.weights import Tensors


class FedMatch(Method):
    """The `[fedmatch]` section."""

    uploads: ClassVar[str] = "psi"
    needs_single_replies: ClassVar[bool] = True  # to choose helpers

    supervised_weight: float = Field(10.0, gt=0, description="λ_s: weight of the server's loss")
    consistency_weight: float = Field(0.01, ge=0, description="λ_i: weight of the divergence from helpers")
    agreement_weight: float = Field(0.01, ge=0, description="λ_a: weight of the loss on voted labels")
    sparsity: float = Field(1e-5, ge=0, description="λ_L1: weight of |ψ|")
    proximity: float = Field(10.0, ge=0, description="λ_L2: weight of ‖σ − ψ‖²")
    threshold: float = Field(0.75, ge=0, le=1, description="minimum confidence of an image")
    helpers: int = Field(2, ge=0, description="helpers per client")
    helpers_every: int = Field(10, ge=1, description="helpers are sent every this many rounds")
    psi_factor: float = Field(0.2, ge=0, description="initial ψ as a fraction of the initial weights")

    def check(self, server: Server) -> None:
        refuse_batch_norm(server.model, "FedMatch")
        if server.bootstrap.epochs:
            raise UserError(
                "FedMatch has two sets of weights and cannot bootstrap: set bootstrap.epochs to 0."
            )
        if server.aggregation.settings.rule == "fltrust":
            raise UserError("FedMatch does not upload whole models, which fltrust needs: use another rule.")
        if server.training.momentum > 0:
            log.warning("FedMatch may not learn with momentum: set server.momentum and client.momentum to 0")

    def initial_state(self, server: Server) -> Packet:
        sigma = weights.get_weights(server.model)
        psi = {name: self.psi_factor * sigma[name] for name, _ in server.model.named_parameters()}
        w = added(sigma, psi)
        return Packet({"model": w, "average": w, "sigma": sigma, "psi": psi})

    def server_round(self, current: Round, state: Packet, server: Server) -> tuple[Packet, dict[int, Packet]]:
        psi = state.tensors["psi"]
        w = train_supervised(
            server, state.tensors["average"], current.t, stream="rounds", weight=self.supervised_weight
        )
        sigma = {name: value - psi[name] if name in psi else value for name, value in w.items()}
        plain = Packet({"sigma": sigma, "psi": psi}, {"t": current.t, "train": True})
        requests = dict.fromkeys(current.cohort, plain)
        if current.t % self.helpers_every == 0:
            everyone = {str(k) for k in current.everyone}
            outputs = {k: v for k, v in state.tensors.get("outputs", {}).items() if k in everyone}
            for k in current.cohort:
                near = nearest(k, outputs, self.helpers)
                helpers = {f"helper.{i}": state.tensors[f"psi.{other}"] for i, other in enumerate(near)}
                requests[k] = Packet({**plain.tensors, **helpers}, plain.scalars)
        return Packet({**state.tensors, "model": w, "sigma": sigma}), requests

    def client_round(self, request: Packet, memory: Packet, client: Participant) -> tuple[Packet, Packet]:
        sigma, psi, t = request.tensors["sigma"], request.tensors["psi"], int(request.scalars["t"])
        helpers = [added(sigma, v) for name, v in request.tensors.items() if name.startswith("helper.")]
        helped = torch.zeros(len(client.data), 0, client.classes)
        if helpers:
            helped = torch.stack([predict(client, helper, client.data) for helper in helpers], dim=1)
        held = {name: sigma[name].to(client.device) for name in psi}

        def loss(model: nn.Module, plain: Tensor, strong: Tensor, helped: Tensor) -> Tensor:
            own = dict(model.named_parameters())
            total = self.regularisation(own, held)
            with torch.set_grad_enabled(bool(helpers)):  # without helpers, no gradient comes from this view
                logits = model(plain)
            sure = logits.softmax(dim=1).amax(dim=1) >= self.threshold
            if sure.any():
                labels = agreed_labels(logits[sure], helped[sure])
                total = total + self.agreement_weight * positive_loss(model(strong[sure]), labels)
                total = total + self.consistency_weight * consistency_loss(logits[sure], helped[sure])
            return total

        batches = self.client_batches(client, t, helped)
        w = fit(client, added(sigma, psi), batches, loss, learning_rate(client, t))
        return Packet({"psi": {name: w[name] - sigma[name] for name in psi}}, {"t": t}), memory

    def client_batches(self, client: Participant, t: int, helped: Tensor) -> Iterator[Batch]:
        """Mini-batches: plain images, strong views, the helpers' confidences [n, helpers, M]."""
        pixels, size, generator = client.data.pixels, client.training.batch, client.rng(t, "batches")
        for _ in range(client.training.epochs):
            rows = torch.randperm(len(pixels), generator=generator)
            images = pixels[rows]
            strong = client.augment.strong(images, generator)
            parts = (images.float(), strong.float(), helped[rows])
            yield from zip(*(part.to(client.device).split(size) for part in parts), strict=True)

    def regularisation(self, w: Mapping[str, Tensor], sigma: Mapping[str, Tensor]) -> Tensor:
        """λ_L1 |ψ| + λ_L2 ‖σ − ψ‖² for ψ = w − σ."""
        pairs = [(sigma[name], value - sigma[name]) for name, value in w.items()]
        sparse = torch.stack([psi.abs().sum() for _, psi in pairs]).sum()
        near = torch.stack([(fixed - psi).square().sum() for fixed, psi in pairs]).sum()
        return self.sparsity * sparse + self.proximity * near

    def collect(self, current: Round, state: Packet, replies: Mapping[int, Packet], server: Server) -> Packet:
        sigma, groups = state.tensors["sigma"], dict(state.tensors)
        received = {k: reply.tensors["psi"] for k, reply in replies.items()}
        if received:
            groups["psi"] = server.aggregation.combine(received, state.tensors["psi"], current.t)
        groups["average"] = added(sigma, groups["psi"])
        if self.helpers:
            noise = Images(self.noise(server))
            outputs = {str(k): predict(server, added(sigma, psi), noise)[0] for k, psi in received.items()}
            groups["outputs"] = {**groups.get("outputs", {}), **outputs}
            groups |= {f"psi.{k}": psi for k, psi in received.items()}
        return Packet(groups)

    def noise(self, server: Server) -> Tensor:
        """The image [1, C, H, W] by which clients' models are compared, the same in every round."""
        empty = torch.empty(1, *server.data.pixels.shape[1:])
        return nn.init.trunc_normal_(empty, 125, 125, 0, 255, generator=server.rng(0, "noise"))


def added(sigma: Mapping[str, Tensor], psi: Mapping[str, Tensor]) -> Tensors:
    """w = σ + ψ. Buffers (the input normalisation) are only in σ."""
    return {name: value + psi[name] if name in psi else value for name, value in sigma.items()}


def nearest(k: int, outputs: Mapping[str, Tensor], number: int) -> list[int]:
    """The clients whose outputs are nearest to client k's; none until client k has an output."""
    if str(k) not in outputs:
        return []
    own = outputs[str(k)]
    others = {int(name): float((value - own).norm()) for name, value in outputs.items() if name != str(k)}
    return sorted(others, key=lambda other: (others[other], other))[:number]
