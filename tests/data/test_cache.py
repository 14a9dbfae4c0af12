"""The cache of decoded images: atomic, verified, and safe when two processes write it."""

import errno
import json
import logging
import multiprocessing
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fedseal.data import cache, hashed_files
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
        "made", pixels, labels, ("a", "b"), {"train": range(20), "test": range(20, count)}, True, {"x": "why"}
    )


def same(a: Pool, b: Pool) -> bool:
    arrays = np.array_equal(a.pixels, b.pixels) and np.array_equal(a.labels, b.labels)
    rest = ("name", "classes", "parts", "flips", "skipped")
    return arrays and all(getattr(a, field) == getattr(b, field) for field in rest)


def test_round_trip_is_exact_mapped_and_read_only(home: Path) -> None:
    assert cache.load_cached("k") is None and cache.origin("k") is None
    stored = cache.store("k", make(), "a test")
    loaded = cache.load_cached("k")
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
    cache.get_or_build("k", lambda: (make(), ""))
    assert same(cache.get_or_build("k", lambda: pytest.fail("built twice")), make())


def test_the_default_folder_is_in_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FEDSEAL_DATA")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.root() == tmp_path / ".cache" / "fedseal"


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def change_class(path: Path) -> None:
    path.write_text(path.read_text().replace('"a"', '"z"'))


def set_old_format(path: Path) -> None:
    outer = json.loads(path.read_text())
    outer["about"]["format"] = 0
    outer["sha256"] = cache._digest(outer["about"])
    path.write_text(json.dumps(outer))


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("pixels.npy", flip_a_byte),
        ("pixels.npy", truncate),
        ("pixels.npy", Path.unlink),
        ("labels.npy", flip_a_byte),
        ("about.json", change_class),
        ("about.json", set_old_format),
        ("about.json", lambda path: path.write_text("[]")),
        ("about.json", lambda path: path.write_bytes(b"\xff\xfe")),
        ("about.json", Path.unlink),
    ],
)
def test_damaged_cache_is_rebuilt_with_a_warning(home, file, damage, caplog) -> None:  # type: ignore[no-untyped-def]
    cache.store("k", make(), "")
    damage(home / "k" / file)
    with caplog.at_level(logging.WARNING, "fedseal"):
        assert same(cache.get_or_build("k", lambda: (make(), "")), make())
    assert "will be rebuilt" in caplog.text and str(home / "k") in caplog.text
    assert cache.load_cached("k") is not None
    assert [path.name for path in home.iterdir()] == ["k"]


def test_a_file_with_the_name_of_a_cache_is_replaced(home: Path) -> None:
    home.mkdir()
    (home / "k").write_text("no folder")
    assert same(cache.get_or_build("k", lambda: (make(), "")), make())


def test_the_first_pool_stays_unless_replaced(home: Path) -> None:
    cache.store("k", make(seed=1), "")
    assert same(cache.store("k", make(seed=2), ""), make(seed=1))
    held = cache.load_cached("k")
    assert same(cache.store("k", make(seed=2), "", replace=True), make(seed=2))
    assert held is not None and same(held, make(seed=1))  # an open memory map outlives its files


def test_full_disk_is_reported_and_nothing_is_left(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hashed_files.HashingFile, "write", full)
    with pytest.raises(UserError, match="No space left on the disk of") as caught:
        cache.store("k", make(), "")
    assert str(home) in str(caught.value) and "FEDSEAL_DATA" in str(caught.value)
    assert list(home.iterdir()) == []


