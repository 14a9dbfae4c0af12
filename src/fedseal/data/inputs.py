"""Images to predict: files, folders of files, images of Pillow and NumPy arrays."""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from fedseal.data.decode import ImageSource, decode_images, failure_reason
from fedseal.data.folders import PROGRESS_FROM, list_files
from fedseal.data.pool import Pixels
from fedseal.errors import UserError
from fedseal.system.logs import log
from fedseal.system.progress import progress_bar

GivenImage = str | os.PathLike[str] | Image.Image | Pixels
NAMED = 10  # skipped files that are named; the others are counted


class Input(NamedTuple):
    """One image that is not decoded yet."""

    source: ImageSource
    in_folder: bool = False  # found in a folder, where other files are to be expected


def list_inputs(given: GivenImage | Iterable[GivenImage]) -> list[Input]:
    """One image or many. A folder stands for all files in it and below, an array [n, H, W, C] for n."""
    if isinstance(given, str | os.PathLike | Image.Image | np.ndarray) or not isinstance(given, Iterable):
        return _expand(given)
    return [found for one in given for found in _expand(one)]


def _expand(one: object) -> list[Input]:
    if isinstance(one, str | os.PathLike):
        path = Path(one)
        return [Input(file, True) for file in list_files(path)] if path.is_dir() else [Input(path)]
    if isinstance(one, Image.Image):
        return [Input(one)]
    if isinstance(one, np.ndarray):
        if one.dtype != np.uint8 or not (one.ndim == 2 or (one.ndim in (3, 4) and one.shape[-1] in (1, 3))):
            raise UserError(
                "An array must be uint8 [H, W], [H, W, C] or [n, H, W, C] with 1 or 3 channels C, not"
                f" {one.dtype} {list(one.shape)}: convert it (images[..., None] adds one to grey images)."
            )
        return [Input(image) for image in one] if one.ndim == 4 else [Input(one)]
    raise UserError(f"Images are given as paths, PIL images or NumPy arrays, not as {type(one).__name__}.")


def read_batches(
    inputs: Sequence[Input], *, size: int, channels: int, batch: int, skip: bool, progress: bool
) -> Iterator[tuple[list[int], Pixels]]:
    """The decoded images [n, C, size, size] in batches, each with the positions of its images in `inputs`.

    Files in folders that are not readable images are skipped with a warning. With `skip`, all others are too.
    """
    positions: list[int] = []
    images: list[Pixels] = []
    skipped = 0
    with progress_bar("images", len(inputs), show=progress and len(inputs) >= PROGRESS_FROM) as advance:
        sources = [one.source for one in inputs]
        for i, image in enumerate(decode_images(sources, size, channels)):
            advance(1)
            if isinstance(image, Exception):
                name = str(sources[i]) if isinstance(sources[i], Path) else f"image {i}"
                if not (skip or inputs[i].in_folder):
                    raise _unreadable(name, image) from image
                skipped += 1
                if skipped <= NAMED:
                    log.warning("skipped %s: not a readable image (%s)", name, failure_reason(image))
                continue
            positions.append(i)
            images.append(image)
            if len(images) == batch:
                yield positions, np.stack(images)
                positions, images = [], []
    if skipped > NAMED:
        log.warning("skipped %s files in all that are not readable images", f"{skipped:,}")
    if images:
        yield positions, np.stack(images)


def _unreadable(name: str, error: Exception) -> UserError:
    if isinstance(error, FileNotFoundError):
        return UserError(f"There is no image {name}: check the path.")
    return UserError(f"{name} is not a readable image ({failure_reason(error)}): give another file.")
