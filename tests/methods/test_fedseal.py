"""FedSEAL on a federation that is small enough to check by hand: requests, ensembles, batches and steps.

Where a test needs a given D⁺ and D⁻, it passes a memory that already includes the round of the request. The
client applies Eq. 8 once per round, so it then uses the p̄ of that memory unchanged.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.testing import assert_close

from fedseal import paper, weights
from fedseal.config.config import parse
from fedseal.core import Images, Packet, Participant, PreparationStep, Round
from fedseal.data.pool import Federation, Pool
from fedseal.engines.client import LabelAudit
from fedseal.learn import predict, train_supervised
from fedseal.methods.fedseal import FedSEAL, repeated_batches
from fedseal.methods.server_sl import ServerSL
from fedseal.models import Network
from fedseal.run_setup import RunSetup
from fedseal.weights import Tensors

CLASSES = ("a", "b", "c", "d")
PER_CLIENT = 15
NO_AUGMENTATION = {"flip": False, "shift": 0, "n": 0}


def make_setup(
    fedseal: dict[str, object] | None = None,
    server: dict[str, object] | None = None,
    client: dict[str, object] | None = None,
    augment: dict[str, object] | None = None,
) -> RunSetup:
    """12 labelled and 8 validation images, and clients with 15, 15, 15 and 0 images, all of them noise."""
    random = np.random.default_rng(0)
    total = 20 + 3 * PER_CLIENT
    pixels = random.integers(0, 256, (total, 1, 12, 12)).astype(np.uint8)
    labels = np.arange(total, dtype=np.int64) % len(CLASSES)
    pool = Pool("test", pixels, labels, CLASSES, {"train": range(total)}, flips=True)
    rows = np.arange(total, dtype=np.int64)
    clients = (*np.split(rows[20:], 3), rows[:0])
    federation = Federation(pool, rows[:12], rows[12:20], clients, ("p", "q", "r", "empty"), {})
    raw = {
        "method": "fedseal",
        "seed": 3,
        "engine": {"device": "cpu"},
        "server": {"lr": 0.05, "epochs": 2, "batch": 4, **(server or {})},
        "client": {"lr": 0.05, "epochs": 2, "batch": 4, **(client or {})},
        "augment": augment or {},
        "fedseal": {"bootstrap_epochs": 0, **(fedseal or {})},
    }
    return RunSetup(parse(raw, "test"), federation)


def method(setup: RunSetup) -> FedSEAL:
    chosen = setup.config.selected_method()
    assert isinstance(chosen, FedSEAL)
    return chosen


def make_client(setup: RunSetup, k: int = 0) -> tuple[Participant, LabelAudit]:
    audit = LabelAudit()
    return setup.client(k, setup.network(), audit.record), audit


def model(setup: RunSetup, seed: int = 0) -> Tensors:
    """The initial weights plus noise, so that confidences differ between images."""
    draw = torch.Generator().manual_seed(seed)
    start = weights.get_weights(setup.network())
    return {
        name: value if name in ("mean", "std") else value + 0.1 * torch.randn(value.shape, generator=draw)
        for name, value in start.items()
    }


def request(w: Tensors, tau: list[float], t: int = 1, weight: float = 0.5) -> Packet:
    return Packet(
        {"model": w, "thresholds": {"tau": torch.tensor(tau)}}, {"t": t, "lambda": weight, "train": True}
    )


def update_request(w: Tensors, t: int = 1) -> Packet:
    """The request to a client that is not sampled: it only updates its ensemble."""
    return Packet({"model": w}, {"t": t, "lambda": 0.5, "train": False})


def remembered(mean: Tensor, t: int = 1) -> Packet:
    return Packet({"images": {"mean": mean, "count": torch.full((len(mean),), t)}}, {"t": t})


def rows_of(plus: int, minus: int, neither: int) -> Tensor:
    """p̄ of images that τ = 0.8 and θ = 0.1 assign to D⁺, to D⁻ and to neither, in random order."""
    kinds = [[0.85, 0.05, 0.05, 0.05]] * plus + [[0.5, 0.4, 0.05, 0.05]] * minus
    kinds += [[0.3, 0.3, 0.2, 0.2]] * neither
    order = torch.randperm(len(kinds), generator=torch.Generator().manual_seed(1))
    return torch.tensor(kinds)[order]


TAU = [0.8] * 4


def equal(a: Tensors, b: Tensors) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a | b)


class RecordedLabels:
    """Records the labels that the method gives, in place of `LabelAudit`."""

    def __init__(self) -> None:
        self.rows: dict[str, list[int]] = {}
        self.given: dict[str, list[int]] = {}

    def __call__(self, name: str, rows: Tensor, given: Tensor, *, complementary: bool = False) -> None:
        assert complementary == (name == "negative")
        self.rows[name], self.given[name] = rows.tolist(), given.tolist()


# ------------------------------------------------------------------ step 0: bootstrapping


def bootstrapped(setup: RunSetup) -> list[PreparationStep]:
    server = setup.server()
    return list(method(setup).prepare(method(setup).initial_state(server), server))


def test_bootstrapping_equals_server_sl() -> None:
    """6 epochs with 2 per round equal three rounds of Server-SL to the bit."""
    setup = make_setup({"bootstrap_epochs": 6})
    alone, server = ServerSL(), setup.server()
    state = alone.initial_state(server)
    for t in (1, 2, 3):
        state, _ = alone.server_round(Round(t, (), ()), state, server)
    w0 = bootstrapped(setup)[-1].state
    assert equal(w0.tensors["model"], state.tensors["model"])
    assert equal(w0.tensors["average"], state.tensors["model"])
    assert not equal(w0.tensors["model"], weights.get_weights(setup.network()))


def test_bootstrapping_can_end_within_a_round() -> None:
    """5 epochs with 2 per round are two rounds of Server-SL and one epoch of the third."""
    setup = make_setup({"bootstrap_epochs": 5})
    server = setup.server()
    w = weights.get_weights(server.model)
    for t, epochs in ((1, 2), (2, 2), (3, 1)):
        w = train_supervised(server, w, t, epochs=epochs)
    steps = bootstrapped(setup)
    assert [(step.done, step.total) for step in steps] == [(2, 5), (4, 5), (5, 5)]
    assert equal(steps[-1].state.tensors["model"], w)
    for number, step in enumerate(steps):  # resumed from any saved step, it ends the same
        rest = list(method(setup).prepare(Packet.from_bytes(step.state.to_bytes()), setup.server()))
        assert len(rest) == 2 - number
        assert not rest or equal(rest[-1].state.tensors["average"], w)


def test_without_bootstrapping_the_first_round_starts_from_random_weights() -> None:
    setup = make_setup({"bootstrap_epochs": 0})
    state = method(setup).initial_state(setup.server())
    assert bootstrapped(setup) == []
    assert equal(state.tensors["model"], weights.get_weights(setup.network()))


# ------------------------------------------------------------------ steps 1 and 2: the server


def server_round(
    setup: RunSetup, t: int = 1, cohort: tuple[int, ...] = (0, 2)
) -> tuple[Packet, dict[int, Packet]]:
    state = Packet({"model": model(setup, 1), "average": model(setup, 2)})
    return method(setup).server_round(Round(t, cohort, range(4)), state, setup.server())


def test_server_trains_the_average_of_the_clients() -> None:
    """w^t starts from w̄, not from the global model of the previous round."""
    setup = make_setup()
    state, requests = server_round(setup, t=3)
    expected = train_supervised(setup.server(), model(setup, 2), 3, stream="rounds")
    assert equal(state.tensors["model"], expected)
    assert all(equal(packet.tensors["model"], expected) for packet in requests.values())


@pytest.mark.parametrize("threshold", ["true-count", "predicted-count"])
def test_thresholds_are_eq_5_on_the_validation_images(threshold: paper.Denominator) -> None:
    """Recomputed image by image from the 8 validation images, 2 of each class."""
    setup = make_setup({"threshold": threshold})
    state, requests = server_round(setup)
    server = setup.server()
    probs = predict(server, state.tensors["model"], server.validation).tolist()
    predicted = [row.index(max(row)) for row in probs]
    counted = Counter(server.validation.labels.tolist() if threshold == "true-count" else predicted)
    tau = {
        m: sum(max(row) for row, y in zip(probs, predicted, strict=True) if y == m) / counted[m]
        for m in range(4)
        if counted[m]
    }
    others = sum(tau.values()) / len(tau)
    expected = torch.tensor([tau.get(m, others) for m in range(4)])
    assert_close(state.tensors["thresholds"]["tau"], expected)
    assert_close(requests[0].tensors["thresholds"]["tau"], expected)


def test_fixed_threshold() -> None:
    _, requests = server_round(make_setup({"threshold": "fixed", "tau": 0.7}))
    assert_close(requests[0].tensors["thresholds"]["tau"], torch.full((4,), 0.7))


def test_lambda_follows_its_schedule() -> None:
    """λ is 0.4 · 0.5² = 0.1 in round 2, 0.4 · 0.5³ = 0.05 in round 3, and constant afterwards."""
    options = {"schedule": "multiply", "positive_weight": 0.4, "schedule_rate": 0.5, "schedule_until": 3}
    for t, expected in ((2, 0.1), (3, 0.05), (9, 0.05)):
        state, requests = server_round(make_setup(options), t=t)
        assert state.scalars == {"t": t, "lambda": pytest.approx(expected)}
        assert requests[0].scalars == {"t": t, "lambda": pytest.approx(expected), "train": True}


def test_scope_all_sends_the_model_to_everyone() -> None:
    _, requests = server_round(make_setup({"scope": "all"}), cohort=(0, 2))
    assert {k: packet.scalars["train"] for k, packet in requests.items()} == {
        0: True,
        1: False,
        2: True,
        3: False,
    }
    assert list(requests[1].tensors) == ["model"]
    assert equal(requests[1].tensors["model"], requests[0].tensors["model"])


@pytest.mark.parametrize("options", [{"scope": "sampled"}, {"scope": "all", "ensemble": False}])
def test_only_the_cohort_gets_a_request(options: dict[str, object]) -> None:
    """With these options, clients that are not sampled do not update an ensemble."""
    _, requests = server_round(make_setup(options), cohort=(0, 2))
    assert {k: packet.scalars["train"] for k, packet in requests.items()} == {0: True, 2: True}


def test_packets_contain_no_images_or_labels() -> None:
    """A request has the model, one threshold per class and scalars; a reply has the model and counts."""
    setup = make_setup({"theta": 0.5})
    _, requests = server_round(setup)
    assert set(requests[0].tensors) == {"model", "thresholds"}
    assert set(requests[0].tensors["thresholds"]) == {"tau"}
    client, _ = make_client(setup)
    reply, _ = method(setup).client_round(requests[0], Packet(), client)
    assert set(reply.tensors) == {"model"} and set(reply.scalars) == {"t", "positive", "negative"}
    assert weights.same_layout(reply.tensors["model"], requests[0].tensors["model"])


# ------------------------------------------------------------------ step 3: labels


def test_client_has_no_labels() -> None:
    setup = make_setup()
    client, _ = make_client(setup, 1)
    assert type(client.data) is Images and not hasattr(client, "validation")
    rows = setup.federation.clients[1]
    assert torch.equal(client.data.pixels, torch.from_numpy(setup.federation.pool.pixels[rows]))
    assert client.name == setup.federation.names[1]


def test_given_labels_are_compared_with_the_true_ones() -> None:
    """The true labels of the client's images are 0, 1, 2, 3, 0, …; images 0 to 4 get the pseudo-label 0.

    The pseudo-label is correct for images 0 and 4. Images 5, 6 and 7 (classes 1, 2, 3) get the complementary
    label 3, the only class with p̄ ≤ 0.1, which is wrong for image 7.
    """
    setup = make_setup()
    mean = torch.tensor(
        [[0.85, 0.05, 0.05, 0.05]] * 5 + [[0.4, 0.35, 0.25, 0.0]] * 3 + [[0.3, 0.3, 0.2, 0.2]] * 7
    )
    client, audit = make_client(setup)
    reply, _ = method(setup).client_round(request(model(setup), TAU), remembered(mean), client)
    assert (reply.scalars["positive"], reply.scalars["negative"]) == (5, 3)
    assert audit.count_correct(setup.true_labels(0)) == {
        "positive_known": 5,
        "positive_right": 2,
        "negative_known": 3,
        "negative_right": 2,
    }


# ------------------------------------------------------------------ step 3: the ensemble


def test_memory_is_the_mean_over_all_models() -> None:
    """Eq. 7 after three rounds, whether the client trained or only updated its ensemble."""
    setup = make_setup()
    client, _ = make_client(setup)
    history, memory = [model(setup, seed) for seed in (1, 2, 3)], Packet()
    for t, w in enumerate(history, start=1):
        packet = update_request(w, t) if t == 2 else request(w, TAU, t)
        _, memory = method(setup).client_round(packet, memory, client)
        assert memory.scalars == {"t": t}
        assert memory.tensors["images"]["count"].tolist() == [t] * PER_CLIENT
    probs = torch.stack([predict(client, w, client.data) for w in history])
    mean = memory.tensors["images"]["mean"]
    assert_close(mean, paper.ensemble_mean(probs), atol=1e-6, rtol=1e-5)
    assert_close(mean.sum(dim=1), torch.ones(PER_CLIENT))
    assert not torch.allclose(mean, probs[2], atol=1e-3)


def test_missed_rounds_do_not_count() -> None:
    """A client that receives only the models of rounds 2 and 7 has the mean of these two."""
    setup = make_setup()
    client, _ = make_client(setup)
    _, memory = method(setup).client_round(update_request(model(setup, 1), 2), Packet(), client)
    _, memory = method(setup).client_round(update_request(model(setup, 2), 7), memory, client)
    both = [predict(client, model(setup, seed), client.data) for seed in (1, 2)]
    assert memory.tensors["images"]["count"].tolist() == [2] * PER_CLIENT
    assert_close(memory.tensors["images"]["mean"], (both[0] + both[1]) / 2)


def test_request_delivered_twice_changes_nothing() -> None:
    """Reply and memory are the same to the bit after every delivery, also if the memory was serialised."""
    setup = make_setup({"theta": 0.3})
    client, _ = make_client(setup)
    _, before = method(setup).client_round(update_request(model(setup, 1), 1), Packet(), client)
    repeated = request(model(setup, 2), [0.3] * 4, t=2)
    first, memory = method(setup).client_round(repeated, before, client)
    assert first.scalars["positive"] and first.scalars["negative"]
    for known in (
        memory,
        Packet.from_bytes(memory.to_bytes()),
        before,
    ):  # the last: reply and memory were lost
        reply, after = method(setup).client_round(repeated, known, client)
        assert reply.to_bytes() == first.to_bytes()
        assert after.to_bytes() == memory.to_bytes()
    assert memory.tensors["images"]["count"].tolist() == [2] * PER_CLIENT


def test_client_that_is_not_sampled_updates_its_memory_and_returns_no_model() -> None:
    setup = make_setup()
    client, audit = make_client(setup)
    w = model(setup)
    reply, memory = method(setup).client_round(update_request(w, 4), Packet(), client)
    assert reply.tensors == {} and reply.scalars == {"t": 4}
    assert torch.equal(memory.tensors["images"]["mean"], predict(client, w, client.data))
    assert memory.tensors["images"]["count"].tolist() == [1] * PER_CLIENT
    assert audit.count_correct(setup.true_labels(0)) == {}


def test_without_ensemble_the_current_model_gives_the_labels() -> None:
    """No memory is written or read. With τ = 0, D⁺ contains every image, labelled by this round's model."""
    setup = make_setup({"ensemble": False})
    client, _ = make_client(setup)
    recorded = RecordedLabels()
    client = replace(client, record_labels=recorded)
    reply, memory = method(setup).client_round(request(model(setup, 1), [0.0] * 4), Packet(), client)
    assert memory == Packet()
    predicted = predict(client, model(setup, 1), client.data).argmax(dim=1).tolist()
    assert len(set(predicted)) > 1
    assert recorded.rows["positive"] == list(range(PER_CLIENT)) and recorded.given["positive"] == predicted
    misleading = remembered(torch.tensor([[0.0, 0.0, 0.0, 1.0]]).expand(PER_CLIENT, -1))
    same, _ = method(setup).client_round(request(model(setup, 1), [0.0] * 4), misleading, client)
    assert same.to_bytes() == reply.to_bytes()


