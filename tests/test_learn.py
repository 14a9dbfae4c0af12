"""The training loop against SGD steps computed by hand, and the inference loop against softmax."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from fedseal import weights
from fedseal.config.sections import AugmentSettings, ModelSettings, ServerTrainingSettings, TrainingSettings
from fedseal.core import Images, LabelledImages, LabelledParticipant
from fedseal.data.augment import Augmenter
from fedseal.learn import (
    INFERENCE_BATCH,
    accuracy,
    fit,
    labelled_batches,
    learning_rate,
    needs_two_images,
    predict,
    train_supervised,
    two_view_batches,
)
from fedseal.models import Network, build_network
from fedseal.weights import Tensors

CLASSES = 3
LABELS = torch.tensor([0, 1, 2, 2, 1, 0, 0, 1, 2, 0])
NO_AUGMENTATION = Augmenter(AugmentSettings(shift=0, n=0), flip=False)


def lenet(seed: int = 0) -> Network:
    return build_network(
        ModelSettings(), channels=1, size=12, classes=CLASSES, mean=[120.0], std=[60.0], seed=seed
    )


def pictures(n: int, channels: int = 1, size: int = 12, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(256, (n, channels, size, size), dtype=torch.uint8, generator=draw)


def participant(
    model: Network | None = None, data: LabelledImages | None = None, **training: object
) -> LabelledParticipant:
    return LabelledParticipant(
        name="server",
        model=model or lenet(),
        data=data or LabelledImages(pictures(10), LABELS),
        training=ServerTrainingSettings.model_validate(training),
        augment=NO_AUGMENTATION,
        seed=0,
        device=torch.device("cpu"),
        classes=CLASSES,
    )


def supervised(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(model(images), labels)


def gradient(model: Network, values: Tensors, images: Tensor, labels: Tensor) -> Tensors:
    """∇L at the weights `values`, computed by autograd; zero for buffers."""
    trained = {name for name, _ in model.named_parameters()}
    leaves = {k: v.clone().requires_grad_(k in trained) for k, v in values.items()}
    names = sorted(trained)
    loss = cross_entropy(functional_call(model, leaves, (images,)), labels)
    gradients = torch.autograd.grad(loss, [leaves[name] for name in names])
    return {name: torch.zeros_like(value) for name, value in values.items()} | dict(
        zip(names, gradients, strict=True)
    )


def equal(a: Tensors, b: Tensors) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a | b)


# ------------------------------------------------------------------ fit


class Scale(nn.Module):
    """One weight: logits = w · x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x.flatten(1)


def half_square(model: nn.Module, images: Tensor) -> Tensor:
    loss: Tensor = model(images).square().sum() / 2
    return loss


@pytest.mark.parametrize(
    ("weight_decay", "expected"), [(0.0, [1.0, 0.6, 0.0, -0.54]), (0.5, [1.0, 0.55, -0.1025, -0.643625])]
)
def test_fit_is_sgd_with_momentum(weight_decay: float, expected: list[float]) -> None:
    """L = (w·x)²/2 with x = 2, so ∇L = x²·w = 4w; w = 1, learning rate 0.1, momentum 0.9.

    v1 = 4·1 = 4;                    w = 1 − 0.1·4 = 0.6
    v2 = 0.9·4 + 4·0.6 = 6.0;        w = 0.6 − 0.6 = 0
    v3 = 0.9·6 + 4·0 = 5.4;          w = 0 − 0.54 = −0.54
    A weight decay of 0.5 makes the gradient 4.5w:
    v1 = 4.5;                        w = 1 − 0.45 = 0.55
    v2 = 4.05 + 2.475 = 6.525;       w = 0.55 − 0.6525 = −0.1025
    v3 = 5.8725 − 0.46125 = 5.41125; w = −0.1025 − 0.541125 = −0.643625
    """
    server = participant(Network(Scale(), [0.0], [1.0]), momentum=0.9, weight_decay=weight_decay)
    start = weights.get_weights(server.model)
    image = torch.full((1, 1, 1, 1), 2.0)
    seen = [float(fit(server, start, [(image,)] * steps, half_square, 0.1)["body.w"]) for steps in range(4)]
    assert seen == pytest.approx(expected, abs=1e-6)


