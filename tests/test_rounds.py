"""Sampling of the clients of a round, and the steps before round 1."""

from collections.abc import Iterator
from typing import Any

import torch

from conftest import TINY
from fedseal.config.load import load_config
from fedseal.core import Packet, PreparationStep, Server
from fedseal.data.federation import load_federation
from fedseal.methods.server_sl import ServerSL
from fedseal.rounds import prepare_steps, sample_cohort
from fedseal.run_setup import RunSetup


def test_sampling_is_uniform_and_seeded() -> None:
    assert sample_cohort(0, 1, range(5), 0) == sample_cohort(0, 1, range(5), 5) == (0, 1, 2, 3, 4)
    hundred = range(100)
    assert sample_cohort(0, 1, hundred, 10) == sample_cohort(0, 1, hundred, 10)
    assert sample_cohort(0, 1, hundred, 10) != sample_cohort(1, 1, hundred, 10)
    counts = torch.zeros(20)
    for t in range(1, 2001):
        chosen = sample_cohort(3, t, range(20), 5)
        assert len(set(chosen)) == 5 and list(chosen) == sorted(chosen)
        counts[list(chosen)] += 1
    # a client is sampled 500 times on average, with a standard deviation of √(2000·¼·¾) ≈ 19.4
    assert float((counts - 500).abs().max()) < 4 * 19.4


def test_expelled_clients_are_never_sampled() -> None:
    left = [0, 2, 3, 7]
    rounds = [sample_cohort(0, t, left, 2) for t in range(1, 101)]
    assert {k for cohort in rounds for k in cohort} == set(left) and {len(cohort) for cohort in rounds} == {2}
    assert sample_cohort(0, 1, left, 0) == sample_cohort(0, 1, left, 9) == (0, 2, 3, 7)


class Dropping(ServerSL):
    """Draws numbers from PyTorch's own generator before round 1, as dropout does."""

    def prepare(self, state: Packet, server: Server) -> Iterator[PreparationStep]:
        drawn = list(state.tensors.get("drawn", {}).values())
        while len(drawn) < 3:
            drawn.append(torch.rand(2))
            state = Packet({"drawn": {str(i): value for i, value in enumerate(drawn)}})
            yield PreparationStep("drawing", len(drawn), 3, state)


def test_random_layers_before_round_1_depend_on_the_seed_alone() -> None:
    def draw(seed: int, state: Packet) -> list[Packet]:
        options: dict[str, Any] = {**TINY, "seed": seed}
        config = load_config("fmnist-lenet", options)
        server = RunSetup(config, load_federation(config.data, config.seed)).server()
        return [step.state for step in prepare_steps(Dropping(), state, server)]

    before = torch.random.get_rng_state()
    whole = draw(0, Packet())
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(1)
    resumed = draw(0, Packet.from_bytes(whole[0].to_bytes()))
    numbers = [tuple(value.tolist()) for value in whole[-1].tensors["drawn"].values()]
    assert [tuple(value.tolist()) for value in resumed[-1].tensors["drawn"].values()] == numbers
    assert len(set(numbers)) == 3 and draw(1, Packet())[-1].to_bytes() != whole[-1].to_bytes()
