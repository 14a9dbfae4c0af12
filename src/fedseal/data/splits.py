"""The paper's splits: which images are the server's, each client's, for validation and for testing."""

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from fedseal.data import partition
from fedseal.data.pool import Federation, Ints, Pool
from fedseal.errors import UserError
from fedseal.settings import Settings

log = logging.getLogger("fedseal")

# 0 in own folders, where the folders themselves say what is whose
_COUNTS = ("labels", "clients", "images_per_client")
_TESTS = ("test_per_client", "held_out_test")


class DataSettings(Settings):
    """The `[data]` section of a config; the defaults are the paper's Fashion-MNIST."""

    source: Literal["fashion-mnist", "cifar10", "svhn", "parquet", "folders"] = Field(
        default="fashion-mnist", description="where the images come from; parquet and folders are your own"
    )
    path: str = Field(default="", description="of your own parquet files or folders")
    labels: int = Field(
        default=500, ge=0, description="labelled images at the server, equal per class; 0 with folders: all"
    )
    validation: int = Field(
        default=200,
        ge=0,
        description="the server's validation images, equal per class; with folders that have no validation"
        " folder, how many of the server's are held out in proportion to the classes; 0 there: a fifth",
    )
    clients: int = Field(
        default=10, ge=0, description="number of clients; 0 with folders: as many as there are"
    )
    images_per_client: int = Field(
        default=1200, ge=0, description="unlabelled images of every client; 0 with folders: all in its folder"
    )
    test_per_client: int = Field(
        default=0,
        ge=0,
        description="test images per client, following its class mix, from the data set's own test set;"
        " 0: all of that test set",
    )
    held_out_test: int = Field(
        default=0,
        ge=0,
        description="test images held out of training and test set taken together, in proportion to the"
        " classes; 0: the data set's own test set",
    )
    partition: Literal["iid", "dirichlet", "fedmatch"] = Field(
        default="dirichlet", description="how classes spread over clients; not used with folders"
    )
    alpha: float = Field(
        default=0.3,
        gt=0,
        allow_inf_nan=False,
        description="of the Dirichlet partition; the smaller, the more clients differ",
    )
    size: int = Field(
        default=0,
        ge=0,
        description="height and width in pixels that images are brought to; 0: the source's own, folders: 32",
    )
    channels: Literal[0, 1, 3] = Field(
        default=0, description="1 grey, 3 colour; 0: the source's own, folders: 3"
    )

    @model_validator(mode="before")
    @classmethod
    def _folders_default_to_all(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("source") == "folders":
            return dict.fromkeys((*_COUNTS, "validation"), 0) | values
        return values

    @model_validator(mode="before")
    @classmethod
    def _paths_are_absolute(cls, values: Any) -> Any:
        """So that the images are found again from wherever one is."""
        if not isinstance(values, dict) or values.get("source") not in ("parquet", "folders"):
            return values
        path = values.get("path")
        if not isinstance(path, str | os.PathLike) or not str(path):
            return values
        home = os.path.expanduser(path)  # noqa: PTH111 - Path's own raises for an unknown user
        return values | {"path": str(Path(home).absolute())}

    @model_validator(mode="after")
    def _keys_fit_together(self) -> Self:
        if self.source in ("parquet", "folders") and not self.path:
            raise ValueError(f'source = "{self.source}" needs path')
        for key in _COUNTS:
            if self.source != "folders" and getattr(self, key) == 0:
                raise ValueError(f"{key} must be at least 1")
        for key in (*_COUNTS, *_TESTS):
            if self.source == "folders" and getattr(self, key) != 0:
                raise ValueError(f"{key} does not apply to folders, which say it themselves: leave it out")
        if self.test_per_client and self.held_out_test:
            raise ValueError("test_per_client and held_out_test exclude each other: set one of them to 0")
        return self


def split(pool: Pool, data: DataSettings, seed: int) -> Federation:
    """Deal a pool out; the same seed gives the same images on every machine."""
    federation = _split_folders(pool, data, seed) if "server" in pool.parts else _split_pool(pool, data, seed)
    return _checked(federation)


def stream(seed: int, purpose: str) -> np.random.Generator:
    """Random numbers for one purpose: no other purpose, whatever it draws, changes them."""
    digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(int.from_bytes(digest, "big"))))


def fingerprint(federation: Federation) -> str:
    """16 hex digits over names, labels, indices and all pixels used; any change of data or split shows."""
    pool = federation.pool
    images = [federation.labelled, federation.validation, *federation.clients, *federation.tests.values()]
    lengths = [len(indices) for indices in images]
    header = [pool.classes, pool.pixels.shape, federation.names, tuple(federation.tests), lengths]
    digest = hashlib.sha256(json.dumps(header).encode())
    digest.update(pool.labels.astype("<i8").tobytes())
    for indices in images:
        digest.update(indices.astype("<i8").tobytes())
        for start in range(0, len(indices), 1000):  # keeps the copy small
            digest.update(np.ascontiguousarray(pool.pixels[indices[start : start + 1000]]).data)
    return digest.hexdigest()[:16]


