"""Secure aggregation over the local engine: the right average, whoever drops out, from uploads that look
random."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

pytest.importorskip("flwr")

from conftest import TINY, Command, same_weights
from fedseal import secure
from fedseal.aggregate import mean
from fedseal.config.load import load_config
from fedseal.config.sections import SecureSettings
from fedseal.core import Packet, Problem, Reply, Round
from fedseal.data.federation import load_federation
from fedseal.engines import secure_client
from fedseal.engines.client import SimulatedClients
from fedseal.engines.local import LocalEngine
from fedseal.engines.secure_client import GROUP, KEYS, PHASE, SHARES, UNMASK, UPLOAD
from fedseal.engines.secure_engine import SecureEngine
from fedseal.errors import UserError
from fedseal.methods.fedavg_fixmatch import FedAvgFixMatch
from fedseal.run_setup import RunSetup
from fedseal.training.train import train
from fedseal.weights import Tensors

PHASES = (KEYS, SHARES, UPLOAD, UNMASK)
Change = Callable[[Reply], Reply]


def make_setup(**changes: Any) -> RunSetup:
    """Four clients with real images; all of them learn something."""
    options = {**TINY, "method": "fedavg-fixmatch", "fedavg-fixmatch.threshold": 0.1, "data.clients": 4}
    config = load_config("fmnist-lenet", options | {k.replace("__", "."): v for k, v in changes.items()})
    return RunSetup(config, load_federation(config.data, config.seed))


@pytest.fixture(scope="module")
def setup() -> RunSetup:
    return make_setup()


class Watched(LocalEngine):
    """Changes the replies of some clients in some phases, and keeps all replies."""

    def __init__(self, setup: RunSetup, changes: Mapping[tuple[int, str], Change] | None = None) -> None:
        super().__init__(setup)
        self.changes, self.seen = changes or {}, list[tuple[str, Packet, Reply]]()

    def exchange(self, requests: Mapping[int, Packet]) -> Iterator[Reply]:
        for reply in super().exchange(requests):
            request = requests[reply.client]
            phase = str(request.scalars[PHASE])
            self.seen.append((phase, request, reply))
            yield self.changes.get((reply.client, phase), lambda reply: reply)(reply)


def lost(reply: Reply) -> Reply:
    return replace(reply, packet=Packet(), problem=Problem("gone"))


def first_requests(setup: RunSetup, train: int = 4) -> dict[int, Packet]:
    """The requests of round 1, of which this number train."""
    method, server = setup.config.selected_method(), setup.server()
    _, requests = method.server_round(Round(1, range(4), range(4)), method.initial_state(server), server)
    return {
        k: p if k < train else Packet(p.tensors, p.scalars | {"train": False}) for k, p in requests.items()
    }


def trained_models(setup: RunSetup, requests: Mapping[int, Packet]) -> dict[int, Tensors]:
    """What every client would upload without masks."""
    clients = SimulatedClients(setup)
    return {k: clients.run(k, request, b"").reply.tensors["model"] for k, request in requests.items()}


@pytest.fixture(scope="module")
def plain(setup: RunSetup) -> dict[int, Tensors]:
    return trained_models(setup, first_requests(setup))


def exchange(
    setup: RunSetup, changes: Mapping[tuple[int, str], Change] | None = None, **settings: Any
) -> tuple[dict[int, Reply], Watched]:
    """The replies of one round, and the engine that carried them."""
    inner = Watched(setup, changes)
    engine = SecureEngine(inner, setup.config.selected_method(), SecureSettings(**settings))
    replies = list(engine.exchange(first_requests(setup)))
    assert len({reply.client for reply in replies}) == len(replies)  # one for each client
    return {reply.client: reply for reply in replies}, inner


def largest_difference(one: Tensors, other: Tensors) -> float:
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in other)


@pytest.mark.parametrize("phase", ["", *PHASES])
def test_the_average_is_right_if_a_client_drops_out(
    setup: RunSetup, plain: dict[int, Tensors], phase: str
) -> None:
    """Client 1 drops out in each of the phases; after its upload, it is part of the sum."""
    replies, inner = exchange(setup, {(1, phase): lost})
    left = [0, 1, 2, 3] if phase in ("", UNMASK) else [0, 2, 3]
    assert [k for k, reply in replies.items() if reply.problem is None] == left
    if 1 not in left:
        assert replies[1].problem == Problem("gone")
    expected, error = mean({k: plain[k] for k in left}), secure.FixedPoint(16.0, 4).step / 2
    models = [replies[k].packet.tensors["model"] for k in left]
    assert all(largest_difference(model, models[0]) == 0 for model in models)
    assert largest_difference(models[0], expected) <= error + 2**-24  # of float32 below 1
    sent = first_requests(setup)[0].tensors["model"]
    assert largest_difference(models[0], sent) > 1e-3  # they did learn
    assert replies[0].up == sum(reply.up for _, _, reply in inner.seen if reply.client == 0)
    secrets = {k: secure_client.take_secrets(inner.memories.get(k))[1] != {} for k in range(4)}
    assert secrets == dict.fromkeys(range(4), False) | {1: phase in PHASES[:3]}


def test_a_client_that_is_expelled_during_the_run_is_not_sampled_again(setup: RunSetup) -> None:
    inner = Watched(setup)
    engine = SecureEngine(inner, setup.config.selected_method(), SecureSettings())
    inner.clients = range(1, 3)
    assert engine.clients == range(1, 3)


@pytest.mark.parametrize("phase", PHASES)
def test_too_few_clients_stop_the_round(setup: RunSetup, phase: str) -> None:
    """Of four clients, two drop out. The threshold is three: two thirds of four, rounded up."""
    message = (
        r"Round 1: only 2 of 4 clients stayed in secure aggregation, but it needs 3 \(secure.threshold\)"
    )
    changes = {(k, phase): lost for k in (0, 2)}
    problems = []
    with pytest.raises(UserError, match=message):
        for reply in SecureEngine(
            Watched(setup, changes), setup.config.selected_method(), SecureSettings()
        ).exchange(first_requests(setup)):
            problems.append(reply)
    assert [(reply.client, reply.problem) for reply in problems] == [(k, Problem("gone")) for k in (0, 2)]
    replies, _ = exchange(setup, changes, threshold=2)
    assert sum(reply.problem is None for reply in replies.values()) == (4 if phase == UNMASK else 2)


def test_an_upload_looks_random(setup: RunSetup, plain: dict[int, Tensors]) -> None:
    """Its bytes are uniform, do not correlate with the update, and differ in every run. The sum does not."""
    uploads, models = [], []
    for _ in range(2):
        replies, inner = exchange(setup)
        [upload] = [reply for phase, _, reply in inner.seen if phase == UPLOAD and reply.client == 2]
        assert set(upload.packet.tensors) == {GROUP} and upload.packet.counts == {}
        uploads.append(upload.packet.tensors[GROUP]["vector"].numpy())
        models.append(replies[0].packet.tensors["model"])
    assert largest_difference(*models) == 0
    sent = first_requests(setup)[0].tensors["model"]
    update = secure.update_of(plain[2], sent)
    assert np.count_nonzero(update) > 0.5 * len(update)
    for vector in uploads:
        octets = np.bincount(vector.view(np.uint8), minlength=256)
        assert stats.chisquare(octets).pvalue > 1e-6
        known = vector[: len(update)]
        for shifted in (0, 1 << 30, 1 << 31):  # also if the wrap-around is elsewhere
            values = (known.view(np.uint32) + np.uint32(shifted)).astype(np.float64)
            assert abs(stats.pearsonr(values, update).statistic) < 6 / len(update) ** 0.5
    assert (uploads[0] == uploads[1]).mean() < 1e-3
    difference = (uploads[0] - uploads[1]).view(np.uint8)  # the masks are new, too
    assert stats.chisquare(np.bincount(difference, minlength=256)).pvalue > 1e-6


def test_the_server_sees_no_count_and_no_model_of_a_client() -> None:
    """Everything that it gets: public keys, sealed shares, masked vectors, and shares of others' secrets."""
    setup = make_setup(method="fedseal", fedseal__bootstrap_epochs=0)
    inner = Watched(setup)
    engine = SecureEngine(inner, setup.config.selected_method(), SecureSettings())
    replies = {reply.client: reply for reply in engine.exchange(first_requests(setup, train=3))}
    sent = {phase: {*r.packet.tensors.get(GROUP, {}), *r.packet.scalars} for phase, _, r in inner.seen}
    assert sent == {
        KEYS: {"cipher", "mask"},
        SHARES: {"sealed"},
        UPLOAD: {"vector", "t", "count_names"},
        "listen": {"t"},
        UNMASK: {"seeds", "keys"},
    }
    assert all({*reply.packet.tensors} <= {GROUP} for _, _, reply in inner.seen)
    assert replies[3].packet == Packet(scalars={"t": 1})
    clients = SimulatedClients(setup)
    counts = [clients.run(k, r, b"").reply.counts for k, r in first_requests(setup, train=3).items() if k < 3]
    for name in ("positive", "negative"):
        assert [replies[k].packet.counts[name] for k in range(3)] == [sum(c[name] for c in counts), 0, 0]
    assert sum(sum(c.values()) for c in counts) > 0


