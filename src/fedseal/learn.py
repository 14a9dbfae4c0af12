"""The one training loop and the one inference loop."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.sgd import sgd

from fedseal import weights
from fedseal.config.sections import ServerTrainingSettings
from fedseal.core import Images, LabelledImages, LabelledParticipant, Participant, Server
from fedseal.models import check_layout
from fedseal.paper import server_loss
from fedseal.weights import Tensors

Batch = tuple[Tensor, ...]
Loss = Callable[..., Tensor]

INFERENCE_BATCH = 500
PORTION = 10  # epochs of bootstrapping between two states that can be resumed


def fit(
    participant: Participant,
    start: Mapping[str, Tensor],
    batches: Iterable[Batch],
    loss: Loss,
    lr: float,
    *,
    clip: float | None = None,
) -> Tensors:
    """Eqs. 4 and 16: mini-batch SGD on `loss(model, *batch)`, from the weights `start`.

    `clip` is the maximum norm of a step's gradient.
    """
    weights.set_weights(participant.model, start)
    check_layout(participant.model)
    participant.model.train()
    parameters = list(participant.model.parameters())
    momenta: dict[Tensor, Tensor | None] = {}
    for batch in batches:
        for parameter in parameters:
            parameter.grad = None
        loss(participant.model, *batch).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters, clip)
        _step(participant, [p for p in parameters if p.grad is not None], lr, momenta)
    return weights.get_weights(participant.model)


@torch.no_grad()
def _step(
    participant: Participant, parameters: list[nn.Parameter], lr: float, momenta: dict[Tensor, Tensor | None]
) -> None:
    """One step of `torch.optim.SGD`, by the function behind it.

    The class itself would import PyTorch's compiler, which doubles the start-up time of every process.
    """
    buffers = [momenta.get(p) for p in parameters]
    sgd(
        [*parameters],
        [p.grad for p in parameters if p.grad is not None],
        buffers,
        fused=participant.device.type != "mps",
        lr=lr,
        momentum=participant.training.momentum,
        weight_decay=participant.training.weight_decay,
        dampening=0.0,
        nesterov=False,
        maximize=False,
    )
    momenta.update(zip(parameters, buffers, strict=True))


def learning_rate(participant: Participant, t: int) -> float:
    """The learning rate of round t ≥ 1."""
    return participant.training.lr * participant.training.decay ** (t - 1)


def needs_two_images(participant: Participant) -> bool:
    """True if BatchNorm in the network cannot learn from one image: it has only one value per channel."""
    if not any(isinstance(module, _BatchNorm) for module in participant.model.modules()):
        return False
    model = copy.deepcopy(participant.model).train()  # the statistics of the network itself do not change
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model(participant.data.pixels[:1].to(participant.device).float())
    except ValueError:
        return True
    return False


def batch_sizes(participant: Participant, n: int) -> list[int]:
    """The sizes of mini-batches of n images.

    If BatchNorm cannot learn from one image, a last one alone joins the batch before it, or is not used.
    """
    size = participant.training.batch
    sizes = [min(size, n - start) for start in range(0, max(n, 1), size)]
    if sizes[-1] == 1 and needs_two_images(participant):
        sizes[-2:] = [size + 1] if len(sizes) > 1 else []
    return sizes


def labelled_batches(
    participant: Participant, data: LabelledImages, epochs: int, generator: torch.Generator, augment: str
) -> Iterator[Batch]:
    """Shuffled mini-batches of labelled images, augmented afresh in every epoch."""
    pixels, labels = data.pixels, data.labels
    sizes = batch_sizes(participant, len(pixels))
    for _ in range(epochs if sizes else 0):
        order = torch.randperm(len(pixels), generator=generator)
        images = pixels[order]
        if augment != "none":
            images = getattr(participant.augment, augment)(images, generator)
        yield from zip(
            images.to(participant.device).float().split(sizes),
            labels[order].to(participant.device).split(sizes),
            strict=True,
        )


def two_view_batches(participant: Participant, generator: torch.Generator) -> Iterator[Batch]:
    """Shuffled mini-batches (weak view, strong view), augmented afresh in every epoch."""
    pixels = participant.data.pixels
    sizes = batch_sizes(participant, len(pixels))
    for _ in range(participant.training.epochs if sizes else 0):
        images = pixels[torch.randperm(len(pixels), generator=generator)]
        views = (
            augment(images, generator) for augment in (participant.augment.weak, participant.augment.strong)
        )
        yield from zip(*(view.to(participant.device).float().split(sizes) for view in views), strict=True)


def train_supervised(
    participant: LabelledParticipant,
    start: Mapping[str, Tensor],
    t: int,
    *,
    epochs: int | None = None,
    stream: str = "supervised",
    weight: float = 1.0,
) -> Tensors:
    """Eqs. 3 and 4: supervised learning at the learning rate of round t; the loss is scaled by `weight`."""

    def loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        return weight * server_loss(model(images), labels)

    settings = participant.training
    augment = settings.augment if isinstance(settings, ServerTrainingSettings) else "weak"
    passes = settings.epochs if epochs is None else epochs
    batches = labelled_batches(participant, participant.data, passes, participant.rng(t, stream), augment)
    with participant.seeded(t, stream):
        return fit(participant, start, batches, loss, learning_rate(participant, t))


def bootstrap(
    server: Server, start: Tensors, done: int = 0, member: int = 0
) -> Iterator[tuple[int, Tensors]]:
    """Supervised training before round 1, as `[bootstrap]` says, after `done` epochs of it.

    Yields the number of epochs and the weights after every portion. `member` distinguishes several models.
    """
    settings, w = server.bootstrap, start
    for first in range(done, settings.epochs, PORTION):
        epochs = min(PORTION, settings.epochs - first)
        rng = server.rng(first, f"bootstrap {member}")
        batches = labelled_batches(server, server.data, epochs, rng, settings.augment)
        lr = settings.lr * settings.decay**first
        with server.seeded(first, f"bootstrap {member}"):
            w = fit(server, w, batches, lambda model, x, y: server_loss(model(x), y), lr)
        yield first + epochs, w


def predict(participant: Participant, values: Mapping[str, Tensor], images: Images) -> Tensor:
    """p(x; w): the confidences [n, M] of a model with the weights `values`, on the CPU."""
    return predict_logits(participant, values, images).softmax(dim=1)


@torch.inference_mode()
def predict_logits(participant: Participant, values: Mapping[str, Tensor], images: Images) -> Tensor:
    """The logits [n, M] of a model with the weights `values`, on the CPU."""
    weights.set_weights(participant.model, values)
    participant.model.eval()
    batches = images.pixels.split(INFERENCE_BATCH)
    if not len(images):
        return torch.zeros(0, participant.classes)
    return torch.cat([participant.model(x.to(participant.device)).cpu() for x in batches])


def accuracy(probs: Tensor, labels: Tensor) -> float:
    """The share of images whose most probable class is their label."""
    return float((probs.argmax(dim=1) == labels).double().mean())
