"""The cache of decoded images: whole or absent, verified, and safe when two processes write it."""

import errno
import json
import logging
import multiprocessing
import os
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from fedseal.data import cache
from fedseal.data.pool import Pool
from fedseal.errors import UserError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDSEAL_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make(count: int = 30, seed: int = 0) -> Pool:
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (count, 3, 4, 4), dtype=np.uint8)
    labels = rng.integers(-1, 2, count)
    return Pool(
        "made", pixels, labels, ("a", "b"), {"train": range(20), "test": range(20, count)}, True, ("x",)
    )


def same(a: Pool, b: Pool) -> bool:
    arrays = np.array_equal(a.pixels, b.pixels) and np.array_equal(a.labels, b.labels)
    rest = ("name", "classes", "parts", "flips", "skipped")
    return arrays and all(getattr(a, field) == getattr(b, field) for field in rest)


def test_round_trip_is_exact_mapped_and_read_only(home: Path) -> None:
    assert cache.load("k") is None and cache.origin("k") is None
    stored = cache.store("k", make(), "a test")
    loaded = cache.load("k")
    assert loaded is not None and same(stored, make()) and same(loaded, make())
    assert isinstance(loaded.pixels, np.memmap) and not loaded.pixels.flags.writeable
    assert loaded.labels.dtype == np.int64
    assert cache.origin("k") == "a test"
    assert [path.name for path in home.iterdir()] == ["k"]


def test_arrays_in_any_memory_order_are_stored(home: Path) -> None:
    turned = Pool(
        "t", make().pixels.transpose(0, 1, 3, 2), make().labels, ("a",), {"train": range(30)}, False
    )
    assert np.array_equal(cache.store("k", turned, "").pixels, turned.pixels)


def test_second_use_does_not_build() -> None:
    cache.cached("k", lambda: (make(), ""))
    assert same(cache.cached("k", lambda: pytest.fail("built again")), make())


def test_location_falls_back_to_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FEDSEAL_DATA")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.root() == tmp_path / ".cache" / "fedseal"


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def lie(path: Path) -> None:
    path.write_text(path.read_text().replace('"a"', '"z"'))


def age(path: Path) -> None:
    outer = json.loads(path.read_text())
    outer["about"]["format"] = 0
    outer["sha256"] = cache._digest(outer["about"])
    path.write_text(json.dumps(outer))


@pytest.mark.parametrize(
    ("file", "harm"),
    [
        ("pixels.npy", flip_a_byte),
        ("pixels.npy", cut),
        ("pixels.npy", Path.unlink),
        ("labels.npy", flip_a_byte),
        ("about.json", lie),
        ("about.json", age),
        ("about.json", lambda path: path.write_text("[]")),
        ("about.json", lambda path: path.write_bytes(b"\xff\xfe")),
        ("about.json", Path.unlink),
    ],
)
def test_damaged_cache_is_rebuilt_with_a_warning(home, file, harm, caplog) -> None:  # type: ignore[no-untyped-def]
    cache.store("k", make(), "")
    harm(home / "k" / file)
    with caplog.at_level(logging.WARNING, "fedseal"):
        assert same(cache.cached("k", lambda: (make(), "")), make())
    assert "built again" in caplog.text and str(home / "k") in caplog.text
    assert cache.load("k") is not None
    assert [path.name for path in home.iterdir()] == ["k"]


def test_file_in_the_place_of_a_cache_is_replaced(home: Path) -> None:
    home.mkdir()
    (home / "k").write_text("no folder")
    assert same(cache.cached("k", lambda: (make(), "")), make())


def test_first_one_stays_unless_replaced(home: Path) -> None:
    cache.store("k", make(seed=1), "")
    assert same(cache.store("k", make(seed=2), ""), make(seed=1))
    held = cache.load("k")
    assert same(cache.store("k", make(seed=2), "", replace=True), make(seed=2))
    assert held is not None and same(held, make(seed=1))  # an open map outlives its files


def test_full_disk_is_named_and_leaves_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache._Hashing, "write", full)
    with pytest.raises(UserError, match="no space left for") as caught:
        cache.store("k", make(), "")
    assert str(home) in str(caught.value) and "FEDSEAL_DATA" in str(caught.value)
    assert list(home.iterdir()) == []


def test_really_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system of 1 MB, where this user may mount one."""
    small = tmp_path / "small"
    small.mkdir()
    try:
        mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)]
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("may not mount a small file system here")
    try:
        monkeypatch.setenv("FEDSEAL_DATA", str(small))
        with pytest.raises(UserError, match="no space left for"):
            cache.store("k", make(100_000), "")
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_folder_that_cannot_be_made_is_named(home: Path) -> None:
    home.write_text("in the way")
    with pytest.raises(UserError, match="cannot write to") as caught:
        cache.store("k", make(), "")
    assert str(home) in str(caught.value)


def test_leftovers_of_killed_processes_go(home: Path) -> None:
    old, new = home / ".work-old", home / ".work-new"
    old.mkdir(parents=True)
    new.mkdir()
    os.utime(old, (0, 0))
    cache.store("k", make(), "")
    assert not old.exists() and new.exists()


def build_beside_another(me: str, folder: Path) -> None:
    """Build only when the other process is at it, too, so that both store."""

    def build() -> tuple[Pool, str]:
        (folder / me).touch()
        while not (folder / ("b" if me == "a" else "a")).exists():
            time.sleep(0.002)
        return make(20_000), me

    assert same(cache.cached("both", build), make(20_000))


@pytest.mark.parametrize("damaged", [False, True])
def test_two_processes_at_once(home: Path, tmp_path: Path, damaged: bool) -> None:
    if damaged:
        cache.store("both", make(), "")
        flip_a_byte(home / "both" / "pixels.npy")
    fork = multiprocessing.get_context("fork")  # importing everything anew would take seconds
    processes = [fork.Process(target=build_beside_another, args=(me, tmp_path)) for me in "ab"]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert cache.load("both") is not None and cache.origin("both") in ("a", "b")
    assert [path.name for path in home.iterdir()] == ["both"]


def test_fingerprint_sees_names_sizes_and_times(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"1")
    os.utime(file, ns=(5, 5))
    first = cache.fingerprint(tmp_path, [file])
    assert first == cache.fingerprint(tmp_path, [file])
    os.utime(file, ns=(5, 6))
    assert first != cache.fingerprint(tmp_path, [file])