def test_fit_updates_every_layer() -> None:
    """w1 = w0 − lr·g(w0); v = 0.9·g(w0) + g(w1); w2 = w1 − lr·v, in every layer of LeNet."""
    server, lr = participant(momentum=0.9), 0.1
    w0 = weights.get_weights(server.model)
    first, second = (pictures(4, seed=1).float(), LABELS[:4]), (pictures(4, seed=2).float(), LABELS[4:8])
    g0 = gradient(server.model, w0, *first)
    w1 = {name: w0[name] - lr * g0[name] for name in w0}
    g1 = gradient(server.model, w1, *second)
    w2 = {name: w1[name] - lr * (0.9 * g0[name] + g1[name]) for name in w0}
    assert all(float(g0[name].abs().max()) > 1e-4 for name, _ in server.model.named_parameters())
    assert_close(fit(server, w0, [first], supervised, lr), w1, atol=2e-6, rtol=1e-5)
    assert_close(fit(server, w0, [first, second], supervised, lr), w2, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_fit_equals_torch_sgd_to_the_bit(weight_decay: float) -> None:
    server = participant(momentum=0.9, weight_decay=weight_decay)
    w0, batches = (
        weights.get_weights(server.model),
        [(pictures(4, seed=i).float(), LABELS[:4]) for i in range(3)],
    )
    weights.set_weights(server.model, w0)
    reference = torch.optim.SGD(
        server.model.parameters(), lr=0.1, momentum=0.9, weight_decay=weight_decay, fused=True
    )
    for batch in batches:
        reference.zero_grad()
        supervised(server.model, *batch).backward()
        reference.step()
    expected = weights.get_weights(server.model)
    trained = fit(server, w0, batches, supervised, 0.1)
    assert all(torch.equal(trained[name], expected[name]) for name in expected)


def test_fit_starts_with_fresh_momentum() -> None:
    """Two calls of one step each: 1 → 0.6, then 0.6 − 0.1·2.4 = 0.36. With the old momentum it would be 0."""
    server = participant(Network(Scale(), [0.0], [1.0]), momentum=0.9)
    image = (torch.full((1, 1, 1, 1), 2.0),)
    once = fit(server, weights.get_weights(server.model), [image], half_square, 0.1)
    twice = fit(server, once, [image], half_square, 0.1)
    assert float(twice["body.w"]) == pytest.approx(0.36, abs=1e-6)


def test_fit_starts_from_the_given_weights() -> None:
    """The model's previous weights have no influence, and the given weights are not modified."""
    start, batch = weights.get_weights(lenet(seed=3)), (pictures(4).float(), LABELS[:4])
    before = {name: value.clone() for name, value in start.items()}
    results = [fit(participant(lenet(seed)), start, [batch], supervised, 0.1) for seed in (0, 3, 4)]
    assert equal(results[0], results[1]) and equal(results[0], results[2])
    assert equal(start, before) and not equal(results[0], start)


def test_fit_without_batches_returns_the_given_weights() -> None:
    start = weights.get_weights(lenet(seed=3))
    assert equal(fit(participant(), start, [], supervised, 0.1), start)


def test_fit_updates_batch_norm_statistics_but_not_the_input_normalisation() -> None:
    settings = ModelSettings(name="resnet9", norm="batch", width=4)
    model = build_network(settings, channels=1, size=32, classes=CLASSES, mean=[120.0], std=[60.0], seed=0)
    model.eval()
    start = weights.get_weights(model)
    batch = (pictures(4, size=32).float(), LABELS[:4])
    after = fit(participant(model), start, [batch] * 3, supervised, 0.01)
    assert int(after["body.conv1.1.num_batches_tracked"]) == 3
    assert not torch.equal(after["body.conv1.1.running_mean"], start["body.conv1.1.running_mean"])
    assert float(after["mean"]) == 120.0 and float(after["std"]) == 60.0


def test_learning_rate_decays_every_round() -> None:
    """0.001 in round 1, 0.001 · 0.995 in round 2, 0.001 · 0.995² = 0.000990025 in round 3."""
    server = participant(lr=0.001, decay=0.995)
    seen = [learning_rate(server, t) for t in (1, 2, 3)]
    assert seen == pytest.approx([0.001, 0.000995, 0.000990025], rel=1e-12)


# ------------------------------------------------------------------ labelled_batches


def numbered(n: int) -> LabelledImages:
    """Image i has the constant grey value i, so that no shift changes it. Its label is i mod 3."""
    pixels = torch.arange(n, dtype=torch.uint8).view(n, 1, 1, 1).expand(n, 1, 12, 12).contiguous()
    return LabelledImages(pixels, torch.arange(n) % CLASSES)


@pytest.mark.parametrize("augment", ["none", "weak"])
def test_labelled_batches_contain_every_image_once_per_epoch(augment: str) -> None:
    server = replace(
        participant(data=numbered(10), batch=4), augment=Augmenter(AugmentSettings(shift=3), flip=True)
    )
    batches = list(labelled_batches(server, server.data, 3, server.rng(1), augment))
    assert [len(images) for images, _ in batches] == [4, 4, 2] * 3
    orders = []
    for epoch in range(3):
        epoch_batches = batches[3 * epoch : 3 * epoch + 3]
        images, labels = (torch.cat(part) for part in zip(*epoch_batches, strict=True))
        assert images.dtype == torch.float32 and images.shape == (10, 1, 12, 12)
        numbers = images[:, 0, 0, 0].long()
        assert torch.equal(images, numbers.view(10, 1, 1, 1).expand_as(images).float())
        assert sorted(numbers.tolist()) == list(range(10))
        assert labels.tolist() == (numbers % CLASSES).tolist()
        orders.append(numbers.tolist())
    assert orders[0] != orders[1] != orders[2]
    again = list(labelled_batches(server, server.data, 3, server.rng(1), augment))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(batches, again, strict=True))