def test_a_client_without_confident_images_is_not_in_the_average() -> None:
    """SemiFL leaves such a client out of the mean, and so does the masked sum."""
    setup = make_setup(method="semifl", semifl__threshold=0.1138, server__lr=0.02)
    requests = first_requests(setup)
    clients = SimulatedClients(setup)
    replies = {k: clients.run(k, request, b"").reply for k, request in requests.items()}
    confident = {k: reply.counts["confident"] for k, reply in replies.items()}
    part = [k for k, number in confident.items() if number]
    assert 0 < len(part) < 4, confident
    found, _ = exchange(setup)
    expected = mean({k: replies[k].tensors["model"] for k in part})
    assert largest_difference(found[0].packet.tensors["model"], expected) < 1e-7
    assert found[0].packet.counts == {"confident": sum(confident.values())}


def test_updates_are_clipped_for_privacy_before_they_are_masked() -> None:
    """Local differential privacy, without noise to make it comparable."""
    setup = make_setup(privacy__mode="local", privacy__noise=0, privacy__clip=0.01)
    plain = trained_models(setup, first_requests(setup))
    model, sent = exchange(setup)[0][0].packet.tensors["model"], first_requests(setup)[0].tensors["model"]
    assert largest_difference(model, mean(plain)) < 1e-7
    assert 0 < np.linalg.norm(secure.update_of(model, sent)) <= 0.01 + 1e-6


