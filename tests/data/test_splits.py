"""The paper's splits on pools with the real class counts but tiny images."""

import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fedseal.config.sections import DataSettings
from fedseal.data.partition import fedmatch_mixes, shuffle
from fedseal.data.pool import Pool
from fedseal.data.splits import split, split_fingerprint, stream
from fedseal.errors import UserError

SVHN = [4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659]
SVHN_TEST = [1744, 5099, 4149, 2882, 2523, 2384, 1977, 2019, 1660, 1595]


def make_pool(**class_counts):
    """A shuffled pool of 2 x 2 images with these class counts in each part (`clients_x` for `clients/x`)."""
    labels, parts, start = [], {}, 0
    for name, counts in class_counts.items():
        part = np.repeat(np.arange(len(counts)), counts)
        labels.append(shuffle(part, stream(0, name)))
        parts[name.replace("_", "/")] = range(start, start + len(part))
        start += len(part)
    pixels = (np.arange(start * 4) * 7 % 251).astype(np.uint8).reshape(start, 1, 2, 2)
    classes = tuple(f"class {label}" for label in range(len(counts)))
    return Pool("tiny", pixels, np.concatenate(labels).astype(np.int64), classes, parts, flips=True)


def per_class(pool, images):
    return np.bincount(pool.labels[images], minlength=len(pool.classes)).tolist()


def assert_disjoint(federation, tests=("test",)):
    arrays = [federation.labelled, federation.validation, *federation.clients]
    used = np.concatenate([*arrays, *(federation.tests[name] for name in tests if name in federation.tests)])
    assert len(np.unique(used)) == len(used)


@pytest.fixture(scope="module")
def fashion():
    return make_pool(train=[6000] * 10, test=[1000] * 10)


@pytest.mark.parametrize("partition", ["iid", "dirichlet"])
def test_fashion_mnist(fashion, partition):
    federation = split(fashion, DataSettings(partition=partition, test_per_client=300), seed=1)
    assert per_class(fashion, federation.labelled) == [50] * 10
    assert per_class(fashion, federation.validation) == [20] * 10
    assert [len(images) for images in federation.clients] == [1200] * 10
    assert len(federation.tests["test"]) == 3000
    assert federation.tests["official"].tolist() == list(range(60_000, 70_000))
    assert federation.tests["test"].min() >= 60_000
    assert max(images.max() for images in federation.clients) < 60_000
    assert_disjoint(federation)
    assert federation.names[:2] == ("client-0", "client-1")
    counts = np.array([per_class(fashion, images) for images in federation.clients])
    tests = np.array([per_class(fashion, part) for part in np.split(federation.tests["test"], 10)])
    if partition == "iid":
        assert (counts == 120).all()
        assert (tests == 30).all()
    else:  # 300 test images for 1,200 images: a quarter of every count
        assert np.abs(tests - counts / 4).max() < 1
        assert counts.max() > 300


@pytest.mark.parametrize("partition", ["iid", "fedmatch"])
def test_cifar10(partition):
    pool = make_pool(train=[5000] * 10, test=[1000] * 10)
    data = DataSettings(
        source="cifar10",
        labels=5000,
        validation=3000,
        clients=100,
        images_per_client=490,
        partition=partition,
        held_out_test=3000,
    )
    federation = split(pool, data, seed=0)
    assert per_class(pool, federation.labelled) == [500] * 10
    assert per_class(pool, federation.validation) == [300] * 10
    assert per_class(pool, federation.tests["test"]) == [300] * 10
    assert list(federation.tests) == ["test"]
    assert_disjoint(federation)
    assert (
        len(federation.labelled) + sum(map(len, federation.clients)) == 54_000
    )  # all remaining images are used
    ideal = 490 * (np.full((100, 10), 0.1) if partition == "iid" else fedmatch_mixes()[np.arange(100) % 10])
    counts = np.array([per_class(pool, images) for images in federation.clients])
    assert (counts.sum(axis=1) == 490).all()
    assert np.abs(counts - ideal).max() < (1e-9 if partition == "iid" else 2)


