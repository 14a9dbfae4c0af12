"""Class counts and assignment of images, against hand-derived values and general properties."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedseal.data.partition import (
    apportion,
    assign_images,
    class_mixes,
    dirichlet_counts,
    fedmatch_counts,
    fedmatch_mixes,
    iid_counts,
    mix_counts,
    shuffle,
    shuffle_by_class,
)
from fedseal.errors import UserError

SVHN = np.array([4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659])
seeds = st.integers(0, 2**32 - 1)


def rng(seed=0):
    return np.random.default_rng(seed)


@st.composite
def demands(draw, classes=None):
    """Number of clients, images per client, and a pool with at least that many images, often exactly."""
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


def test_apportion_gives_the_excess_of_a_full_class_to_the_others():
    """As above with 2 of the first: (2, 2, 1), the 2 left as 3:2 are (1.2, 0.8), so 1 and 1 more."""
    assert apportion(np.array([0.5, 0.3, 0.2]), 7, np.array([2, 9, 9])).tolist() == [2, 3, 2]


def test_apportion_falls_back_to_free_places():
    """All weight on a class of 2: the 3 left go 4:2 to the others, 2 and 1."""
    assert apportion(np.array([1.0, 0.0, 0.0]), 5, np.array([2, 4, 2])).tolist() == [2, 2, 1]


def test_iid_is_equal_per_class_if_the_pool_allows():
    assert (iid_counts(10, 1200, np.full(10, 5930)) == 120).all()
    assert (iid_counts(100, 490, np.full(10, 4900)) == 49).all()


def test_iid_gives_extras_to_the_clients_in_turn():
    """2 clients x 3 images of 2 classes: 3 of each class, 1 for each client and 1 extra for one of them."""
    assert iid_counts(2, 3, np.array([9, 9])).tolist() == [[2, 1], [1, 2]]


def test_iid_follows_the_pool_if_a_class_is_too_small():
    """2 clients x 3 images would need 3 of each class; from (4, 2), each client gets (2, 1)."""
    assert iid_counts(2, 3, np.array([4, 2])).tolist() == [[2, 1], [2, 1]]


def test_iid_on_svhn_follows_its_class_mix():
    """49,000 x 4,519 / 71,857 = 3,081.6 of class 9: 30 or 31 for each of 100 clients."""
    available = SVHN - 140
    counts = iid_counts(100, 490, available)
    assert_fits(counts, 100, 490, available)
    assert np.ptp(counts, axis=0).max() <= 1
    assert np.abs(counts.sum(axis=0) - 49_000 * available / available.sum()).max() < 1
    assert set(counts[:, 9].tolist()) == {30, 31}


@given(demands())
def test_iid_clients_differ_by_at_most_one(demand):
    counts = iid_counts(*demand)
    assert_fits(counts, *demand)
    assert np.ptp(counts, axis=0).max() <= 1


@given(demands(), st.floats(0.05, 100), seeds)
def test_dirichlet_gives_each_client_its_number_of_images(demand, alpha, seed):
    clients, each, available = demand
    assert_fits(dirichlet_counts(clients, each, alpha, available, rng(seed)), clients, each, available)


@pytest.mark.parametrize("alpha", [1e-4, 0.05, 0.3, 1.0, 100.0])
def test_dirichlet_has_the_moments_of_its_distribution(alpha):
    """E p_c = 1/M and E sum p_c^2 = (alpha + 1) / (M alpha + 1), within 5 % over 4,000 draws of 5 classes."""
    p = class_mixes(dirichlet_counts(4000, 10_000, alpha, np.full(5, 10**9), rng()))
    np.testing.assert_allclose(p.mean(axis=0), 0.2, atol=0.03)
    np.testing.assert_allclose((p**2).sum(axis=1).mean(), (alpha + 1) / (5 * alpha + 1), rtol=0.05)


def test_clients_are_served_in_random_order():
    """Both want class 0, which is enough for one: each gets it in about half of 100 seeds (deviation 5)."""
    mixes = np.array([[1.0, 0.0], [1.0, 0.0]])
    wins = sum(mix_counts(mixes, 5, np.array([5, 5]), rng(seed))[0, 0] == 5 for seed in range(100))
    assert 30 < wins < 70


def test_mix_counts_follow_the_mix_of_each_client():
    """300 x (0.25, 0.75) and 300 x (1, 0); with only 325 of class 0, the client served last misses 50."""
    mixes = class_mixes(np.array([[30, 90], [120, 0]]))
    assert mixes.tolist() == [[0.25, 0.75], [1.0, 0.0]]
    assert mix_counts(mixes, 300, np.array([1000, 1000]), rng()).tolist() == [[75, 225], [300, 0]]
    short = mix_counts(mixes, 300, np.array([325, 1000]), rng())
    assert short.tolist() in ([[75, 225], [250, 50]], [[25, 275], [300, 0]])  # depends on who is first


def test_fedmatch_mixes_sum_to_one_both_ways():
    mixes = fedmatch_mixes()
    assert mixes[3].tolist() == [0.03, 0.03, 0.15, 0.5, 0.15, 0.03, 0.03, 0.03, 0.02, 0.03]
    np.testing.assert_allclose(mixes.sum(axis=0), 1)
    np.testing.assert_allclose(mixes.sum(axis=1), 1)


def test_fedmatch_uses_up_cifar10_exactly():
    """490 x (0.5, 0.15, 0.03, 0.02) = (245, 73.5, 14.7, 9.8): ten clients get 2,450, 735, 147 and 98."""
    counts = fedmatch_counts(100, 490, np.full(10, 4900))
    assert (counts.sum(axis=0) == 4900).all()
    assert (counts.sum(axis=1) == 490).all()
    ideal = 490 * fedmatch_mixes()[np.arange(100) % 10]
    assert np.abs(counts - ideal).max() < 1
    assert counts[0::10].sum(axis=0).tolist() == [2450, 735, 147, 147, 147, 98, 147, 147, 147, 735]


@settings(max_examples=60)
@given(st.integers(1, 120), st.integers(1, 600), st.integers(0, 3))
def test_fedmatch_stays_near_the_ideal_in_the_smallest_pool(clients, each, spare):
    ideal = each * fedmatch_mixes()[np.arange(clients) % 10]
    available = np.ceil(ideal.sum(axis=0) - 1e-9).astype(np.int64) + spare
    counts = fedmatch_counts(clients, each, available)
    assert_fits(counts, clients, each, available)
    assert np.abs(counts - ideal).max() <= 2


@settings(max_examples=60)
@given(demands(classes=10))
def test_fedmatch_fits_any_pool(demand):
    assert_fits(fedmatch_counts(*demand), *demand)


def test_fedmatch_shares_a_scarce_class():
    """SVHN has 4,519 images of class 9 instead of 4,900: every type gets 5 to 13 % less of it."""
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


def test_too_many_clients_are_refused_before_anything_is_drawn():
    with pytest.raises(UserError, match="1000000000 clients with 1 images each"):
        dirichlet_counts(10**9, 1, 0.3, np.full(10, 29), rng=None)


@given(demands(), seeds)
def test_no_image_is_assigned_twice(demand, seed):
    clients, each, available = demand
    labels = shuffle(np.repeat(np.arange(len(available)), available), rng(seed))
    candidates = np.arange(len(labels)) + 5  # the first 5 images are not candidates
    labels = np.concatenate([np.zeros(5, np.int64), labels])
    counts = dirichlet_counts(clients, each, 0.3, available, rng(seed))
    assigned = assign_images(labels, candidates, counts, rng(seed))
    used = np.concatenate(assigned)
    assert len(np.unique(used)) == len(used) == clients * each
    assert used.min() >= 5
    got = [np.bincount(labels[images], minlength=len(available)) for images in assigned]
    np.testing.assert_array_equal(got, counts)


def test_counts_beyond_the_candidates_are_refused():
    with pytest.raises(ValueError, match="3 images of a class that has 2"):
        assign_images(np.array([0, 0, 1]), np.arange(3), np.array([[3, 1]]), rng())


def test_images_without_a_label_are_not_assigned():
    shuffled = shuffle_by_class(np.array([0, -1, 1, 0]), np.arange(4), 2, rng())
    assert [sorted(images.tolist()) for images in shuffled] == [[0, 3], [2]]


def test_shuffle_is_uniform():
    """Each of the 6 orders of 3 items in a sixth of 6,000 shuffles; the standard deviation is 29."""
    generator = rng()
    orders = [tuple(shuffle(np.arange(3), generator).tolist()) for _ in range(6000)]
    assert len(set(orders)) == 6
    assert all(abs(orders.count(order) - 1000) < 150 for order in set(orders))
