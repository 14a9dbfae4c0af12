"""FedSEAL (Bian, Fu, Xu 2021, arXiv 2110.07829): self-ensemble learning and negative learning.

This is Algorithm 1 of the paper. Where the paper is ambiguous, there is an option; `docs/paper-map.md` lists
the options with their defaults and reasons.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedseal import paper, weights
from fedseal.config.sections import BootstrapSettings
from fedseal.core import Method, Metrics, Packet, Participant, PreparationStep, Round, Server
from fedseal.label_shift import Calibration
from fedseal.learn import (
    Batch,
    bootstrap,
    fit,
    learning_rate,
    needs_two_images,
    predict_logits,
    train_supervised,
)
from fedseal.methods import class_mix
from fedseal.methods.class_mix import calibration_of, find_adapter
from fedseal.weights import Tensors


class FedSEAL(Method):
    """The `[fedseal]` section."""

    titles: ClassVar[Mapping[str, str]] = {
        "positive": "D⁺",
        "negative": "D⁻",
        "tau": "thresholds τ",
        "lambda": "λ",
    }
    explanations: ClassVar[Mapping[str, str]] = {
        "positive": "D⁺: images whose label a client trusts, because its confidence reaches the threshold τ"
        " of the class. The client learns that they belong to this class.",
        "negative": "D⁻: other images for which some class is very unlikely. The client learns only that they"
        " do not belong to that class.",
        "tau": "τ: the confidence that a client's label needs to be trusted, by class. The server computes it"
        " in every round from its validation images.",
        "lambda": "λ: the weight of the loss on D⁺. The loss on D⁻ has weight 1.",
    }

    bootstrap_epochs: int = Field(
        750, ge=0, description="supervised epochs before round 1; 0: start from random weights"
    )
    ensemble: bool = Field(
        True, description="label by the mean over all past global models, not by the last one"
    )
    scope: Literal["all", "sampled"] = Field(
        "all", description="clients that update their ensemble in a round"
    )
    negative: bool = Field(True, description="negative learning on images outside D⁺")
    theta: float = Field(0.1, ge=0, le=1, description="θ: a complementary label needs p̄ ≤ θ")
    threshold: Literal["true-count", "predicted-count", "fixed"] = Field(
        "predicted-count",
        description="τ: Eq. 5 over the predicted images (predicted-count), as printed (true-count), or fixed",
    )
    tau: float = Field(0.9, ge=0, description="the value of τ with threshold = fixed")
    labels: Literal["hard", "soft"] = Field("hard", description="pseudo-labels: hard (the class) or soft (p̄)")
    positive_weight: float = Field(0.25, ge=0, description="λ0, the initial weight of the loss on D⁺")
    schedule: paper.Schedule = Field("approach-one", description="how λ changes over the rounds")
    schedule_rate: float = Field(0.95, ge=0.5, le=1, description="rate of change of λ per round")
    schedule_until: int = Field(100, ge=0, le=1000, description="the round after which λ is constant")
    batches: Literal["joint", "paired"] = Field(
        "paired",
        description="a mini-batch: joint (B_c images of D⁺ ∪ D⁻) or paired (B_c of each, the smaller set"
        " repeated)",
    )
    mix: bool = Field(False, description=class_mix.DESCRIPTION)

    def initial_state(self, server: Server) -> Packet:
        w = weights.get_weights(server.model)
        return Packet({"model": w, "average": w}, {"bootstrapped": 0})

    def prepare(self, state: Packet, server: Server) -> Iterator[PreparationStep]:
        """Bootstrapping: w⁰ from the server's labels alone.

        As in the paper it takes the same steps as Server-SL, or those of `[bootstrap]` if it has epochs.
        """
        start, first = state.tensors["model"], int(state.scalars["bootstrapped"])
        for after, w in bootstrap(server, start, first):
            state = Packet({"model": w, "average": w}, {"bootstrapped": after})
            yield PreparationStep("bootstrapping", after, server.bootstrap.epochs, state)
        if server.bootstrap.epochs:
            return
        w, total, size = start, self.bootstrap_epochs, max(server.training.epochs, 1)
        for done in range(first, total, size):
            after = min(done + size, total)
            w = train_supervised(server, w, done // size + 1, epochs=after - done)
            state = Packet({"model": w, "average": w}, {"bootstrapped": after})
            yield PreparationStep("bootstrapping", after, total, state)

    def server_round(self, current: Round, state: Packet, server: Server) -> tuple[Packet, dict[int, Packet]]:
        """Step 1: the global model w^t and the thresholds τ^t. Step 2 sends them out."""
        w = train_supervised(server, state.tensors["average"], current.t, stream="rounds")
        calibration = calibration_of(w, server) if self.mix else None
        tau = {"tau": self.thresholds(w, server, calibration)}
        weight = paper.positive_weight(
            self.schedule, self.positive_weight, current.t, self.schedule_rate, self.schedule_until
        )
        scalars = {"t": current.t, "lambda": weight}
        groups = {"model": w} | ({class_mix.GROUP: calibration.to_tensors()} if calibration else {})
        train = Packet({**groups, "thresholds": tau}, scalars | {"train": True})
        listen = Packet(groups, scalars | {"train": False})
        requests = dict.fromkeys(current.cohort, train)
        if self.ensemble and self.scope == "all":
            requests = {k: requests.get(k, listen) for k in current.everyone}
        return Packet({"model": w, "thresholds": tau}, scalars), requests

    def thresholds(self, w: Tensors, server: Server, calibration: Calibration | None) -> Tensor:
        """Eq. 5, or the fixed value for every class."""
        if self.threshold == "fixed":
            return torch.full((server.classes,), self.tau)
        logits = predict_logits(server, w, server.validation)
        probs = calibration.probs(logits).float() if calibration else logits.softmax(dim=1)
        return paper.thresholds(probs, server.validation.labels, self.threshold)

    def client_round(self, request: Packet, memory: Packet, client: Participant) -> tuple[Packet, Packet]:
        """Step 3: labels the images by the ensemble; a sampled client also trains on D⁺ and D⁻."""
        w, t = request.tensors["model"], int(request.scalars["t"])
        adapt = find_adapter(request, client)
        if self.ensemble:
            memory = update_ensemble(w, t, memory, client, adapt)
            mean = memory.tensors["images"]["mean"]
        if not request.trains:
            return Packet(scalars={"t": t}), memory
        if not self.ensemble:
            mean = adapt(predict_logits(client, w, client.data)).softmax(dim=1)

        tau = request.tensors["thresholds"]["tau"]
        draw = client.rng(t, "complementary")
        positive, negative = (mask.nonzero().squeeze(1) for mask in self.label_sets(mean, tau))  # D⁺, D⁻
        y_plus = paper.pseudo_labels(mean)[positive]
        y_minus = paper.complementary_labels(mean, self.theta, draw)[negative]
        client.record_labels("positive", positive, y_plus)
        client.record_labels("negative", negative, y_minus, complementary=True)

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

    def label_sets(self, mean: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
        """The masks of D⁺ (Eq. 10) and D⁻ (Eq. 12); D⁻ is empty without negative learning."""
        negative = paper.negative_set(mean, tau, self.theta)
        return paper.positive_set(mean, tau), negative if self.negative else torch.zeros_like(negative)

    def client_batches(
        self, client: Participant, t: int, positive: Tensor, target: Tensor, negative: Tensor, y_minus: Tensor
    ) -> Iterator[Batch]:
        """Mini-batches (images, targets of those from D⁺, labels of those from D⁻), D⁺ first in each.

        D⁺ is strongly augmented afresh in every epoch; D⁻ is not augmented (Eqs. 14 and 15).
        """
        pixels, size, generator = client.data.pixels, client.training.batch, client.rng(t, "batches")
        plus, minus = len(positive), len(negative)
        for _ in range(client.training.epochs):
            if self.batches == "joint":
                rows = torch.randperm(plus + minus, generator=generator).split(size)
                pairs = [(chunk[chunk < plus], chunk[chunk >= plus] - plus) for chunk in rows]
            else:
                longest = max(plus, minus)
                streams = (repeated_batches(n, longest, size, generator) for n in (plus, minus))
                pairs = list(zip(*streams, strict=True))
            if sum(map(len, pairs[-1])) == 1 and needs_two_images(client):
                *pairs, alone = pairs
                if not pairs:
                    return
                pairs[-1] = (torch.cat([pairs[-1][0], alone[0]]), torch.cat([pairs[-1][1], alone[1]]))
            used = torch.cat([p for p, _ in pairs])
            strong = client.augment.strong(pixels[positive[used]], generator).split(
                [len(p) for p, _ in pairs]
            )
            for augmented, (p, m) in zip(strong, pairs, strict=True):
                images = torch.cat([augmented, pixels[negative[m]]]).to(client.device).float()
                yield images, target[p].to(client.device), y_minus[m].to(client.device)

    def collect(self, current: Round, state: Packet, replies: Mapping[int, Packet], server: Server) -> Packet:
        """Step 4: Eq. 2, the average from which the next round starts."""
        w = state.tensors["model"]
        models = {k: replies[k].tensors["model"] for k in current.cohort if k in replies}
        average = server.aggregation.combine(models, w, current.t) if models else w
        return Packet({**state.tensors, "average": average}, state.scalars)

    def metrics(self, state: Packet) -> Metrics:
        return {
            "tau": state.tensors["thresholds"]["tau"].tolist(),
            "lambda": float(state.scalars["lambda"]),
        }

    def preparation_epochs(self, bootstrap: BootstrapSettings) -> int:
        return bootstrap.epochs or self.bootstrap_epochs

    def predicts_everywhere(self) -> bool:
        return self.ensemble and self.scope == "all"

    def explain_labels(
        self, memory: Packet, metrics: Metrics, predict: Callable[[], Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        mean = memory.tensors["images"]["mean"] if "images" in memory.tensors else predict()
        positive, negative = self.label_sets(mean, torch.tensor(metrics["tau"]))
        return mean, {
            "learned as this class (D⁺)": positive,
            "learned as not another class (D⁻)": negative,
            "not used": ~(positive | negative),
        }


def update_ensemble(
    w: Tensors, t: int, memory: Packet, client: Participant, adapt: Callable[[Tensor], Tensor]
) -> Packet:
    """Eq. 8: the ensemble mean p̄ after w^t, once per round even if the request comes twice or late.

    Each image has a count of its own, so a client that misses rounds stays correct, and a new image (with
    count 0) starts afresh.
    """
    if int(memory.scalars.get("t", 0)) >= t:
        return memory
    probs = adapt(predict_logits(client, w, client.data)).softmax(dim=1)
    past = memory.tensors.get("images") or {
        "mean": torch.zeros_like(probs),
        "count": torch.zeros(len(probs), dtype=torch.int64),
    }
    count = past["count"] + 1
    mean = paper.ensemble_update(past["mean"], probs, count)
    return Packet({"images": {"mean": mean, "count": count}}, {"t": t})


def repeated_batches(n: int, length: int, size: int, generator: torch.Generator) -> list[Tensor]:
    """`length` numbers below n in batches: shuffled once, and repeated when used up; empty for n = 0."""
    order = torch.randperm(n, generator=generator)
    if n == 0:
        return [order] * -(-length // size)
    return list(order[torch.arange(length) % n].split(size))
