"""The cached pixels of image folders: a new state reuses the files of an earlier one."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedseal.data import cache, decode, folders, segments
from fedseal.data.pool import Pool, SegmentedPixels
from fedseal.data.segments import choose_kept


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDSEAL_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are decoded from now on."""
    names: list[str] = []
    original = decode.decode_image

    def record(file: Path, size: int, channels: int) -> object:
        names.append(file.name)
        return original(file, size, channels)

    monkeypatch.setattr(decode, "decode_image", record)
    return names


def draw(path: Path, value: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (4, 4), value).save(path)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two classes and two clients; the images have different values."""
    root, value = tmp_path / "data", 0
    for folder in ("server/cat", "server/dog", "clients/a", "clients/b"):
        for i in range(4):
            draw(root / folder / f"{folder[-1]}{i}.png", value := value + 1)
    return root


def read(root: Path) -> Pool:
    return folders.read_folders(root, size=4, channels=1)


def read_afresh(root: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Pool:
    """The pool without an earlier state."""
    with monkeypatch.context() as patch:
        patch.setenv("FEDSEAL_DATA", str(home.parent / "another"))
        return read(root)


def same(one: Pool, other: Pool) -> bool:
    rest = all(getattr(one, name) == getattr(other, name) for name in ("classes", "parts", "skipped"))
    return rest and np.array_equal(one.pixels, other.pixels) and np.array_equal(one.labels, other.labels)


def newest(home: Path) -> Path:
    return max(home.iterdir(), key=lambda path: path.stat().st_mtime_ns)


def test_only_new_and_changed_files_are_decoded(
    data: Path, home: Path, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(read(data).labels) == len(decoded) == 16
    first = newest(home)

    decoded.clear()
    draw(data / "clients" / "a" / "a00.png", 100)  # between others in the order of names
    pool = read(data)
    assert decoded == ["a00.png"]
    assert pool.pixels[8:14][:, 0, 0, 0].tolist() == [9, 100, 10, 11, 12, 13]
    linked = newest(home) / "pixels-0.bin"
    assert linked.samefile(first / "pixels-0.bin") and linked.stat().st_size == 16 * 16
    assert (newest(home) / "pixels-1.bin").stat().st_size == 16
    assert same(pool, read_afresh(data, home, monkeypatch))

    decoded.clear()
    draw(data / "server" / "cat" / "t1.png", 200)
    os.utime(data / "server" / "cat" / "t1.png", ns=(7, 7))
    (data / "clients" / "b" / "b0.png").unlink()
    (data / "clients" / "b" / "b1.png").rename(data / "clients" / "b" / "c.png")
    pool = read(data)
    assert sorted(decoded) == ["c.png", "t1.png"]
    assert same(pool, read_afresh(data, home, monkeypatch))
    decoded.clear()
    assert same(pool, read(data)) and decoded == []


def test_a_removed_image_needs_no_new_segment(data: Path, home: Path, decoded: list[str]) -> None:
    read(data)
    decoded.clear()
    (data / "clients" / "b" / "b0.png").unlink()
    pool = read(data)
    assert decoded == [] and [path.name for path in newest(home).glob("*.bin")] == ["pixels-0.bin"]
    assert pool.pixels[:][:, 0, 0, 0].tolist() == [*range(1, 13), 14, 15, 16]


def test_many_additions_leave_few_segments(
    data: Path, home: Path, monkeypatch: pytest.MonkeyPatch, decoded: list[str]
) -> None:
    read(data)
    decoded.clear()
    for i in range(20):
        draw(data / "clients" / "a" / f"new-{i}.png", 50 + i)
        pool = read(data)
    assert decoded == [f"new-{i}.png" for i in range(20)]
    assert len(list(newest(home).glob("*.bin"))) <= 4
    assert same(pool, read_afresh(data, home, monkeypatch))


def test_a_segment_is_kept_if_it_is_larger_than_the_new_one_and_half_used() -> None:
    """1 new image absorbs the segment with 1; the 2 are then absorbed too; 5 > 4, but of "d" 9 of 20 are
    used, which is less than half."""
    used = {"a": 5, "b": 1, "c": 2, "d": 9}
    assert choose_kept(used, {"a": 5, "b": 1, "c": 4, "d": 20, "unused": 3}, 1) == ["a"]
    assert choose_kept(used, {"a": 5, "b": 1, "c": 4, "d": 18}, 0) == ["a", "b", "c", "d"]


def test_without_hard_links_segments_are_copied(
    data: Path, home: Path, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no hard links here")

    read(data)
    first = newest(home) / "pixels-0.bin"
    decoded.clear()
    monkeypatch.setattr(segments.os, "link", refuse)
    draw(data / "clients" / "a" / "new.png", 50)
    read(data)
    copied = newest(home) / "pixels-0.bin"
    assert decoded == ["new.png"] and not copied.samefile(first)
    assert copied.read_bytes() == first.read_bytes()


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("pixels-0.bin", flip_last_byte),  # large: linked
        ("pixels-1.bin", flip_last_byte),  # small: absorbed
        ("pixels-1.bin", Path.unlink),
        ("places.npy", flip_last_byte),
        ("files.json", flip_last_byte),
        ("about.json", lambda path: path.write_text("{}")),
    ],
)
def test_nothing_is_taken_from_a_damaged_state(  # type: ignore[no-untyped-def]
    data: Path, home: Path, decoded: list[str], monkeypatch: pytest.MonkeyPatch, file: str, damage
) -> None:
    read(data)
    draw(data / "clients" / "a" / "x.png", 50)
    read(data)
    for path in sorted(home.iterdir())[:]:
        if not (path / "pixels-1.bin").exists():
            assert cache.remove(path)
    damage(newest(home) / file)
    draw(data / "clients" / "a" / "y.png", 60)
    decoded.clear()
    assert same(read(data), read_afresh(data, home, monkeypatch))
    assert len([name for name in decoded if name != "y.png"]) == 2 * 17


def test_a_state_of_an_earlier_version_is_still_read(data: Path, home: Path, decoded: list[str]) -> None:
    """Its pixels are in one file; a new state cannot take images from it."""
    pool = read(data)
    key = newest(home).name
    whole = Pool("folders", np.array(pool.pixels), np.array(pool.labels), pool.classes, pool.parts, False)
    cache.store(key, whole, "the folder", replace=True)
    assert (home / key / "pixels.npy").exists()
    decoded.clear()
    assert same(read(data), pool) and decoded == []
    draw(data / "clients" / "a" / "x.png", 50)
    assert len(read(data).labels) == len(decoded) == 17


def test_a_worker_maps_the_same_files(data: Path) -> None:
    read(data)
    draw(data / "clients" / "a" / "x.png", 50)
    pool = read(data)
    assert isinstance(pool.pixels, SegmentedPixels)
    sent = pickle.dumps(pool.pixels)
    received = pickle.loads(sent)
    assert all(isinstance(segment, np.memmap) for segment in received.segments)
    assert np.array_equal(received, pool.pixels) and received.shape == (17, 1, 4, 4)
    assert received[3].tolist() == pool.pixels[np.array([3])][0].tolist()
    assert len(received) == 17


def test_channel_statistics_are_exact() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (300, 3, 5, 5), dtype=np.uint8)
    rows = np.arange(0, 300, 2)
    pool = Pool("made", pixels, np.zeros(300, np.int64), ("a",), {}, False)
    mean, std = pool.channel_statistics(rows)
    assert mean == pixels[rows].mean(axis=(0, 2, 3), dtype=np.float64).tolist()
    assert std == pytest.approx(pixels[rows].std(axis=(0, 2, 3), dtype=np.float64).tolist(), rel=1e-14)
