"""Images in folders: what is read, what is skipped, and what is refused."""

import errno
import logging
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedseal.data import cache, decode, folders
from fedseal.data.pool import Pool
from fedseal.errors import UserError

RED, BLUE = (200, 10, 10), (10, 10, 200)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDSEAL_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


def paint(
    path: Path, colour: tuple[int, ...] | int = RED, size: tuple[int, int] = (8, 8), mode: str = "RGB"
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two classes, two clients, validation and test images, in several formats."""
    root = tmp_path / "data"
    for i, kind in enumerate(("png", "jpg", "bmp", "webp")):
        paint(root / "server" / "cat" / f"{i}.{kind}", RED)
        paint(root / "server" / "dog" / f"{i}.{kind}", BLUE)
    paint(root / "clients" / "ward-1" / "x.png", RED)
    paint(root / "clients" / "ward-1" / "deeper" / "y.jpeg", BLUE)
    paint(root / "clients" / "ward-2" / "z.png", BLUE, (40, 20))
    paint(root / "validation" / "dog" / "v.png", BLUE)
    paint(root / "test" / "dog" / "t.png", BLUE)
    paint(root / "test" / "cat" / "t.png", RED)
    return root


def read(root: Path, **options: int) -> Pool:
    return folders.read_folders(root, **({"size": 8, "channels": 3} | options))  # type: ignore[arg-type]


def test_reads_everything_in_order(data: Path) -> None:
    pool = read(data)
    assert pool.pixels.shape == (14, 3, 8, 8) and pool.pixels.dtype == np.uint8
    assert pool.classes == ("cat", "dog")
    assert pool.parts == {
        "server": range(0, 8),
        "clients/ward-1": range(8, 10),
        "clients/ward-2": range(10, 11),
        "validation": range(11, 12),
        "test": range(12, 14),
    }
    assert pool.labels.tolist() == [0] * 4 + [1] * 4 + [-1] * 3 + [1] + [0, 1]
    assert pool.skipped == {} and pool.flips is False
    red = pool.pixels[:, 0].mean(axis=(1, 2)) > 100
    assert red.tolist() == [True] * 4 + [False] * 4 + [False, True] + [False] + [False] + [True, False]


def test_grey_and_resized(data: Path) -> None:
    pool = read(data, size=5, channels=1)
    assert pool.pixels.shape == (14, 1, 5, 5)
    assert pool.pixels[0, 0, 0, 0] == Image.new("RGB", (1, 1), RED).convert("L").getpixel((0, 0))


def test_second_start_decodes_nothing(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = read(data)
    monkeypatch.setattr(decode, "decode_image", lambda *_: pytest.fail("decoded again"))
    again = read(data)
    assert np.array_equal(first.pixels, again.pixels) and first.parts == again.parts


def test_changed_file_is_read_again(data: Path) -> None:
    before = read(data).pixels[0].copy()
    changed = paint(data / "server" / "cat" / "0.png", BLUE)
    os.utime(changed, ns=(1, 1))
    assert not np.array_equal(before, read(data).pixels[0])


def test_earlier_states_of_a_folder_are_kept_for_a_week(data: Path, home: Path) -> None:
    """A run that started with one of them opens it again for each new worker."""
    read(data, size=5)
    for number in range(3):
        paint(data / "clients" / "ward-1" / f"new-{number}.png", BLUE)
        read(data)
    assert len(list(home.glob("folders-*"))) == 4
    for path in home.glob("folders-*"):
        os.utime(path, (0, 0))
    read(data)  # removes the earlier states, but not that of another size
    assert len(list(home.glob("folders-*"))) == 2


def test_a_linked_folder_is_read_again_when_it_changes(data: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (data / "clients" / "ward-1").rename(elsewhere)
    (data / "clients" / "ward-1").symlink_to(elsewhere)
    before = len(read(data).parts["clients/ward-1"])
    paint(elsewhere / "new.png", BLUE)
    assert len(read(data).parts["clients/ward-1"]) == before + 1


def test_new_empty_client_is_noticed_despite_the_cache(data: Path) -> None:
    read(data)
    (data / "clients" / "ward-3").mkdir()
    with pytest.raises(UserError, match="Client 'ward-3' has no readable image"):
        read(data)


def test_unreadable_files_are_skipped_counted_and_named(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    (data / "server" / "cat" / "notes.txt").write_text("not an image")
    whole = (data / "server" / "dog" / "0.png").read_bytes()
    (data / "clients" / "ward-1" / "cut.png").write_bytes(whole[: len(whole) // 2])
    (data / "clients" / "ward-1" / "empty.png").touch()
    (data / "server" / "stray.png").write_bytes(whole)
    (data / "clients" / "ward-1" / ".DS_Store").write_text("hidden")
    paint(data / "clients" / "ward-1" / ".thumbs" / "t.png")
    with caplog.at_level(logging.WARNING, "fedseal"):
        pool = read(data)
    names = {Path(name).name for name in pool.skipped}
    assert names == {"notes.txt", "cut.png", "empty.png", "stray.png"} and len(pool.skipped) == 4
    assert all(name in caplog.text for name in names) and "DS_Store" not in caplog.text
    assert pool.skipped[str(data / "server" / "stray.png")] == "not in the folder of a class"
    assert pool.skipped[str(data / "server" / "cat" / "notes.txt")] == "not a readable image (unknown format)"
    assert len(pool.labels) == 14 and len(pool.parts["clients/ward-1"]) == 2
    caplog.clear()
    with caplog.at_level(logging.WARNING, "fedseal"):
        assert read(data).skipped == pool.skipped
    assert "4 files" in caplog.text


def png_of(width: int, height: int) -> bytes:
    """A small file that declares a huge image."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("side", [8193, 60_000])
def test_decompression_bomb_is_skipped(data: Path, side: int) -> None:
    (data / "clients" / "ward-2" / "bomb.png").write_bytes(png_of(side, side))
    [(name, reason)] = read(data).skipped.items()
    assert Path(name).name == "bomb.png"
    assert reason == "not a readable image (more than 67 million pixels)"


def test_postscript_is_never_run(data: Path) -> None:
    (data / "clients" / "ward-2" / "evil.eps").write_text(
        "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EOF\n"
    )
    assert [Path(name).name for name in read(data).skipped] == ["evil.eps"]


def empty(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def drop(folder: Path) -> None:
    for where, _, names in os.walk(folder, topdown=False):
        for name in names:
            Path(where, name).unlink()
        Path(where).rmdir()


@pytest.mark.parametrize(
    ("change", "message", "culprit"),
    [
        (lambda d: drop(d / "server"), "has no server/", ""),
        (lambda d: drop(d / "clients"), "has no clients/", ""),
        (lambda d: empty(d / "server" / "dog"), "Class 'dog' has no readable image", "server/dog"),
        (
            lambda d: drop(d / "server" / "dog"),
            "a folder for each of two or more classes, but has 1",
            "server",
        ),
        (
            lambda d: [drop(d / "clients" / w) for w in ("ward-1", "ward-2")],
            "is empty: add one folder for each client",
            "clients",
        ),
        (
            lambda d: empty(d / "clients" / "ward-2"),
            "Client 'ward-2' has no readable image",
            "clients/ward-2",
        ),
        (lambda d: paint(d / "test" / "cow" / "c.png"), "is not one of the classes cat, dog", "test/cow"),
        (lambda d: [drop(c) for c in (d / "test").iterdir()], "one folder for each class", "test"),
        (
            lambda d: paint(d / "validation" / "cow" / "c.png"),
            "is not one of the classes cat, dog",
            "validation/cow",
        ),
    ],
)
def test_refused_folders_are_named(data: Path, home: Path, change, message: str, culprit: str) -> None:  # type: ignore[no-untyped-def]
    change(data)
    with pytest.raises(UserError, match=message) as caught:
        read(data)
    assert str(data / culprit) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not home.exists() or list(home.iterdir()) == []


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There is no folder"):
        read(tmp_path / "nowhere")


def test_client_with_only_broken_files(data: Path) -> None:
    empty(data / "clients" / "ward-2")
    (data / "clients" / "ward-2" / "a.png").write_text("no")
    with pytest.raises(UserError, match="Client 'ward-2' has no readable image"):
        read(data)


def test_a_broken_link_is_skipped(data: Path) -> None:
    (data / "clients" / "ward-1" / "gone.png").symlink_to(data / "nowhere.png")
    assert [Path(name).name for name in read(data).skipped] == ["gone.png"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PermissionError(errno.EACCES, "Permission denied"), "Permission denied"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
        (MemoryError(), "not enough memory"),
    ],
)
def test_a_file_that_cannot_be_read_now_is_tried_again(
    data: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    locked, real = data / "clients" / "ward-1" / "x.png", decode.decode_image

    def fail(file: Path, *rest: Any) -> Any:
        if file == locked:
            raise error
        return real(file, *rest)

    with monkeypatch.context() as patched, pytest.raises(UserError) as caught:
        patched.setattr(decode, "decode_image", fail)
        read(data)
    assert str(caught.value) == f"Cannot read {locked} ({reason}): check the file, then try again."
    assert read(data).skipped == {}


def test_image_of_the_right_size_is_unchanged(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "i.png")
    assert np.array_equal(decode.decode_image(tmp_path / "i.png", 8, 3), pixels.transpose(2, 0, 1))


def test_wide_image_is_cropped_in_the_middle(tmp_path: Path) -> None:
    pixels = np.zeros((10, 30, 3), dtype=np.uint8)
    pixels[:, 10:20] = 255
    Image.fromarray(pixels).save(tmp_path / "i.png")
    assert decode.decode_image(tmp_path / "i.png", 10, 3).min() == 255


def test_shrinking_is_antialiased(tmp_path: Path) -> None:
    """A fine chequerboard becomes grey; without antialiasing it would stay black or white."""
    board = (np.indices((64, 64)).sum(axis=0) % 2 * 255).astype(np.uint8)
    Image.fromarray(board).save(tmp_path / "i.png")
    small = decode.decode_image(tmp_path / "i.png", 8, 1)
    assert small.min() > 110 and small.max() < 145


def test_images_are_rotated_according_to_exif(tmp_path: Path) -> None:
    pixels = np.zeros((8, 8, 3), dtype=np.uint8)
    pixels[:4] = 255
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    Image.fromarray(pixels).save(tmp_path / "i.png", exif=exif)
    turned = decode.decode_image(tmp_path / "i.png", 8, 3)
    assert turned[:, :4].max() == 0 and turned[:, 4:].min() == 255


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_colour_mode(tmp_path: Path, mode: str, channels: int) -> None:
    path = tmp_path / ("i.tiff" if mode == "CMYK" else "i.png")
    Image.new("RGBA", (8, 8), (255, 255, 255, 255)).convert("RGB").convert(mode).save(path)
    pixels = decode.decode_image(path, 6, channels)
    assert pixels.shape == (channels, 6, 6) and pixels.dtype == np.uint8 and pixels.min() > 250


def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path) -> None:
    Image.fromarray(np.full((8, 8), 0x8000, dtype=np.uint16)).save(tmp_path / "i.png")
    assert set(decode.decode_image(tmp_path / "i.png", 8, 1).ravel().tolist()) == {128}


def test_single_parts(data: Path) -> None:
    server = folders.read_labelled(data / "server", size=8, channels=3)
    assert server.classes == ("cat", "dog") and server.labels.tolist() == [0] * 4 + [1] * 4
    test = folders.read_labelled(data / "validation", server.classes, size=8, channels=3)
    assert test.labels.tolist() == [1]


def test_a_client_alone(data: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ward = data / "clients" / "ward-1"
    client = folders.read_client(ward, ("cat", "dog"), size=8, channels=3)
    assert client.pixels.shape == (2, 3, 8, 8) and client.labels.tolist() == [-1, -1]
    assert client.classes == ("cat", "dog")
    decoded: list[Path] = []
    real = folders.decode_images

    def count(files: Sequence[Path], *rest: Any) -> Any:
        decoded.extend(files)
        return real(files, *rest)

    monkeypatch.setattr(folders, "decode_images", count)
    paint(ward / "new.png")
    more = folders.read_client(ward, ("cat", "dog"), size=8, channels=3)
    assert len(more.labels) == 3 and decoded == [ward / "new.png"]
    folders.read_client(ward, ("cat", "dog"), size=8, channels=3)
    assert len(decoded) == 1
    with pytest.raises(UserError, match="There is no folder"):
        folders.read_client(data / "clients" / "nobody", (), size=8, channels=3)


def test_files_are_in_the_order_of_their_names_for_any_number_of_threads(tmp_path: Path, home: Path) -> None:
    for i in np.random.default_rng(0).permutation(300):
        paint(tmp_path / "c" / f"{i % 7}" / f"{i:03d}.png", int(i % 256), (4, 4), "L")
    expected = [i % 256 for i in sorted(range(300), key=lambda i: f"{i % 7}/{i:03d}")]
    for workers in (1, 4):
        pool = folders.read_client(tmp_path / "c", (), size=4, channels=1, workers=workers)
        assert pool.pixels[np.arange(300)][:, 0, 0, 0].tolist() == expected
        shutil.rmtree(home)


def test_the_cache_records_the_origin(data: Path, home: Path) -> None:
    read(data)
    (key,) = (path.name for path in home.iterdir())
    assert cache.origin(key) == f"the folder {data}"


def test_special_files_and_foreign_folders_are_left_out(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = read(data)
    (data / "server" / "__MACOSX" / "cat").mkdir(parents=True)
    for name in ("Thumbs.db", ".DS_Store", "desktop.ini"):
        (data / "server" / "cat" / name).write_bytes(b"foreign")
        (data / "clients" / name).write_bytes(b"foreign")
    assert read(data).pixels.shape == before.pixels.shape and not caplog.messages
    os.mkfifo(data / "server" / "cat" / "fifo.png")
    (data / "clients" / "ward-2" / "loop.png").symlink_to(data / "clients" / "ward-2" / "loop.png")
    (data / "clients" / "ward-1" / "up").symlink_to(data / "clients")
    pool = read(data)
    assert pool.pixels.shape == before.pixels.shape and pool.classes == ("cat", "dog")
    assert sorted(Path(name).name for name in pool.skipped) == ["fifo.png", "loop.png", "up"]
    assert "fifo.png: not a readable image (not a regular file)" in caplog.text
    assert "up: not a readable image (a link to a folder)" in caplog.text


def test_files_beside_the_folders_of_clients_are_named(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    read(data)  # a pool in the cache does not hide them
    stray = paint(data / "clients" / "stray.png")
    assert read(data).skipped == {str(stray): "not in the folder of a client"}
    assert f"skipped {stray}: not in the folder of a client" in caplog.text


@pytest.mark.parametrize("folder", ["clients", "clients/ward-1", "clients/ward-1/deeper"])
def test_a_folder_that_cannot_be_read_is_refused(
    data: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    locked = str(data / folder)

    def lock(real: Callable[..., Any]) -> Callable[..., Any]:
        def scan(path: Any = ".") -> Any:
            if str(path) == locked:
                raise PermissionError(errno.EACCES, "Permission denied", locked)
            return real(path)

        return scan

    for name in ("listdir", "scandir"):  # of pathlib and of os.walk
        monkeypatch.setattr(os, name, lock(getattr(os, name)))
    with pytest.raises(UserError) as caught:
        read(data)
    expected = f"Cannot read {locked} (Permission denied): check the folder, then try again."
    assert str(caught.value) == expected


def test_folder_names_that_are_not_utf8_are_refused(data: Path) -> None:
    (data / "server" / "caf\udce9").mkdir()
    with pytest.raises(UserError) as caught:
        read(data)
    assert str(caught.value) == f"The name of the folder {data}/server/caf\\udce9 is not UTF-8: rename it."