def test_with_ensemble_the_mean_gives_the_labels() -> None:
    """The same request, but p̄ is largest for class 3 in every image."""
    setup = make_setup()
    client, _ = make_client(setup)
    recorded = RecordedLabels()
    memory = remembered(torch.tensor([[0.0, 0.1, 0.2, 0.7]]).repeat(PER_CLIENT, 1))
    client = replace(client, record_labels=recorded)
    method(setup).client_round(request(model(setup, 1), [0.0] * 4), memory, client)
    assert recorded.given["positive"] == [3] * PER_CLIENT


# ------------------------------------------------------------------ step 3: D⁺ and D⁻


def test_images_are_assigned_by_eqs_10_to_12() -> None:
    """6 images are in D⁺, 5 in D⁻ and 4 in neither; y⁻ is one of the two classes with p̄ = 0.05."""
    setup = make_setup()
    client, _ = make_client(setup)
    recorded, mean = RecordedLabels(), rows_of(6, 5, 4)
    client = replace(client, record_labels=recorded)
    reply, _ = method(setup).client_round(request(model(setup), TAU), remembered(mean), client)
    assert reply.scalars == {"t": 1, "positive": 6, "negative": 5}
    assert recorded.rows["positive"] == [i for i, row in enumerate(mean.tolist()) if row[0] > 0.8]
    assert recorded.given["positive"] == [0] * 6
    assert recorded.rows["negative"] == [i for i, row in enumerate(mean.tolist()) if 0.45 < row[0] < 0.6]
    assert set(recorded.given["negative"]) == {2, 3}


