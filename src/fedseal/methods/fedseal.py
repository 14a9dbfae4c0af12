"""FedSEAL (Bian, Fu, Xu): self-ensemble learning and negative learning. Algorithm 1 of the paper.

What the paper leaves open is an option here; `docs/paper-map.md` has the table of options, defaults and
reasons.
"""

from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedseal import paper, weights
from fedseal.core import Method, Packet, Prepared, Round, Site
from fedseal.learn import Batch, fit, learning_rate, predict, train_supervised
from fedseal.weights import Tensors


class FedSEAL(Method):
    """The `[fedseal]` section."""

    bootstrap_epochs: int = Field(750, ge=0, description="supervised epochs before round 1; 0: random start")
    ensemble: bool = Field(True, description="label with the mean over all past models, not the last alone")
    scope: Literal["all", "sampled"] = Field("all", description="who updates the ensemble in a round")
    negative: bool = Field(True, description="negative learning on images outside D⁺")
    theta: float = Field(0.1, ge=0, le=1, description="θ: complementary labels have p̄ ≤ θ")
    threshold: Literal["true-count", "predicted-count", "fixed"] = Field(
        "predicted-count",
        description="τ: Eq. 5 over the images predicted (predicted-count), as printed (true-count), or fixed",
    )
    tau: float = Field(0.9, ge=0, description="the fixed value")
    labels: Literal["hard", "soft"] = Field("hard", description="pseudo-labels: the class, or p̄ itself")
    positive_weight: float = Field(0.25, ge=0, description="λ0")
    schedule: paper.Schedule = Field("approach-one", description="how λ goes from λ0")
    schedule_rate: float = Field(0.95, ge=0.5, le=1, description="λ's rate per round")
    schedule_until: int = Field(100, ge=0, le=1000, description="the round after which λ stays")
    batches: Literal["joint", "paired"] = Field(
        "paired",
        description="a mini-batch: joint, B_c of D⁺ ∪ D⁻, or paired, B_c of each, the smaller set repeated",
    )

    def start(self, server: Site) -> Packet:
        w = weights.save(server.model)
        return Packet({"model": w, "average": w}, {"bootstrapped": 0})

    def prepare(self, state: Packet, server: Site) -> Iterator[Prepared]:
        """Bootstrapping: w⁰ from the server's labels alone, the very steps of Server-SL."""
        w, total = state.tensors["model"], self.bootstrap_epochs
        size = max(server.learning.epochs, 1)
        for done in range(int(state.scalars["bootstrapped"]), total, size):
            after = min(done + size, total)
            w = train_supervised(server, w, done // size + 1, epochs=after - done)
            state = Packet({"model": w, "average": w}, {"bootstrapped": after})
            yield Prepared("bootstrapping", after, total, state)

    def server_round(self, round: Round, state: Packet, server: Site) -> tuple[Packet, dict[int, Packet]]:
        """Step 1: the global model w^t and the thresholds τ^t; step 2 sends them out."""
        w = train_supervised(server, state.tensors["average"], round.t, stream="rounds")
        tau = {"tau": self.thresholds(w, server)}
        weight = paper.positive_weight(
            self.schedule, self.positive_weight, round.t, self.schedule_rate, self.schedule_until
        )
        scalars = {"t": round.t, "lambda": weight}
        train = Packet({"model": w, "thresholds": tau}, scalars | {"train": True})
        listen = Packet({"model": w}, scalars | {"train": False})
        requests = dict.fromkeys(round.cohort, train)
        if self.ensemble and self.scope == "all":
            requests = {k: requests.get(k, listen) for k in round.everyone}
        return Packet({"model": w, "thresholds": tau}, scalars), requests

    def thresholds(self, w: Tensors, server: Site) -> Tensor:
        """Eq. 5, or the fixed value for every class."""
        if self.threshold == "fixed":
            return torch.full((server.classes,), self.tau)
        assert server.validation is not None and server.validation.labels is not None
        probs = predict(server, w, server.validation)
        return paper.thresholds(probs, server.validation.labels, self.threshold)

    def client_round(self, request: Packet, memory: Packet, client: Site) -> tuple[Packet, Packet]:
        """Step 3: labels the images by the ensemble, and trains on D⁺ and D⁻ if sampled."""
        w, t = request.tensors["model"], int(request.scalars["t"])
        if self.ensemble:
            memory = remember(w, t, memory, client)
            mean = memory.tensors["images"]["mean"]
        if not request.scalars["train"]:
            return Packet(scalars={"t": t}), memory
        if not self.ensemble:
            mean = predict(client, w, client.data)

        tau = request.tensors["thresholds"]["tau"]
        draw = client.rng(t, "complementary")
        positive = paper.positive_set(mean, tau).nonzero().squeeze(1)  # D⁺
        negative = (
            paper.negative_set(mean, tau, self.theta).nonzero().squeeze(1)[: None if self.negative else 0]
        )
        y_plus = paper.pseudo_labels(mean)[positive]
        y_minus = paper.complementary_labels(mean, self.theta, draw)[negative]
        client.diagnose("positive", positive, y_plus)
        client.diagnose("negative", negative, y_minus)

        if len(positive) + len(negative) > 0:
            target = y_plus if self.labels == "hard" else mean[positive]
            weight = float(request.scalars["lambda"])

            def loss(model: nn.Module, images: Tensor, target: Tensor, y_minus: Tensor) -> Tensor:
                logits, split = model(images), len(target)
                return paper.client_loss(
                    weight,
                    paper.positive_loss(logits[:split], target),
                    paper.negative_loss(logits[split:], y_minus),
                )

            batches = self.client_batches(client, t, positive, target, negative, y_minus)
            w = fit(client, w, batches, loss, learning_rate(client, t))
        scalars = {"t": t, "positive": len(positive), "negative": len(negative)}
        return Packet({"model": dict(w)}, scalars), memory

    def client_batches(
        self, client: Site, t: int, positive: Tensor, target: Tensor, negative: Tensor, y_minus: Tensor
    ) -> Iterator[Batch]:
        """Mini-batches (images, targets of those from D⁺, labels of those from D⁻), D⁺ first in each.

        D⁺ is strongly augmented anew in every epoch, D⁻ is left as it is (Eqs. 14 and 15).
        """
        pixels, size, generator = client.data.pixels, client.learning.batch, client.rng(t, "batches")
        plus, minus = len(positive), len(negative)
        for _ in range(client.learning.epochs):
            if self.batches == "joint":
                rows = torch.randperm(plus + minus, generator=generator).split(size)
                pairs = [(chunk[chunk < plus], chunk[chunk >= plus] - plus) for chunk in rows]
            else:
                longest = max(plus, minus)
                streams = (repeated_batches(n, longest, size, generator) for n in (plus, minus))
                pairs = list(zip(*streams, strict=True))
            used = torch.cat([p for p, _ in pairs])
            strong = client.augment.strong(pixels[positive[used]], generator).split(
                [len(p) for p, _ in pairs]
            )
            for augmented, (p, m) in zip(strong, pairs, strict=True):
                images = torch.cat([augmented, pixels[negative[m]]]).to(client.device).float()
                yield images, target[p].to(client.device), y_minus[m].to(client.device)

    def collect(self, round: Round, state: Packet, replies: Mapping[int, Packet], server: Site) -> Packet:
        """Step 4: Eq. 2, the average that the next round starts from."""
        models = {k: replies[k].tensors["model"] for k in round.cohort if k in replies}
        average = weights.average(models) if models else state.tensors["model"]
        return Packet({**state.tensors, "average": average}, state.scalars)


def remember(w: Tensors, t: int, memory: Packet, client: Site) -> Packet:
    """Eq. 8: p̄ with w^t taken in, once for each round however often and late the request comes.

    Each image has its own count, so that a client that misses rounds stays right, and an image that an engine
    adds to the memory with a count of 0 starts fresh.
    """
    if int(memory.scalars.get("t", 0)) >= t:
        return memory
    probs = predict(client, w, client.data)
    past = memory.tensors.get("images") or {
        "mean": torch.zeros_like(probs),
        "count": torch.zeros(len(probs), dtype=torch.int64),
    }
    count = past["count"] + 1
    mean = paper.ensemble_update(past["mean"], probs, count)
    return Packet({"images": {"mean": mean, "count": count}}, {"t": t})


def repeated_batches(n: int, length: int, size: int, generator: torch.Generator) -> list[Tensor]:
    """`length` of the numbers below n, shuffled and repeated when used up, in batches; none if n = 0."""
    order = torch.randperm(n, generator=generator)
    if n == 0:
        return [order] * -(-length // size)
    return list(order[torch.arange(length) % n].split(size))
