"""Images in Parquet files, in the layout of the Hugging Face Hub."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedseal.config.sections import DataSettings
from fedseal.data import cache
from fedseal.data.decode import decode_images
from fedseal.data.pool import Pixels, Pool, PoolPart, join_parts
from fedseal.errors import UserError
from fedseal.system.lazy import LazyModule
from fedseal.system.logs import log
from fedseal.system.machine import limited_memory
from fedseal.system.progress import progress_bar

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
else:  # it starts a thread, which a process that workers are forked from must not have
    pa, pq = LazyModule("pyarrow"), LazyModule("pyarrow.parquet")


PARTS = ("train", "test")

# A file of a few kilobytes can hold gigabytes: one image to which a million rows refer. A PNG file with one
# colour that is enlarged to 224×224 pixels expands by a factor of 1,500.
MAX_EXPANSION, FREE_BYTES = 2000, 1 << 28
WORK_BYTES = 1 << 30  # memory for reading, besides the images
MAX_ROWS = 16  # that are read at once
BLOCK_ROWS, BLOCK_BYTES = 1024, 1 << 26  # that are decoded at once


def load_parquet(data: DataSettings, progress: bool) -> Pool:
    """The source "parquet" of the `[data]` section."""
    return read_parquet(
        Path(data.path), size=data.size or None, channels=data.channels or None, progress=progress
    )


def read_parquet(
    folder: Path,
    *,
    size: int | None = None,
    channels: int | None = None,
    progress: bool = True,
) -> Pool:
    """Images in `train*.parquet` and `test*.parquet`, as a cached pool."""

    def build() -> tuple[Pool, str]:
        return read_parts(folder, size, channels, progress), f"Parquet files in {folder.resolve()}"

    files = [path for part in PARTS for path in _part_files(folder, part)]
    return cache.get_or_build(cache.own_images_key("parquet", folder, files, size, channels), build)


def _part_files(folder: Path, part: str) -> list[Path]:
    """Regular files only: opening a FIFO would wait for ever."""
    return sorted(path for path in folder.glob(f"{part}*.parquet") if path.is_file())


def read_parts(folder: Path, size: int | None, channels: int | None, progress: bool) -> Pool:
    """The same without the cache."""
    read = {}
    for part in PARTS:
        paths = _part_files(folder, part)
        if not paths:
            raise UserError(
                f"{folder} has no {part}*.parquet: give a folder with train*.parquet and test*.parquet."
            )
        read[part] = _read_part(paths, size, channels, progress)
    if len({images.pixels.shape[1:] for images in read.values()}) > 1:
        raise UserError(f"The images in {folder} differ in size or colour: set data.size and data.channels.")
    highest = max(int(images.labels.max()) for images in read.values())
    classes = _same_classes(read["train"].classes, read["test"].classes, folder / "test*.parquet")
    classes = classes or tuple(map(str, range(highest + 1)))
    if highest >= len(classes):
        raise UserError(
            f"{folder} has a label {highest} but names {len(classes)} classes: correct one of them."
        )
    return join_parts("parquet", read, classes)


def _read_part(paths: list[Path], size: int | None, channels: int | None, progress: bool) -> PoolPart:
    images: list[Pixels] = []
    labels: list[int] = []
    skipped: dict[str, str] = {}
    classes: tuple[str, ...] = ()
    for path in paths:
        try:
            file = pq.ParquetFile(path)
            largest = max(_column_sizes(file.metadata), default=0)
            _check_expansion(path, largest)
            columns = file.schema_arrow.names
            column = "image" if "image" in columns else "img"
            if not {column, "label"} <= set(columns):
                raise UserError(f"{path} needs the columns image and label, but has {', '.join(columns)}.")
            classes = _same_classes(classes, _class_names(file.schema_arrow.metadata), path)
            with (
                progress_bar(path.name, file.metadata.num_rows, show=progress) as advance,
                limited_memory(WORK_BYTES + _max_size(path)),  # the sizes in the file may be false
            ):
                row = expanded = 0
                for content, numbers in _read_blocks(file, column, largest):
                    for image, label in zip(decode_images(content, size, channels), numbers, strict=True):
                        if isinstance(image, MemoryError):
                            raise UserError(
                                f"Not enough memory for row {row} of {path}: remove the row, or try again."
                            ) from image
                        if isinstance(image, Exception) or label is None or label < 0:  # -1: no label
                            skipped[f"{path} row {row}"] = "no readable image or no label"
                            log.warning("skipped row %d of %s: no readable image or no label", row, path)
                        else:
                            images.append(image)
                            labels.append(label)
                            expanded += image.nbytes
                            _check_expansion(path, expanded)
                        row += 1
                    advance(len(content))
        except MemoryError as error:
            raise _expands(path) from error
        except (pa.ArrowException, OSError, KeyError, AttributeError, TypeError, ValueError) as error:
            raise UserError(f"{path} is not a Parquet file of images ({error}): replace it.") from error
    if not images:
        raise UserError(f"{paths[0]} has no readable image with a label: give another folder.")
    if len({image.shape for image in images}) > 1:
        raise UserError(
            f"The images in {paths[0]} differ in size or colour: set data.size and data.channels."
        )
    _, height, width = images[0].shape
    if height != width:
        raise UserError(f"The images in {paths[0]} are {width}×{height}, not square: set data.size.")
    return PoolPart(np.stack(images), np.array(labels, dtype=np.int64), classes, skipped)


def _same_classes(known: tuple[str, ...], more: tuple[str, ...], path: Path) -> tuple[str, ...]:
    """The class names of two files, either of which may have none."""
    if known and more and known != more:
        raise UserError(
            f"{path} names other classes than the files before it, or in another order: write all alike."
        )
    return known or more


def _column_sizes(metadata: "pq.FileMetaData") -> list[int]:
    """The sizes of the columns of all row groups, decompressed."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    return [group.column(i).total_uncompressed_size for group in groups for i in range(group.num_columns)]


def _check_expansion(path: Path, size: int) -> None:
    """Refuses a file whose content needs far more memory than images of its size do."""
    if size > _max_size(path):
        raise _expands(path)


def _max_size(path: Path) -> int:
    return FREE_BYTES + MAX_EXPANSION * path.stat().st_size


def _expands(path: Path) -> UserError:
    return UserError(
        f"{path} expands to more than {MAX_EXPANSION:,} times its size, which no file of images does:"
        " replace it."
    )


def _read_blocks(
    file: "pq.ParquetFile", column: str, largest: int
) -> Iterator[tuple[list[bytes], list[int | None]]]:
    """The bytes and labels of the images, in blocks that fit into memory.

    Each of the rows that are read at once may refer to the same image, which has up to `largest` bytes.
    """
    rows = max(1, min(MAX_ROWS, BLOCK_BYTES // max(largest, 1)))
    content: list[bytes] = []
    labels: list[int | None] = []
    for batch in file.iter_batches(rows, columns=[column, "label"]):
        content += [image or b"" for image in batch.column(column).field("bytes").to_pylist()]
        labels += batch.column("label").cast("int64").to_pylist()
        if len(content) >= BLOCK_ROWS or sum(map(len, content)) > BLOCK_BYTES:
            yield content, labels
            content, labels = [], []
    yield content, labels


def _class_names(metadata: Mapping[bytes, bytes] | None) -> tuple[str, ...]:
    """The class names that Hugging Face's `datasets` library writes into the schema, if present."""
    try:
        about = json.loads((metadata or {})[b"huggingface"])
        return tuple(map(str, about["info"]["features"]["label"]["names"]))
    except (KeyError, ValueError, TypeError):
        return ()