def test_complementary_labels_are_drawn_in_every_round() -> None:
    setup = make_setup()
    client, _ = make_client(setup)
    mean = rows_of(0, PER_CLIENT, 0)
    drawn = []
    for t in (1, 2):
        recorded = RecordedLabels()
        client = replace(client, record_labels=recorded)
        method(setup).client_round(request(model(setup), TAU, t), remembered(mean, t), client)
        drawn.append(recorded.given["negative"])
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize("batches", ["joint", "paired"])
def test_with_both_sets_empty_the_model_is_returned_unchanged(batches: str) -> None:
    """θ = 0 admits no complementary label (softmax is never 0 here), and τ = 1.5 no pseudo-label."""
    setup = make_setup({"theta": 0.0, "threshold": "fixed", "tau": 1.5, "batches": batches})
    state, requests = server_round(setup)
    client, audit = make_client(setup)
    reply, memory = method(setup).client_round(requests[0], Packet(), client)
    assert equal(reply.tensors["model"], state.tensors["model"])
    assert reply.scalars == {"t": 1, "positive": 0, "negative": 0}
    assert memory.scalars == {"t": 1}
    assert set(audit.count_correct(setup.true_labels(0)).values()) == {0}


def test_client_without_images_returns_the_model() -> None:
    setup = make_setup()
    client, _ = make_client(setup, 3)
    w, memory = model(setup), Packet()
    for t in (1, 2):
        reply, memory = method(setup).client_round(request(w, TAU, t), memory, client)
        assert equal(reply.tensors["model"], w)
        assert reply.scalars == {"t": t, "positive": 0, "negative": 0}
    assert memory.tensors["images"]["mean"].shape == (0, 4)