def test_clients_may_keep_their_counts_to_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then there are no totals, and the average is the same. SemiFL learns whether any client took part."""
    options: dict[str, Any] = {"method": "semifl", "semifl__threshold": 0.1138, "server__lr": 0.02}
    setup = make_setup(**options)
    usual, found = secure_client.upload, [exchange(setup)[0]]
    found.append(exchange(make_setup(**options, engine__counts=False))[0])

    def only_client_2(
        method: Any, request: Packet, reply: Packet, secrets: Tensors, *rest: Any, **_: Any
    ) -> Packet:
        return usual(method, request, reply, secrets, *rest, counts=int(secrets["me"]) == 2)

    monkeypatch.setattr(secure_client, "upload", only_client_2)
    found.append(exchange(setup)[0])
    for replies in found[1:]:
        for k in range(4):
            assert replies[k].packet.scalars == {"t": 1, "counts": False, "confident": True}
            one, other = (r[k].packet.tensors["model"] for r in (found[0], replies))
            assert largest_difference(one, other) == 0


def test_a_total_that_is_no_number_of_images_is_nobodys_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Client 2 claims too many images. The sum does not tell who it was, so it has no totals."""
    setup = make_setup(method="semifl", semifl__threshold=0.1138, server__lr=0.02)
    usual = secure_client.upload

    def boast(
        method: Any, request: Packet, reply: Packet, secrets: Tensors, *rest: Any, **more: Any
    ) -> Packet:
        if int(secrets["me"]) == 2:
            reply = Packet(reply.tensors, {**reply.scalars, "confident": 2**40})
        return usual(method, request, reply, secrets, *rest, **more)

    monkeypatch.setattr(secure_client, "upload", boast)
    for reply in exchange(setup)[0].values():
        assert reply.problem is None
        assert reply.packet.scalars == {"t": 1, "counts": False, "confident": True}


