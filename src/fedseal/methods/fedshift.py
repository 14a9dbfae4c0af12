"""fedshift: learn with each client's own class mix (docs/label-shift.md).

Before round 1 the server trains several models on its labels, the teachers. In round 1 every client gets them
and remembers what they say about its images, on average. From that it estimates its own class mix without a
label, and labels its images by teachers and mix together, which is right far more often than the teachers
alone. It learns these labels. The server averages the clients' models with momentum. The model to take home,
w̄, is a moving average over rounds. Its last biases are set by the server's labels, because the clients'
images together have a class mix, too.

A client's mix and labels never leave it. Each part is a switch; `fedseal reproduce ablation-fedshift` shows
what each is worth.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedseal import weights
from fedseal.aggregate import momentum_step, moving_average
from fedseal.config.sections import BootstrapSettings
from fedseal.core import (
    Images,
    LabelledImages,
    Method,
    Metrics,
    Packet,
    Participant,
    PreparationStep,
    Round,
    Server,
    derive_seed,
)
from fedseal.errors import UserError
from fedseal.label_shift import (
    Calibration,
    adjusted_loss,
    calibrate,
    estimate_mix,
    posterior,
    sharpened,
)
from fedseal.learn import bootstrap, fit, labelled_batches, learning_rate, predict_logits, train_supervised
from fedseal.methods.class_mix import GROUP, calibration_of
from fedseal.weights import Tensors


class FedShift(Method):
    """The `[fedshift]` section."""

    titles: ClassVar[Mapping[str, str]] = {"labelled": "labelled images", "temperature": "temperature T"}
    explanations: ClassVar[Mapping[str, str]] = {
        "model": "wᵗ: the model that clients start from in round t. With server_step, the server has trained"
        " it on its labelled images.",
        "average": "w̄: the average of the models that clients send back, also over the last rounds.",
        "labelled": "labelled images: client images whose label is confident enough to learn from.",
        "temperature": "T: the model's outputs are divided by T, so that its confidence agrees with its"
        " accuracy on the validation images. Above 1, the model is overconfident.",
    }

    teachers: int = Field(8, ge=1, le=32, description="models that the server trains before round 1")
    mix: bool = Field(True, description="label with the client's own class mix")
    threshold: float = Field(0.0, ge=0, le=1, description="minimum confidence of a label")
    sharpen: float = Field(
        0.5, ge=0, le=1, description="temperature of the labels: 1: soft as they are, 0: hard"
    )
    adjust: float = Field(
        0.0, ge=0, le=1, description="1: the loss leaves out the client's class mix; 0: it does not"
    )
    views: Literal["weak", "strong"] = Field("weak", description="augmentation of the clients' images")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of the server's averaging")
    keep: float = Field(
        0.9, ge=0, lt=1, description="w̄ is a moving average over rounds, of which this share is kept"
    )
    balance: bool = Field(
        True,
        description="set the biases of w̄'s last layer by the server's labels, so that no class is favoured",
    )
    server_step: bool = Field(False, description="also train on the server's labels in every round")

    def check(self, server: Server) -> None:
        if server.bootstrap.epochs == 0:
            raise UserError(
                "fedshift labels with bootstrapped models: set bootstrap.epochs, for example to 750."
            )
        if self.balance:
            output_bias(server.model, server.classes)  # refuses a network without one

    def initial_state(self, server: Server) -> Packet:
        w = weights.get_weights(server.model)
        return Packet({"model": w, "average": w}, {"bootstrapped": 0})

    def prepare(self, state: Packet, server: Server) -> Iterator[PreparationStep]:
        """Trains the teachers one after the other. The first one is the model of round 1."""
        each, done = server.bootstrap.epochs, int(state.scalars["bootstrapped"])
        tensors = dict(state.tensors)
        for member in range(done // each, self.teachers):
            if teacher(member) in tensors:
                start = tensors[teacher(member)]
            elif member == 0:
                start = tensors["model"]
            else:
                network = server.new_network(derive_seed(server.seed, "teacher", member))
                start = weights.get_weights(network)
            for epochs, w in bootstrap(server, start, max(done - member * each, 0), member):
                tensors[teacher(member)] = w
                if member == 0:
                    tensors |= {"model": w, "average": w}
                total = member * each + epochs
                state = Packet(dict(tensors), {"bootstrapped": total})
                yield PreparationStep("bootstrapping", total, self.teachers * each, state)

    def preparation_epochs(self, bootstrap: BootstrapSettings) -> int:
        return self.teachers * bootstrap.epochs

    def server_round(self, current: Round, state: Packet, server: Server) -> tuple[Packet, dict[int, Packet]]:
        """Sends the global model to the cohort, and in round 1 the teachers to everyone."""
        w = state.tensors.get("next", state.tensors["model"])
        if self.server_step:
            w = train_supervised(server, w, current.t, stream="rounds")
        calibration = calibration_of(w, server)
        groups = {"model": w, GROUP: calibration.to_tensors()}
        teachers = {name: group for name, group in state.tensors.items() if name.startswith(TEACHER)}
        if teachers:
            validation = server.validation
            found = calibrate(mean_logits(server, teachers, validation), validation.labels)
            groups |= teachers | {"teachers": found.to_tensors()}
        train = Packet(groups, {"t": current.t, "train": True})
        listen = Packet(groups, {"t": current.t, "train": False})
        requests = dict.fromkeys(current.cohort, train)
        if teachers:
            requests = {k: requests.get(k, listen) for k in current.everyone}
        kept = {
            name: state.tensors[name] for name in ("average", "mean", "velocity") if name in state.tensors
        }
        return Packet({"model": w, **kept}, {"temperature": calibration.temperature}), requests

    def client_round(self, request: Packet, memory: Packet, client: Participant) -> tuple[Packet, Packet]:
        """Labels the images by the teachers and the client's own class mix, and learns the labels."""
        w, t = request.tensors["model"], int(request.scalars["t"])
        memory = remember_teachers(request, memory, client)
        if not request.trains:
            return Packet(scalars={"t": t}), memory

        calibration = Calibration.from_tensors(request.tensors[GROUP])
        probs, old = confidences(w, calibration, memory, client), calibration.mix
        mix = estimate_mix(probs, calibration) if self.mix else old
        adapted = posterior(probs, old, mix)
        confidence, best = adapted.max(dim=1)
        rows = (confidence >= self.threshold).nonzero().squeeze(1)
        client.record_labels("labelled", rows, best[rows])
        if "images" in memory.tensors:  # for the report
            images = memory.tensors["images"] | {"labels": adapted.float()}
            memory = Packet({"images": images}, memory.scalars)
        labels = sharpened(adapted, self.sharpen).float()
        if len(rows):

            def loss(model: nn.Module, images: Tensor, y: Tensor) -> Tensor:
                return adjusted_loss(model(images), y, old, mix, self.adjust)

            data = LabelledImages(client.data.pixels[rows], labels[rows])
            epochs, generator = client.training.epochs, client.rng(t, "batches")
            batches = labelled_batches(client, data, epochs, generator, self.views)
            w = fit(client, w, batches, loss, learning_rate(client, t))
        return Packet({"model": dict(w)}, {"t": t, "labelled": len(rows)}), memory

    def collect(self, current: Round, state: Packet, replies: Mapping[int, Packet], server: Server) -> Packet:
        w = state.tensors["model"]
        received = {k: replies[k].tensors["model"] for k in current.cohort if k in replies}
        if not received:
            return Packet({**state.tensors, "next": w}, state.scalars)
        combined = server.aggregation.combine(received, w, current.t)
        after, velocity = momentum_step(w, combined, state.tensors.get("velocity"), self.momentum)
        mean = moving_average(state.tensors.get("mean", w), after, self.keep)
        average = balanced(server, mean) if self.balance else mean
        groups = {"model": w, "next": after, "mean": mean, "average": average, "velocity": velocity}
        return Packet(groups, state.scalars)

    def metrics(self, state: Packet) -> Metrics:
        return {"temperature": float(state.scalars["temperature"])}

    def explain_labels(
        self, memory: Packet, metrics: Metrics, predict: Callable[[], Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        images = memory.tensors.get("images", {})
        if "labels" not in images:
            return predict(), {}
        used = images["labels"].max(dim=1).values >= self.threshold
        return images["labels"], {"learned as this class": used, "not used": ~used}


def balanced(server: Server, w: Tensors) -> Tensors:
    """The weights with biases of the last layer that fit all of the server's labels.

    Without them the model has learned how frequent classes are at the clients together. Training labels help,
    too: the model began with them, but the rounds do not train on them.
    """
    name, known = output_bias(server.model, server.classes), (server.data, server.validation)
    logits = torch.cat([predict_logits(server, w, images) for images in known])
    found = calibrate(logits, torch.cat([images.labels for images in known]), deviation=1.0)
    return {**w, name: w[name] + (found.temperature * found.bias).to(w[name])}


TEACHER = "teacher-"


def teacher(member: int) -> str:
    """The name of a teacher's group of tensors."""
    return f"{TEACHER}{member}"


def mean_logits(participant: Participant, teachers: Mapping[str, Tensors], images: Images) -> Tensor:
    """The teachers' logits, on average."""
    total = sum(predict_logits(participant, w, images).double() for w in teachers.values())
    return torch.as_tensor(total) / len(teachers)


def remember_teachers(request: Packet, memory: Packet, client: Participant) -> Packet:
    """A client's memory: the teachers' calibrated confidences of its images, if it has got the teachers."""
    images = memory.tensors.get("images")
    teachers = {name: group for name, group in request.tensors.items() if name.startswith(TEACHER)}
    if teachers:
        probs = Calibration.from_tensors(request.tensors["teachers"]).probs(
            mean_logits(client, teachers, client.data)
        )
        images = {"probs": probs, "known": torch.ones(len(probs), dtype=torch.bool)}
    return Packet({"images": images} if images else {}, {"t": request.scalars["t"]})


def confidences(w: Tensors, calibration: Calibration, memory: Packet, client: Participant) -> Tensor:
    """Calibrated confidences of a client's images: the teachers', or the model's for images new to them."""
    images = memory.tensors.get("images")
    if images is not None and bool(images["known"].all()):
        return images["probs"]
    probs = calibration.probs(predict_logits(client, w, client.data))
    if images is None:
        return probs
    return torch.where(images["known"].unsqueeze(1), images["probs"], probs)


def output_bias(model: nn.Module, classes: int) -> str:
    """The name of the last layer's bias."""
    name, last = list(model.named_parameters())[-1]
    if last.shape != (classes,):
        raise UserError(
            f"The network's last parameter, {name}, is not a bias for each of the {classes} classes: set"
            " fedshift.balance to false."
        )
    return name