def test_real_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system of 1 MB, if this user may mount one."""
    small = tmp_path / "small"
    small.mkdir()
    try:
        mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)]
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("cannot mount a small file system here")
    try:
        monkeypatch.setenv("FEDSEAL_DATA", str(small))
        with pytest.raises(UserError, match="No space left on the disk of"):
            cache.store("k", make(100_000), "")
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_folder_that_cannot_be_created_is_named(home: Path) -> None:
    home.write_text("in the way")
    with pytest.raises(UserError, match="Cannot write to") as caught:
        cache.store("k", make(), "")
    assert str(home) in str(caught.value)


def test_leftovers_of_killed_processes_are_removed(home: Path) -> None:
    old, new = home / ".work-old", home / ".work-new"
    old.mkdir(parents=True)
    new.mkdir()
    os.utime(old, (0, 0))
    cache.store("k", make(), "")
    assert not old.exists() and new.exists()


def build_beside_another(me: str, folder: Path) -> None:
    """Waits until the other process builds too, so that both store."""

    def build() -> tuple[Pool, str]:
        (folder / me).touch()
        while not (folder / ("b" if me == "a" else "a")).exists():
            time.sleep(0.002)
        return make(20_000), me

    assert same(cache.get_or_build("both", build), make(20_000))


@pytest.mark.parametrize("damaged", [False, True])
def test_two_processes_at_once(home: Path, tmp_path: Path, damaged: bool) -> None:
    if damaged:
        cache.store("both", make(), "")
        flip_a_byte(home / "both" / "pixels.npy")
    fork = multiprocessing.get_context("fork")  # a new interpreter would take seconds to import everything
    processes = [fork.Process(target=build_beside_another, args=(me, tmp_path)) for me in "ab"]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert cache.load_cached("both") is not None and cache.origin("both") in ("a", "b")
    assert [path.name for path in home.iterdir()] == ["both"]


def test_files_state_depends_on_names_sizes_and_times(tmp_path: Path) -> None:
    file, other = tmp_path / "f", tmp_path / "g"

    def state(path: Path, content: bytes, changed: int) -> str:
        path.write_bytes(content)
        os.utime(path, ns=(5, changed))
        return cache.files_state(tmp_path, [path])

    first = state(file, b"1", 5)
    assert first == state(file, b"1", 5)
    assert len({first, state(file, b"1", 6), state(file, b"12", 5), state(other, b"1", 5)}) == 4


def own(number: int, age: float) -> str:
    """Stores own images of about 5 kB that were last used some seconds ago, and returns their key."""
    key = f"folders-{number:016x}-{0:024x}"
    cache.store(key, make(100, number), f"the folder {number}")
    os.utime(cache.root() / key, (time.time() - age,) * 2)
    return key


def names() -> list[str]:
    return [path.name for path in cache.entries()]


def test_own_images_that_were_not_used_for_long_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, newer = own(1, 300), own(2, 200), own(3, 100)
    cache.store("fashion-mnist", make(1000), "")
    os.utime(cache.root() / "fashion-mnist", (0, 0))
    size = cache.size_of([cache.root() / old])
    assert 100 * 3 * 4 * 4 < size < 8000
    monkeypatch.setenv("FEDSEAL_CACHE_GB", str(3.5 * size / 1e9))
    cache.evict()
    assert names() == ["fashion-mnist", old, new, newer]
    monkeypatch.setenv("FEDSEAL_CACHE_GB", str(1.5 * size / 1e9))
    cache.evict()
    assert names() == ["fashion-mnist", newer]
    assert list(cache.root().glob(".work-*")) == []


def test_pools_in_use_are_not_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    old, _ = own(1, 300), own(2, 200)
    monkeypatch.setenv("FEDSEAL_CACHE_GB", "0")
    used = cache.load_cached(old)
    cache.evict()
    assert names() == [old]
    del used
    cache.evict()
    assert names() == []


def use(key: str, ready: Path) -> None:
    pool = cache.load_cached(key)
    ready.touch()
    time.sleep(60)
    assert pool is None


def test_another_process_keeps_what_it_uses(tmp_path: Path) -> None:
    key, ready = own(1, 0), tmp_path / "ready"
    process = multiprocessing.get_context("fork").Process(target=use, args=(key, ready), daemon=True)
    process.start()
    while not ready.exists():
        time.sleep(0.01)
    assert not cache.remove(cache.root() / key) and names() == [key]
    process.kill()
    process.join()
    assert cache.remove(cache.root() / key) and names() == []


def test_an_entry_with_a_file_in_use_is_kept(home: Path) -> None:
    """Features of images have no lock on their folder, but on a file in it. Many files are no problem."""
    folder = home / f"features-{24 * '1'}"
    folder.mkdir(parents=True)
    for number in range(5000):
        (folder / f"{number}.npy").touch()
    os.utime(folder, (0, 0))
    user = make()
    cache.mark_used(folder, user)
    assert time.time() - cache.last_used(folder) < 60
    assert not cache.remove(folder) and names() == [folder.name]
    del user
    assert cache.remove(folder) and names() == []


def test_a_cache_that_cannot_be_changed_is_still_read(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old pools stay there."""
    (tmp_path / "f").write_bytes(b"1")
    key = cache.own_images_key("folders", tmp_path, [tmp_path / "f"])
    old = key[:-1] + ("1" if key[-1] == "0" else "0")
    for name in (key, old):
        cache.store(name, make(), "")
    os.utime(home / old, (0, 0))

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        with pytest.raises(UserError, match=f"Cannot remove {home / old} .Permission denied.: remove it as"):
            cache.remove(home / old)
        patch.setenv("FEDSEAL_CACHE_GB", "0")
        cache.evict()
        assert cache.own_images_key("folders", tmp_path, [tmp_path / "f"]) == key
    assert set(names()) == {key, old} and cache.load_cached(key) is not None
    assert cache.own_images_key("folders", tmp_path, [tmp_path / "f"]) == key
    assert names() == [key]


