"""The local engine: the number of workers, dying workers and the order of replies change nothing."""

import os
import signal
from collections.abc import Iterator, Mapping

import pytest
import torch

from fedseal.api import deal
from fedseal.config import load_config
from fedseal.core import Packet, Reply, Round, Site
from fedseal.engines import local
from fedseal.engines.local import LocalEngine
from fedseal.errors import UserError
from fedseal.methods.fedseal import FedSEAL
from fedseal.run import ClientDone, LeftOut, RoundDone, rounds
from fedseal.sites import Sites

SMALL = {
    "rounds": 3,
    "cohort": 4,
    "data.clients": 5,
    "data.images_per_client": 60,
    "data.labels": 50,
    "data.validation": 20,
    "data.test_per_client": 20,
    "server.epochs": 1,
    "client.epochs": 1,
    "fedseal.bootstrap_epochs": 4,
    "engine.workers": 1,
}


def small(**changes: object) -> Sites:
    config = load_config("fmnist-lenet", SMALL | {k.replace("__", "."): v for k, v in changes.items()})
    return Sites(config, deal(config.data, config.seed))


def final(sites: Sites, engine: LocalEngine | None = None) -> tuple[bytes, dict[str, bytes]]:
    """The state after the last round and all clients' memories, to the bit."""
    engine = engine or LocalEngine(sites)
    try:
        states = [
            event.state
            for event in rounds(sites.config.chosen(), sites.server(), engine, sites)
            if isinstance(event, RoundDone)
        ]
        assert len(states) == sites.config.rounds
        return states[-1].to_bytes(), engine.memories()
    finally:
        engine.close()


@pytest.fixture(scope="module")
def alone() -> tuple[bytes, dict[str, bytes]]:
    return final(small())


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_do_not_change_the_result(alone: tuple[bytes, dict[str, bytes]], workers: int) -> None:
    assert final(small(engine__workers=workers)) == alone


def test_the_seed_does_change_the_result(alone: tuple[bytes, dict[str, bytes]]) -> None:
    assert final(small(seed=1))[0] != alone[0]


def test_order_of_replies_does_not_change_the_result(alone: tuple[bytes, dict[str, bytes]]) -> None:
    class Backwards(LocalEngine):
        def exchange(self, requests: Mapping[int, Packet]) -> Iterator[Reply]:
            yield from reversed(list(super().exchange(requests)))

    assert final(small(), Backwards(small())) == alone


def test_a_killed_worker_is_replaced_and_the_result_stays(alone: tuple[bytes, dict[str, bytes]]) -> None:
    sites = small(engine__workers=2)
    engine, killed, state = LocalEngine(sites), False, Packet()
    try:
        for event in rounds(sites.config.chosen(), sites.server(), engine, sites):
            assert not isinstance(event, LeftOut)
            if isinstance(event, ClientDone) and event.t == 2 and not killed:
                for worker in engine._workers:
                    os.kill(worker.process.pid or 0, signal.SIGKILL)
                killed = True
            if isinstance(event, RoundDone):
                state = event.state
        assert killed
        assert (state.to_bytes(), engine.memories()) == alone
        assert all(worker.process.is_alive() for worker in engine._workers)
    finally:
        engine.close()
    assert engine._workers == []


def test_a_client_that_kills_its_workers_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine gives up on a client after two dead workers, and the round goes on with the others."""
    sites = small(engine__workers=2)
    method, server, engine, ask = sites.config.chosen(), sites.server(), LocalEngine(sites), local._Worker.ask

    def deadly(worker: local._Worker, k: int, number: int, wire: bytes, memory: bytes) -> None:
        if k == 1:
            worker.process.kill()
            worker.process.join()
        ask(worker, k, number, wire, memory)

    monkeypatch.setattr(local._Worker, "ask", deadly)
    _, requests = method.server_round(Round(1, (0, 1, 2), range(3)), method.start(server), server)
    try:
        replies = {reply.client: reply for reply in engine.exchange(requests)}
    finally:
        engine.close()
    assert sorted(replies) == [0, 1, 2]
    assert "died twice" in replies[1].problem
    assert not replies[0].problem and not replies[2].problem
    assert sorted(engine.memories()) == ["0", "2"]


def test_a_worker_keeps_every_packet_of_a_round_and_none_of_the_last() -> None:
    """Three packets that are shared, as of a method with a model for each group of clients: A, B, C, A."""
    sites = small()
    method, server, worker = sites.config.chosen(), sites.server(), local._Worker(sites)
    _, requests = method.server_round(Round(1, (0,), range(1)), method.start(server), server)
    wire = requests[0].to_bytes()
    try:
        for k, number in enumerate((1, 2, 3, 1)):
            worker.ask(k, number, wire, b"")
            assert not isinstance(worker.pipe.recv(), local._Failure)
        worker.seen.clear()  # as at the start of a round
        worker.ask(0, 4, wire, b"")
        assert not isinstance(worker.pipe.recv(), local._Failure)
        worker.pipe.send((0, False, 1, b"", b""))
        answer = worker.pipe.recv()
        assert isinstance(answer, local._Failure) and "KeyError: 1" in answer.text
    finally:
        worker.process.kill()


def test_who_only_listens_is_no_reply_that_a_round_needs() -> None:
    """Four train, one listens; nobody who trains comes back."""

    class Deaf(LocalEngine):
        def exchange(self, requests: Mapping[int, Packet]) -> Iterator[Reply]:
            for reply in super().exchange(requests):
                trains = requests[reply.client].scalars["train"]
                yield Reply(reply.client, Packet(), problem="gone") if trains else reply

    with pytest.raises(UserError, match=r"Round 1: 0 of 4 clients gave a usable reply"):
        final(small(), Deaf(small()))


def test_clients_get_no_labels_and_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    sites, seen, threads = small(rounds=1), [], torch.get_num_threads()
    original = FedSEAL.client_round

    def spy(self: FedSEAL, request: Packet, memory: Packet, client: Site) -> tuple[Packet, Packet]:
        seen.append((client.data.labels, torch.get_num_threads()))
        return original(self, request, memory, client)

    monkeypatch.setattr(FedSEAL, "client_round", spy)
    final(sites)
    assert seen == [(None, 1)] * 5
    assert torch.get_num_threads() == threads


def test_only_the_cohort_trains_and_no_packet_has_a_row_per_image() -> None:
    sites, sent = small(cohort=2, rounds=1), []

    class Watching(LocalEngine):
        def exchange(self, requests: Mapping[int, Packet]) -> Iterator[Reply]:
            for reply in super().exchange(requests):
                sent.append((requests[reply.client], reply.packet))
                yield reply

    final(sites, Watching(sites))
    assert len(sent) == 5  # scope "all": who is not sampled updates the ensemble
    assert sum(bool(request.scalars["train"]) for request, _ in sent) == 2
    assert sum("model" in reply.tensors for _, reply in sent) == 2
    for packet in (packet for pair in sent for packet in pair):
        assert all(60 not in value.shape for group in packet.tensors.values() for value in group.values())
