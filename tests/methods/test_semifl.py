"""SemiFL: pseudo-labels, mixup, server momentum and static BatchNorm, with hand-derived numbers."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from conftest import TINY
from fedseal import weights
from fedseal.config.load import load_config
from fedseal.core import Packet, Round
from fedseal.data.federation import load_federation
from fedseal.learn import predict
from fedseal.losses import mixup_loss
from fedseal.methods.semifl import SemiFL, beta, momentum_step, static_batch_norm
from fedseal.run_setup import RunSetup


def make(**changes: Any) -> tuple[RunSetup, SemiFL]:
    keys = {**TINY, "method": "semifl", "semifl.threshold": 0.1}
    config = load_config("fmnist-lenet", keys | {k.replace("__", "."): v for k, v in changes.items()})
    method = config.selected_method()
    assert isinstance(method, SemiFL)
    return RunSetup(config, load_federation(config.data, config.seed)), method


def test_mixup_loss() -> None:
    """Two classes, p = (3/4, 1/4), labels 0 with share 0.7 and 1 with 0.3: −0.7 ln ¾ − 0.3 ln ¼."""
    logits = torch.tensor([[math.log(3.0), 0.0]])
    loss = mixup_loss(logits, torch.tensor([0]), torch.tensor([1]), torch.tensor(0.7))
    assert loss.item() == pytest.approx(-0.7 * math.log(0.75) - 0.3 * math.log(0.25))


def test_momentum_step() -> None:
    """Weight 10 and average 8: the velocity is 2 and the new weight 8. Then weight 9, average 8 and momentum
    ½: the velocity is ½ · 2 + 1 = 2 and the new weight 7. BatchNorm statistics and integers are copied from
    the average."""
    count = {"n": torch.tensor(3), "norm.running_var": torch.tensor([0.5])}
    w, v = momentum_step({"w": torch.tensor([10.0]), **count}, {"w": torch.tensor([8.0]), **count}, None, 0.5)
    assert (w["w"].item(), v["w"].item(), w["n"].item(), list(v)) == (8, 2, 3, ["w"])
    w, v = momentum_step({"w": torch.tensor([9.0])}, {"w": torch.tensor([8.0])}, v, 0.5)
    assert (w["w"].item(), v["w"].item()) == (7, 2)


def test_beta_has_the_right_moments_and_is_seeded() -> None:
    """Beta(¾, ¾) has mean ½ and variance 1/(4 · (2 · ¾ + 1)) = 0.1; 20,000 draws give both to about 0.002."""
    draws = beta(0.75, 20_000, torch.Generator().manual_seed(1))
    assert torch.equal(draws, beta(0.75, 20_000, torch.Generator().manual_seed(1)))
    assert float(draws.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(draws.var()) == pytest.approx(0.1, abs=0.005)


def test_batches_contain_confident_images_and_mixtures_with_any_image() -> None:
    """Image i has the grey value i and is not augmented, so a mixture is share · i + (1 − share) · j."""
    setup, method = make(augment__shift=0, augment__flip=False, augment__n=0, client__batch=8)
    client = setup.client(0, setup.network())
    grey = torch.arange(40, dtype=torch.uint8).view(-1, 1, 1, 1)
    client.data.pixels.copy_(grey.expand(-1, 1, 28, 28))
    labels, confident = torch.arange(40) % 10, torch.arange(0, 40, 2)
    batches = list(method.client_batches(client, 1, confident, labels))
    assert [len(y) for _, y, _, _ in batches] == [8, 8, 4]
    seen = []
    for images, y, other, share in batches:
        strong, mixed = images[:, 0, 0, 0].split(len(y))
        seen += strong.tolist()
        assert torch.equal(strong.long() % 10, y) and 0 <= float(share) <= 1
        mixed_in = (mixed - share * strong) / (1 - share) if share < 1 else mixed
        near = mixed_in.round()
        assert torch.allclose(mixed_in, near, atol=0.02) and torch.equal(near.long() % 10, other)
    assert sorted(seen) == confident.tolist()


def test_client_trains_on_confident_images_only() -> None:
    """The reply counts the images that reach the threshold. Without any, the model is returned unchanged."""
    setup, method = make()
    client, w = setup.client(0, setup.network()), weights.get_weights(setup.network())
    top = predict(client, w, client.data).amax(dim=1).sort().values
    middle = float((top[19] + top[20]) / 2)
    some = method.model_copy(update={"threshold": middle})
    reply, _ = some.client_round(Packet({"model": w}, {"t": 1}), Packet(), client)
    assert reply.scalars == {"t": 1, "confident": 20}
    none = method.model_copy(update={"threshold": 1.0})
    reply, _ = none.client_round(Packet({"model": w}, {"t": 1}), Packet(), client)
    assert reply.scalars["confident"] == 0
    assert all(torch.equal(reply.tensors["model"][name], value) for name, value in w.items())


def test_client_without_confident_images_is_left_out_of_the_average() -> None:
    setup, method = make()
    server, current = setup.server(), Round(1, (0, 1), range(3))
    one = {"w": torch.tensor([1.0])}
    state = Packet({"model": one})
    replies = {
        k: Packet({"model": {"w": torch.tensor([value])}}, {"confident": n})
        for k, value, n in ((0, 5.0, 3), (1, 99.0, 0))
    }
    after = method.collect(current, state, replies, server)
    assert after.tensors["average"]["w"].item() == 5 and after.tensors["velocity"]["w"].item() == -4
    unchanged = method.collect(current, state, {1: replies[1]}, server)
    assert unchanged.tensors["average"] is one and "velocity" not in unchanged.tensors


def test_static_batch_norm_has_the_statistics_of_the_labelled_images() -> None:
    """The first BatchNorm has the statistics of its inputs over the 50 labelled images, in one batch."""
    resnet = {"model__name": "resnet18", "model__norm": "batch", "model__width": 8, "server__batch": 50}
    setup, _ = make(**resnet)
    server = setup.server()
    before = weights.get_weights(server.model)
    after = static_batch_norm(server, before)
    stem = server.model.body.stem[0]
    assert isinstance(stem, nn.Conv2d)
    with torch.no_grad():
        inputs = stem((server.data.pixels - server.model.mean) / server.model.std)
    name = next(n for n in after if n.endswith("running_mean"))
    assert torch.allclose(after[name], inputs.mean(dim=(0, 2, 3)), atol=1e-4)
    assert torch.allclose(after[name.replace("mean", "var")], inputs.var(dim=(0, 2, 3)), rtol=1e-3)
    parameters = [n for n, _ in server.model.named_parameters()]
    assert all(torch.equal(after[n], before[n]) for n in parameters)
    assert all(m.momentum == 0.1 for m in server.model.modules() if isinstance(m, nn.BatchNorm2d))


def test_static_batch_norm_without_batch_norm_does_nothing() -> None:
    setup, _ = make()
    w = weights.get_weights(setup.network())
    assert static_batch_norm(setup.server(), w) is w
