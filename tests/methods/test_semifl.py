"""SemiFL: labels made once, mixtures, momentum, static BatchNorm; numbers derived by hand."""

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
    """From 10, the average being 8: the velocity is 2, the weights 8. Then from 9 with an average of 8 and
    momentum ½: velocity ½ · 2 + 1 = 2, weights 7. BatchNorm's statistics and integers are the average's."""
    count = {"n": torch.tensor(3), "norm.running_var": torch.tensor([0.5])}
    w, v = momentum_step({"w": torch.tensor([10.0]), **count}, {"w": torch.tensor([8.0]), **count}, None, 0.5)
    assert (w["w"].item(), v["w"].item(), w["n"].item(), list(v)) == (8, 2, 3, ["w"])
    w, v = momentum_step({"w": torch.tensor([9.0])}, {"w": torch.tensor([8.0])}, v, 0.5)
    assert (w["w"].item(), v["w"].item()) == (7, 2)


def test_shares_are_of_the_beta_distribution_and_seeded() -> None:
    """Beta(¾, ¾) has mean ½ and variance 1/(4 · (2 · ¾ + 1)) = 0.1; 20,000 draws tell both to about 0.002."""
    draws = beta(0.75, 20_000, torch.Generator().manual_seed(1))
    assert torch.equal(draws, beta(0.75, 20_000, torch.Generator().manual_seed(1)))
    assert float(draws.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(draws.var()) == pytest.approx(0.1, abs=0.005)


def test_batches_hold_the_confident_and_mixtures_with_anything() -> None:
    """Images of one grey value each, augmentation that does nothing: a mixture is share · own + rest."""
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


def test_labels_are_made_once_and_only_from_the_confident() -> None:
    """The count says how many images reach the threshold; with none the model comes back as it went."""
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


def test_who_has_nothing_confident_is_left_out_of_the_average() -> None:
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
    nobody = method.collect(current, state, {1: replies[1]}, server)
    assert nobody.tensors["average"] is one and "velocity" not in nobody.tensors


def test_static_batch_norm_has_the_labelled_images_statistics() -> None:
    """The first BatchNorm's mean is that of its inputs over the labelled images: 50, in one batch of 50."""
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


def test_without_batch_norm_nothing_is_done() -> None:
    setup, _ = make()
    w = weights.get_weights(setup.network())
    assert static_batch_norm(setup.server(), w) is w
