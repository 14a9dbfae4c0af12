"""Networks: the paper's LeNet, ResNet-9 (from the table in its appendix) and ResNet-18; pretrained; your own.

Every network takes images as uint8 (or as floats from 0 to 255) and normalises them itself. Mean and standard
deviation are buffers, so a file with the weights is all that is needed for predictions. docs/new-model.md
shows how to use a network of your own. To add one to the package, write its class and add it to `MODELS`.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, max_pool2d, relu
from torch.nn.modules.batchnorm import _BatchNorm

from fedseal.config.sections import ModelSettings
from fedseal.errors import UserError
from fedseal.pretrained import efficientnet_lite0, load_weights
from fedseal.system.own_code import load_own, split_path

Norm = Literal["none", "batch", "group"]


class Network(nn.Module):
    """Normalisation of the images, followed by a network such as those in `MODELS`.

    With `resize`, images are enlarged to that size first.
    """

    mean: Tensor
    std: Tensor
    loaded = ""  # what was loaded from `model.weights`

    def __init__(self, body: nn.Module, mean: Sequence[float], std: Sequence[float], resize: int = 0) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1))
        self.body = body
        self.resize = resize

    def forward(self, images: Tensor) -> Tensor:
        x = (images - self.mean) / self.std
        if self.resize:
            x = interpolate(x, size=(self.resize, self.resize), mode="bilinear")
        logits: Tensor = self.body(x.contiguous(memory_format=torch.channels_last))
        return logits


class MaxPool(nn.Module):
    """2×2 max-pooling, bit-identical to PyTorch's and faster without gradients (see `bench/predict.py`).

    PyTorch's kernel is slow on channels-last tensors with few channels. Training still uses it, because
    PyTorch defines which of several equal pixels receives the gradient.
    """

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return max_pool2d(x, 2)
        height, width = (side - side % 2 for side in x.shape[2:])
        rows = torch.maximum(x[:, :, 0:height:2], x[:, :, 1:height:2])
        return torch.maximum(rows[..., 0:width:2], rows[..., 1:width:2])


class LeNet(nn.Module):
    """Two 5×5 convolutions (6 and 16 channels), then layers of 120, 84 and M units.

    ReLU follows the pooling: the result is the same as before it, for a quarter of the work.
    """

    def __init__(self, channels: int, size: int, classes: int, settings: ModelSettings) -> None:
        super().__init__()
        padding = 2 if size <= 28 else 0  # LeNet expects 32×32, so 28×28 is padded to that
        side = ((size + 2 * padding - 4) // 2 - 4) // 2
        if side < 1:
            raise UserError(f"LeNet needs images of at least 12×12, not {size}×{size}: raise data.size.")
        self.conv1 = nn.Conv2d(channels, 6, 5, padding=padding)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.norm1, self.norm2 = _norm(settings.norm, 6), _norm(settings.norm, 16)
        self.pool = MaxPool()
        self.fc1 = nn.Linear(16 * side * side, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = relu(self.pool(self.norm1(self.conv1(x))))
        x = relu(self.pool(self.norm2(self.conv2(x)))).flatten(1)
        logits: Tensor = self.fc3(relu(self.fc2(relu(self.fc1(x)))))
        return logits


def _norm(kind: Norm, channels: int) -> nn.Module:
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    if kind == "group":  # 32 groups as in FedRGD, fewer in layers with fewer channels
        return nn.GroupNorm(next(g for g in (32, 16, 8, 4, 2) if channels % g == 0), channels)
    return nn.Identity()


def _conv(inputs: int, outputs: int, norm: Norm, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return nn.Sequential(convolution, _norm(norm, outputs), nn.ReLU())


class ResNet9(nn.Module):
    """The table in the paper's appendix, without biases and with the residual connections of FedMatch."""

    def __init__(self, channels: int, size: int, classes: int, settings: ModelSettings) -> None:
        super().__init__()
        if size < 32 or size % 32:
            raise UserError(
                f"ResNet-9 needs images of 32×32 (or a multiple), not {size}×{size}: set data.size."
            )
        w, norm = settings.width, settings.norm
        self.conv1, self.conv2 = _conv(channels, w, norm), _conv(w, 2 * w, norm)
        self.conv3, self.conv4 = _conv(2 * w, 2 * w, norm), _conv(2 * w, 2 * w, norm)
        self.conv5, self.conv6 = _conv(2 * w, 4 * w, norm), _conv(4 * w, 8 * w, norm)
        self.conv7, self.conv8 = _conv(8 * w, 8 * w, norm), _conv(8 * w, 8 * w, norm)
        self.pool = MaxPool()
        self.last_pool = nn.MaxPool2d(size // 8)
        self.fc = nn.Linear(8 * w, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.conv2(self.conv1(x)))
        x = x + self.conv4(self.conv3(x))
        x = self.pool(self.conv6(self.pool(self.conv5(x))))
        x = x + self.conv8(self.conv7(x))
        logits: Tensor = self.fc(self.last_pool(x).flatten(1))
        return logits


class BasicBlock(nn.Module):
    """Two 3×3 convolutions with a shortcut around them.

    The shortcut applies its stride by slicing. With few channels, a 1×1 convolution with a stride gives wrong
    results or crashes in oneDNN (uxlfoundation/oneDNN, issue 6035).
    """

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.stride = stride
        self.first = _conv(inputs, outputs, norm, stride)
        self.second = nn.Sequential(
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), _norm(norm, outputs)
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, bias=False), _norm(norm, outputs))

    def forward(self, x: Tensor) -> Tensor:
        seen = x[:, :, :: self.stride, :: self.stride]
        return relu(self.second(self.first(x)) + self.shortcut(seen))


