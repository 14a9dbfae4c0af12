"""Robust averaging, with hand-derived numbers and in any order of arrival."""

import math
from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedseal import aggregate, robust
from fedseal.aggregate import Aggregation
from fedseal.config.sections import AggregateSettings
from fedseal.weights import Tensors

SENT = {"w": torch.zeros(2)}


def models(*values: list[float]) -> dict[int, Tensors]:
    return {k: {"w": torch.tensor(value)} for k, value in enumerate(values)}


def test_norms_of_learned_weights_and_statistics() -> None:
    """Weights move by (3, 4), statistics by (5, 12): norms 5 and 13. Integers do not count."""
    sent = {
        "a": torch.ones(1),
        "b": torch.ones(1),
        "n.running_mean": torch.zeros(2),
        "n.count": torch.tensor(1),
    }
    upload = {
        "a": torch.tensor([4.0]),
        "b": torch.tensor([5.0]),
        "n.running_mean": torch.tensor([5.0, -12.0]),
        "n.count": torch.tensor(99),
    }
    assert robust.update_norm(upload, sent) == (5.0, 13.0)


def test_gate_leaves_out_long_updates() -> None:
    """Norms 1, 2, 3, 20 have the median 2.5: 20 is 8 times as long, more than 3 times."""
    uploads = models([1.0, 0.0], [0.0, 2.0], [3.0, 0.0], [12.0, 16.0])
    norms = robust.update_norms(uploads, SENT)
    usual = robust.usual_norms(norms, no_root)
    assert usual == (2.5, 0)
    assert robust.beyond_gate(norms, usual, 3) == {3: "its weights moved 8 times as far as is usual"}
    assert robust.beyond_gate(norms, usual, 8) == {}


def test_gate_sees_batch_norm_statistics() -> None:
    """One client's variance is 3e38, its weights are as usual."""
    sent = {"w": torch.zeros(1), "norm.running_var": torch.ones(1)}
    uploads = {
        k: {"w": torch.ones(1), "norm.running_var": torch.tensor([value])}
        for k, value in enumerate([2.0, 3.0, 2.0, 3e38])
    }
    norms = robust.update_norms(uploads, sent)
    [(client, reason)] = robust.beyond_gate(norms, robust.usual_norms(norms, no_root), 3).items()
    assert client == 3 and reason.startswith("its BatchNorm statistics moved 2e+38 times")


def test_common_steps() -> None:
    """Directions (1, 0), (0, 1), (0, 1) and (0.6, 0.8) have the sum (1.6, 2.8), which is √10.4 long.

    The second update is ten times as long as the third, but its direction counts once.
    """
    uploads = models([2.0, 0.0], [0.0, 10.0], [0.0, 1.0], [3.0, 4.0])
    found = robust.common_steps(uploads, dict.fromkeys(uploads, SENT), robust.update_norms(uploads, SENT))
    expected = {0: 3.2, 1: 28.0, 2: 2.8, 3: 16.0}
    assert found == pytest.approx({k: product / math.sqrt(10.4) for k, product in expected.items()})


def test_opposite_updates_have_no_common_direction() -> None:
    uploads = models([1.0, 0.0], [-1.0, 0.0])
    norms = robust.update_norms(uploads, SENT)
    assert robust.common_steps(uploads, dict.fromkeys(uploads, SENT), norms) == {0: 0.0, 1: 0.0}


def test_common_steps_of_learned_weights_from_the_model_that_each_client_was_sent() -> None:
    """Statistics, integers and constants do not count: all clients move by (1, 1)."""
    sent = {
        k: {
            "a": torch.full((1,), 10.0 * k),
            "b": torch.zeros(1),
            "mean": torch.ones(3),
            "n.running_mean": torch.zeros(2),
            "n.num_batches_tracked": torch.tensor(1),
        }
        for k in range(3)
    }
    uploads = {
        k: {**model, "a": model["a"] + 1, "b": model["b"] + 1, "n.running_mean": torch.full((2,), 90.0 - k)}
        for k, model in sent.items()
    }
    norms = {k: robust.update_norm(uploads[k], sent[k]) for k in sent}
    assert robust.common_steps(uploads, sent, norms) == pytest.approx(dict.fromkeys(sent, math.sqrt(2)))