def test_svhn():
    pool = make_pool(train=SVHN, test=SVHN_TEST)
    data = DataSettings(
        source="svhn", labels=1000, validation=400, clients=100, images_per_client=490, partition="iid"
    )
    federation = split(pool, data, seed=0)
    assert per_class(pool, federation.labelled) == [100] * 10
    assert per_class(pool, federation.validation) == [40] * 10
    assert [len(images) for images in federation.clients] == [490] * 100
    assert federation.tests["test"].tolist() == list(range(73_257, 73_257 + 26_032))
    assert_disjoint(federation)
    counts = np.array([per_class(pool, images) for images in federation.clients])
    assert np.ptp(counts, axis=0).max() <= 1
    np.testing.assert_allclose(counts.mean(axis=0) / 490, np.array(SVHN) / sum(SVHN), atol=0.002)


def test_golden(fashion):
    """A changed number here means that all results change: runs with this seed get other data."""
    federation = split(fashion, DataSettings(test_per_client=300), seed=0)
    assert federation.labelled[:5].tolist() == [61, 131, 441, 536, 567]
    assert federation.validation[:5].tolist() == [91, 318, 563, 728, 899]
    assert federation.clients[0][:5].tolist() == [16, 71, 113, 218, 229]
    assert per_class(fashion, federation.clients[0]) == [225, 0, 390, 2, 16, 116, 21, 0, 1, 429]
    assert federation.tests["test"][:5].tolist() == [60054, 60085, 60098, 60117, 60145]
    assert federation.fingerprint == "25097bde746f3e81"


def test_streams_are_the_same_everywhere():
    assert stream(0, "server").bit_generator.random_raw(2).tolist() == [
        15494919558854456594,
        1853502403540606278,
    ]
    assert stream(0, "server").random() != stream(1, "server").random()
    assert stream(0, "server").random() != stream(0, "deal").random()


def test_the_servers_images_depend_only_on_the_seed(fashion):
    base = split(fashion, DataSettings(), seed=0)
    for change in (
        {"clients": 7},
        {"images_per_client": 100},
        {"partition": "iid"},
        {"alpha": 5.0},
        {"test_per_client": 10},
    ):
        other = split(fashion, DataSettings(**change), seed=0)
        np.testing.assert_array_equal(other.labelled, base.labelled)
        np.testing.assert_array_equal(other.validation, base.validation)
    np.testing.assert_array_equal(split(fashion, DataSettings(validation=500), 0).labelled, base.labelled)
    more = split(fashion, DataSettings(labels=2000), 0)
    np.testing.assert_array_equal(more.validation, base.validation)
    assert set(base.labelled) < set(more.labelled)
    assert set(base.labelled) != set(split(fashion, DataSettings(), seed=1).labelled)


def test_test_sets_do_not_change_the_clients(fashion):
    base, other = (split(fashion, DataSettings(test_per_client=n), 0) for n in (0, 300))
    for one, two in zip(base.clients, other.clients, strict=True):
        np.testing.assert_array_equal(one, two)


def test_labels_per_class_differ_by_at_most_one(fashion):
    federation = split(fashion, DataSettings(labels=503), seed=0)
    assert per_class(fashion, federation.labelled) == [51] * 3 + [50] * 7


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 60), min_size=10, max_size=10),
    st.integers(10, 60),
    st.integers(0, 40),
    st.integers(1, 9),
    st.integers(1, 30),
    st.sampled_from(["iid", "dirichlet", "fedmatch"]),
    st.floats(0.05, 100),
    st.sampled_from(["official", "per client", "held out"]),
    st.integers(0, 2**31),
)
def test_any_split_is_disjoint_and_exact_or_a_clear_error(
    extra, labels, validation, clients, each, partition, alpha, test, seed
):
    pool = make_pool(train=[10 + n for n in extra], test=[30] * 10)
    data = DataSettings(
        labels=labels,
        validation=validation,
        clients=clients,
        images_per_client=each,
        partition=partition,
        alpha=alpha,
        test_per_client=7 if test == "per client" else 0,
        held_out_test=50 if test == "held out" else 0,
    )
    try:
        federation = split(pool, data, seed)
    except UserError as error:
        assert "data." in str(error)
        return
    assert_disjoint(federation)
    assert len(federation.labelled) == labels
    assert len(federation.validation) == validation
    assert [len(images) for images in federation.clients] == [each] * clients
    assert len(federation.tests["test"]) == {"official": 300, "per client": 7 * clients, "held out": 50}[test]
    assert np.ptp(per_class(pool, federation.labelled)) <= 1