def test_batch_norm_and_clipping(caplog: pytest.LogCaptureFixture) -> None:
    setup = make_setup(model__name="resnet18", model__norm="batch", model__width=4, client__lr=0.05)
    requests = first_requests(setup)
    plain, sent = trained_models(setup, requests), requests[0].tensors["model"]
    found, _ = exchange(setup)
    model = found[0].packet.tensors["model"]
    floats = {k: v for k, v in mean(plain).items() if v.is_floating_point()}
    assert len(floats) < len(model)
    assert largest_difference(model, floats) < 1e-5
    for name in model.keys() - floats.keys():
        assert torch.equal(model[name], sent[name])
    assert not caplog.records

    with caplog.at_level(logging.WARNING, "fedseal"):
        clipped, _ = exchange(setup, clip=1e-4)
    updates = np.array([secure.update_of(plain[k], sent) for k in range(4)])
    number, average = int((np.abs(updates) > 1e-4).sum()), np.clip(updates, -1e-4, 1e-4).mean(axis=0)
    assert number > 0
    assert f"round 1: {number} values of the clients' updates were clipped to ±0.0001" in caplog.text
    update = secure.update_of(clipped[0].packet.tensors["model"], sent)
    assert np.abs(update - average).max() < 1e-6


def rows(number: int, length: int) -> torch.Tensor:
    return torch.zeros(number, length, dtype=torch.uint8)


VECTOR = torch.zeros(7, dtype=torch.int32)
WRONG: list[tuple[str, Packet]] = [
    (KEYS, Packet({GROUP: {"cipher": rows(1, 49), "mask": rows(1, 49)}})),  # not on the curve
    (KEYS, Packet()),
    (SHARES, Packet({GROUP: {"sealed": rows(3, 185)}})),
    (SHARES, Packet({GROUP: {"sealed": rows(4, 184)}})),
    (UPLOAD, Packet({GROUP: {"vector": VECTOR}}, {"t": 1, "count_names": "[]"})),
    (UPLOAD, Packet({GROUP: {"vector": VECTOR}}, {"t": 1, "count_names": "[" * 100_000})),
    (UPLOAD, Packet({"model": {"w": torch.zeros(7)}}, {"t": 1, "positive": 4})),
    (UNMASK, Packet({GROUP: {"seeds": rows(4, 36), "keys": rows(0, 0)}})),  # all of place 0
    (UNMASK, Packet({GROUP: {"seeds": rows(4, 20), "keys": rows(0, 0)}})),
    (UNMASK, Packet(scalars={"refused": "a text of\nits own"})),
]


@pytest.mark.parametrize(("phase", "packet"), WRONG)
def test_a_reply_that_makes_no_sense_is_left_out(setup: RunSetup, phase: str, packet: Packet) -> None:
    replies, _ = exchange(setup, {(1, phase): lambda reply: replace(reply, packet=packet)})
    left = {k for k, reply in replies.items() if reply.problem is None}
    assert left == ({0, 1, 2, 3} if phase == UNMASK else {0, 2, 3})
    if phase != UNMASK:
        assert "its reply cannot be read" in str(replies[1].problem)


def test_other_names_of_counts_are_left_out() -> None:
    setup = make_setup(method="fedseal", fedseal__bootstrap_epochs=0)

    def rename(reply: Reply) -> Reply:
        scalars = {**reply.packet.scalars, "count_names": next(names)}
        return replace(reply, packet=replace(reply.packet, scalars=scalars))

    names = iter(['["left_out"]', '["a name"]', '["x"]'])
    for _ in range(2):
        replies, _ = exchange(setup, {(0, UPLOAD): rename})
        assert replies[0].problem == Problem("its reply cannot be read (ValueError)")
    replies, _ = exchange(setup, {(0, UPLOAD): rename})
    assert replies[0].problem == Problem("its counts have other names than those of the others")
    assert [k for k in replies if replies[k].problem is None] == [1, 2, 3]


@pytest.mark.parametrize("phase", [UPLOAD, UNMASK])
def test_a_wrong_upload_or_wrong_shares_stop_the_run(setup: RunSetup, phase: str) -> None:
    """They are well-formed, so nobody knows whose they are; the sum is out of range."""

    def spoil(reply: Reply) -> Reply:
        group = dict(reply.packet.tensors[GROUP])
        if phase == UPLOAD:
            group["vector"] = torch.randint(-(2**31), 2**31, group["vector"].shape, dtype=torch.int32)
        else:
            group["seeds"] = torch.cat([group["seeds"][:, :4], group["seeds"][:, 4:] ^ 1], dim=1)
        return replace(reply, packet=replace(reply.packet, tensors={GROUP: group}))

    with pytest.raises(UserError, match="Round 1: the masked sum makes no sense"):
        exchange(setup, {(1, phase): spoil})


