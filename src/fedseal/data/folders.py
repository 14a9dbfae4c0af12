"""One's own images in folders: `server/<class>/…` with labels, `clients/<name>/…` without.

Optional are `test/<class>/…` and `validation/<class>/…`. Every image is turned as its EXIF data say, made
grey or RGB, cropped in the middle to a square and resized (bilinear, antialiased), so that nothing is
distorted; an image that already has the size stays as it is.
"""

import io
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from fedseal.data import cache
from fedseal.data.download import bar
from fedseal.data.pool import Ints, Pixels, Pool
from fedseal.errors import UserError

log = logging.getLogger("fedseal")

# Only these: some of Pillow's other formats start outside programs.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
MANY = 200  # files from which on a progress bar is worth it


@dataclass(frozen=True)
class Images:
    """What was read from a folder."""

    pixels: Pixels  # [N, C, size, size]
    labels: Ints  # [N]; -1 without labels
    classes: tuple[str, ...]  # empty without labels
    skipped: tuple[str, ...]  # files that were no images


def decode(file: Path | bytes, size: int | None, channels: int | None) -> Pixels:
    """Decode one image to [C, H, W]; raises what Pillow raises. None leaves size or channels as they are."""
    with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file, formats=FORMATS) as opened:
        image: Image.Image = ImageOps.exif_transpose(opened)
        if image.mode.startswith("I;16"):  # convert() would clip at 255
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        grey = channels == 1 if channels else image.mode in ("1", "L", "LA", "I", "F")
        image = image.convert("L" if grey else "RGB")
        if size is not None and image.size != (size, size):
            image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
        pixels = np.asarray(image)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def read_image(path: Path, size: int, channels: int) -> Pixels:
    """One image as uint8 [C, size, size]."""
    try:
        return decode(path, size, channels)
    except FileNotFoundError as error:
        raise UserError(f"there is no image {path}: check its name") from error
    except Exception as error:  # Pillow raises nearly anything on a broken file
        raise UserError(f"{path} is not an image that can be read ({why(error)})") from error


def read_labelled(
    folder: Path,
    classes: Sequence[str] | None = None,
    *,
    size: int,
    channels: int,
    workers: int | None = None,
    progress: bool = True,
) -> Images:
    """Images in `folder/<class>/…`; the classes are the folders' names, or must be among `classes`."""
    found = _subfolders(folder)
    if classes is None:
        classes = found
        if len(found) < 2:
            raise UserError(f"{folder} needs at least two folders, one for each class, but has {len(found)}")
    elif unknown := [name for name in found if name not in classes]:
        raise UserError(f"{folder / unknown[0]} is no class: known are {', '.join(classes)}")
    elif not found:
        raise UserError(f"{folder} has no images in folders that are called like their class: sort them so")
    files = [(file, classes.index(name)) for name in found for file in _files(folder / name)]
    pixels, kept, skipped = _decode_all([file for file, _ in files], size, channels, workers, progress)
    labels = np.array([files[i][1] for i in kept], dtype=np.int64)
    for name in found:
        if not np.any(labels == classes.index(name)):
            raise UserError(f"class '{name}' has no usable image: put some in {folder / name}, or remove it")
    stray = [str(path) for path in sorted(folder.iterdir()) if path.is_file() and path.name[0] != "."]
    for name in stray:
        log.warning("skipped %s: it lies in no class's folder", name)
    return Images(pixels, labels, tuple(classes), (*stray, *skipped))


