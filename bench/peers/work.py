"""The work that all contestants share: data, network, settings, and a bare training loop.

Every contestant reads the same file: the clients' images and labels, and the initial weights. It writes the
averaged model of the last round. Nothing here imports fedseal.

A contestant trains in one of two ways. "usual" is what one writes with PyTorch: `nn.Module` as it is,
`DataLoader`, `torch.optim.SGD`. "tuned" is the fastest loop found: weights in channels-last layout, batches
cut from one tensor, fused SGD.
"""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, max_pool2d, relu
from torch.optim.sgd import sgd
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, LR = 5, 32, 0.01


class LeNet(nn.Module):
    """Two 5×5 convolutions, then layers of 120, 84 and 10 units. ReLU after the pooling is faster."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(400, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = relu(max_pool2d(self.conv1(x), 2))
        x = relu(max_pool2d(self.conv2(x), 2)).flatten(1)
        logits: Tensor = self.fc3(relu(self.fc2(relu(self.fc1(x)))))
        return logits


@dataclass(frozen=True)
class Work:
    """What every contestant starts from."""

    images: Tensor  # [clients, n, 1, 28, 28], normalised
    labels: Tensor  # [clients, n]
    weights: Mapping[str, Tensor]

    def network(self, way: str = "tuned") -> LeNet:
        """The initial network."""
        model = LeNet()
        model.load_state_dict(self.weights)
        return model.to(memory_format=torch.channels_last) if way == "tuned" else model


@lru_cache(1)
def load(path: str) -> Work:
    """Reads the work once per process."""
    content = load_file(path)
    images, labels = content.pop("images"), content.pop("labels")
    return Work(images.float().sub_(content.pop("mean")).div_(content.pop("std")), labels, content)


@lru_cache(1)
def scratch_network(path: str, way: str) -> LeNet:
    """The network that a process uses for all of its clients."""
    return load(path).network(way)


def batches(images: Tensor, labels: Tensor, size: int = BATCH) -> Iterator[tuple[Tensor, Tensor]]:
    """The mini-batches of one epoch, shuffled."""
    order = torch.randperm(len(labels))
    return zip(images[order].split(size), labels[order].split(size), strict=True)


def loader(images: Tensor, labels: Tensor, size: int = BATCH) -> DataLoader[tuple[Tensor, ...]]:
    """PyTorch's own mini-batches."""
    return DataLoader(TensorDataset(images, labels), size, shuffle=True)


def train(model: nn.Module, images: Tensor, labels: Tensor, way: str = "tuned") -> None:
    """A client's part of a round: plain SGD, in place."""
    model.train()
    (train_tuned if way == "tuned" else train_usual)(model, images, labels)


def train_usual(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """As it is usually written."""
    optimizer = torch.optim.SGD(model.parameters(), LR)
    batches = loader(images, labels)
    for _ in range(EPOCHS):
        for x, y in batches:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()


def train_tuned(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """As fast as possible.

    This calls the function behind `torch.optim.SGD`. The class would import PyTorch's compiler, which makes
    processes start more slowly.
    """
    parameters = list(model.parameters())
    for _ in range(EPOCHS):
        for x, y in batches(images, labels):
            for parameter in parameters:
                parameter.grad = None
            cross_entropy(model(x), y).backward()
            with torch.no_grad():
                sgd(
                    parameters,
                    [p.grad for p in parameters],
                    [None] * len(parameters),
                    fused=True,
                    lr=LR,
                    momentum=0.0,
                    weight_decay=0.0,
                    dampening=0.0,
                    nesterov=False,
                    maximize=False,
                )


def flatten(model: nn.Module) -> Tensor:
    """All weights as one vector, in the order of a contiguous tensor."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


@torch.no_grad()
def unflatten(model: nn.Module, weights: Tensor) -> None:
    """Loads the weights from such a vector."""
    sizes = [parameter.numel() for parameter in model.parameters()]
    for parameter, values in zip(model.parameters(), weights.split(sizes), strict=True):
        parameter.copy_(values.view(parameter.shape))


class Stopwatch:
    """Seconds of each round, from the end of the round before it."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.start()

    def start(self) -> None:
        """The beginning of round 1."""
        self._last = time.perf_counter()

    def lap(self) -> None:
        """The end of a round."""
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now

    def finish(self, model: nn.Module, out: str) -> None:
        """Writes the model, and the seconds beside it."""
        save_file({name: value.contiguous() for name, value in model.state_dict().items()}, Path(out))
        Path(out).with_suffix(".json").write_text(json.dumps({"seconds": self.seconds}))