@pytest.mark.parametrize(
    ("length", "step", "left_out"),
    [
        (5.9, 5.9, False),  # with the others, 3 · 2 is the limit
        (6.1, 6.1, True),
        (3.4, 0.0, False),  # across, √3 · 2 ≈ 3.46
        (3.5, 0.0, True),
        (1.9, -1.9, False),  # against them, 2
        (2.1, -2.1, True),
    ],
)
def test_limit_of_a_gate_of_3_by_direction(length: float, step: float, left_out: bool) -> None:
    """The usual norm is 2."""
    found = robust.off_course({7: robust.Pair(length, 0)}, {7: step}, 2.0, 3.0)
    assert [*found] == ([7] if left_out else [])


def test_gate_says_which_way_an_update_went() -> None:
    """The median norm is about 1. The common direction lies between those of the first four and the last."""
    uploads = models([1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.1], [-1.1, 0.0], [0.0, 2.5])
    assert screened(aggregation("mean", gate=3), uploads) == {
        4: "its weights moved 1.1 times as far as is usual, and against the others",
        5: "its weights moved 2.49 times as far as is usual, and not with the others",
    }
    assert screened(aggregation("mean"), uploads) == {}


def test_long_updates_and_clients_that_did_not_train_do_not_decide_the_direction() -> None:
    """With the three that the gate leaves out for their length, there would be no common direction."""
    uploads = models(*3 * [[0.0, 0.0]], *4 * [[1.0, 0.0]], [-2.0, 0.0], *3 * [[-900.0, 0.0]])
    assert sorted(screened(aggregation("mean", gate=3), uploads)) == [7, 8, 9, 10]
    few = models(*3 * [[0.0, 0.0]], [1.0, 0.0], [1.0, 0.0], [-2.0, 0.0])  # most did not train
    assert screened(aggregation("mean", gate=3), few) == {}


def test_of_two_clients_the_gate_cannot_say_which_one_is_wrong() -> None:
    assert screened(aggregation("mean", gate=3), models([1.0, 0.0], [-2.0, 0.0])) == {}


def test_gate_ignores_clients_that_did_not_train() -> None:
    """Two of five send back what they were sent. The median of 1, 2 and 7 counts."""
    uploads = models([0.0, 0.0], [0.0, 0.0], [1.0, 0.0], [2.0, 0.0], [7.0, 0.0])
    assert [*screened(aggregation("mean", gate=3), uploads)] == [4]
    assert screened(aggregation("mean", gate=3), models([0.0, 0.0])) == {}
    assert screened(aggregation("mean", gate=3), {}) == {}


def test_gate_holds_if_half_of_the_clients_that_moved_are_malicious() -> None:
    """The server's own norm is √2. Of 1 and 900, 1.41 is usual. Of 5 and 900, 5 is: the lower one stays.
    Of 0.001 and 1, 1.41 is: a tiny update does not make the honest one look long."""
    for norms, left_out in (
        ([0, 1, 900], [2]),
        ([0, 5, 900], [2]),
        ([0, 0.001, 1], []),
        ([0, 2, 3], []),
        ([0, 0, 0, 1, 1, 900, 900], [5, 6]),
        ([0, 0, 0, 0.001, 0.001, 1, 1], []),
    ):
        uploads = models(*([float(norm), 0.0] for norm in norms))
        assert [*screened(aggregation("mean", gate=3), uploads)] == left_out