def read_unlabelled(
    folder: Path, *, size: int, channels: int, workers: int | None = None, progress: bool = True
) -> Images:
    """Every image below `folder`."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}: check its name")
    pixels, kept, skipped = _decode_all(_files(folder), size, channels, workers, progress)
    if not kept:
        raise UserError(f"client '{folder.name}' has no usable image: put some in {folder}, or remove it")
    return Images(pixels, np.full(len(kept), -1, dtype=np.int64), (), skipped)


def read_folders(
    path: Path,
    *,
    size: int,
    channels: int,
    workers: int | None = None,
    progress: bool = True,
) -> Pool:
    """The whole of a data folder as a pool, cached until a file in it changes."""
    if not path.is_dir():
        raise UserError(f"there is no folder {path}: give one that has server/ and clients/")
    for needed, content in (("server", "a folder for each class"), ("clients", "a folder for each client")):
        if not (path / needed).is_dir():
            raise UserError(f"{path} has no {needed}/: it must hold {content}")
    clients = _subfolders(path / "clients")
    if not clients:
        raise UserError(f"{path / 'clients'} has no client: it must hold a folder for each client")

    def build() -> tuple[Pool, str]:
        def labelled(name: str, classes: Sequence[str] | None) -> Images:
            return read_labelled(
                path / name, classes, size=size, channels=channels, workers=workers, progress=progress
            )

        server = labelled("server", None)
        read = {"server": server}
        for name in clients:
            read[f"clients/{name}"] = read_unlabelled(
                path / "clients" / name, size=size, channels=channels, workers=workers, progress=progress
            )
        for name in ("validation", "test"):
            if (path / name).is_dir():
                read[name] = labelled(name, server.classes)
        return join("folders", read, server.classes), f"the folder {path}"

    parts = [path / name for name in ("server", "clients", "validation", "test") if (path / name).is_dir()]
    found = [part / name for part in parts for name in _subfolders(part)]  # one may have no file
    files = [file for folder in found for file in _files(folder)]
    key = cache.own_key("folders", path, [*found, *files], size, channels)
    pool = cache.load(key)
    if pool is not None and pool.skipped:  # a build names each of them
        log.warning("%d files in %s are no images, such as %s", len(pool.skipped), path, pool.skipped[0])
    return pool or cache.store(key, *build())


def join(name: str, read: dict[str, Images], classes: Sequence[str]) -> Pool:
    """Images of several parts behind one another. Only `augment.flip` can say that they may be mirrored."""
    parts, start = {}, 0
    for part, images in read.items():
        parts[part] = range(start, start + len(images.labels))
        start += len(images.labels)
    pixels = np.concatenate([images.pixels for images in read.values()])
    labels = np.concatenate([images.labels for images in read.values()])
    skipped = tuple(file for images in read.values() for file in images.skipped)
    return Pool(name, pixels, labels, tuple(classes), parts, flips=False, skipped=skipped)


def _subfolders(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}: check its name")
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")


def _files(folder: Path) -> list[Path]:
    """All files below a folder but hidden ones, in an order that is the same on every machine."""
    found = []
    for where, subfolders, names in os.walk(folder):
        subfolders[:] = [name for name in subfolders if name[0] != "."]
        found += [Path(where, name) for name in names if name[0] != "."]
    return sorted(found, key=lambda file: file.relative_to(folder).as_posix())


def _decode_all(
    files: Sequence[Path], size: int, channels: int, workers: int | None, progress: bool
) -> tuple[Pixels, list[int], tuple[str, ...]]:
    """The images, the indices of the files that they are from, and the files that were none."""
    pixels = np.empty((len(files), channels, size, size), dtype=np.uint8)
    kept: list[int] = []
    skipped = []
    with bar("images", len(files), progress and len(files) >= MANY) as advance:
        for i, image in enumerate(decode_many(files, size, channels, workers)):
            if isinstance(image, Exception):
                log.warning("skipped %s: it is no image that can be read (%s)", files[i], why(image))
                skipped.append(str(files[i]))
            else:
                pixels[len(kept)] = image
                kept.append(i)
            advance(1)
    return pixels[: len(kept)], kept, tuple(skipped)


def decode_many(
    files: Sequence[Path] | Sequence[bytes],
    size: int | None,
    channels: int | None,
    workers: int | None = None,
) -> Iterator[Pixels | Exception]:
    """Decode in threads (Pillow lets go of Python's lock), in order; a broken file gives its exception."""

    def attempt(file: Path | bytes) -> Pixels | Exception:
        try:
            return decode(file, size, channels)
        except Exception as error:  # Pillow raises nearly anything on a broken file
            return error

    with ThreadPoolExecutor(workers or min(8, os.cpu_count() or 1)) as threads:
        for start in range(0, len(files), 1024):  # by blocks, to hold few images at once
            yield from threads.map(attempt, files[start : start + 1024])


def why(error: Exception) -> str:
    """In a few words; Pillow's own message repeats the path."""
    if isinstance(error, UnidentifiedImageError):
        return "unknown format"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
