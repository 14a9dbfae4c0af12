"""Sampling of the clients of a round."""

import torch

from fedseal.rounds import sample_cohort


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