@pytest.mark.parametrize("rule", ["mean", "multi-krum"])
def test_if_most_clients_did_not_train_the_server_says_what_is_usual(rule: str) -> None:
    """Three of five send back what they were sent. The server's own update (1, 1) has the norm √2 ≈ 1.41:
    4 is shorter than three times that, 5 is longer."""
    uploads = models([0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [4.0, 0.0], [5.0, 0.0])
    found = screened(aggregation(rule, gate=3), uploads)
    assert found == {4: "its weights moved 3.54 times as far as is usual"}
    alone = models(*9 * [[0.0, 0.0]], [899.0, 0.0])
    assert [*screened(aggregation(rule, gate=3), alone)] == [9]


def test_multi_krum_has_a_gate_if_most_clients_did_not_train() -> None:
    assert [*screened(aggregation("multi-krum"), models(*9 * [[0.0, 0.0]], [899.0, 0.0]))] == [9]


def test_without_an_update_of_the_server_a_minority_that_moved_is_left_out() -> None:
    uploads, settings = models([0.0, 0.0], [0.0, 0.0], [1.0, 0.0]), AggregateSettings(gate=3)
    found = Aggregation(settings).screen(uploads, dict.fromkeys(uploads, SENT), 1)
    assert found == {2: "its weights moved although those of most clients did not"}


def test_clip_shortens_to_the_servers_update_if_most_clients_did_not_train() -> None:
    """(30, 40) becomes √2 · (0.6, 0.8), of which a third counts."""
    moved = aggregation("clip").combine(models([0.0, 0.0], [0.0, 0.0], [30.0, 40.0]), SENT, 1)
    assert moved["w"].tolist() == pytest.approx([0.2 * math.sqrt(2), 0.8 / 3 * math.sqrt(2)])


def test_gate_measures_from_the_model_that_each_client_was_sent() -> None:
    uploads = models([1.0, 0.0], [101.0, 0.0], [201.0, 0.0], [320.0, 0.0])
    sent = models([0.0, 0.0], [100.0, 0.0], [200.0, 0.0], [300.0, 0.0])
    assert [*aggregation("mean", gate=3).screen(uploads, sent, 1)] == [3]  # 20 against 1


def test_clip_shortens_to_the_median() -> None:
    """Norms 1, 2, 5: (3, 4) becomes (1.2, 1.6). The mean is ((1, 0) + (0, 2) + (1.2, 1.6)) / 3."""
    uploads = models([1.0, 0.0], [0.0, 2.0], [3.0, 4.0])
    average = aggregation("clip").combine(uploads, SENT, 1)
    assert average["w"].tolist() == pytest.approx([2.2 / 3, 3.6 / 3])


def test_median_of_every_weight() -> None:
    """Of 1, 5, 9 and of 1, 2, 3, 100: 5, and (2 + 3) / 2."""
    assert robust.median(torch.tensor([9.0, 1.0, 5.0])) == 5.0
    assert robust.median(torch.tensor([100.0, 1.0, 3.0, 2.0])) == 2.5


def test_trimmed_mean() -> None:
    """Without 1 and 100, (2 + 3) / 2; never all values are left out."""
    values = torch.tensor([100.0, 1.0, 3.0, 2.0])
    assert robust.trimmed_mean(values, 1) == 2.5
    assert robust.trimmed_mean(values, 5) == 2.5
    assert robust.trimmed_mean(values, 0) == 26.5


def test_krum_scores() -> None:
    """Points 0, 1, 3, 10 on a line, f = 1: the sum of squared distances to the one nearest other."""
    uploads = models([0.0, 0.0], [1.0, 0.0], [3.0, 0.0], [10.0, 0.0])
    assert robust.krum_scores(uploads, 1) == {0: 1.0, 1: 1.0, 2: 4.0, 3: 49.0}
    assert robust.krum_rejects(uploads, 1) == [3]


def test_fltrust() -> None:
    """The server's update is (2, 0). Cosines: (3, 4) 0.6, (0, 5) 0, (−1, 0) −1 → 0, (4, 0) 1.

    Weights 0.6 / 1.6 and 1 / 1.6, each update with length 2: 0.375 · (1.2, 1.6) + 0.625 · (2, 0).
    """
    uploads = models([3.0, 4.0], [0.0, 5.0], [-1.0, 0.0], [4.0, 0.0])
    factors = robust.trust_factors(uploads, SENT, {"w": torch.tensor([2.0, 0.0])})
    average = robust.weighted_update(uploads, SENT, factors)
    assert average["w"].tolist() == pytest.approx([1.7, 0.6])


@pytest.mark.parametrize("rule", ["multi-krum", "fltrust"])
def test_rules_that_look_at_learned_weights_take_the_median_of_statistics(rule: str) -> None:
    """Learned weights 1, 1, 1 and variances 1, 2, 3e38: one client alone does not decide the variance."""
    sent = {"w": torch.zeros(1), "n.running_var": torch.ones(1)}
    uploads = {
        k: {"w": torch.ones(1), "n.running_var": torch.tensor([v])} for k, v in enumerate([1, 2, 3e38])
    }
    combined = aggregation(rule).combine(uploads, sent, 1)
    assert combined["n.running_var"].tolist() == [2.0] and combined["w"].tolist() == pytest.approx([1.0])


def test_norms_do_not_depend_on_the_order_of_tensors() -> None:
    """The model of a resumed run has its tensors in another order."""
    for seed in range(50):
        values = torch.randn(20, 100, generator=torch.Generator().manual_seed(seed))
        upload = {str(i): value for i, value in enumerate(values)}
        sent = {name: torch.zeros(100) for name in upload}
        turned = dict(reversed(sent.items()))
        assert robust.update_norm(upload, sent) == robust.update_norm(upload, turned)
        one, other = (robust.trust_factors({0: upload}, each, upload) for each in (sent, turned))
        assert one == other


def test_fltrust_without_a_trusted_client_keeps_the_model() -> None:
    uploads, sent = models([-1.0, 0.0], [0.0, 0.0]), {"w": torch.tensor([0.0, 0.0])}
    factors = robust.trust_factors(uploads, sent, {"w": torch.tensor([2.0, 0.0])})
    assert robust.weighted_update(uploads, sent, factors)["w"].tolist() == [0.0, 0.0]


def aggregation(rule: str, gate: float = 0.0, **more: float) -> Aggregation:
    settings = AggregateSettings.model_validate({"rule": rule, "gate": gate, **more})
    return Aggregation(settings, lambda sent, t: {k: v + 1 for k, v in sent.items()})


def no_root() -> robust.Pair:
    raise AssertionError("most clients have moved")


def screened(aggregation: Aggregation, uploads: dict[int, Tensors]) -> dict[int, str]:
    return aggregation.screen(uploads, dict.fromkeys(uploads, SENT), 1)


RULES = ["mean", "clip", "median", "trimmed-mean", "multi-krum", "fltrust"]


@pytest.mark.parametrize("rule", RULES)
def test_rules_keep_names_types_and_integers(rule: str) -> None:
    sent: Tensors = {
        "b": torch.zeros(3),
        "a": torch.zeros(2, 2),
        "norm.running_var": torch.ones(2),
        "norm.num_batches_tracked": torch.tensor(4),
    }
    uploads: dict[int, Tensors] = {k: {name: value + k for name, value in sent.items()} for k in range(1, 6)}
    combined = aggregation(rule).combine(uploads, sent, 1)
    assert list(combined) == list(sent)
    assert all(combined[name].dtype == value.dtype for name, value in sent.items())
    assert combined["norm.num_batches_tracked"] == 9


@pytest.mark.parametrize("rule", RULES)
def test_rules_do_not_depend_on_the_order_of_arrival(rule: str) -> None:
    values: list[Tensor] = list(torch.randn(4, 50, generator=torch.Generator().manual_seed(0)) * 1e3)
    sent, uploads = {"w": torch.zeros(50)}, {k: {"w": value} for k, value in enumerate(values)}
    ordered = aggregation(rule).combine(uploads, sent, 1)["w"]
    for order in permutations(uploads):
        again = {k: uploads[k] for k in order}
        assert torch.equal(aggregation(rule).combine(again, sent, 1)["w"], ordered)
        found, expected = (
            aggregation(rule, gate=1.5).screen(models, dict.fromkeys(models, sent), 1)
            for models in (again, uploads)
        )
        assert found == expected


@pytest.mark.parametrize("rule", RULES)
def test_rules_of_equal_uploads_give_that_upload(rule: str) -> None:
    uploads = {k: {"w": torch.tensor([1.5, 1.5])} for k in range(5)}
    combined = aggregation(rule).combine(uploads, SENT, 1)["w"].tolist()
    # FLTrust takes only the direction, and the server's own update is (1, 1).
    assert combined == pytest.approx([1.0, 1.0] if rule == "fltrust" else [1.5, 1.5])


@given(st.lists(st.floats(-100, 100), min_size=5, max_size=9), st.floats(1e3, 1e30), st.integers(0, 4))
def test_one_of_five_cannot_move_the_median_beyond_the_others(
    values: list[float], far: float, place: int
) -> None:
    uploads = {k: {"w": torch.tensor([value])} for k, value in enumerate(values)}
    honest = [value for k, value in enumerate(values) if k != place]
    uploads[place] = {"w": torch.tensor([far])}
    sent = {"w": torch.zeros(1)}
    for rule in ("median", "trimmed-mean"):
        combined = float(aggregation(rule).combine(uploads, sent, 1)["w"])
        assert min(honest) - 1e-3 <= combined <= max(honest) + 1e-3


def test_multi_krum_counts_those_that_the_gate_leaves_out() -> None:
    """Of ten clients, two may be malicious. The gate leaves out one of them, multi-krum another one."""
    uploads = models(*([1.0 + k / 100, 0.0] for k in range(8)), [2.5, 0.0], [900.0, 0.0])
    found = screened(aggregation("multi-krum", gate=3), uploads)
    assert sorted(found) == [8, 9]
    assert "moved" in found[9] and "multi-krum" in found[8]
    assert len(screened(aggregation("multi-krum"), uploads)) == 2
    assert screened(aggregation("mean"), uploads) == {}


def test_multi_krum_of_few_clients_leaves_out_nobody() -> None:
    """Distances between three models say nothing about who is malicious."""
    assert screened(aggregation("multi-krum"), models([1.0, 0.0], [0.0, 1.0], [9.0, 9.0])) == {}


def test_multi_krum_does_not_compare_with_clients_that_did_not_train() -> None:
    """Four of ten found no labels. They are not the ones to which the others are compared."""
    uploads = models(*4 * [[0.0, 0.0]], *([1.0 + k / 100, 0.0] for k in range(5)), [0.2, 0.0])
    assert 9 in screened(aggregation("multi-krum"), uploads)


def test_share_of_malicious_clients_is_not_rounded_down_twice() -> None:
    """0.29 · 100 is 28.999… in binary."""
    assert Aggregation(AggregateSettings(malicious=0.29)).malicious(100) == 29


def test_mean_with_gate_is_the_mean_to_the_bit() -> None:
    values = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    uploads: dict[int, Tensors] = {k: {"w": value} for k, value in enumerate(values)}
    plain = aggregate.mean(uploads)
    assert torch.equal(
        aggregation("mean", gate=3).combine(uploads, {"w": torch.zeros(50)}, 1)["w"], plain["w"]
    )


def test_norm_of_huge_statistics_is_finite() -> None:
    largest = {"n.running_var": torch.full((100,), 3e38)}
    assert math.isfinite(robust.update_norm(largest, {"n.running_var": torch.ones(100)}).statistics)