def test_a_pool_used_up_completely():
    """20 images in each of 2 classes: 4 labelled, 4 for validation and 4 x 8 for clients are all of them."""
    pool = make_pool(train=[20, 20], test=[5, 5])
    data = DataSettings(labels=4, validation=4, clients=4, images_per_client=8, alpha=0.05)
    federation = split(pool, data, seed=3)
    assert_disjoint(federation)
    assert sum(map(len, federation.clients)) == 32
    with pytest.raises(UserError, match="4 clients with 9 images each need 36 images, but only 32"):
        split(pool, data.model_copy(update={"images_per_client": 9}), seed=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": 5}, r"data\.labels = 5 .* 10 or more"),
        (
            {"labels": 500},
            r"Class 'class 0' has 30 images, but 50 labelled and 2 for validation.*data\.labels",
        ),
        ({"validation": 290}, r"29 for validation.*data\.validation"),
        ({"clients": 50}, r"50 clients with 10 images each need 500 .* only 180"),
        ({"test_per_client": 51}, r"2 clients with 51 .* only 100 .*data\.test_per_client"),
        ({"held_out_test": 401}, r"data\.held_out_test = 401.* only 400"),
    ],
)
def test_errors_name_the_key(change, message):
    pool = make_pool(train=[30] * 10, test=[10] * 10)
    data = {"labels": 100, "validation": 20, "clients": 2, "images_per_client": 10} | change
    with pytest.raises(UserError, match=message):
        split(pool, DataSettings(**data), seed=0)


def test_clients_test_images_come_from_a_held_out_test_set():
    pool = make_pool(train=[400] * 10, test=[100] * 10)
    data = DataSettings(
        labels=100,
        validation=50,
        clients=10,
        images_per_client=300,
        partition="fedmatch",
        held_out_test=300,
        test_per_client=30,
    )
    federation = split(pool, data, 0)
    assert per_class(pool, federation.tests["official"]) == [30] * 10
    assert sorted(federation.tests["test"]) == sorted(federation.tests["official"])  # 10 clients use all
    assert [len(images) for images in federation.client_tests] == [30] * 10
    for kind, images in enumerate(federation.client_tests):
        assert np.argmax(per_class(pool, images)) == kind  # half of its images
    assert_disjoint(federation)


def test_a_pool_without_a_test_set_needs_a_held_out_one():
    pool = make_pool(train=[30] * 2)
    data = {"labels": 4, "validation": 4, "clients": 2, "images_per_client": 5}
    with pytest.raises(UserError, match=r"data\.held_out_test"):
        split(pool, DataSettings(**data), seed=0)
    assert per_class(pool, split(pool, DataSettings(**data, held_out_test=10), 0).tests["test"]) == [5, 5]


def test_missing_validation_class_warns(fashion, caplog):
    with caplog.at_level(logging.WARNING, "fedseal"):
        split(fashion, DataSettings(), seed=0)
        assert not caplog.messages
        split(fashion, DataSettings(validation=8), seed=0)
    [message] = caplog.messages
    assert message == "no validation image of 'class 8', 'class 9': add some, or raise data.validation"


def folders(**change):
    return DataSettings(source="folders", path="mine", **change)


def test_folders_define_the_split():
    """A fifth of the 30 + 20 labelled images is held out: 1 of each class, and 8 as 3:2 (4.8 and 3.2)."""
    pool = make_pool(server=[30, 20], clients_a=[5, 9], clients_b=[0, 4], test=[3, 3])
    federation = split(pool, folders(), seed=0)
    assert per_class(pool, federation.validation) == [6, 4]
    assert per_class(pool, federation.labelled) == [24, 16]
    assert [images.tolist() for images in federation.clients] == [list(range(50, 64)), list(range(64, 68))]
    assert federation.names == ("a", "b")
    assert federation.tests["test"].tolist() == list(range(68, 74))
    assert_disjoint(federation)
    assert len(split(pool, folders(validation=7), seed=0).validation) == 7


