"""Image files as arrays of pixels.

Every image is rotated according to its EXIF data, converted to grey or RGB, cropped to a centred square and
resized (bilinear, antialiased), so that nothing is distorted. An image that has the right size already keeps
its pixels.
"""

import errno
import io
import os
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import BITSPERSAMPLE, PHOTOMETRIC_INTERPRETATION, SAMPLEFORMAT, TiffImageFile

from fedseal.data.pool import Pixels
from fedseal.errors import UserError

# No others: for some formats, Pillow starts external programs.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
UNSIGNED, WHITE_IS_ZERO = 1, 0  # values of TIFF tags

# A small file can have billions of pixels, and Pillow needs 4 to 20 bytes of memory for each of them.
MAX_PIXELS = 1 << 26  # 8192×8192; larger images are refused before they are decoded
LARGE_PIXELS = 1 << 24  # larger images are decoded one after the other, in a thread of their own
_large_images = ThreadPoolExecutor(1, "large-image")

# A file, its content, an image of Pillow, or an array: uint8 [H, W] or [H, W, C].
ImageSource = Path | bytes | Image.Image | Pixels


def decode_image(source: ImageSource, size: int | None, channels: int | None) -> Pixels:
    """One image as [C, H, W]; None keeps the image's own size or channels. Raises what Pillow raises."""
    if isinstance(source, Image.Image):
        return _prepare(ImageOps.exif_transpose(source), source, size, channels)
    if isinstance(source, np.ndarray):
        pixels = source.squeeze(2) if source.shape[2:] == (1,) else source
        image = Image.fromarray(pixels)
        return _prepare(image, image, size, channels)
    if isinstance(source, Path):
        mode = source.stat().st_mode
        if stat.S_ISDIR(mode):
            raise UserError("a link to a folder")
        if not stat.S_ISREG(mode):
            raise UserError("not a regular file")  # opening a FIFO would wait for ever
    file = source if isinstance(source, Path) else io.BytesIO(source)
    with Image.open(file, formats=FORMATS) as opened:
        number = opened.width * opened.height
        if number > MAX_PIXELS:
            raise Image.DecompressionBombError  # as Pillow does from 179 million pixels on
        if number > LARGE_PIXELS:
            return _large_images.submit(_load, opened, size, channels).result()
        return _load(opened, size, channels)


def _load(opened: Image.Image, size: int | None, channels: int | None) -> Pixels:
    ImageOps.exif_transpose(opened, in_place=True)
    return _prepare(opened, opened, size, channels)


def _prepare(image: Image.Image, opened: Image.Image, size: int | None, channels: int | None) -> Pixels:
    image = _to_eight_bits(image, opened)
    grey = channels == 1 if channels else image.mode in ("1", "L", "LA")
    mode = "L" if grey else "RGB"
    image = image if image.mode == mode else image.convert(mode)
    if size is not None and image.size != (size, size):
        image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
    pixels = np.asarray(image)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _to_eight_bits(image: Image.Image, opened: Image.Image) -> Image.Image:
    """Scales grey images of 12 and 16 bits, which `convert` would clip at 255. Refuses unknown ranges."""
    tags = opened.tag_v2 if isinstance(opened, TiffImageFile) else {}
    if any(kind != UNSIGNED for kind in tags.get(SAMPLEFORMAT, ())):
        raise UserError("signed or floating-point pixels: convert it to 8 or 16 bits")
    if image.mode.startswith("I;16") or (image.mode == "I" and opened.format == "PPM"):
        bits = 12 if tags.get(BITSPERSAMPLE) == (12,) else 16
        values = np.asarray(image)
        if tags.get(PHOTOMETRIC_INTERPRETATION) == WHITE_IS_ZERO:
            values = 2**bits - 1 - values
        return Image.fromarray((values >> (bits - 8)).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise UserError("32-bit pixels: convert it to 8 or 16 bits")
    return image


def decode_images(
    files: Sequence[ImageSource],
    size: int | None,
    channels: int | None,
    workers: int | None = None,
) -> Iterator[Pixels | Exception]:
    """Decodes in threads (Pillow releases the GIL), in order. A broken file yields its exception."""

    def attempt(file: ImageSource) -> Pixels | Exception:
        try:
            return decode_image(file, size, channels)
        except Exception as error:  # Pillow raises many different exceptions on broken files
            return error

    threads = ThreadPoolExecutor(workers or min(8, os.cpu_count() or 1))
    try:
        for start in range(0, len(files), 1024):  # in blocks, to limit the decoded images in memory
            yield from threads.map(attempt, files[start : start + 1024])
    finally:
        threads.shutdown(wait=False, cancel_futures=True)  # a disk that hangs must not delay a stop


def is_unreadable(error: Exception) -> bool:
    """True if an image could not be read now, so that it is unknown whether it is one."""
    if isinstance(error, OSError):  # EINVAL: the file's content asks for a place that cannot be
        return error.errno not in (None, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL)
    return isinstance(error, MemoryError)


def failure_reason(error: Exception) -> str:
    """A short reason; Pillow's own message would repeat the path."""
    if isinstance(error, UnidentifiedImageError):
        return "unknown format"
    if isinstance(error, Image.DecompressionBombError):
        return f"more than {MAX_PIXELS / 1e6:.0f} million pixels"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, MemoryError):
        return "not enough memory"
    if isinstance(error, UserError):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
