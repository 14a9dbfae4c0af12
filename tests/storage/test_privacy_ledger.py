"""The ledger of a private run: what was spent, and what the rounds to come would spend."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedseal.config.load import load_config
from fedseal.errors import UserError
from fedseal.privacy import spent_epsilon
from fedseal.rounds import sample_cohort
from fedseal.storage.privacy_ledger import Ledger


def make_ledger(folder: Path, clients: int = 3, **keys: Any) -> Ledger:
    options = {"cohort": 0, "privacy.mode": "central", "privacy.noise": 2.0}
    options |= {key.replace("__", "."): value for key, value in keys.items()}
    return Ledger(folder, load_config("fmnist-lenet", options), clients)


def spend(ledger: Ledger, *rounds: int) -> list[float]:
    return [ledger.spend(t, range(len(ledger.uploads)))["epsilon"] for t in rounds]


def test_every_round_spends(tmp_path: Path) -> None:
    ledger = make_ledger(tmp_path)
    assert ledger.epsilon == 0
    assert spend(ledger, 1, 2, 3) == [spent_epsilon(2.0, n, 1e-5) for n in (1, 2, 3)]
    assert ledger.summary() == {
        "mode": "central", "clip": 1.0, "noise": 2.0, "delta": 1e-5, "epsilon": ledger.epsilon, "uploads": 3,
    }  # fmt: skip


def test_repeated_round_counts_twice(tmp_path: Path) -> None:
    spend(make_ledger(tmp_path), 1, 2)
    again = make_ledger(tmp_path)
    assert again.uploads.tolist() == [2, 2, 2]
    spend(again, 2)
    assert make_ledger(tmp_path).uploads.tolist() == [3, 3, 3]


def test_sampled_clients_spend_only_in_their_rounds(tmp_path: Path) -> None:
    """ε is that of the client that was asked most often."""
    ledger = make_ledger(tmp_path, clients=6, cohort=2)
    counts = np.zeros(6, int)
    for t in range(1, 9):
        cohort = sample_cohort(ledger.config.seed, t, range(6), 2)
        counts[list(cohort)] += 1
        assert ledger.spend(t, cohort)["epsilon"] == spent_epsilon(2.0, int(counts.max()), 1e-5)
    assert ledger.uploads.tolist() == counts.tolist() and 8 > counts.max() > counts.min()


def test_run_stops_before_a_round_that_exceeds_the_budget(tmp_path: Path) -> None:
    """Two uploads of one client fit. The third is stopped although the plan was to ask others."""
    ledger = make_ledger(tmp_path, clients=6, cohort=2, privacy__epsilon=3.0, rounds=2)
    ledger.check(0)
    ledger.spend(1, [0, 1])
    ledger.spend(2, [0, 2])
    before = ledger.path.read_bytes()
    with pytest.raises(UserError, match=r"Round 3 would spend ε = 3.709.*with --resume and rounds = 2"):
        ledger.spend(3, [0, 3])
    assert ledger.path.read_bytes() == before


def test_budget_names_the_rounds_and_the_noise_that_fit(tmp_path: Path) -> None:
    """σ = 2 spends ε = 2.94 in two rounds, 3.71 in three and 44.1 in 150, which need σ = 17.03 for ε = 3."""
    with pytest.raises(UserError) as found:
        make_ledger(tmp_path, privacy__epsilon=3.0, rounds=150).check(0)
    text = str(found.value)
    assert "privacy.epsilon is 3, but 150 rounds spend ε = 44.11 at" in text
    assert "lower rounds to 2 or raise privacy.noise to 17.032." in text
    make_ledger(tmp_path, privacy__epsilon=3.0, rounds=2).check(0)
    noise = float(text.rsplit(" ", 1)[1].rstrip("."))
    make_ledger(tmp_path, privacy__epsilon=3.0, rounds=150, privacy__noise=noise).check(0)
    with pytest.raises(UserError, match=r"ε = 44.11 at δ = 1e-05: raise privacy.noise to"):
        make_ledger(tmp_path, privacy__epsilon=1.0, rounds=150).check(0)  # not even one round fits


@pytest.mark.parametrize(("epsilon", "delta"), [(0.001, 1e-12), (0.001, 0.9), (1e9, 1e-12)])
@pytest.mark.parametrize("noise", [0.001, 1e9])
def test_extreme_settings_have_an_answer(epsilon: float, delta: float, noise: float, tmp_path: Path) -> None:
    settings = {"privacy__epsilon": epsilon, "privacy__delta": delta, "privacy__noise": noise, "rounds": 3}
    ledger = make_ledger(tmp_path, **settings)
    fits = spent_epsilon(noise, 3, delta) <= epsilon
    if fits:
        ledger.check(0)
    else:
        with pytest.raises(UserError, match=r"raise privacy.noise to"):
            ledger.check(0)


def test_interrupted_rounds_use_the_budget(tmp_path: Path) -> None:
    """Two rounds fit. After one that was repeated, one has to do."""
    spend(make_ledger(tmp_path), 1, 1)
    make_ledger(tmp_path, privacy__epsilon=3.0, rounds=1).check(1)
    with pytest.raises(UserError, match="with 1 that were interrupted: lower rounds to 1"):
        make_ledger(tmp_path, privacy__epsilon=3.0, rounds=2).check(1)
    with pytest.raises(UserError, match="the budget is spent"):
        make_ledger(tmp_path, privacy__epsilon=3.0, rounds=2).check(0)


def test_missing_and_damaged_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"privacy.jsonl lacks round 1, so the ε that was spent is not known"):
        make_ledger(tmp_path).check(3)
    spend(make_ledger(tmp_path), 1, 2, 3)
    path = tmp_path / "privacy.jsonl"
    path.write_text(path.read_text().replace('"t": 2', '"t": 1'))
    with pytest.raises(UserError, match=r"privacy.jsonl is damaged in line 2"):
        make_ledger(tmp_path)
    path.write_text('{"event": "asked", "t": 1, "clients": [7]}\n')
    with pytest.raises(UserError, match=r"privacy.jsonl is damaged, or of other clients"):
        make_ledger(tmp_path)


def test_without_noise_there_is_no_epsilon(tmp_path: Path) -> None:
    ledger = make_ledger(tmp_path, privacy__noise=0.0)
    assert ledger.spend(1, [0]) == {} and ledger.summary()["epsilon"] is None