class ResNet18(nn.Module):
    """He et al. (2016), with two basic blocks at each of four widths."""

    def __init__(self, channels: int, size: int, classes: int, settings: ModelSettings) -> None:
        super().__init__()
        w, norm, stem = settings.width, settings.norm, settings.stem
        if stem == "large" and norm == "batch" and size < 64:  # the last feature maps would be 1×1
            raise UserError(
                f"model.stem = 'large' with batch normalisation needs images of at least 64×64, not"
                f" {size}×{size}: set model.stem to 'small' or raise data.size."
            )
        self.stem: nn.Module = _conv(channels, w, norm)
        if stem == "large":
            seven = nn.Conv2d(channels, w, 7, 2, padding=3, bias=False)
            self.stem = nn.Sequential(seven, _norm(norm, w), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1))
        shapes = [(w, w, 1), (w, 2 * w, 2), (2 * w, 4 * w, 2), (4 * w, 8 * w, 2)]
        self.blocks = nn.Sequential(
            *(block for i, o, s in shapes for block in (BasicBlock(i, o, s, norm), BasicBlock(o, o, 1, norm)))
        )
        self.fc = nn.Linear(8 * w, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.blocks(self.stem(x)).mean(dim=(2, 3)))
        return logits


# Each entry takes channels, size, classes and the `[model]` section.
MODELS: dict[str, Callable[[int, int, int, ModelSettings], nn.Module]] = {
    "lenet": LeNet,
    "resnet9": ResNet9,
    "resnet18": ResNet18,
    "efficientnet-lite0": efficientnet_lite0,
}
PRETRAINED = ("efficientnet-lite0",)  # those of them that start with trained weights


