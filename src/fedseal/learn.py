"""The only training loop and the only inference loop."""

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from fedseal import weights
from fedseal.core import Images, ServerLearning, Site
from fedseal.paper import server_loss
from fedseal.weights import Tensors

Batch = tuple[Tensor, ...]
Loss = Callable[..., Tensor]

INFERENCE_BATCH = 500


def fit(
    site: Site,
    start: Mapping[str, Tensor],
    batches: Iterable[Batch],
    loss: Loss,
    lr: float,
    *,
    clip: float | None = None,
) -> Tensors:
    """Eqs. 4 and 16: mini-batch SGD from the weights `start`; `loss(model, *batch)` is what falls.

    `clip` is the largest norm of a step's gradient.
    """
    weights.load(site.model, start)
    site.model.train()
    momenta: dict[Tensor, Tensor | None] = {}
    for batch in batches:
        site.model.zero_grad()
        loss(site.model, *batch).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(site.model.parameters(), clip)
        _step(site, lr, momenta)
    return weights.save(site.model)


@torch.no_grad()
def _step(site: Site, lr: float, momenta: dict[Tensor, Tensor | None]) -> None:
    """What `torch.optim.SGD` does, by the same function; the class would load PyTorch's compiler, which takes
    as long as all the rest of PyTorch, in every process."""
    moved = {p: p.grad for p in site.model.parameters() if p.grad is not None}
    buffers = [momenta.get(p) for p in moved]
    sgd(
        [*moved],
        [*moved.values()],
        buffers,
        fused=site.device.type != "mps",
        lr=lr,
        momentum=site.learning.momentum,
        weight_decay=site.learning.weight_decay,
        dampening=0.0,
        nesterov=False,
        maximize=False,
    )
    momenta.update(zip(moved, buffers, strict=True))


def learning_rate(site: Site, t: int) -> float:
    """The learning rate of round t ≥ 1."""
    return site.learning.lr * site.learning.decay ** (t - 1)


def labelled_batches(site: Site, epochs: int, generator: torch.Generator, augment: str) -> Iterator[Batch]:
    """Shuffled mini-batches of a site's labelled images, freshly augmented every epoch."""
    pixels, labels = site.data.pixels, site.data.labels
    assert labels is not None, f"{site.name} has no labels"
    for _ in range(epochs):
        order = torch.randperm(len(pixels), generator=generator)
        images = pixels[order]
        if augment != "none":
            images = getattr(site.augment, augment)(images, generator)
        batch = site.learning.batch
        yield from zip(
            images.to(site.device).float().split(batch),
            labels[order].to(site.device).split(batch),
            strict=True,
        )


def two_view_batches(site: Site, generator: torch.Generator) -> Iterator[Batch]:
    """Shuffled mini-batches (weak view, strong view) of a site's images, freshly augmented every epoch."""
    pixels, batch = site.data.pixels, site.learning.batch
    for _ in range(site.learning.epochs):
        images = pixels[torch.randperm(len(pixels), generator=generator)]
        views = (augment(images, generator) for augment in (site.augment.weak, site.augment.strong))
        yield from zip(*(view.to(site.device).float().split(batch) for view in views), strict=True)


def train_supervised(
    site: Site,
    start: Mapping[str, Tensor],
    t: int,
    *,
    epochs: int | None = None,
    stream: str = "supervised",
    weight: float = 1.0,
) -> Tensors:
    """Eqs. 3 and 4: supervised learning on the site's labelled images at round t's learning rate.

    `weight` is a factor on the loss.
    """

    def loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        return weight * server_loss(model(images), labels)

    settings = site.learning
    augment = settings.augment if isinstance(settings, ServerLearning) else "weak"
    passes = settings.epochs if epochs is None else epochs
    batches = labelled_batches(site, passes, site.rng(t, stream), augment)
    return fit(site, start, batches, loss, learning_rate(site, t))


@torch.inference_mode()
def predict(site: Site, values: Mapping[str, Tensor], images: Images) -> Tensor:
    """p(x; w): the confidences [n, M] of a model with these weights, on the CPU."""
    weights.load(site.model, values)
    site.model.eval()
    batches = images.pixels.split(INFERENCE_BATCH)
    if not len(images):
        return torch.zeros(0, site.classes)
    return torch.cat([site.model(x.to(site.device)).softmax(dim=1).cpu() for x in batches])


def accuracy(probs: Tensor, labels: Tensor) -> float:
    """The share of images whose most probable class is their label."""
    return float((probs.argmax(dim=1) == labels).double().mean())