def test_a_client_refuses_what_would_reveal_its_update(setup: RunSetup) -> None:
    """A second upload under the same masks, a sum of too few, foreign keys, both shares of a client."""
    _, inner = exchange(setup)
    clients, sent = SimulatedClients(setup), {phase: request for phase, request, _ in inner.seen}

    def ask(phase: str, memory: bytes, threshold: int = 3, **tensors: Any) -> tuple[str, bytes]:
        request = sent[phase]
        values = {name: torch.as_tensor(value) for name, value in tensors.items()}
        group = {GROUP: {**request.tensors.get(GROUP, {}), **values}}
        scalars = {**request.scalars, "threshold": threshold}
        result = clients.run(0, Packet({**request.tensors, **group}, scalars), memory)
        refused, left = (
            str(result.reply.scalars.get("refused", "")),
            secure_client.take_secrets(result.memory)[1],
        )
        if refused:
            assert result.memory == memory if refused == "late" else left == {}
        return refused, result.memory

    _, other = ask(KEYS, b"")
    own = clients.run(0, sent[KEYS], b"")
    keys, lists = own.reply.tensors[GROUP], sent[SHARES].tensors[GROUP]
    mine = {
        "ciphers": torch.cat([keys["cipher"], lists["ciphers"][1:]]),
        "masks": torch.cat([keys["mask"], lists["masks"][1:]]),
    }
    again = clients.run(0, sent[KEYS], own.memory)  # sent twice: the server may have the first reply
    assert all(torch.equal(again.reply.tensors[GROUP][name], key) for name, key in keys.items())
    assert ask(SHARES, b"")[0] == "late"
    assert ask(SHARES, other, **mine)[0] == "keys"
    assert ask(SHARES, own.memory, **mine, threshold=1)[0] == "few"
    assert ask(SHARES, own.memory, **mine, threshold=5)[0] == "few"
    assert ask(UPLOAD, own.memory)[0] == "late"
    refused, shared = ask(SHARES, own.memory, **mine)
    assert refused == ""
    seeds = [secure_client.take_secrets(ask(SHARES, m, **mine)[1])[1]["seed"] for m in (shared, own.memory)]
    first = secure_client.take_secrets(shared)[1]["seed"]
    assert torch.equal(seeds[0], first) and not torch.equal(seeds[1], first)
    new = clients.run(0, sent[KEYS], shared).reply.tensors[GROUP]  # the next round
    assert not any(torch.equal(new[name], key) for name, key in keys.items())
    assert ask(UPLOAD, shared, peers=[0, 1])[0] == "few"
    assert ask(UPLOAD, shared, peers=[0, 1, 1])[0] == "few"
    assert ask(UPLOAD, shared, peers=[1, 2, 3])[0] == "keys"
    assert ask(UPLOAD, shared, peers=[0, 1, 2, 9])[0] == "keys"
    refused, uploaded = ask(UPLOAD, shared)
    assert refused == ""
    assert not {"seed", "mask", "masks"} & secure_client.take_secrets(uploaded)[1].keys()
    assert ask(UPLOAD, uploaded)[0] == "late"
    assert ask(UNMASK, shared)[0] == "late"
    assert ask(UNMASK, uploaded, uploaded=[0, 1])[0] == "few"
    assert ask(UNMASK, uploaded, uploaded=[1, 2, 3])[0] == "keys"
    assert ask(UNMASK, uploaded)[0] == "keys"  # shares that are for other keys


def test_a_repeated_round_is_unmasked_for_the_same_clients_only(setup: RunSetup) -> None:
    """Its updates are the same, so two sums that differ by client 1 would reveal the update of client 1."""
    first, inner = exchange(setup)
    engine = SecureEngine(inner, setup.config.selected_method(), SecureSettings())
    again = {reply.client: reply for reply in engine.exchange(first_requests(setup))}
    models = [replies[0].packet.tensors["model"] for replies in (first, again)]
    assert largest_difference(*models) == 0
    inner.changes = {(1, UPLOAD): lost}
    reason = "it has helped to add up this round before, with other clients"
    problems = dict[int, Problem | None]()
    with pytest.raises(UserError, match="only 0 of 4 clients stayed in secure aggregation"):
        for reply in engine.exchange(first_requests(setup)):
            problems[reply.client] = reply.problem
    assert problems == dict.fromkeys((0, 2, 3), Problem(reason)) | {1: Problem("gone")}


