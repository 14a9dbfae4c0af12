"""Class counts of clients and dealing, against values worked out by hand and properties of any deal."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedseal.data.partition import (
    apportion,
    by_class,
    deal,
    dirichlet_counts,
    fedmatch_counts,
    fedmatch_mixes,
    iid_counts,
    mix,
    mix_counts,
    shuffle,
)
from fedseal.errors import UserError

SVHN = np.array([4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659])
seeds = st.integers(0, 2**32 - 1)


def rng(seed=0):
    return np.random.default_rng(seed)


@st.composite
def demands(draw, classes=None):
    """Clients, images each, and a pool that holds at least that many, often exactly."""
    clients, each, number = (
        draw(st.integers(1, 12)),
        draw(st.integers(1, 40)),
        classes or draw(st.integers(1, 12)),
    )
    spare = draw(st.one_of(st.just(0), st.integers(0, 200)))
    total = clients * each + spare
    cuts = sorted(draw(st.lists(st.integers(0, total), min_size=number - 1, max_size=number - 1)))
    return clients, each, np.diff([0, *cuts, total])


def assert_fits(counts, clients, each, available):
    assert counts.shape == (clients, len(available))
    assert (counts >= 0).all()
    assert (counts.sum(axis=1) == each).all()
    assert (counts.sum(axis=0) <= available).all()


def test_apportion_gives_the_remainder_to_the_largest_fraction():
    """7 x (0.5, 0.3, 0.2) = (3.5, 2.1, 1.4): 3 + 2 + 1, and the seventh to the first."""
    assert apportion(np.array([0.5, 0.3, 0.2]), 7).tolist() == [4, 2, 1]


def test_apportion_passes_on_what_a_full_class_cannot_take():
    """As above with 2 of the first: (2, 2, 1), the 2 left as 3:2 are (1.2, 0.8), so 1 and 1 more."""
    assert apportion(np.array([0.5, 0.3, 0.2]), 7, np.array([2, 9, 9])).tolist() == [2, 3, 2]


def test_apportion_falls_back_to_availability():
    """All weight on a class of 2: the 3 left go 4:2 to the others, 2 and 1."""
    assert apportion(np.array([1.0, 0.0, 0.0]), 5, np.array([2, 4, 2])).tolist() == [2, 2, 1]


def test_iid_is_equal_per_class_where_the_pool_allows():
    assert (iid_counts(10, 1200, np.full(10, 5930)) == 120).all()
    assert (iid_counts(100, 490, np.full(10, 4900)) == 49).all()


def test_iid_deals_extras_in_turn():
    """2 clients x 3 of 2 classes: 3 of each class, 1 each, the third to one client or the other."""
    assert iid_counts(2, 3, np.array([9, 9])).tolist() == [[2, 1], [1, 2]]


def test_iid_follows_the_pool_where_a_class_is_too_small():
    """2 clients x 3 would need 3 of each class; of (4, 2) each gets (2, 1)."""
    assert iid_counts(2, 3, np.array([4, 2])).tolist() == [[2, 1], [2, 1]]


def test_iid_on_svhn_is_its_natural_mix():
    """49,000 x 4,519 / 71,857 = 3,081.6 of class 9: 30 or 31 for each of 100 clients."""
    available = SVHN - 140
    counts = iid_counts(100, 490, available)
    assert_fits(counts, 100, 490, available)
    assert np.ptp(counts, axis=0).max() <= 1
    assert np.abs(counts.sum(axis=0) - 49_000 * available / available.sum()).max() < 1
    assert set(counts[:, 9].tolist()) == {30, 31}


@settings(deadline=None)
@given(demands())
def test_iid_clients_differ_by_at_most_one(demand):
    counts = iid_counts(*demand)
    assert_fits(counts, *demand)
    assert np.ptp(counts, axis=0).max() <= 1


@settings(deadline=None)
@given(demands(), st.floats(0.05, 100), seeds)
def test_dirichlet_gives_each_client_its_number_within_the_pool(demand, alpha, seed):
    clients, each, available = demand
    assert_fits(dirichlet_counts(clients, each, alpha, available, rng(seed)), clients, each, available)


@pytest.mark.parametrize("alpha", [1e-4, 0.05, 0.3, 1.0, 100.0])
def test_dirichlet_has_the_moments_of_its_distribution(alpha):
    """E p_c = 1/M and E sum p_c^2 = (alpha + 1) / (M alpha + 1), within 5 % over 4,000 draws of 5 classes."""
    p = mix(dirichlet_counts(4000, 10_000, alpha, np.full(5, 10**9), rng()))
    np.testing.assert_allclose(p.mean(axis=0), 0.2, atol=0.03)
    np.testing.assert_allclose((p**2).sum(axis=1).mean(), (alpha + 1) / (5 * alpha + 1), rtol=0.05)


def test_clients_are_served_in_random_order():
    """Both want class 0, which lasts for one: over 100 seeds each wins about half (standard deviation 5)."""
    mixes = np.array([[1.0, 0.0], [1.0, 0.0]])
    wins = sum(mix_counts(mixes, 5, np.array([5, 5]), rng(seed))[0, 0] == 5 for seed in range(100))
    assert 30 < wins < 70


def test_mix_counts_follow_the_mix_of_each_client():
    """300 x (0.25, 0.75) and 300 x (1, 0); then with 75 + 250 of class 0 the second client is short of 50."""
    mixes = mix(np.array([[30, 90], [120, 0]]))
    assert mixes.tolist() == [[0.25, 0.75], [1.0, 0.0]]
    assert mix_counts(mixes, 300, np.array([1000, 1000]), rng()).tolist() == [[75, 225], [300, 0]]
    short = mix_counts(mixes, 300, np.array([325, 1000]), rng())
    assert short.tolist() in ([[75, 225], [250, 50]], [[25, 275], [300, 0]])  # whoever came first


def test_fedmatch_mixes_sum_to_one_both_ways():
    mixes = fedmatch_mixes()
    assert mixes[3].tolist() == [0.03, 0.03, 0.15, 0.5, 0.15, 0.03, 0.03, 0.03, 0.02, 0.03]
    np.testing.assert_allclose(mixes.sum(axis=0), 1)
    np.testing.assert_allclose(mixes.sum(axis=1), 1)


def test_fedmatch_uses_up_cifar10_exactly():
    """490 x (0.5, 0.15, 0.03, 0.02) = (245, 73.5, 14.7, 9.8): ten clients take 2,450, 735, 147, 98."""
    counts = fedmatch_counts(100, 490, np.full(10, 4900))
    assert (counts.sum(axis=0) == 4900).all()
    assert (counts.sum(axis=1) == 490).all()
    ideal = 490 * fedmatch_mixes()[np.arange(100) % 10]
    assert np.abs(counts - ideal).max() < 1
    assert counts[0::10].sum(axis=0).tolist() == [2450, 735, 147, 147, 147, 98, 147, 147, 147, 735]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 120), st.integers(1, 600), st.integers(0, 3))
def test_fedmatch_stays_near_the_ideal_in_the_smallest_pool(clients, each, spare):
    ideal = each * fedmatch_mixes()[np.arange(clients) % 10]
    available = np.ceil(ideal.sum(axis=0) - 1e-9).astype(np.int64) + spare
    counts = fedmatch_counts(clients, each, available)
    assert_fits(counts, clients, each, available)
    assert np.abs(counts - ideal).max() <= 2


@settings(max_examples=60, deadline=None)
@given(demands(classes=10))
def test_fedmatch_fits_any_pool(demand):
    assert_fits(fedmatch_counts(*demand), *demand)


def test_fedmatch_shares_a_scarce_class():
    """SVHN has 4,519 of class 9 where 4,900 are wanted: every type takes 5 to 13 % less of it."""
    available = SVHN - 140
    counts = fedmatch_counts(100, 490, available)
    assert_fits(counts, 100, 490, available)
    ideal = 4900 * fedmatch_mixes()
    got = np.stack([counts[kind::10].sum(axis=0) for kind in range(10)])
    share = got[:, 9] / ideal[:, 9]
    assert share.min() > 0.87
    assert share.max() < 0.95


def test_fedmatch_needs_ten_classes():
    with pytest.raises(UserError, match="exactly 10 classes, but there are 7"):
        fedmatch_counts(10, 10, np.full(7, 100))


@pytest.mark.parametrize(
    "count",
    [iid_counts, fedmatch_counts, lambda c, n, pool: dirichlet_counts(c, n, 0.3, pool, rng())],
)
def test_too_few_images_are_an_error_with_numbers_and_keys(count):
    with pytest.raises(
        UserError, match=r"3 clients .* need 300 .* only 290 .*data\.clients or data\.images_per"
    ):
        count(3, 100, np.full(10, 29))


@settings(deadline=None)
@given(demands(), seeds)
def test_deal_hands_out_no_image_twice(demand, seed):
    clients, each, available = demand
    labels = shuffle(np.repeat(np.arange(len(available)), available), rng(seed))
    candidates = np.arange(len(labels)) + 5  # 5 images are no candidates
    labels = np.concatenate([np.zeros(5, np.int64), labels])
    counts = dirichlet_counts(clients, each, 0.3, available, rng(seed))
    hands = deal(labels, candidates, counts, rng(seed))
    dealt = np.concatenate(hands)
    assert len(np.unique(dealt)) == len(dealt) == clients * each
    assert dealt.min() >= 5
    got = [np.bincount(labels[hand], minlength=len(available)) for hand in hands]
    np.testing.assert_array_equal(got, counts)


def test_deal_refuses_counts_beyond_the_candidates():
    with pytest.raises(ValueError, match="3 images of a class that has 2"):
        deal(np.array([0, 0, 1]), np.arange(3), np.array([[3, 1]]), rng())


def test_images_without_label_are_not_dealt():
    assert [sorted(x.tolist()) for x in by_class(np.array([0, -1, 1, 0]), np.arange(4), 2, rng())] == [
        [0, 3],
        [2],
    ]


def test_shuffle_is_fair():
    """Each of the 6 orders of 3 items in a sixth of 6,000 shuffles; the standard deviation is 29."""
    generator = rng()
    orders = [tuple(shuffle(np.arange(3), generator).tolist()) for _ in range(6000)]
    assert len(set(orders)) == 6
    assert all(abs(orders.count(order) - 1000) < 150 for order in set(orders))
