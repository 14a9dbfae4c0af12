"""The networks against the paper's table: parameters counted by hand, shapes, residual connections."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn.functional import conv2d, max_pool2d, relu

from fedseal.config.sections import ModelSettings
from fedseal.core import Packet
from fedseal.errors import UserError
from fedseal.models import (
    MODELS,
    PRETRAINED,
    BasicBlock,
    LeNet,
    MaxPool,
    Network,
    ResNet9,
    build_network,
    check_layout,
)
from fedseal.weights import get_weights, set_weights


def make(channels: int = 3, size: int = 32, classes: int = 10, seed: int = 0, **model: object) -> Network:
    return build_network(
        ModelSettings.model_validate(model),
        channels=channels,
        size=size,
        classes=classes,
        mean=[100.0] * channels,
        std=[50.0] * channels,
        seed=seed,
    )


def parameters(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def random_images(n: int, channels: int, size: int) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(256, (n, channels, size, size), dtype=torch.uint8, generator=draw)


def record_calls(network: nn.Module, names: list[str], images: Tensor) -> list[tuple[str, Tensor, Tensor]]:
    """Name, input and output of the named modules of the body, in the order in which they ran."""
    calls: list[tuple[str, Tensor, Tensor]] = []

    def record(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        return lambda _, inputs, output: calls.append((name, inputs[0], output))

    for name in names:
        network.get_submodule(f"body.{name}").register_forward_hook(record(name))
    with torch.no_grad():
        network(images)
    return calls


# ------------------------------------------------------------------ parameters


@pytest.mark.parametrize(("channels", "size", "expected"), [(1, 28, 61_706), (3, 32, 62_006)])
def test_lenet_parameters(channels: int, size: int, expected: int) -> None:
    """Kernel · inputs · outputs + biases; 28×28 is padded to 32×32, so both end in 5×5 maps.

    conv1: 5·5·1·6 + 6 = 156 (three channels: 5·5·3·6 + 6 = 456)
    conv2: 5·5·6·16 + 16 = 2,416
    fc1: 16·5·5 = 400 inputs, 400·120 + 120 = 48,120
    fc2: 120·84 + 84 = 10,164
    fc3: 84·10 + 10 = 850
    One channel: 156 + 2,416 + 48,120 + 10,164 + 850 = 61,706; three: 300 more, 62,006.
    """
    assert parameters(make(channels, size, name="lenet")) == expected


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_normalisation_adds_a_scale_and_a_shift_per_channel_to_lenet(norm: str) -> None:
    """2·(6 + 16) = 44 more than 61,706."""
    assert parameters(make(1, 28, name="lenet", norm=norm)) == 61_750


@pytest.mark.parametrize(
    ("norm", "expected"), [("none", 6_568_640), ("batch", 6_573_120), ("group", 6_573_120)]
)
def test_resnet9_parameters(norm: str, expected: int) -> None:
    """The filters of the paper's table, no biases.

    conv1: 3·3·3·64 = 1,728
    conv2: 3·3·64·128 = 73,728
    conv3, conv4: 3·3·128·128 = 147,456 each
    conv5: 3·3·128·256 = 294,912
    conv6: 3·3·256·512 = 1,179,648
    conv7, conv8: 3·3·512·512 = 2,359,296 each
    softmax: 512·10 = 5,120
    1,728 + 73,728 + 294,912 + 294,912 + 1,179,648 + 4,718,592 + 5,120 = 6,568,640.
    Normalisation has a scale and a shift per channel:
    2 · (64 + 128 + 128 + 128 + 256 + 512 + 512 + 512) = 2 · 2,240 = 4,480 more.
    """
    assert parameters(make(name="resnet9", norm=norm)) == expected


@pytest.mark.parametrize(
    ("channels", "stem", "norm", "expected"),
    [
        (1, "small", "none", 11_163_210),
        (1, "small", "batch", 11_172_810),
        (1, "small", "group", 11_172_810),
        (1, "large", "none", 11_165_770),
        (3, "small", "none", 11_164_362),
    ],
)
def test_resnet18_parameters(channels: int, stem: str, norm: str, expected: int) -> None:
    """Two blocks of two 3×3 convolutions at each width, a 1×1 shortcut where the width changes.

    stem: 3·3·1·64 = 576 (7×7: 49·64 = 3,136, so 2,560 more; three channels: 1,728, so 1,152 more)
    width 64: 4 · 9·64·64 = 4 · 36,864 = 147,456
    width 128: 9·64·128 + 3 · 9·128·128 + 64·128 = 73,728 + 442,368 + 8,192 = 524,288
    width 256: four times that, 294,912 + 1,769,472 + 32,768 = 2,097,152
    width 512: four times again, 1,179,648 + 7,077,888 + 131,072 = 8,388,608
    fc: 512·10 + 10 = 5,130
    576 + 147,456 + 524,288 + 2,097,152 + 8,388,608 + 5,130 = 11,163,210.
    Normalisation: after the stem, 4 at width 64, and 5 (4 and the shortcut's) at each of the others:
    2 · (64 + 4·64 + 5·128 + 5·256 + 5·512) = 2 · 4,800 = 9,600 more.
    """
    network = make(channels, 28, name="resnet18", stem=stem, norm=norm)
    assert parameters(network) == expected


def test_only_batch_norm_has_integer_buffers() -> None:
    """One batch count for each of ResNet-9's eight convolutions; none without BatchNorm."""

    def counts(norm: str) -> int:
        state = make(name="resnet9", width=4, norm=norm).state_dict()
        return sum(not value.is_floating_point() for value in state.values())

    assert (counts("batch"), counts("group"), counts("none")) == (8, 0, 0)


def test_group_norm_has_32_groups_if_the_width_allows() -> None:
    def groups(**model: object) -> list[int]:
        modules = make(**model, norm="group").modules()
        return [m.num_groups for m in modules if isinstance(m, nn.GroupNorm)]

    assert groups(name="resnet9", width=64) == [32] * 8
    assert groups(name="resnet9", width=4) == [4, 8, 8, 8, 16, 32, 32, 32]
    assert groups(name="lenet") == [2, 16]  # of 6 and 16 channels


# ------------------------------------------------------------------ shapes


@pytest.mark.parametrize(
    ("channels", "size", "classes", "model"),
    [
        (1, 12, 4, {"name": "lenet"}),
        (1, 28, 10, {"name": "lenet"}),
        (3, 33, 7, {"name": "lenet"}),
        (1, 28, 10, {"name": "lenet", "norm": "group"}),
        (3, 64, 5, {"name": "resnet9", "width": 4}),
        (1, 28, 10, {"name": "resnet18", "width": 4}),
        (1, 28, 3, {"name": "resnet18", "width": 4, "stem": "large", "norm": "group"}),
    ],
)
def test_logits_shape(channels: int, size: int, classes: int, model: dict[str, object]) -> None:
    logits = make(channels, size, classes, **model)(random_images(3, channels, size))
    assert logits.shape == (3, classes) and logits.dtype == torch.float32
    assert bool(logits.isfinite().all())
    assert not torch.allclose(logits[0], logits[1])  # the logits depend on the image


def test_resnet9_matches_the_papers_table() -> None:
    network = make(name="resnet9")
    names = [*(f"conv{i}" for i in range(1, 9)), "pool", "last_pool", "fc"]
    calls = record_calls(network, names, random_images(1, 3, 32))
    assert [(name, tuple(output.shape[1:])) for name, _, output in calls] == [
        ("conv1", (64, 32, 32)),
        ("conv2", (128, 32, 32)),
        ("pool", (128, 16, 16)),
        ("conv3", (128, 16, 16)),
        ("conv4", (128, 16, 16)),
        ("conv5", (256, 16, 16)),
        ("pool", (256, 8, 8)),
        ("conv6", (512, 8, 8)),
        ("pool", (512, 4, 4)),
        ("conv7", (512, 4, 4)),
        ("conv8", (512, 4, 4)),
        ("last_pool", (512, 1, 1)),
        ("fc", (10,)),
    ]
    filters = [tuple(network.get_parameter(f"body.conv{i}.0.weight").shape) for i in range(1, 9)]
    assert filters == [
        (64, 3, 3, 3),
        (128, 64, 3, 3),
        (128, 128, 3, 3),
        (128, 128, 3, 3),
        (256, 128, 3, 3),
        (512, 256, 3, 3),
        (512, 512, 3, 3),
        (512, 512, 3, 3),
    ]


def test_resnet18_halves_the_maps_three_times() -> None:
    names = ["stem", *(f"blocks.{i}" for i in range(8))]
    small = make(1, 28, name="resnet18", width=4)
    large = make(1, 28, name="resnet18", width=4, stem="large")
    shapes = [
        [tuple(output.shape[1:3]) for _, _, output in record_calls(network, names, random_images(1, 1, 28))]
        for network in (small, large)
    ]
    channels = [4, 4, 4, 8, 8, 16, 16, 32, 32]
    assert shapes[0] == list(zip(channels, [28, 28, 28, 14, 14, 7, 7, 4, 4], strict=True))
    assert shapes[1] == list(zip(channels, [7, 7, 7, 4, 4, 2, 2, 1, 1], strict=True))


# ------------------------------------------------------------------ layers


def test_resnet9_residual_connections() -> None:
    """The input of conv5 is the first pool plus conv4; that of the last pool is the third pool plus conv8."""
    network = make(name="resnet9", width=8)
    names = ["pool", "conv4", "conv5", "conv8", "last_pool"]
    pool1, conv4, conv5, _, pool3, conv8, last = record_calls(network, names, random_images(2, 3, 32))
    assert float(conv4[2].abs().max()) > 0 and float(conv8[2].abs().max()) > 0
    assert torch.equal(conv5[1], pool1[2] + conv4[2])
    assert torch.equal(last[1], pool3[2] + conv8[2])


def test_resnet9_blocks_with_zero_weights_are_the_identity() -> None:
    network = make(name="resnet9", width=8)
    with torch.no_grad():
        for name in ("conv4", "conv8"):
            network.get_parameter(f"body.{name}.0.weight").zero_()
    names = ["pool", "conv5", "last_pool"]
    pool1, conv5, _, pool3, last = record_calls(network, names, random_images(2, 3, 32))
    assert float(pool1[2].abs().max()) > 0 and float(pool3[2].abs().max()) > 0
    assert torch.equal(conv5[1], pool1[2])
    assert torch.equal(last[1], pool3[2])


@pytest.mark.parametrize("shape", [(3, 6, 28, 28), (2, 16, 10, 10), (2, 3, 9, 7), (1, 2, 2, 3)])
def test_max_pool_equals_pytorchs_with_and_without_gradients(shape: tuple[int, ...]) -> None:
    x = torch.randint(-3, 3, shape, generator=torch.Generator().manual_seed(0)).float()
    x = x.contiguous(memory_format=torch.channels_last)
    expected = max_pool2d(x, 2)
    with torch.no_grad():
        assert torch.equal(MaxPool()(x), expected)
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    MaxPool()(ours).square().sum().backward()
    max_pool2d(theirs, 2).square().sum().backward()
    assert ours.grad is not None and theirs.grad is not None and torch.equal(ours.grad, theirs.grad)


def test_basic_block_with_zero_weights_is_the_identity_or_its_shortcut() -> None:
    x = torch.rand(2, 4, 6, 6, generator=torch.Generator().manual_seed(0))
    same, wider = BasicBlock(4, 4, 1, "none"), BasicBlock(4, 8, 2, "none")
    with torch.no_grad():
        for block in (same, wider):
            second = block.second[0]
            assert isinstance(second, nn.Conv2d)
            second.weight.zero_()
        assert torch.equal(same(x), x)  # x ≥ 0, so the last ReLU does not change it
        convolution = wider.shortcut[0]  # type: ignore[index]
        shortcut = conv2d(x, convolution.weight, stride=2)
        assert shortcut.shape == (2, 8, 3, 3)
        torch.testing.assert_close(wider(x), relu(shortcut))


def test_narrow_resnet18_trains_on_one_thread() -> None:
    """Strided 1×1 convolutions can crash oneDNN on one thread, so this runs in a separate process."""
    code = """
import torch
from fedseal.config.sections import ModelSettings
from fedseal.models import build_network
torch.set_num_threads(1)
settings = ModelSettings(name="resnet18", width=4)
network = build_network(settings, channels=1, size=28, classes=10, mean=[0.0], std=[1.0], seed=0)
for _ in range(3):
    network(torch.rand(32, 1, 28, 28)).square().sum().backward()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("norm", ["none", "group"])
def test_lenet_equals_relu_before_pooling(norm: str) -> None:
    network = make(1, 28, name="lenet", norm=norm)
    lenet = network.body
    assert isinstance(lenet, LeNet)
    with torch.no_grad():
        images = random_images(8, 1, 28)
        x = (images - 100.0) / 50.0
        x = max_pool2d(relu(lenet.norm1(lenet.conv1(x))), 2)
        x = max_pool2d(relu(lenet.norm2(lenet.conv2(x))), 2).flatten(1)
        expected = lenet.fc3(relu(lenet.fc2(relu(lenet.fc1(x)))))
        torch.testing.assert_close(network(images), expected)


def test_network_normalises_its_inputs() -> None:
    """Mean and deviation are 100 and 50 in channel 0, 20 and 10 in channel 1, 0 and 200 in channel 2.

    An image at the mean becomes 0. The values 150, 15 and 100 become 1, −1/2 and 1/2.
    """
    network = build_network(
        ModelSettings(),
        channels=3,
        size=12,
        classes=4,
        mean=[100.0, 20.0, 0.0],
        std=[50.0, 10.0, 200.0],
        seed=0,
    )
    images = torch.tensor([[100, 20, 0], [150, 15, 100]], dtype=torch.uint8)[:, :, None, None].expand(
        2, 3, 12, 12
    )
    inputs: list[Tensor] = []
    network.body.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    with torch.no_grad():
        logits = network(images)
        assert torch.equal(network(images.float()), logits)
    assert not bool(inputs[0][0].any())
    assert inputs[0][1, :, 5, 7].tolist() == [1.0, -0.5, 0.5]
    state = network.state_dict()
    assert state["mean"].flatten().tolist() == [100.0, 20.0, 0.0]
    assert state["std"].flatten().tolist() == [50.0, 10.0, 200.0]
    assert {"mean", "std"}.isdisjoint(name for name, _ in network.named_parameters())


# ------------------------------------------------------------------ building


@pytest.mark.parametrize("name", [name for name in MODELS if name not in PRETRAINED])
def test_weights_depend_only_on_the_seed(name: str) -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    first = make(name=name, width=4, seed=5).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(12)
    second = make(name=name, width=4, seed=5).state_dict()
    other = make(name=name, width=4, seed=6).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    weights = [key for key in first if key.endswith("weight")]
    assert weights and not any(torch.equal(first[key], other[key]) for key in weights)


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("lenet", -0.00086450349772349, 0.02100435644388199),
        ("resnet9", -0.0014408392598852515, -0.153075709939003),
        ("resnet18", -0.0014408392598852515, 0.11446420103311539),
    ],
)
def test_golden_weights(name: str, first: float, last: float) -> None:
    """If these values change, all results change: the layers then draw their weights in another order."""
    values = [parameter.detach().flatten() for parameter in make(name=name, width=4).parameters()]
    assert float(values[0][0]) == pytest.approx(first, rel=1e-6)
    assert float(values[-1][-1]) == pytest.approx(last, rel=1e-6)


def test_weights_are_channels_last() -> None:
    weight = make(name="resnet9", width=4).get_parameter("body.conv2.0.weight")
    assert weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("lenet", 11, "at least 12×12, not 11×11"),
        ("lenet", 1, "at least 12×12, not 1×1"),
        ("resnet9", 28, "32×32 .*, not 28×28"),
        ("resnet9", 48, "32×32 .*, not 48×48"),
    ],
)
def test_unsuitable_image_sizes_are_refused(name: str, size: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(size=size, name=name)


def test_resnet9_pools_larger_images_to_one_pixel() -> None:
    network = make(size=96, name="resnet9", width=4)
    assert isinstance(network.body, ResNet9)
    ((_, before, after),) = record_calls(network, ["last_pool"], random_images(1, 3, 96))
    assert before.shape == (1, 32, 12, 12) and after.shape == (1, 32, 1, 1)


def test_resnet18_with_large_stem_and_batch_norm_needs_large_images() -> None:
    with pytest.raises(UserError, match=r"at least 64×64, not 32×32: set model\.stem to 'small'"):
        make(name="resnet18", width=4, stem="large", norm="batch")
    make(size=64, name="resnet18", width=4, stem="large", norm="batch")


def test_unknown_model_is_refused() -> None:
    with pytest.raises(UserError, match=r"model\.name is 'vgg', but must be one of lenet, resnet9, resnet18"):
        make(name="vgg")


def test_new_entry_in_models_adds_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    class Linear(nn.Sequential):
        def __init__(self, channels: int, size: int, classes: int, settings: ModelSettings) -> None:
            super().__init__(nn.Flatten(), nn.Linear(channels * size * size, classes))

    monkeypatch.setitem(MODELS, "linear", Linear)
    assert parameters(make(name="linear")) == 3 * 32 * 32 * 10 + 10


@pytest.mark.parametrize("wrong", [{"nme": "lenet"}, {"width": 6}, {"width": 0}, {"norm": "layer"}])
def test_settings_reject_unknown_keys_and_values(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ModelSettings.model_validate(wrong)


# ------------------------------------------------------------------ memory layout


def test_convolutions_keep_the_fast_layout_when_weights_are_set() -> None:
    """Strides of conv1 [6, 1, 5, 5]: 25, 1, 5, 1. Copied, loaded or received weights have other strides."""
    network = build_network(ModelSettings(), channels=1, size=28, classes=10, mean=[0.0], std=[1.0], seed=0)
    assert network.get_parameter("body.conv1.weight").stride() == (25, 1, 5, 1)
    assert network.get_parameter("body.conv2.weight").stride() == (150, 1, 30, 6)
    values = get_weights(network)
    assert values["body.conv1.weight"].stride() == (25, 25, 5, 1)
    set_weights(network, Packet.from_bytes(Packet({"model": values}).to_bytes()).tensors["model"])
    check_layout(network)


def test_other_strides_are_refused_where_training_begins() -> None:
    """For PyTorch these strides, too, are channels-last, since there is one channel."""
    network = build_network(ModelSettings(), channels=1, size=28, classes=10, mean=[0.0], std=[1.0], seed=0)
    weight = network.get_parameter("body.conv1.weight")
    weight.data = weight.data.clone(memory_format=torch.contiguous_format)
    assert weight.is_contiguous(memory_format=torch.channels_last)
    with pytest.raises(RuntimeError, match=r"body\.conv1\.weight has the strides \(25, 25, 5, 1\)"):
        check_layout(network)