def test_without_negative_learning() -> None:
    """D⁻ is empty and the loss is λL⁺, as if no image had a class below θ."""
    mean, replies = rows_of(6, 9, 0), []
    for options in ({"negative": False}, {"theta": 0.0}, {}):
        setup = make_setup(options)
        client, audit = make_client(setup)
        reply, _ = method(setup).client_round(request(model(setup), TAU), remembered(mean), client)
        replies.append(reply)
    assert [r.scalars["positive"] for r in replies] == [6, 6, 6]
    assert [r.scalars["negative"] for r in replies] == [0, 0, 9]
    assert replies[0].to_bytes() == replies[1].to_bytes()
    assert not equal(replies[0].tensors["model"], replies[2].tensors["model"])
    assert audit.count_correct(setup.true_labels(0))["negative_known"] == 9


def test_soft_labels_differ_from_hard_labels() -> None:
    mean, models = rows_of(9, 6, 0), []
    for labels in ("hard", "soft", "soft"):
        setup = make_setup({"labels": labels})
        client, _ = make_client(setup)
        reply, _ = method(setup).client_round(request(model(setup), TAU), remembered(mean), client)
        models.append(reply.tensors["model"])
    assert not equal(models[0], models[1]) and equal(models[1], models[2])
    certain = torch.eye(4)[mean.argmax(dim=1)]  # one-hot p̄: soft and hard labels are equal
    results = []
    for labels in ("hard", "soft"):
        setup = make_setup({"labels": labels})
        client, _ = make_client(setup)
        reply, _ = method(setup).client_round(request(model(setup), TAU), remembered(certain), client)
        results.append(reply.tensors["model"])
    assert_close(results[0], results[1], atol=1e-6, rtol=1e-5)


