"""Images in Parquet files, in the layout of the Hugging Face hub."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fedseal.data import cache, download, folders
from fedseal.data.pool import Pixels, Pool
from fedseal.errors import UserError

log = logging.getLogger("fedseal")

PARTS = ("train", "validation", "test")


def read_parquet(
    folder: Path,
    *,
    size: int | None = None,
    channels: int | None = None,
    progress: bool = True,
) -> Pool:
    """Images in Hugging Face's layout, `train*.parquet` and `test*.parquet` (`validation*`, if there)."""
    files = [path for part in PARTS for path in sorted(folder.glob(f"{part}*.parquet"))]
    key = cache.own_key("parquet", folder, files, size, channels)
    build = lambda: (read_parts(folder, size, channels, progress), f"Parquet files in {folder}")  # noqa: E731
    return cache.cached(key, build)


def read_parts(folder: Path, size: int | None, channels: int | None, progress: bool) -> Pool:
    read = {}
    for part in PARTS:
        paths = sorted(folder.glob(f"{part}*.parquet"))
        if paths:
            read[part] = _read_part(paths, size, channels, progress)
        elif part != "validation":
            raise UserError(f"{folder} has no {part}*.parquet: give a folder that has train* and test*")
    if len({images.pixels.shape[1:] for images in read.values()}) > 1:
        raise UserError(f"the images in {folder} differ in size or colour: set size and channels")
    highest = max(int(images.labels.max()) for images in read.values())
    classes = read["train"].classes or tuple(map(str, range(highest + 1)))
    if highest >= len(classes):
        raise UserError(f"{folder} has a label {highest} but names {len(classes)} classes: mend either")
    return folders.join("parquet", read, classes)


def _read_part(paths: list[Path], size: int | None, channels: int | None, progress: bool) -> folders.Images:
    images: list[Pixels] = []
    labels: list[int] = []
    skipped: list[str] = []
    classes: tuple[str, ...] = ()
    for path in paths:
        try:
            file = pq.ParquetFile(path)
            columns = file.schema_arrow.names
            column = "image" if "image" in columns else "img"
            if not {column, "label"} <= set(columns):
                raise UserError(f"{path} needs the columns image and label, but has {', '.join(columns)}")
            classes = classes or _class_names(file.schema_arrow.metadata)
            with download.bar(path.name, file.metadata.num_rows, progress) as advance:
                row = 0
                for batch in file.iter_batches(1024, columns=[column, "label"]):
                    content = batch.column(column).field("bytes").to_pylist()
                    for image, label in zip(
                        folders.decode_many(content, size, channels),
                        batch.column("label").cast("int64").to_pylist(),
                        strict=True,
                    ):
                        if isinstance(image, Exception) or label is None or label < 0:  # -1: not labelled
                            skipped.append(f"{path} row {row}")
                            log.warning("skipped row %d of %s: no image or no label", row, path)
                        else:
                            images.append(image)
                            labels.append(label)
                        row += 1
                    advance(len(content))
        except (pa.ArrowException, OSError, KeyError, AttributeError) as error:
            raise UserError(f"{path} is no Parquet file of images that can be read ({error})") from error
    if not images:
        raise UserError(f"{paths[0]} has no usable image: give another folder")
    if len({image.shape for image in images}) > 1:
        raise UserError(f"the images in {paths[0]} differ in size or colour: set size and channels")
    _, height, width = images[0].shape
    if height != width:
        raise UserError(f"the images in {paths[0]} are {width}×{height}, not square: set size")
    return folders.Images(np.stack(images), np.array(labels, dtype=np.int64), classes, tuple(skipped))


def _class_names(metadata: Mapping[bytes, bytes] | None) -> tuple[str, ...]:
    """As Hugging Face's library writes them into the schema."""
    try:
        about = json.loads((metadata or {})[b"huggingface"])
        return tuple(map(str, about["info"]["features"]["label"]["names"]))
    except (KeyError, ValueError, TypeError):
        return ()