def test_labelled_batches_are_augmented_afresh_in_every_epoch() -> None:
    """Each epoch is one batch. "none" leaves the images unchanged; "weak" and "strong" change most."""
    server = replace(participant(batch=10), augment=Augmenter(AugmentSettings(shift=2, n=2), flip=True))

    def epochs(augment: str) -> list[set[bytes]]:
        batches = labelled_batches(server, server.data, 2, server.rng(1), augment)
        return [{image.byte().numpy().tobytes() for image in images} for images, _ in batches]

    plain = {image.numpy().tobytes() for image in server.data.pixels}
    assert epochs("none") == [plain, plain]
    (first, second), (strong, _) = epochs("weak"), epochs("strong")
    assert len(first - plain) >= 8 and len(second - first) >= 5 and len(strong - first) >= 5


class Normalised(nn.Module):
    """BatchNorm over vectors, which needs two images."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(144, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits


@pytest.mark.parametrize(("n", "sizes"), [(9, [4, 5]), (5, [5]), (10, [4, 4, 2]), (1, []), (3, [3])])
def test_a_last_image_alone_joins_the_batch_before_it_if_batch_norm_needs_two(
    n: int, sizes: list[int]
) -> None:
    server = participant(Network(Normalised(), [0.0], [255.0]), numbered(n), batch=4, epochs=2)
    start = weights.get_weights(server.model)
    batches = list(labelled_batches(server, server.data, 2, server.rng(1), "none"))
    assert [len(images) for images, _ in batches] == 2 * sizes
    assert sorted(torch.cat([images[:, 0, 0, 0] for images, _ in batches]).tolist() if sizes else []) == [
        i for i in range(sum(sizes)) for _ in range(2)
    ]
    views = list(two_view_batches(server, server.rng(1)))
    assert [(len(weak), len(strong)) for weak, strong in views] == 2 * [(size, size) for size in sizes]
    assert equal(weights.get_weights(server.model), start)  # looking at the network does not change it
    assert equal(train_supervised(server, start, 1), start) == (not sizes)


def test_other_batches_of_one_image_stay_as_they_are() -> None:
    """Without BatchNorm, and with BatchNorm over feature maps of more than one pixel."""
    settings = ModelSettings(norm="batch")
    normalised = build_network(
        settings, channels=1, size=12, classes=CLASSES, mean=[120.0], std=[60.0], seed=0
    )
    for model in (lenet(), normalised):
        server = participant(model, numbered(9), batch=4)
        batches = labelled_batches(server, server.data, 1, server.rng(1), "none")
        assert [len(images) for images, _ in batches] == [4, 4, 1]
        assert needs_two_images(server) is False


# ------------------------------------------------------------------ train_supervised


def test_train_supervised_is_eq_4() -> None:
    """One step over all ten images in round 3: w − lr·decay²·∇L_s = w − 0.4·0.25·∇L_s."""
    server = participant(lr=0.4, decay=0.5, epochs=1, batch=10, augment="none")
    start = weights.get_weights(server.model)
    g = gradient(server.model, start, server.data.pixels.float(), LABELS)
    expected = {name: start[name] - 0.1 * g[name] for name in start}
    assert_close(train_supervised(server, start, 3), expected, atol=2e-6, rtol=1e-5)


def test_train_supervised_takes_epochs_from_the_settings_by_default() -> None:
    server = participant(lr=0.05, epochs=2, batch=4)
    start = weights.get_weights(server.model)
    two, one = train_supervised(server, start, 1), train_supervised(server, start, 1, epochs=1)
    assert equal(two, train_supervised(server, start, 1, epochs=2)) and not equal(two, one)
    assert equal(train_supervised(server, start, 1, epochs=0), start)


def test_train_supervised_draws_depend_on_round_and_stream() -> None:
    server = participant(lr=0.05, decay=1.0, epochs=1, batch=2)
    start = weights.get_weights(server.model)
    first = train_supervised(server, start, 1)
    assert equal(first, train_supervised(server, start, 1))
    assert not equal(first, train_supervised(server, start, 2))
    assert not equal(first, train_supervised(server, start, 1, stream="rounds"))


def test_train_supervised_augmentation_is_set_at_the_server_and_weak_at_clients() -> None:
    """All images are in one batch, so that shuffling only reorders sums; the augmentation differs."""
    settings = {"lr": 0.1, "epochs": 1, "batch": 10}
    server = replace(participant(**settings), augment=Augmenter(AugmentSettings(shift=2), flip=True))
    start = weights.get_weights(server.model)
    weak, none, strong = (
        train_supervised(
            replace(server, training=ServerTrainingSettings.model_validate(settings | {"augment": how})),
            start,
            1,
        )
        for how in ("weak", "none", "strong")
    )
    client = train_supervised(replace(server, training=TrainingSettings.model_validate(settings)), start, 1)
    assert equal(client, weak)
    assert not equal(weak, none) and not equal(strong, weak) and not equal(strong, none)


# ------------------------------------------------------------------ predict, accuracy


def test_predict_is_softmax_of_the_given_weights() -> None:
    other = lenet(seed=8)
    images = pictures(6)
    with torch.no_grad():
        scores = other(images).exp()
    probs = predict(participant(), weights.get_weights(other), Images(images))
    assert probs.shape == (6, CLASSES) and probs.dtype == torch.float32
    assert_close(probs, scores / scores.sum(dim=1, keepdim=True))


def test_predict_returns_one_row_per_image_in_order() -> None:
    """With several batches, row i equals the prediction for image i alone."""
    n = 2 * INFERENCE_BATCH + 3
    images, values = pictures(n), weights.get_weights(lenet())
    probs = predict(participant(), values, Images(images))
    assert probs.shape == (n, CLASSES)
    for i in (0, INFERENCE_BATCH - 1, INFERENCE_BATCH, n - 1):
        assert_close(probs[i : i + 1], predict(participant(), values, Images(images[i : i + 1])))


def test_predict_uses_and_keeps_batch_norm_statistics() -> None:
    """Predictions do not depend on the other images of a batch, and the running statistics do not change."""
    settings = ModelSettings(name="resnet9", norm="batch", width=4)
    model = build_network(settings, channels=1, size=32, classes=CLASSES, mean=[120.0], std=[60.0], seed=0)
    model.train()
    values, images = weights.get_weights(model), pictures(5, size=32)
    probs = predict(participant(model), values, Images(images))
    assert equal(weights.get_weights(model), values)
    assert_close(probs[:1], predict(participant(model), values, Images(images[:1])))


def test_predict_without_images() -> None:
    probs = predict(participant(), weights.get_weights(lenet()), Images(pictures(0)))
    assert probs.shape == (0, CLASSES) and probs.dtype == torch.float32


def test_accuracy() -> None:
    """Predicted 0, 2, 1, 1 against 0, 2, 0, 1: three of four."""
    probs = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.3, 0.4, 0.3], [0.0, 1.0, 0.0]])
    assert accuracy(probs, torch.tensor([0, 2, 0, 1])) == 0.75
    assert accuracy(probs[:3], torch.tensor([0, 2, 0])) == pytest.approx(2 / 3, abs=1e-15)
