"""The paper's splits: which images are for the server, for each client, for validation and for testing."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedseal.config.sections import DataSettings
from fedseal.data import partition
from fedseal.data.pool import BLOCK, Federation, Ints, Pool
from fedseal.errors import UserError
from fedseal.system.logs import log


def split(pool: Pool, data: DataSettings, seed: int) -> Federation:
    """Splits a pool between server and clients. The same seed gives the same split on every machine."""
    federation = _split_folders(pool, data, seed) if "server" in pool.parts else _split_pool(pool, data, seed)
    return _finish(federation)


def stream(seed: int, purpose: str) -> np.random.Generator:
    """A random generator for one purpose, independent of the draws for all other purposes."""
    digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(int.from_bytes(digest, "big"))))


def split_fingerprint(federation: Federation) -> str:
    """16 hex digits that change with any name, label, index or used pixel."""
    pool = federation.pool
    images = [federation.labelled, federation.validation, *federation.clients, *federation.tests.values()]
    lengths = [len(indices) for indices in images]
    header = [pool.classes, pool.pixels.shape, federation.names, tuple(federation.tests), lengths]
    digest = hashlib.sha256(json.dumps(header).encode())
    digest.update(pool.labels.astype("<i8").tobytes())
    for indices in images:
        digest.update(indices.astype("<i8").tobytes())
        for start in range(0, len(indices), BLOCK):
            digest.update(np.ascontiguousarray(pool.pixels[indices[start : start + BLOCK]]).data)
    return digest.hexdigest()[:16]


def _split_pool(pool: Pool, data: DataSettings, seed: int) -> Federation:
    candidates = _part(pool, "train")
    if data.held_out_test:
        everything = np.concatenate([_part(pool, name) for name in ("train", "test") if name in pool.parts])
        test, candidates = _hold_out_test(pool, everything, data.held_out_test, stream(seed, "test"))
    elif "test" in pool.parts:
        test = _part(pool, "test")
    else:
        raise UserError(f"{pool.name} has no test set: set data.held_out_test.")

    labelled, validation, rest = _server_images(pool, candidates, data, stream(seed, "server"))

    available = _sizes(pool, rest)
    if data.partition == "iid":
        counts = partition.iid_counts(data.clients, data.images_per_client, available)
    elif data.partition == "fedmatch":
        counts = partition.fedmatch_counts(data.clients, data.images_per_client, available)
    else:
        counts = partition.dirichlet_counts(
            data.clients, data.images_per_client, data.alpha, available, stream(seed, "partition")
        )
    clients = partition.assign_images(pool.labels, rest, counts, stream(seed, "deal"))

    tests: dict[str, Ints] = {"test": test}
    client_tests: Sequence[Ints] = ()
    if data.test_per_client:
        rng, mixes = stream(seed, "test"), partition.class_mixes(counts)
        wanted = partition.mix_counts(
            mixes, data.test_per_client, _sizes(pool, test), rng, key="data.test_per_client"
        )
        client_tests = partition.assign_images(pool.labels, test, wanted, rng)
        tests = {"test": np.concatenate(client_tests), "official": test}
    names = tuple(f"client-{client}" for client in range(data.clients))
    return Federation(pool, labelled, validation, clients, names, tests, client_tests=client_tests)


def _hold_out_test(pool: Pool, candidates: Ints, number: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    sizes = _sizes(pool, candidates)
    if number > sizes.sum():
        raise UserError(
            f"data.held_out_test = {number}, but {pool.name} has only {sizes.sum()} images: lower it."
        )
    quota = partition.apportion(sizes, number, sizes)
    order = partition.shuffle_by_class(pool.labels, candidates, len(sizes), rng)
    test = _join([images[:n] for images, n in zip(order, quota, strict=True)])
    return test, _join([images[n:] for images, n in zip(order, quota, strict=True)])


def _server_images(
    pool: Pool, candidates: Ints, data: DataSettings, rng: np.random.Generator
) -> tuple[Ints, Ints, Ints]:
    """The labelled images, the validation images, and the remaining ones.

    Each class is shuffled once. The labelled images are taken from the front and the validation images from
    the back, so neither depends on the size of the other, and a larger set contains the smaller ones.
    """
    classes = len(pool.classes)
    if data.labels < classes:
        raise UserError(
            f"data.labels = {data.labels} leaves a class without labels: raise it to {classes} or more."
        )
    labelled, validation, rest = [], [], []
    fronts, backs = (partition.apportion(np.ones(classes), n) for n in (data.labels, data.validation))
    order = partition.shuffle_by_class(pool.labels, candidates, classes, rng)
    for name, images, front, back in zip(pool.classes, order, fronts, backs, strict=True):
        if front + back > len(images):
            raise UserError(
                f"Class {name!r} has {len(images)} images, but {front} labelled and {back} for validation are"
                " needed: lower data.labels or data.validation."
            )
        labelled.append(images[:front])
        rest.append(images[front : len(images) - back])
        validation.append(images[len(images) - back :])
    return _join(labelled), _join(validation), _join(rest)


def split_server(pool: Pool, data: DataSettings, seed: int, clients: Sequence[str]) -> Federation:
    """The server's part of `split`, for clients whose images are on other machines."""
    labelled, validation, tests = _split_server(pool, data, seed)
    empty = tuple(np.zeros(0, np.int64) for _ in clients)
    return _finish(Federation(pool, labelled, validation, empty, tuple(clients), tests))