# ------------------------------------------------------------------ step 3: mini-batches


class Inverting:
    """Inverts images in place of the strong augmentation, so that a test recognises augmented images."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def strong(self, images: Tensor, generator: torch.Generator) -> Tensor:
        self.calls.append(len(images))
        return 255 - images


Part = list[tuple[int, int]]  # index in the client's data, label


def batches_of(
    mode: str, plus: int, minus: int, epochs: int = 1
) -> tuple[list[tuple[Part, Part]], list[int]]:
    """The D⁺ part and the D⁻ part of every mini-batch, and the sizes of all calls of the strong augmentation.

    D⁺ consists of the images 0, 2, 4, … with labels 100, 102, …; D⁻ of 1, 3, 5, … with labels 201, 203, ….
    Images are recognised by their pixels. The batch size is 4.
    """
    setup = make_setup({"batches": mode}, client={"epochs": epochs, "batch": 4})
    client, _ = make_client(setup)
    augment = Inverting()
    pixels = torch.cat([client.data.pixels, client.data.pixels.flip(3)])
    client = replace(client, augment=augment, data=replace(client.data, pixels=pixels))  # type: ignore[arg-type]
    positive, negative = 2 * torch.arange(plus), 2 * torch.arange(minus) + 1
    plain = {image.numpy().tobytes(): i for i, image in enumerate(pixels)}
    inverted = {image.numpy().tobytes(): i for i, image in enumerate(255 - pixels)}
    assert len(plain) == len(pixels) and not plain.keys() & inverted.keys()

    seen: list[tuple[Part, Part]] = []
    arguments = (client, 1, positive, positive + 100, negative, negative + 200)
    for images, target, y_minus in method(setup).client_batches(*arguments):
        assert images.dtype == torch.float32 and len(images) == len(target) + len(y_minus)
        bits = [image.byte().numpy().tobytes() for image in images]
        first = [inverted[b] for b in bits[: len(target)]]  # KeyError if D⁺ is not augmented or not first
        second = [plain[b] for b in bits[len(target) :]]  # KeyError if D⁻ is augmented
        seen.append(
            (list(zip(first, target.tolist(), strict=True)), list(zip(second, y_minus.tolist(), strict=True)))
        )
    return seen, augment.calls


def plus_images(plus: int) -> Part:
    return [(2 * i, 2 * i + 100) for i in range(plus)]


def minus_images(minus: int) -> Part:
    return [(2 * i + 1, 2 * i + 201) for i in range(minus)]


@pytest.mark.parametrize(("plus", "minus"), [(6, 5), (3, 11), (7, 0), (0, 9), (1, 0), (0, 1), (4, 4)])
def test_joint_batches_contain_every_image_once_per_epoch(plus: int, minus: int) -> None:
    seen, augmented = batches_of("joint", plus, minus, epochs=3)
    steps = -(-(plus + minus) // 4)
    assert len(seen) == 3 * steps and augmented == [plus] * 3
    for epoch in range(3):
        batches = seen[epoch * steps : (epoch + 1) * steps]
        sizes = [len(p) + len(m) for p, m in batches]
        assert sizes[:-1] == [4] * (steps - 1) and sum(sizes) == plus + minus
        assert sorted(image for p, _ in batches for image in p) == plus_images(plus)
        assert sorted(image for _, m in batches for image in m) == minus_images(minus)


def test_joint_batches_mix_both_sets_differently_in_every_epoch() -> None:
    seen, _ = batches_of("joint", 8, 8, epochs=3)
    assert any(p and m for p, m in seen)
    assert seen[:4] != seen[4:8] != seen[8:]


@pytest.mark.parametrize(("plus", "minus"), [(5, 12), (12, 5), (4, 4), (1, 10), (9, 8)])
def test_paired_batches_repeat_the_smaller_set(plus: int, minus: int) -> None:
    """5 and 12 in fours are ceil(12 / 4) = 3 steps. 12 = 2·5 + 2, so two images occur 3 times, 3 twice."""
    seen, augmented = batches_of("paired", plus, minus, epochs=2)
    longest = max(plus, minus)
    steps = -(-longest // 4)
    assert len(seen) == 2 * steps and augmented == [longest] * 2
    for epoch in range(2):
        batches = seen[epoch * steps : (epoch + 1) * steps]
        sizes = [4] * (longest // 4) + [longest % 4] * (longest % 4 > 0)
        assert [len(p) for p, _ in batches] == [len(m) for _, m in batches] == sizes
        streams = ([image for p, _ in batches for image in p], [image for _, m in batches for image in m])
        for stream, n, images in zip(
            streams, (plus, minus), (plus_images(plus), minus_images(minus)), strict=True
        ):
            assert sorted(set(stream)) == images
            assert sorted(stream[:n]) == images  # every image occurs before any is repeated
            extra = longest % n
            times = sorted(Counter(stream).values())
            assert times == [longest // n] * (n - extra) + [longest // n + 1] * extra


@pytest.mark.parametrize(("plus", "minus"), [(6, 0), (0, 6)])
def test_paired_batches_with_one_empty_set(plus: int, minus: int) -> None:
    seen, _ = batches_of("paired", plus, minus)
    assert [(len(p), len(m)) for p, m in seen] == [
        (4 * (plus > 0), 4 * (minus > 0)),
        (2 * (plus > 0), 2 * (minus > 0)),
    ]
    assert sorted(image for p, _ in seen for image in p) == plus_images(plus)
    assert sorted(image for _, m in seen for image in m) == minus_images(minus)


@pytest.mark.parametrize("batches", ["joint", "paired"])
@pytest.mark.parametrize(("plus", "minus"), [(0, 9), (9, 0), (1, 0)])
def test_a_last_image_alone_joins_the_batch_before_it_if_batch_norm_needs_two(
    batches: str, plus: int, minus: int
) -> None:
    setup = make_setup({"batches": batches}, client={"epochs": 1, "batch": 4})
    client, _ = make_client(setup)
    body = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(client.data.pixels[0].numel()))
    client = replace(client, model=Network(body, [0.0], [255.0]))
    positive, negative = torch.arange(plus), torch.arange(minus)
    found = method(setup).client_batches(client, 1, positive, positive, negative, negative)
    assert [len(images) for images, *_ in found] == ([4, 5] if plus + minus == 9 else [])


def test_repeated_batches() -> None:
    """7 indices below 3 in batches of 3: a permutation, the same permutation, and its first index."""
    parts = repeated_batches(3, 7, 3, torch.Generator().manual_seed(0))
    first, second, third = (part.tolist() for part in parts)
    assert sorted(first) == [0, 1, 2] and second == first and third == first[:1]
    assert [len(part) for part in repeated_batches(0, 7, 3, torch.Generator())] == [0, 0, 0]


def test_only_positive_images_are_augmented_and_afresh_in_every_epoch() -> None:
    """With the real augmentation and one batch per epoch: D⁺ differs between epochs, D⁻ is unchanged."""
    setup = make_setup({"batches": "joint"}, client={"epochs": 2, "batch": 100})
    client, _ = make_client(setup)
    positive, negative = torch.arange(8), torch.arange(8, 15)
    batches = method(setup).client_batches(client, 1, positive, positive, negative, negative)
    epochs = []
    for images, target, y_minus in islice(batches, 3):
        pixels = client.data.pixels.float()
        assert torch.equal(images[8:], pixels[y_minus])
        changed = images[:8][target.argsort()]
        assert sum(not torch.equal(a, b) for a, b in zip(changed, pixels[:8], strict=True)) >= 6
        epochs.append(changed)
    assert len(epochs) == 2
    assert sum(not torch.equal(a, b) for a, b in zip(*epochs, strict=True)) >= 6


# ------------------------------------------------------------------ step 3: gradient steps


def gradient_by_hand(
    setup: RunSetup,
    w: Tensors,
    positive: list[int],
    target: Tensor,
    negative: list[int],
    y_minus: list[int],
    weight: float,
) -> Tensors:
    """∇(λL⁺ + L⁻) from Eqs. 13 to 15, over all images in double precision."""
    network, (client, _) = setup.network().double(), make_client(setup)
    trained = sorted(name for name, _ in network.named_parameters())
    values = {name: value.double().requires_grad_(name in trained) for name, value in w.items()}

    def confidence(i: int) -> Tensor:
        logits: Tensor = functional_call(network, values, (client.data.pixels[i : i + 1].double(),))[0]
        return logits.exp() / logits.exp().sum()

    loss = torch.zeros((), dtype=torch.float64)
    for i, share in zip(positive, target.double(), strict=True):
        loss = loss - weight / len(positive) * (share * confidence(i).log()).sum()
    for i, y in zip(negative, y_minus, strict=True):
        loss = loss - 1 / len(negative) * (1 - confidence(i)[y]).log()
    gradients = torch.autograd.grad(loss, [values[name] for name in trained])
    return dict(zip(trained, gradients, strict=True))


@pytest.mark.parametrize(
    ("plus", "minus", "options"),
    [
        (6, 5, {"batches": "joint"}),
        (6, 5, {"batches": "joint", "labels": "soft"}),
        (6, 6, {"batches": "paired"}),
        (7, 0, {"batches": "joint"}),
        (0, 7, {"batches": "paired"}),
    ],
)
def test_first_step_follows_the_gradient_of_eq_13(plus: int, minus: int, options: dict[str, object]) -> None:
    """In round 1, with one unaugmented mini-batch and learning rate 1, w − w' is the gradient."""
    setup = make_setup(options, client={"lr": 1.0, "epochs": 1, "batch": 100}, augment=NO_AUGMENTATION)
    client, _ = make_client(setup)
    mean, w, recorded = rows_of(plus, minus, PER_CLIENT - plus - minus), model(setup), RecordedLabels()
    client = replace(client, record_labels=recorded)
    reply, _ = method(setup).client_round(request(w, TAU, weight=0.3), remembered(mean), client)
    positive, negative = recorded.rows["positive"], recorded.rows["negative"]
    assert (len(positive), len(negative)) == (plus, minus)
    soft = options.get("labels") == "soft"
    target = mean[positive] if soft else torch.eye(4)[recorded.given["positive"]]
    expected = gradient_by_hand(setup, w, positive, target, negative, recorded.given["negative"], weight=0.3)
    step = {name: (w[name] - reply.tensors["model"][name]).double() for name in expected}
    assert max(float(g.abs().max()) for g in expected.values()) > 0.01
    assert_close(step, expected, atol=2e-6, rtol=1e-3)


