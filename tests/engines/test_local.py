"""The local engine: neither workers, nor their death, nor the order of replies change the result."""

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from fedseal.config.load import load_config
from fedseal.core import Engine, Images, Packet, Participant, Problem, Reply, Round
from fedseal.data.federation import load_federation
from fedseal.engines import local
from fedseal.engines.local import LocalEngine
from fedseal.errors import UserError
from fedseal.methods.fedseal import FedSEAL
from fedseal.rounds import ClientDone, Event, LeftOut, RoundDone, rounds
from fedseal.run_setup import RunSetup

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


def small(**changes: object) -> RunSetup:
    config = load_config("fmnist-lenet", SMALL | {k.replace("__", "."): v for k, v in changes.items()})
    return RunSetup(config, load_federation(config.data, config.seed))


def run_rounds(setup: RunSetup, engine: Engine) -> Iterator[Event]:
    """All rounds, without evaluation."""
    return rounds(setup.config, setup.server(), engine, setup.federation.names, lambda state: {})


def memories(engine: LocalEngine) -> dict[int, bytes]:
    """The memories of all clients that have one."""
    return {k: memory for k in engine.clients if (memory := engine.memories.get(k))}


def final(setup: RunSetup, engine: LocalEngine | None = None) -> tuple[bytes, dict[int, bytes]]:
    """The state after the last round and the memories of all clients, as bytes."""
    engine = engine or LocalEngine(setup)
    try:
        states = [event.state for event in run_rounds(setup, engine) if isinstance(event, RoundDone)]
        assert len(states) == setup.config.rounds
        return states[-1].to_bytes(), memories(engine)
    finally:
        engine.close()


@pytest.fixture(scope="module")
def reference() -> tuple[bytes, dict[int, bytes]]:
    """The result with one worker."""
    return final(small())


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_do_not_change_the_result(reference: tuple[bytes, dict[int, bytes]], workers: int) -> None:
    assert final(small(engine__workers=workers)) == reference


def test_seed_changes_the_result(reference: tuple[bytes, dict[int, bytes]]) -> None:
    assert final(small(seed=1))[0] != reference[0]


def test_order_of_replies_does_not_change_the_result(reference: tuple[bytes, dict[int, bytes]]) -> None:
    class Backwards(LocalEngine):
        def exchange(self, requests: Mapping[int, Packet]) -> Iterator[Reply]:
            yield from reversed(list(super().exchange(requests)))

    assert final(small(), Backwards(small())) == reference


def test_killed_worker_is_replaced_and_the_result_is_the_same(
    reference: tuple[bytes, dict[int, bytes]],
) -> None:
    setup = small(engine__workers=2)
    engine, killed, state = LocalEngine(setup), False, Packet()
    try:
        for event in run_rounds(setup, engine):
            assert not isinstance(event, LeftOut)
            if isinstance(event, ClientDone) and event.t == 2 and not killed:
                for worker in engine._workers:
                    os.kill(worker.process.pid or 0, signal.SIGKILL)
                killed = True
            if isinstance(event, RoundDone):
                state = event.state
        assert killed
        assert (state.to_bytes(), memories(engine)) == reference
        assert all(worker.process.is_alive() for worker in engine._workers)
    finally:
        engine.close()
    assert engine._workers == []


def test_client_that_kills_its_workers_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine gives up on a client after two dead workers, and the round continues with the others."""
    setup = small(engine__workers=2)
    method, server, engine, ask = (
        setup.config.selected_method(),
        setup.server(),
        LocalEngine(setup),
        local._Worker.ask,
    )

    def deadly(worker: local._Worker, k: int, number: int, wire: bytes, memory: bytes) -> None:
        if k == 1:
            worker.process.kill()
            worker.process.join()
        ask(worker, k, number, wire, memory)

    monkeypatch.setattr(local._Worker, "ask", deadly)
    _, requests = method.server_round(Round(1, (0, 1, 2), range(3)), method.initial_state(server), server)
    try:
        replies = {reply.client: reply for reply in engine.exchange(requests)}
    finally:
        engine.close()
    assert sorted(replies) == [0, 1, 2]
    problem = replies[1].problem
    assert problem is not None and problem.worker_died and "died twice" in problem.reason
    assert not replies[0].problem and not replies[2].problem
    assert sorted(memories(engine)) == [0, 2]


def test_worker_keeps_the_packets_of_the_current_round_only() -> None:
    """Clients can share packets, as in a method with one model per group. Four clients get 1, 2, 3, 1."""
    setup = small()
    method, server, worker = setup.config.selected_method(), setup.server(), local._Worker()
    worker.send(setup)
    _, requests = method.server_round(Round(1, (0,), range(1)), method.initial_state(server), server)
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


def test_clients_that_do_not_train_do_not_count_for_min_replies() -> None:
    """Four clients train, and all of their replies are lost. The fifth only updates its ensemble."""

    class LosesTraining(LocalEngine):
        def exchange(self, requests: Mapping[int, Packet]) -> Iterator[Reply]:
            for reply in super().exchange(requests):
                trains = requests[reply.client].trains
                yield Reply(reply.client, Packet(), problem=Problem("gone")) if trains else reply

    with pytest.raises(UserError, match=r"Round 1: only 0 of 4 clients sent a usable reply"):
        final(small(), LosesTraining(small()))


def test_clients_have_no_labels_and_use_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    setup, seen, threads = small(rounds=1), [], torch.get_num_threads()
    original = FedSEAL.client_round

    def spy(self: FedSEAL, request: Packet, memory: Packet, client: Participant) -> tuple[Packet, Packet]:
        seen.append((type(client.data), torch.get_num_threads()))
        return original(self, request, memory, client)

    monkeypatch.setattr(FedSEAL, "client_round", spy)
    final(setup)
    assert seen == [(Images, 1)] * 5
    assert torch.get_num_threads() == threads


def test_only_the_cohort_trains_and_no_packet_has_a_row_per_image() -> None:
    setup, sent = small(cohort=2, rounds=1), []

    class Watching(LocalEngine):
        def exchange(self, requests: Mapping[int, Packet]) -> Iterator[Reply]:
            for reply in super().exchange(requests):
                sent.append((requests[reply.client], reply.packet))
                yield reply

    final(setup, Watching(setup))
    assert len(sent) == 5  # scope "all": clients that are not sampled update their ensemble
    assert sum(bool(request.scalars["train"]) for request, _ in sent) == 2
    assert sum("model" in reply.tensors for _, reply in sent) == 2
    for packet in (packet for pair in sent for packet in pair):
        assert all(60 not in value.shape for group in packet.tensors.values() for value in group.values())


def test_an_error_while_a_worker_starts_is_reported_as_it_is(tmp_path: Path) -> None:
    """Here the network's weights are only there until the workers start."""
    path = tmp_path / "net.py"
    path.write_text(
        "import multiprocessing, torch\n"
        "def build(channels, size, classes):\n"
        "    if multiprocessing.parent_process():\n"
        "        raise OSError('the hub is not reachable')\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(28 * 28, classes))\n"
    )
    setup = small(engine__workers=2, model__name=f"{path}:build")
    engine = LocalEngine(setup)
    try:
        with pytest.raises(UserError, match="the hub is not reachable"):
            list(run_rounds(setup, engine))
    finally:
        engine.close()


def test_a_worker_without_memory_says_so() -> None:
    assert "not enough memory" in local._failure(MemoryError()).sentence
    assert "not enough memory" in local._failure(RuntimeError("can't allocate memory: 9 bytes")).sentence