def _finish(federation: Federation) -> Federation:
    """Adds the fingerprint, and warns about classes without validation images, which get no threshold."""
    missing = np.flatnonzero(_sizes(federation.pool, federation.validation) == 0)
    if len(missing):
        names = _names(federation.pool, missing)
        log.warning("no validation image of %s: add some, or raise data.validation", names)
    return replace(federation, fingerprint=split_fingerprint(federation))


def _split_folders(pool: Pool, data: DataSettings, seed: int) -> Federation:
    labelled, validation, tests = _split_server(pool, data, seed)
    folders = {name.removeprefix("clients/"): name for name in pool.parts if name.startswith("clients/")}
    if not folders:
        raise UserError(
            f"{data.path} has no client folders: put the images of each client into clients/<name>."
        )
    clients = tuple(_part(pool, part) for part in folders.values())
    for name, images in zip(folders, clients, strict=True):
        if not len(images):
            raise UserError(f"Client {name!r} has no images: add images to its folder, or remove it.")
    return Federation(pool, labelled, validation, clients, tuple(folders), tests)


def _split_server(pool: Pool, data: DataSettings, seed: int) -> tuple[Ints, Ints, dict[str, Ints]]:
    """The labelled, validation and test images of the user's own folders."""
    server = _part(pool, "server")
    sizes = _sizes(pool, server)
    if (sizes == 0).any():
        raise UserError(
            f"The server's folder has no images of {_names(pool, np.flatnonzero(sizes == 0))}: add some."
        )
    if "validation" in pool.parts:
        if data.validation:
            log.warning("data.validation = %d is ignored: there is a validation folder", data.validation)
        labelled, validation = server, _part(pool, "validation")
    else:
        quota = _validation_quota(pool, sizes, data.validation)
        order = partition.shuffle_by_class(pool.labels, server, len(sizes), stream(seed, "server"))
        labelled = _join([images[n:] for images, n in zip(order, quota, strict=True)])
        validation = _join([images[:n] for images, n in zip(order, quota, strict=True)])
    return labelled, validation, {"test": _part(pool, "test")} if "test" in pool.parts else {}


def _validation_quota(pool: Pool, sizes: Ints, number: int) -> Ints:
    """In proportion to the class sizes: if possible one of each class, and always one left for training."""
    if (sizes == 1).any():
        raise UserError(
            f"The server has only one image of {_names(pool, np.flatnonzero(sizes == 1))}, but needs one for"
            " training and one for validation: add images or a validation folder."
        )
    classes, total = len(sizes), int(sizes.sum())
    number = number or max(classes, round(total / 5))
    if number > total - classes:
        raise UserError(
            f"data.validation = {number} of the server's {total} images leaves too few to train: lower it."
        )
    least = 1 if number >= classes else 0
    return least + partition.apportion(sizes, number - least * classes, sizes - 1 - least)


def _part(pool: Pool, name: str) -> Ints:
    return np.asarray(pool.parts[name], np.int64)


def _sizes(pool: Pool, images: Ints) -> Ints:
    """The number of images of each class."""
    labels = pool.labels[images]
    return np.bincount(labels[labels >= 0], minlength=len(pool.classes)).astype(np.int64)


def _join(arrays: Sequence[Ints]) -> Ints:
    return np.sort(np.concatenate(arrays))


def _names(pool: Pool, labels: Ints) -> str:
    return ", ".join(repr(pool.classes[label]) for label in labels)