def without_first(reply: Packet) -> Packet:
    return Packet({"model": dict(list(reply.tensors["model"].items())[1:])}, reply.scalars)


def with_nan(reply: Packet) -> Packet:
    return Packet({"model": {k: v * torch.nan for k, v in reply.tensors["model"].items()}}, reply.scalars)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda reply: Packet(reply.tensors, {**reply.scalars, "loss": 0.5}), "more than a model and counts"),
        (
            lambda reply: Packet(reply.tensors, {**reply.scalars, "sure": True}),
            "more than a model and counts",
        ),
        (lambda reply: Packet({**reply.tensors, "more": {}}, reply.scalars), "more than a model and counts"),
        (lambda reply: Packet(reply.tensors, {**reply.scalars, "n": -1}), "not a number of images"),
        (without_first, "other names, shapes or types"),
        (with_nan, "NaN or infinite weights"),
    ],
)
def test_a_client_does_not_upload_what_the_server_could_not_check(
    setup: RunSetup, monkeypatch: pytest.MonkeyPatch, change: Callable[[Packet], Packet], reason: str
) -> None:
    usual = FedAvgFixMatch.client_round

    def client_round(method: Any, request: Packet, memory: Packet, client: Any) -> tuple[Packet, Packet]:
        reply, memory = usual(method, request, memory, client)
        return (change(reply) if client.name == "client-1" else reply), memory

    monkeypatch.setattr(FedAvgFixMatch, "client_round", client_round)
    replies, _ = exchange(setup)
    assert reason in str(replies[1].problem)
    assert [k for k in replies if replies[k].problem is None] == [0, 2, 3]


def test_what_cannot_work_is_refused_before_anything_is_written(
    fedseal: Command, tiny: dict[str, Any], tmp_path: Path
) -> None:
    def refuses(*parts: str, **options: Any) -> None:
        keys = tiny | {"secure.enabled": "true"} | {k.replace("__", "."): v for k, v in options.items()}
        fedseal("train", "fmnist-lenet", "--out", tmp_path / "run", options=keys).refuses(*parts)
        assert not (tmp_path / "run").exists()

    refuses("fedmatch needs the replies of single clients", method="fedmatch")
    refuses("fedrgd needs the replies of single clients", method="fedrgd")
    refuses('aggregate.rule = "median" compares single uploads', aggregate__rule="median")
    refuses("simulate.malicious changes uploads", simulate__malicious=1)
    refuses("needs at least 2 clients in a round", "there are 1", cohort=1)
    refuses("needs at least 4 clients in a round", "there are 3", secure__threshold=4)
    refuses("threshold must be at least 2", secure__threshold=1)


def test_different_models_have_no_sum(setup: RunSetup) -> None:
    requests = first_requests(setup)
    other = {name: value + 1 for name, value in requests[0].tensors["model"].items()}
    requests[2] = Packet({"model": other}, requests[2].scalars)
    with pytest.raises(UserError, match="different models"):
        list(
            SecureEngine(Watched(setup), setup.config.selected_method(), SecureSettings()).exchange(requests)
        )


def test_same_weights_with_workers_on_flower_and_after_a_resume(tmp_path: Path) -> None:
    """Masks are random, but the sum is an integer. A client that is not sampled updates its memory only."""
    keys = {**TINY, "rounds": 3, "cohort": 2, "server.threads": 1, "secure.enabled": True}

    def run(name: str, **more: Any) -> Path:
        options = keys | {key.replace("__", "."): value for key, value in more.items()}
        train("fmnist-lenet", out=tmp_path / name, resume=True, options=options)
        return tmp_path / name

    reference = run("local")
    assert same_weights(run("workers", engine__workers=2), reference)
    assert same_weights(run("flower", engine__name="flower"), reference)
    run("resumed", rounds=1)
    assert same_weights(run("resumed"), reference)
    assert not same_weights(run("plain", secure__enabled=False), reference)  # the last bits differ