def test_client_folders_need_no_labels():
    pool = make_pool(server=[3, 2], clients_a=[4, 4])
    pool.labels[5:] = -1
    federation = split(pool, folders(), seed=0)
    assert len(federation.clients[0]) == 8
    assert federation.tests == {}
    assert per_class(pool, federation.validation) == [1, 1]


def test_folders_with_a_validation_folder(caplog):
    pool = make_pool(server=[1, 2], clients_a=[5, 9], validation=[3, 0])
    federation = split(pool, folders(validation=2), seed=0)
    assert per_class(pool, federation.labelled) == [1, 2]
    assert per_class(pool, federation.validation) == [3, 0]
    assert caplog.messages == [
        "data.validation = 2 is ignored: there is a validation folder",
        "no validation image of 'class 1': add some, or raise data.validation",
    ]


@pytest.mark.parametrize(
    ("parts", "validation", "message"),
    [
        ({"server": [4, 1], "clients_a": [1, 1]}, 0, "only one image of 'class 1'"),
        ({"server": [4, 0], "clients_a": [1, 1]}, 0, "no images of 'class 1'"),
        ({"server": [4, 4], "clients_a": [0, 0]}, 0, "Client 'a' has no images"),
        ({"server": [4, 4]}, 0, "no client folders"),
        ({"server": [4, 4], "clients_a": [1, 1]}, 7, r"data\.validation = 7 of the server's 8"),
    ],
)
def test_errors_of_folders(parts, validation, message):
    with pytest.raises(UserError, match=message):
        split(make_pool(**parts), folders(validation=validation), seed=0)


@settings(max_examples=50)
@given(st.lists(st.integers(2, 30), min_size=1, max_size=6), st.data())
def test_folders_hold_out_any_number(sizes, data):
    number = data.draw(st.integers(0, sum(sizes) - len(sizes)))
    pool = make_pool(server=sizes, clients_a=[1] * len(sizes))
    federation = split(pool, folders(validation=number), seed=0)
    assert_disjoint(federation)
    assert len(federation.validation) == number or number == 0
    assert len(federation.labelled) + len(federation.validation) == sum(sizes)
    assert min(per_class(pool, federation.labelled)) >= 1
    assert min(per_class(pool, federation.validation)) >= (1 if number == 0 or number >= len(sizes) else 0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"source": "folders", "path": "mine", "clients": 10}, "clients does not apply to folders"),
        ({"source": "folders", "path": "mine", "held_out_test": 10}, "held_out_test does not apply"),
        ({"source": "parquet"}, "needs path"),
        ({"labels": 0}, "labels must be at least 1"),
        ({"alpha": 0.0}, "alpha"),
        ({"alpha": float("inf")}, "alpha"),
        ({"channels": 2}, "channels"),
        ({"client": 3}, "client"),
    ],
)
def test_invalid_settings(values, message):
    with pytest.raises(ValidationError, match=message):
        DataSettings(**values)


@pytest.mark.parametrize("data", [DataSettings(), folders(), folders(validation=9)])
def test_settings_round_trip(data):
    assert DataSettings(**data.model_dump()) == data


def test_every_setting_is_described():
    assert all(field.description for field in DataSettings.model_fields.values())


def test_the_fingerprint_changes_with_the_data():
    pool = make_pool(train=[30] * 2, test=[5, 5])
    data = DataSettings(labels=4, validation=4, clients=2, images_per_client=5)
    federation = split(pool, data, seed=0)
    assert split_fingerprint(split(pool, data, seed=0)) == federation.fingerprint
    assert split(pool, data, seed=1).fingerprint != federation.fingerprint
    for images in (
        federation.labelled,
        federation.validation,
        federation.clients[1],
        federation.tests["test"],
    ):
        pool.pixels[images[-1], 0, 1, 1] ^= 1
        assert split_fingerprint(federation) != federation.fingerprint
        pool.pixels[images[-1], 0, 1, 1] ^= 1
    assert split_fingerprint(federation) == federation.fingerprint
