"""Data sets by name: every way to get them, on real files where they can be had here."""

import gzip
import hashlib
import http.server
import io
import json
import logging
import os
import shutil
import socket
import struct
import tarfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from fedseal.data import cache, download, parquet, sources
from fedseal.data.pool import Pool
from fedseal.data.sources import SOURCES, Source
from fedseal.errors import UserError

FASHION = SOURCES["fashion-mnist"]
SVHN_PARQUET = Path(os.environ.get("FEDSEAL_SVHN") or Path(__file__).parents[3] / "shared" / "data" / "svhn")
USER_CACHE = os.environ.get("FEDSEAL_DATA")


@pytest.fixture(scope="session")
def official(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The four files of Fashion-MNIST, really fetched by Debian's package manager."""
    try:
        tree = download.debian(FASHION.debian, tmp_path_factory.mktemp("debian"))
    except UserError as error:
        pytest.skip(f"Debian's package is not to be had: {error}")
    return tree / "usr/share/datasets/fashion-mnist"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, and a current folder with no data nearby."""
    for name in SOURCES:
        monkeypatch.delenv("FEDSEAL_" + name.upper().replace("-", "_"), raising=False)
    monkeypatch.setenv("FEDSEAL_DATA", str(tmp_path / "cache"))
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    return tmp_path / "cache"


def md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def is_fashion(pool: Pool) -> None:
    assert pool.pixels.shape == (70_000, 1, 28, 28) and pool.labels.dtype == np.int64
    assert pool.parts == {"train": range(60_000), "test": range(60_000, 70_000)}
    assert np.bincount(pool.labels[:60_000]).tolist() == [6000] * 10
    assert np.bincount(pool.labels[60_000:]).tolist() == [1000] * 10
    assert pool.labels[:5].tolist() == [9, 0, 0, 3, 0] and pool.classes[9] == "Ankle boot"
    assert pool.flips and pool.name == "fashion-mnist"


# --- Fashion-MNIST, the real files


def test_import_and_cache(official: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_fashion(sources.get("fashion-mnist", official))
    monkeypatch.setattr(sources, "obtain", lambda *_, **__: pytest.fail("fetched again"))
    start = time.perf_counter()
    is_fashion(sources.load("fashion-mnist"))
    assert time.perf_counter() - start < 2.0


def test_unpacked_files_one_folder_below(official: Path, tmp_path: Path) -> None:
    (tmp_path / "mine" / "raw").mkdir(parents=True)
    for path in official.iterdir():
        (tmp_path / "mine" / "raw" / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    is_fashion(sources.read_dir(FASHION, tmp_path / "mine")[0])


def test_found_beside_the_project(official: Path) -> None:
    Path("../data").mkdir()
    Path("../data/fashion-mnist").symlink_to(official)
    is_fashion(sources.get("fashion-mnist"))


def test_named_by_the_environment(official: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSEAL_FASHION_MNIST", str(official))
    is_fashion(sources.get("fashion-mnist"))
    assert cache.origin("fashion-mnist") == "the official files, checksums verified"


def test_falls_back_to_the_package(official: Path, home: Path) -> None:
    """The whole chain: nothing nearby, no answer at the address, then Debian's package."""
    pool, _ = sources.obtain(
        replace(FASHION, mirrors=(f"http://127.0.0.1:{closed_port()}/",)), progress=False
    )
    is_fashion(pool)
    assert list(home.iterdir()) == []


def test_tampered_file_is_refused(official: Path, tmp_path: Path, home: Path) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(official, bad)
    labels = bytearray(gzip.decompress((bad / "t10k-labels-idx1-ubyte.gz").read_bytes()))
    labels[-1] ^= 1
    (bad / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    with pytest.raises(UserError, match=r"t10k-labels-idx1-ubyte\.gz was cut short or changed"):
        sources.get("fashion-mnist", bad)
    assert not home.exists()


def test_truncated_file_is_refused(official: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(official, bad)
    whole = (bad / "train-labels-idx1-ubyte.gz").read_bytes()
    (bad / "train-labels-idx1-ubyte.gz").write_bytes(whole[:-100])
    with pytest.raises(UserError, match=r"train-labels-idx1-ubyte\.gz is damaged"):
        sources.get("fashion-mnist", bad)


def test_missing_file_is_named(official: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(official, bad)
    (bad / "t10k-images-idx3-ubyte.gz").unlink()
    with pytest.raises(UserError, match="has no t10k-images-idx3-ubyte"):
        sources.get("fashion-mnist", bad)
    with pytest.raises(UserError, match="there is no folder"):
        sources.get("fashion-mnist", tmp_path / "nowhere")


# --- downloads, from a server in this process


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder and the address at which it is served."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(folder))  # type: ignore[arg-type]

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def tiny(folder: Path, address: str) -> tuple[Source, Pool]:
    """A data set in CIFAR-10's format with 12 training and 4 test images, packed in `folder`."""
    rng = np.random.default_rng(0)
    labels = np.array([0, 1] * 8, dtype=np.uint8)
    pixels = rng.integers(0, 256, (16, 3, 32, 32), dtype=np.uint8)
    rows = np.column_stack([labels, pixels.reshape(16, -1)])
    files = {"data_batch_1.bin": rows[:12].tobytes(), "test_batch.bin": rows[12:].tobytes()}
    with tarfile.open(folder / "tiny.tar.gz", "w:gz") as archive:
        for name, data in (files | {"../../escape.txt": b"out"}).items():
            member = tarfile.TarInfo(f"batches/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    source = replace(
        SOURCES["cifar10"],
        name="tiny",
        title="Tiny",
        classes=("a", "b"),
        counts={"train": (6, 6), "test": (2, 2)},
        mirrors=(address,),
        downloads={"tiny.tar.gz": md5((folder / "tiny.tar.gz").read_bytes())},
        files={name: md5(data) for name, data in files.items()},
        sha256=hashlib.sha256(pixels.tobytes() + labels.astype(np.int64).tobytes()).hexdigest(),
        npm="",
    )
    parts = {"train": range(12), "test": range(12, 16)}
    return source, Pool("tiny", pixels, labels.astype(np.int64), ("a", "b"), parts, True)


def test_download(served: tuple[Path, str], home: Path) -> None:
    source, expected = tiny(*served)
    pool, origin = sources.obtain(source)
    assert np.array_equal(pool.pixels, expected.pixels) and np.array_equal(pool.labels, expected.labels)
    assert pool.parts == expected.parts and "official" in origin
    assert list(home.iterdir()) == []  # the archive is not kept, and nothing of it was unpacked to disk


def test_second_mirror_helps(served: tuple[Path, str]) -> None:
    source, expected = tiny(*served)
    source = replace(source, mirrors=(f"http://127.0.0.1:{closed_port()}/", *source.mirrors))
    assert np.array_equal(sources.obtain(source)[0].pixels, expected.pixels)


@pytest.mark.parametrize("harm", [lambda b: b[:-9], lambda b: b[:-1] + bytes([b[-1] ^ 1]), lambda b: b""])
def test_bad_download_is_refused_and_not_kept(
    served: tuple[Path, str],
    home: Path,
    harm: Callable[[bytes], bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    source, _ = tiny(*served)
    archive = served[0] / "tiny.tar.gz"
    archive.write_bytes(harm(archive.read_bytes()))
    with caplog.at_level(logging.WARNING, "fedseal"), pytest.raises(UserError) as caught:
        sources.obtain(source)
    assert "tiny.tar.gz was cut short or changed" in str(caught.value)
    assert "fedseal data get tiny --from DIR" in str(caught.value)
    assert "cut short or changed" in caplog.text
    assert list(home.iterdir()) == []


def test_connection_that_breaks_off(home: Path, served: tuple[Path, str]) -> None:
    """The server promises more bytes than it sends."""
    source, _ = tiny(*served)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for _ in range(2):  # HEAD, then GET
                client, _ = listener.accept()
                client.recv(4096)
                client.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 99999\r\n\r\nabc")
                client.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(UserError, match=r"tiny\.tar\.gz"):
            sources.obtain(replace(source, mirrors=(f"http://127.0.0.1:{listener.getsockname()[1]}/",)))
        thread.join()
    assert list(home.iterdir()) == []


def test_file_that_is_not_there(served: tuple[Path, str]) -> None:
    source, _ = tiny(*served)
    (served[0] / "tiny.tar.gz").unlink()
    with pytest.raises(UserError, match=r"could not be fetched .*not found"):
        sources.obtain(source)


def test_server_that_never_answers(served: tuple[Path, str], home: Path) -> None:
    source, _ = tiny(*served)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start = time.perf_counter()
        with pytest.raises(UserError, match="timed out"):
            sources.obtain(replace(source, mirrors=(f"http://127.0.0.1:{silent.getsockname()[1]}/",)))
        assert 3.5 < time.perf_counter() - start < 6.5
    assert list(home.iterdir()) == []


def test_right_checksums_but_wrong_content(served: tuple[Path, str]) -> None:
    source, _ = tiny(*served)
    for wrong in ({"sha256": "0" * 64}, {"counts": {"train": (5, 7), "test": (2, 2)}}):
        with pytest.raises(UserError, match="are not those of Tiny"):
            sources.obtain(replace(source, **wrong))  # type: ignore[arg-type]


def test_full_disk_ends_the_search(
    served: tuple[Path, str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.write_text("a file where the folder should be")
    with pytest.raises(cache.DiskError, match="set FEDSEAL_DATA"):
        sources.obtain(tiny(*served)[0])


def test_missing_tools_are_named(served: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    source = replace(tiny(*served)[0], mirrors=(), debian="some-package", npm="some-package@1")
    with pytest.raises(UserError, match=r"apt-get is not installed.*npm is not installed"):
        sources.obtain(source)


# --- SVHN and CIFAR-10


def element(kind: int, body: bytes) -> bytes:
    return struct.pack("<II", kind, len(body)) + body + bytes(-len(body) % 8)


def matrix(name: str, array: np.ndarray, kind: int) -> bytes:  # type: ignore[type-arg]
    flags = element(6, struct.pack("<II", 9 if kind == 2 else 6, 0))
    shape = element(5, np.array(array.shape, "<i4").tobytes())
    short_name = struct.pack("<HH", 1, len(name)) + name.encode().ljust(4, b"\0")
    return element(14, flags + shape + short_name + element(kind, array.tobytes(order="F")))


def mat_file(pixels: np.ndarray, labels: np.ndarray, compressed: bool) -> bytes:  # type: ignore[type-arg]
    """As MATLAB writes it: [H, W, C, N] column by column, and labels 1 to 10 as doubles."""
    matrices = [
        matrix("X", pixels.transpose(2, 3, 1, 0), 2),
        matrix("y", labels.reshape(-1, 1).astype("<f8"), 9),
    ]
    if compressed:
        packed = [zlib.compress(m) for m in matrices]
        matrices = [struct.pack("<II", 15, len(body)) + body for body in packed]  # not filled up to 8 bytes
    return b"MATLAB 5.0 MAT-file".ljust(124) + struct.pack("<HH", 0x0100, 0x4D49) + b"".join(matrices)


@pytest.mark.parametrize("compressed", [False, True])
def test_mat_files(tmp_path: Path, compressed: bool) -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (30, 3, 32, 32), dtype=np.uint8)
    digits = np.arange(30) % 10
    stored = np.where(digits == 0, 10, digits)
    files = {"train_32x32.mat": mat_file(pixels[:20], stored[:20], compressed)}
    files["test_32x32.mat"] = mat_file(pixels[20:], stored[20:], compressed)
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    sums = {name: md5(data) for name, data in files.items()}
    counts = {"train": (2,) * 10, "test": (1,) * 10}
    pool, _ = sources.read_dir(replace(SOURCES["svhn"], counts=counts, downloads=sums, files=sums), tmp_path)
    assert np.array_equal(pool.pixels, pixels) and np.array_equal(pool.labels, digits)
    assert not pool.flips


def test_svhn_parquet(tmp_path: Path) -> None:
    """The first rows of the real files; all of them take half a minute."""
    if not SVHN_PARQUET.is_dir():
        pytest.skip("SVHN as Parquet is not at hand: set FEDSEAL_SVHN to its folder")
    for part in ("train", "test"):
        (path,) = SVHN_PARQUET.glob(f"{part}*.parquet")
        rows = next(pq.ParquetFile(path).iter_batches(500))
        pq.write_table(pa.Table.from_batches([rows]), tmp_path / f"{part}.parquet")
    pool = sources.load("parquet", tmp_path, progress=False)
    assert pool.pixels.shape == (1000, 3, 32, 32)
    assert pool.labels[:6].tolist() == [1, 9, 2, 3, 2, 5]  # the official file's first ones
    assert pool.labels[500:506].tolist() == [5, 2, 1, 0, 6, 1]
    with pytest.raises(UserError, match="are not those of SVHN"):
        sources.get("svhn", tmp_path)


@pytest.mark.parametrize("name", list(SOURCES))
def test_what_the_user_has_in_the_cache(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDSEAL_DATA")
    if USER_CACHE:
        monkeypatch.setenv("FEDSEAL_DATA", USER_CACHE)
    if cache.origin(name) is None:
        pytest.skip(f"{name} is not in the cache: `fedseal data get {name}` brings it")
    source, pool = SOURCES[name], sources.get(name)
    assert pool.pixels.shape[1:] == source.shape and pool.classes == source.classes
    for part, span in pool.parts.items():
        assert tuple(np.bincount(pool.labels[span.start : span.stop])) == source.counts[part]


def test_facts() -> None:
    totals = {name: [len(span) for span in source.spans().values()] for name, source in SOURCES.items()}
    assert totals == {
        "fashion-mnist": [60_000, 10_000],
        "cifar10": [50_000, 10_000],
        "svhn": [73_257, 26_032],
    }
    assert all(len(source.classes) == 10 for source in SOURCES.values())


# --- anybody's Parquet files


def write_parquet(
    path: Path,
    images: list[bytes | None],
    labels: list[int],
    classes: list[str] | None = None,
    image: str = "image",
) -> None:
    table = pa.table(
        {
            image: pa.array(
                [{"bytes": data, "path": None} for data in images],
                pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
            ),
            "label": pa.array(labels, pa.int64()),
        }
    )
    if classes:
        about = {"info": {"features": {"label": {"names": classes, "_type": "ClassLabel"}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(about)})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)


def png(shade: int, size: int = 8, mode: str = "L") -> bytes:
    out = io.BytesIO()
    Image.new(mode, (size, size), shade if mode == "L" else (shade, 0, 0)).save(out, "PNG")
    return out.getvalue()


def test_parquet_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "p"
    write_parquet(folder / "train-0.parquet", [png(1), png(2)], [0, 1], ["no", "yes"], image="img")
    write_parquet(folder / "train-1.parquet", [png(3)], [1], image="img")
    write_parquet(folder / "test-0.parquet", [png(4)], [0], image="img")
    write_parquet(folder / "validation-0.parquet", [png(5)], [1], image="img")
    pool = sources.load("parquet", folder)
    assert pool.pixels[:, 0, 0, 0].tolist() == [1, 2, 3, 5, 4] and pool.labels.tolist() == [0, 1, 1, 1, 0]
    assert pool.parts == {"train": range(3), "validation": range(3, 4), "test": range(4, 5)}
    assert pool.classes == ("no", "yes") and pool.flips is False and pool.name == "parquet"
    larger = sources.load("parquet", folder, size=16, channels=3)
    assert larger.pixels.shape == (5, 3, 16, 16)
    monkeypatch.setattr(parquet, "read_parts", lambda *_: pytest.fail("decoded again"))
    assert np.array_equal(sources.load("parquet", folder).pixels, pool.pixels)


def test_broken_rows_are_skipped_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_parquet(tmp_path / "train.parquet", [png(1), b"no image", None, png(2)], [0, 1, 1, 1])
    write_parquet(tmp_path / "test.parquet", [png(4)], [0])
    with caplog.at_level(logging.WARNING, "fedseal"):
        pool = sources.load("parquet", tmp_path)
    assert len(pool.labels) == 3 and pool.classes == ("0", "1")
    assert [name.rpartition("/")[2] for name in pool.skipped] == [
        "train.parquet row 1",
        "train.parquet row 2",
    ]
    assert "row 1 of" in caplog.text


def test_rows_that_are_marked_as_not_labelled_are_skipped(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet", [png(1), png(2)], [0, 1])
    write_parquet(tmp_path / "test.parquet", [png(4), png(5)], [-1, 1])
    pool = sources.load("parquet", tmp_path)
    assert pool.labels.tolist() == [0, 1, 1] and pool.skipped == (f"{tmp_path / 'test.parquet'} row 0",)


def test_refused_parquet(tmp_path: Path) -> None:
    def refuse(message: str) -> None:
        with pytest.raises(UserError, match=message) as caught:
            sources.load("parquet", tmp_path)
        assert str(tmp_path) in str(caught.value)

    refuse(r"has no train\*")
    write_parquet(tmp_path / "train.parquet", [png(1), png(1, 9)], [0, 1])
    refuse("differ in size or colour")
    write_parquet(tmp_path / "train.parquet", [png(1)], [1])
    refuse(r"has no test\*")
    write_parquet(tmp_path / "test.parquet", [png(1, mode="RGB")], [1])
    refuse("differ in size or colour")
    write_parquet(tmp_path / "test.parquet", [png(1)], [5], ["only"])
    write_parquet(tmp_path / "train.parquet", [png(1)], [1], ["only", "two"])
    refuse("has a label 5 but names 2 classes")
    write_parquet(tmp_path / "test.parquet", [png(1)], [0], image="picture")
    refuse("needs the columns image and label")
    write_parquet(tmp_path / "test.parquet", [b"no"], [0])
    refuse("has no usable image")
    pq.write_table(pa.table({"image": [b"plain"], "label": [0]}), tmp_path / "test.parquet")
    refuse("is no Parquet file of images")
    wide = io.BytesIO()
    Image.new("L", (8, 4)).save(wide, "PNG")
    write_parquet(tmp_path / "train.parquet", [wide.getvalue()], [0])
    refuse("are 8×4, not square: set size")
    write_parquet(tmp_path / "train.parquet", [png(1)], [1], ["only", "two"])
    (tmp_path / "test.parquet").write_bytes(b"PAR1 not really")
    refuse("is no Parquet file")


def test_named_source_from_parquet_is_verified(served: tuple[Path, str], tmp_path: Path) -> None:
    source, expected = tiny(*served)

    def save(pixels: np.ndarray) -> None:  # type: ignore[type-arg]
        for part, span in expected.parts.items():
            images: list[bytes | None] = []
            for i in span:
                out = io.BytesIO()
                Image.fromarray(pixels[i].transpose(1, 2, 0)).save(out, "PNG")
                images.append(out.getvalue())
            labels = expected.labels[span.start : span.stop].tolist()
            write_parquet(tmp_path / "p" / f"{part}.parquet", images, labels)

    save(expected.pixels)
    pool, origin = sources.read_dir(source, tmp_path / "p")
    assert np.array_equal(pool.pixels, expected.pixels) and "Parquet" in origin
    save(expected.pixels ^ 1)
    with pytest.raises(UserError, match="are not those of Tiny"):
        sources.read_dir(source, tmp_path / "p")


# --- what `load` refuses


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mnist", {}, "there is no data set 'mnist': choose fashion-mnist"),
        ("folders", {}, "needs a path"),
        ("folders", {"path": Path("x")}, "need a size"),
        ("folders", {"path": Path("x"), "size": 8, "channels": 2}, "channels, 1"),
        ("svhn", {"path": Path("x")}, "fedseal data get svhn --from x"),
        ("svhn", {"size": 28}, "leave size and channels out"),
    ],
)
def test_refused_requests(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        sources.load(name, **options)  # type: ignore[arg-type]


def test_unknown_name_for_get() -> None:
    with pytest.raises(UserError, match="choose one of"):
        sources.get("imagenet")