def build_network(
    settings: ModelSettings,
    *,
    channels: int,
    size: int,
    classes: int,
    mean: Sequence[float],
    std: Sequence[float],
    seed: int,
) -> Network:
    """A newly initialised network, with the weights of `model.weights`. The seed alone decides the others."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        body = _build_body(settings, channels, settings.resize or size, classes)
    mean = _own_pixels(body, "pixel_mean", channels) or mean
    std = _own_pixels(body, "pixel_std", channels) or std
    network = Network(body, mean, std, settings.resize)
    network.body.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if settings.weights:
        network.loaded = load_weights(network, Path(settings.weights))
    return network


def _own_pixels(body: nn.Module, name: str, channels: int) -> list[float]:
    """A network's own normalisation of pixels; empty if it has none."""
    given = getattr(body, name, None)
    if given is None:
        return []
    try:
        found = [float(value) for value in given]
    except (TypeError, ValueError):
        found = []
    usable = all(math.isfinite(value) and (value > 0 or name == "pixel_mean") for value in found)
    if len(found) != channels or not usable:
        kind = "finite" if name == "pixel_mean" else "positive"
        raise UserError(f"The network's {name} is {given!r}, but must have {channels} {kind} numbers.")
    return found


def weight_bytes(settings: ModelSettings, channels: int, size: int, classes: int) -> int:
    """The size of a built-in network's weights, computed without memory for them; 0 for other networks."""
    if settings.name not in MODELS or settings.name in PRETRAINED:
        return 0
    with torch.device("meta"):
        body = _build_body(settings, channels, settings.resize or size, classes)
    return sum(value.nbytes for value in body.parameters())


def _build_body(settings: ModelSettings, channels: int, size: int, classes: int) -> nn.Module:
    if settings.name in MODELS:
        return MODELS[settings.name](channels, size, classes, settings)
    found = split_path(settings.name)
    if found is None:
        raise UserError(
            f"model.name is '{settings.name}', but must be one of {', '.join(MODELS)}, or FILE.py:function."
        )
    path, name = found
    build = load_own(path, name)
    if not callable(build):
        raise UserError(f"{path} defines no function {name} that builds a network.")
    try:
        body: Any = build(channels, size, classes)
        if not isinstance(body, nn.Module):
            raise TypeError(f"it returns {type(body).__name__}, not an nn.Module")
        _try(body, channels, size, classes, training=not settings.freeze)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # the user's code can raise anything
        raise UserError(f"{name} in {path} builds no usable network: {error}.") from error
    return body


def _try(body: nn.Module, channels: int, size: int, classes: int, *, training: bool) -> None:
    """Raises if a network cannot predict, or cannot learn. Its weights stay as they are."""
    images = torch.rand(2, channels, size, size)
    body.eval()
    with torch.no_grad():
        _check_logits(body(images), images, classes)
    if not training:
        return
    before = {name: value.clone() for name, value in body.state_dict().items()}
    body.train()
    logits = body(images)
    _check_logits(logits, images, classes)
    logits.sum().backward()
    body.load_state_dict(before)
    body.zero_grad(set_to_none=True)
    body.eval()


def _check_logits(logits: Any, images: Tensor, classes: int) -> None:
    if not isinstance(logits, Tensor):
        raise TypeError(f"its output is a {type(logits).__name__}, not a tensor")
    if tuple(logits.shape) != (len(images), classes):
        raise ValueError(
            f"for 2 images of {'×'.join(map(str, images.shape[1:]))} its output has the shape"
            f" {tuple(logits.shape)}, not {(len(images), classes)}"
        )
    if not logits.is_floating_point() or not bool(logits.isfinite().all()):
        raise ValueError("its output has other values than finite floating-point numbers")


def check_layout(model: nn.Module) -> None:
    """Raises if the weights of a convolution are not in channels-last layout.

    This layout trains LeNet up to 1.7 times as fast on a CPU. With one input channel PyTorch regards other
    strides as channels-last, too, but computes slowly with them. So the strides count.
    """
    for name, value in model.named_parameters():
        if value.dim() == 4:
            _, inputs, height, width = value.shape
            strides = (inputs * height * width, 1, inputs * width, inputs)
            if value.stride() != strides:
                raise RuntimeError(f"{name} has the strides {value.stride()}, not {strides}")


def refuse_batch_norm(model: nn.Module, method: str) -> None:
    """For methods that average clients' weights, which excludes running statistics."""
    if any(isinstance(module, _BatchNorm) for module in model.modules()):
        raise UserError(
            f"{method} does not support batch normalisation: set model.norm to 'group' or 'none'."
        )
