"""Malicious clients of a simulation, and the server that leaves them out."""

from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from engines.test_local import run_rounds, small
from fedseal.config.sections import SimulateSettings
from fedseal.engines.attack import forge_weights, malicious_clients
from fedseal.engines.flower.task import make_task
from fedseal.engines.local import LocalEngine
from fedseal.robust import update_norm
from fedseal.rounds import LeftOut, RoundDone
from fedseal.weights import Tensors

SENT: Tensors = {
    "mean": torch.tensor([7.0]),
    "body.weight": torch.tensor([1.0, 1.0]),
    "norm.running_var": torch.tensor([1.0]),
    "last.weight": torch.tensor([[1.0], [3.0], [5.0]]),
    "last.bias": torch.tensor([0.0, 1.0, 2.0]),
}
TRAINED = SENT | {"body.weight": torch.tensor([4.0, 5.0]), "norm.running_var": torch.tensor([2.0])}


def forged(attack: str, strength: float = 2.0) -> Tensors:
    settings = SimulateSettings.model_validate({"attack": attack, "strength": strength})
    return forge_weights(TRAINED, SENT, settings, torch.Generator().manual_seed(0))


def test_scale_and_sign_flip() -> None:
    """The honest update is (3, 4). Twice as far: (1, 1) ± (6, 8)."""
    assert forged("scale")["body.weight"].tolist() == [7.0, 9.0]
    assert forged("sign-flip")["body.weight"].tolist() == [-5.0, -7.0]


def test_class_swap_exchanges_neighbours() -> None:
    """Rows 0 and 1 change places: 1 ↔ 3 and 0 ↔ 1; class 2 has no neighbour. The way is (2, −2, 1, −1) / √10,
    and as long as the honest update, 5, with strength 1."""
    found, step = forged("class-swap", 1.0), 5 / 10**0.5
    assert found["last.weight"].flatten().tolist() == pytest.approx([1 + 2 * step, 3 - 2 * step, 5.0])
    assert found["last.bias"].tolist() == pytest.approx([step, 1 - step, 2.0])
    assert found["body.weight"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("attack", ["scale", "sign-flip", "noise", "class-swap"])
def test_strength_is_the_length_of_the_update(attack: str) -> None:
    assert update_norm(forged(attack, 3.0), SENT).learned == pytest.approx(15.0)


def test_other_attacks() -> None:
    assert forged("zeros")["body.weight"].tolist() == [0.0, 0.0]
    assert forged("nan")["last.bias"].isnan().all()
    assert forged("huge")["body.weight"].abs().tolist() == [5400.0, 5400.0]  # 900 · (1 + 5)
    assert forged("statistics")["norm.running_var"].item() == 1.8e6  # 900 · 1000 · (1 + 1)
    assert forged("statistics")["body.weight"].tolist() == [4.0, 5.0]


@pytest.mark.parametrize("attack", ["scale", "noise", "zeros", "huge", "class-swap"])
def test_normalisation_stays(attack: str) -> None:
    assert forged(attack)["mean"].tolist() == [7.0]


def test_only_simulated_clients_are_told_of_an_attack() -> None:
    setup = small(simulate__malicious=1, simulate__attack="huge")
    task = make_task(setup, "a" * 32, memory_folder="memories")
    assert task.parse_config().simulate == setup.config.simulate
    assert "simulate" not in make_task(setup, "a" * 32).config


def test_malicious_clients_follow_the_seed() -> None:
    settings = SimulateSettings(malicious=3)
    chosen = [malicious_clients(settings, 10, seed) for seed in range(20)]
    assert all(len(clients) == 3 and clients <= set(range(10)) for clients in chosen)
    assert chosen[0] == malicious_clients(settings, 10, 0) and len(set(chosen)) > 10
    assert malicious_clients(SimulateSettings(), 10, 0) == frozenset()


def left_out(**changes: Any) -> list[set[str]]:
    """The clients that each round leaves out."""
    setup = small(cohort=0, rounds=2, simulate__malicious=1, **changes)
    found: list[set[str]] = [set() for _ in range(setup.config.rounds)]
    for event in run_rounds(setup, LocalEngine(setup)):
        if isinstance(event, LeftOut):
            found[event.t - 1].add(event.client)
        elif isinstance(event, RoundDone):
            assert event.metrics["left_out"] == sorted(found[event.t - 1])
    return found


def malicious_client() -> str:
    """The one of `left_out`."""
    setup = small(simulate__malicious=1)
    [k] = malicious_clients(setup.config.simulate, 5, setup.config.seed)
    return setup.federation.names[k]


@pytest.mark.parametrize("attack", ["scale", "zeros", "huge", "nan"])
def test_the_gate_leaves_out_who_attacks(attack: str) -> None:
    assert left_out(simulate__attack=attack, aggregate__gate=3) == [{malicious_client()}] * 2


def test_without_the_gate_everyone_is_averaged() -> None:
    assert left_out(simulate__attack="scale", aggregate__gate=0) == [set(), set()]


def test_the_gate_sees_forged_batch_norm_statistics() -> None:
    """One honest client learns so much more than others in the first round that it is left out too."""
    more: dict[str, Any] = {"model__norm": "batch", "aggregate__gate": 3}
    honest = left_out(simulate__attack="scale", simulate__strength=1, **more)
    found = left_out(simulate__attack="statistics", **more)
    assert [forged - usual for forged, usual in zip(found, honest, strict=True)] == [{malicious_client()}] * 2


def test_a_malicious_client_is_left_out_although_most_clients_find_no_labels() -> None:
    """With a threshold of 1 nobody is confident: only the malicious client changes the model."""
    more: dict[str, Any] = {"method": "fedavg-fixmatch", "fedavg-fixmatch__threshold": 1.0}
    for rule in ("mean", "multi-krum"):
        [first, second] = left_out(simulate__attack="huge", aggregate__gate=3, aggregate__rule=rule, **more)
        assert len(first) == 1 and first == second