def _split_pool(pool: Pool, data: DataSettings, seed: int) -> Federation:
    candidates = _part(pool, "train")
    if data.held_out_test:
        everything = np.concatenate([_part(pool, name) for name in ("train", "test") if name in pool.parts])
        test, candidates = _hold_out_test(pool, everything, data.held_out_test, stream(seed, "test"))
    elif "test" in pool.parts:
        test = _part(pool, "test")
    else:
        raise UserError(f"{pool.name} has no test images of its own: set data.held_out_test.")

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
    clients = partition.deal(pool.labels, rest, counts, stream(seed, "deal"))

    tests = {"test": test}
    if data.test_per_client:
        rng, mixes = stream(seed, "test"), partition.mix(counts)
        wanted = partition.mix_counts(
            mixes, data.test_per_client, _sizes(pool, test), rng, key="data.test_per_client"
        )
        # client after client, so that each client's own test images can be told apart
        tests = {"test": np.concatenate(partition.deal(pool.labels, test, wanted, rng)), "official": test}
    names = tuple(f"client-{client}" for client in range(data.clients))
    return Federation(pool, labelled, validation, clients, names, tests)


def _hold_out_test(pool: Pool, candidates: Ints, number: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    sizes = _sizes(pool, candidates)
    if number > sizes.sum():
        raise UserError(
            f"data.held_out_test = {number}, but {pool.name} has only {sizes.sum()} images: lower it."
        )
    quota = partition.apportion(sizes, number, sizes)
    order = partition.by_class(pool.labels, candidates, len(sizes), rng)
    test = _join([images[:n] for images, n in zip(order, quota, strict=True)])
    return test, _join([images[n:] for images, n in zip(order, quota, strict=True)])


def _server_images(
    pool: Pool, candidates: Ints, data: DataSettings, rng: np.random.Generator
) -> tuple[Ints, Ints, Ints]:
    """Labelled, validation, the rest.

    Of one random order of each class, the labelled images are the front and the validation images the back:
    neither set changes with the other's number, and a smaller set is contained in a larger one.
    """
    classes = len(pool.classes)
    if data.labels < classes:
        raise UserError(
            f"data.labels = {data.labels} leaves a class without label: raise it to {classes} or more."
        )
    labelled, validation, rest = [], [], []
    fronts, backs = (partition.apportion(np.ones(classes), n) for n in (data.labels, data.validation))
    order = partition.by_class(pool.labels, candidates, classes, rng)
    for name, images, front, back in zip(pool.classes, order, fronts, backs, strict=True):
        if front + back > len(images):
            raise UserError(
                f"class {name!r} has {len(images)} images, but {front} labelled and {back} for validation are"
                " wanted: lower data.labels or data.validation."
            )
        labelled.append(images[:front])
        rest.append(images[front : len(images) - back])
        validation.append(images[len(images) - back :])
    return _join(labelled), _join(validation), _join(rest)


def split_server(pool: Pool, data: DataSettings, seed: int, clients: Sequence[str]) -> Federation:
    """The server's part alone, exactly as `split` has it, of clients that keep their images elsewhere."""
    labelled, validation, tests = _split_server(pool, data, seed)
    nothing = tuple(np.zeros(0, np.int64) for _ in clients)
    return _checked(Federation(pool, labelled, validation, nothing, tuple(clients), tests))


def _checked(federation: Federation) -> Federation:
    """With its fingerprint; warns of a class that no threshold can be told for."""
    missing = np.flatnonzero(_sizes(federation.pool, federation.validation) == 0)
    if len(missing):
        names = _names(federation.pool, missing)
        log.warning("no validation image of %s: add some, or raise data.validation", names)
    return replace(federation, fingerprint=fingerprint(federation))


def _split_folders(pool: Pool, data: DataSettings, seed: int) -> Federation:
    labelled, validation, tests = _split_server(pool, data, seed)
    folders = {name.removeprefix("clients/"): name for name in pool.parts if name.startswith("clients/")}
    if not folders:
        raise UserError(f"{data.path} has no client folders: put each client's images into clients/<name>.")
    clients = tuple(_part(pool, part) for part in folders.values())
    for name, images in zip(folders, clients, strict=True):
        if not len(images):
            raise UserError(f"the folder of client {name!r} has no images: fill or remove it.")
    return Federation(pool, labelled, validation, clients, tuple(folders), tests)


def _split_server(pool: Pool, data: DataSettings, seed: int) -> tuple[Ints, Ints, dict[str, Ints]]:
    """Labelled, validation and test images of own folders."""
    server = _part(pool, "server")
    sizes = _sizes(pool, server)
    if (sizes == 0).any():
        raise UserError(
            f"the server's folder has no image of {_names(pool, np.flatnonzero(sizes == 0))}: add some."
        )
    if "validation" in pool.parts:
        if data.validation:
            log.warning("data.validation = %d is not used: there is a validation folder", data.validation)
        labelled, validation = server, _part(pool, "validation")
    else:
        quota = _validation_quota(pool, sizes, data.validation)
        order = partition.by_class(pool.labels, server, len(sizes), stream(seed, "server"))
        labelled = _join([images[n:] for images, n in zip(order, quota, strict=True)])
        validation = _join([images[:n] for images, n in zip(order, quota, strict=True)])
    return labelled, validation, {"test": _part(pool, "test")} if "test" in pool.parts else {}


def _validation_quota(pool: Pool, sizes: Ints, number: int) -> Ints:
    """In proportion to class sizes; one of each class where the number allows, and one left to train on."""
    if (sizes == 1).any():
        raise UserError(
            f"the server has a single image of {_names(pool, np.flatnonzero(sizes == 1))}, but needs one for"
            " training and one for validation: add images or a validation folder."
        )
    classes, total = len(sizes), int(sizes.sum())
    number = number or max(classes, round(total / 5))
    if number > total - classes:
        raise UserError(
            f"data.validation = {number} of the server's {total} images leaves none to train on: lower it."
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