def test_learning_rate_decays_with_the_round() -> None:
    """With decay 0.5, the step of round 3 is a quarter of that of round 1. D⁻, which is drawn, is empty."""
    setup = make_setup(client={"lr": 0.4, "decay": 0.5, "epochs": 1, "batch": 100}, augment=NO_AUGMENTATION)
    client, _ = make_client(setup)
    w, steps = model(setup), []
    for t in (1, 3):
        memory = remembered(rows_of(10, 0, 5), t)
        reply, _ = method(setup).client_round(request(w, TAU, t), memory, client)
        steps.append({name: w[name] - reply.tensors["model"][name] for name in w})
    quarter = {name: step / 4 for name, step in steps[0].items()}
    assert max(float(step.abs().max()) for step in steps[1].values()) > 1e-3
    assert_close(steps[1], quarter, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("batches", ["joint", "paired"])
def test_reply_depends_only_on_the_arguments(batches: str) -> None:
    """The previous weights of the worker's model and the global random state have no influence."""
    setup = make_setup({"batches": batches})
    w, memory = model(setup), remembered(rows_of(6, 5, 4))
    replies = []
    for k, disturb in ((0, False), (0, True), (1, False)):
        client, _ = make_client(setup, k)
        if disturb:
            torch.manual_seed(77)
            weights.set_weights(client.model, model(setup, 9))
        else:
            torch.manual_seed(1)
        reply, _ = method(setup).client_round(request(w, TAU), memory, client)
        replies.append(reply.to_bytes())
    assert replies[0] == replies[1] != replies[2]


def test_client_round_does_not_modify_the_request() -> None:
    """Clients share one packet, so training one client must not change the request of the next."""
    setup = make_setup()
    client, _ = make_client(setup)
    packet = request(model(setup), TAU)
    before = packet.to_bytes()
    reply, _ = method(setup).client_round(packet, remembered(rows_of(6, 5, 4)), client)
    assert packet.to_bytes() == before and not equal(reply.tensors["model"], packet.tensors["model"])


# ------------------------------------------------------------------ step 4: the average


def moved(by: float) -> Callable[[Tensors], Packet]:
    return lambda w: Packet({"model": {name: value + by for name, value in w.items()}}, {"t": 1})


def test_collect_averages_the_cohorts_replies() -> None:
    """Client 0 adds 1 and client 2 adds 3. Client 1 is not sampled and client 3's reply is lost: w + 2."""
    setup = make_setup()
    w = {"w": torch.tensor([1.0, -2.0])}
    state = Packet({"model": w, "thresholds": {"tau": torch.ones(4)}}, {"t": 1, "lambda": 0.5})
    replies = {2: moved(3.0)(w), 1: Packet(scalars={"t": 1}), 0: moved(1.0)(w)}
    current = Round(1, cohort=(0, 2, 3), everyone=range(4))
    after = method(setup).collect(current, state, replies, setup.server())
    assert after.tensors["average"]["w"].tolist() == [3.0, 0.0]
    assert after.tensors["model"]["w"].tolist() == [1.0, -2.0]
    assert set(after.tensors) == {"model", "thresholds", "average"}
    assert after.scalars == {"t": 1, "lambda": 0.5}


@pytest.mark.parametrize("replies", [{}, {1: Packet(scalars={"t": 1})}])
def test_without_replies_the_next_round_starts_from_the_global_model(replies: dict[int, Packet]) -> None:
    setup = make_setup()
    state = Packet({"model": {"w": torch.tensor([1.0, -2.0])}})
    current = Round(1, cohort=(0, 2), everyone=range(4))
    after = method(setup).collect(current, state, replies, setup.server())
    assert after.tensors["average"]["w"].tolist() == [1.0, -2.0]


# ------------------------------------------------------------------ all four steps


def run(
    setup: RunSetup, cohorts: list[tuple[int, ...]], *, backwards: bool
) -> tuple[Packet, dict[int, Packet]]:
    server = setup.server()
    state, memories = method(setup).initial_state(server), dict[int, Packet]()
    for t, cohort in enumerate(cohorts, start=1):
        current = Round(t, cohort, range(4))
        state, requests = method(setup).server_round(current, state, server)
        replies = {}
        for k in sorted(requests, reverse=backwards):
            client, _ = make_client(setup, k)
            replies[k], memories[k] = method(setup).client_round(
                requests[k], memories.get(k, Packet()), client
            )
        state = method(setup).collect(current, state, replies, server)
    return state, memories


def test_rounds_do_not_depend_on_the_order_of_the_clients() -> None:
    setup = make_setup({"bootstrap_epochs": 2, "theta": 0.3})
    cohorts = [(0, 1), (1, 2), (0, 2, 3)]
    state, memories = run(setup, cohorts, backwards=False)
    state_backwards, memories_backwards = run(setup, cohorts, backwards=True)
    assert state.to_bytes() == state_backwards.to_bytes()
    assert {k: m.to_bytes() for k, m in memories.items()} == {
        k: m.to_bytes() for k, m in memories_backwards.items()
    }
    assert [memories[k].tensors["images"]["count"].tolist() for k in range(3)] == [[3] * PER_CLIENT] * 3
    assert not equal(state.tensors["average"], state.tensors["model"])


def test_with_scope_sampled_clients_count_only_their_rounds() -> None:
    """Client 0 is in rounds 1 and 3, client 1 in 1 and 2, client 2 in 2 and 3: each has seen two models."""
    setup = make_setup({"scope": "sampled", "theta": 0.3})
    _, memories = run(setup, [(0, 1), (1, 2), (0, 2)], backwards=False)
    assert {k: m.scalars["t"] for k, m in memories.items()} == {0: 3, 1: 2, 2: 3}
    assert [memories[k].tensors["images"]["count"].tolist() for k in range(3)] == [[2] * PER_CLIENT] * 3