def test_shared_files_count_once(home: Path) -> None:
    home.mkdir()
    for name in ("a", "b"):
        (home / name).mkdir()
        (home / name / "own").write_bytes(bytes(10))
    (home / "a" / "shared").write_bytes(bytes(1000))
    os.link(home / "a" / "shared", home / "b" / "shared")
    assert cache.size_of([home / "a"]) == cache.size_of([home / "b"]) == 1010
    assert cache.size_of([home / "a", home / "b"]) == 1020


@pytest.mark.parametrize("value", ["many", "nan", "-1"])
def test_a_size_limit_that_is_not_a_number_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSEAL_CACHE_GB", value)
    with pytest.raises(UserError, match=f"FEDSEAL_CACHE_GB is '{value}': set it to a number of gigabytes"):
        cache.evict()


def modes(folder: Path) -> set[int]:
    """The permissions of a folder and its files."""
    return {stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())}


def test_pools_of_own_images_are_private_and_old_ones_become_so(home: Path) -> None:
    key = f"folders-{'0' * 16}-{'1' * 24}"
    before = os.umask(0)
    try:
        cache.store(key, make(), "the folder x")
        cache.store("published", make(), "the official files")
    finally:
        os.umask(before)
    assert modes(home / key) == {0o700, 0o600} and modes(home / "published") == {0o777, 0o666}
    (home / key).chmod(0o755)
    assert cache.load_cached(key) is not None
    assert stat.S_IMODE((home / key).stat().st_mode) == 0o700


@pytest.mark.skipif(os.getuid() == 0 and not Path("/usr/bin/setpriv").exists(), reason="needs setpriv")
def test_a_pool_of_another_user_is_named(home: Path, tmp_path: Path) -> None:
    key = f"folders-{'0' * 16}-{'1' * 24}"
    cache.store(key, make(), "the folder x")
    if os.getuid():
        (home / key).chmod(0)
    code = f"from fedseal.data import cache; cache.load_cached({key!r})"
    command = ["setpriv", "--reuid=65534", "--clear-groups"] if os.getuid() == 0 else []
    answer = subprocess.run([*command, sys.executable, "-c", code], capture_output=True, text=True)
    assert f"The cache {home / key} belongs to another user: set FEDSEAL_DATA" in answer.stderr


def test_a_workspace_in_use_is_kept_and_an_old_one_removed(home: Path) -> None:
    with cache.workspace() as work:
        os.utime(work, (0, 0))
        left = home / ".work-left"
        left.mkdir()
        os.utime(left, (0, 0))
        with cache.workspace():
            assert work.exists() and not left.exists()


def test_a_user_without_a_home_folder_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("FEDSEAL_DATA")
    monkeypatch.setattr(Path, "home", fail)
    with pytest.raises(UserError, match="no home folder: set FEDSEAL_DATA"):
        cache.root()
