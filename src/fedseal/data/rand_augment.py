"""RandAugment for whole batches of uint8 images [N, C, H, W], C = 1 or 3, on the CPU.

Cubuk, Zoph, Shlens and Le, "RandAugment: Practical automated data augmentation with a reduced search space"
(2020), with the fourteen operations of that paper.

Each operation gives exactly the pixels of Pillow (nearest sampling, black outside). For speed, all images
with the same operation are processed together, in a few passes over memory that fits into the CPU's cache.
NumPy has less overhead per call than PyTorch and converts floats to bytes several times faster; PyTorch does
the rest. All randomness comes from the generator passed in.
"""

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

HIGHEST_MAGNITUDE = 30  # the top of the paper's scale of M

GREYS = np.arange(256, dtype=np.uint8)
LUMA = np.array([19595, 38470, 7471], np.float32) / 65536  # Pillow's weights for red, green and blue

Bytes = NDArray[np.uint8]
Indices = NDArray[np.int64]
Factor = float | Tensor  # for all images, or [k, 1, 1, 1]
AffineMatrix = tuple[float, float, float, float, float, float]


def rand_augment(images: Tensor, generator: torch.Generator, *, n: int = 2, m: int = 10) -> Tensor:
    """RandAugment(N, M): applies to each image `n` operations, drawn uniformly with replacement.

    `m` in 0..30 is the strength of all operations (see `magnitudes`). Operations with a direction take either
    sign with equal probability.
    """
    check_images(images)
    if n < 0:
        raise ValueError(f"n must not be negative: {n}")
    table = magnitudes(m, *images.shape[2:])
    drawn = torch.randint(len(OPERATIONS), (n, len(images)), generator=generator).numpy()
    signs = torch.randint(2, (n, len(images)), generator=generator).numpy()
    signed = np.array([len(values) - 1 for values in table.values()])

    source = images.contiguous().numpy()
    result = np.empty_like(source) if n else source.copy()
    for variants in (2 * drawn + signs * signed[drawn]).astype(np.uint8):
        for name, magnitude, those in _groups(variants, table):
            result[those] = _ON_ARRAYS[name](source.take(those, axis=0), magnitude)
        source = result
    return torch.from_numpy(result)


def _groups(variants: Bytes, table: dict[str, tuple[float, ...]]) -> Iterator[tuple[str, Factor, Indices]]:
    """Operation, magnitude and images of each group. A variant is 2 · operation, plus 1 for minus."""
    order = variants.argsort(kind="stable")
    stops = np.bincount(variants, minlength=2 * len(table)).cumsum().tolist()
    values = np.array([(pair[0], pair[-1]) for pair in table.values()], np.float32).ravel()
    factors = torch.from_numpy(values[variants[order]]).view(-1, 1, 1, 1)
    start = 0
    for (name, pair), middle, stop in zip(table.items(), stops[::2], stops[1::2], strict=True):
        if name in ENHANCEMENTS and start < stop:
            yield name, factors[start:stop], order[start:stop]
        else:
            for first, last, value in ((start, middle, pair[0]), (middle, stop, pair[-1])):
                if first < last:
                    yield name, value, order[first:last]
        start = stop


def magnitudes(m: int, height: int, width: int) -> dict[str, tuple[float, ...]]:
    """The magnitude of each operation at strength `m`: one value, or two if it has two directions.

    The ranges are AutoAugment's, as in torchvision: a translation of at most 150/331 of the side, truncated
    to whole pixels, and a number of bits rounded to the nearest. Only solarize differs: it starts at 256
    instead of 255, so that it changes nothing at m = 0.
    """
    if not 0 <= m <= HIGHEST_MAGNITUDE:
        raise ValueError(f"m must be in 0..{HIGHEST_MAGNITUDE}: {m}")
    strength = m / HIGHEST_MAGNITUDE
    degrees = 30.0 * strength
    shear = 0.3 * strength
    columns = float(int(150 / 331 * width * strength))
    rows = float(int(150 / 331 * height * strength))
    enhancement = (1 + 0.9 * strength, 1 - 0.9 * strength)
    return {
        "identity": (0.0,),
        "auto_contrast": (0.0,),
        "equalize": (0.0,),
        "rotate": (degrees, -degrees),
        "solarize": (256.0 * (1 - strength),),
        "color": enhancement,
        "posterize": (8.0 - round(4 * strength),),
        "contrast": enhancement,
        "brightness": enhancement,
        "sharpness": enhancement,
        "shear_x": (shear, -shear),
        "shear_y": (shear, -shear),
        "translate_x": (columns, -columns),
        "translate_y": (rows, -rows),
    }


def check_images(images: Tensor) -> None:
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3):
        raise ValueError(f"images must be uint8 [N, 1 or 3, H, W], not {images.dtype} {list(images.shape)}")


# ------------------------------------------------------------------ operations on grey values

# Each takes contiguous uint8 images [k, C, H, W] and leaves them unchanged. The result has the same shape and
# values from 0 to below 256; storing them as bytes truncates them.


def _auto_contrast(images: Bytes, _: float) -> NDArray[np.float64]:
    planes = _planes(images)
    darkest, brightest = planes.min(1, keepdims=True), planes.max(1, keepdims=True)
    flat = darkest == brightest  # these stay unchanged
    darkest[flat], brightest[flat] = 0, 255
    scale = 255.0 / (brightest - darkest)
    values = torch.from_numpy(planes.astype(np.float64))
    values.mul_(torch.from_numpy(scale)).sub_(torch.from_numpy(darkest * scale))
    return values.numpy().reshape(images.shape)


def _equalize(images: Bytes, _: float) -> Bytes:
    planes = _planes(images)
    count, pixels = planes.shape
    places = planes.astype(np.int32)  # indices into all lookup tables in a row, 256 entries per plane
    places += np.arange(0, 256 * count, 256, dtype=np.int32)[:, None]
    line = torch.from_numpy(places.ravel())
    histogram = line.bincount(minlength=256 * count).numpy().reshape(count, 256)
    of_brightest = histogram[np.arange(count), planes.max(1)]
    pixels_per_level = (pixels - of_brightest[:, None]) // 255
    step = np.maximum(pixels_per_level, 1)
    histogram[:, :1] += step // 2  # for rounding; black stays black
    up_to = histogram.cumsum(1)[:, :-1].astype(np.float32)
    up_to /= step.astype(np.float32)
    tables = np.zeros((count, 256), np.uint8)
    tables[:, 1:] = torch.from_numpy(up_to).clamp_(max=255).numpy()
    tables[pixels_per_level[:, 0] == 0] = GREYS
    return torch.from_numpy(tables.ravel()).index_select(0, line).numpy().reshape(images.shape)


def _color(images: Bytes, factor: Factor) -> NDArray[Any]:
    if images.shape[1] == 1:
        return images
    floats = images.astype(np.float32)
    return _blend(_grey(floats), floats, factor)


def _contrast(images: Bytes, factor: Factor) -> NDArray[np.float32]:
    floats = images.astype(np.float32)
    total = _grey(floats).sum((2, 3), keepdims=True, dtype=np.uint32)
    return _blend(np.floor(total / (images.shape[2] * images.shape[3]) + 0.5), floats, factor)


def _brightness(images: Bytes, factor: Factor) -> NDArray[np.float32]:
    return torch.from_numpy(images.astype(np.float32)).mul_(factor).clamp_(0, 255).numpy()


def _sharpness(images: Bytes, factor: Factor) -> NDArray[Any]:
    """Blends with the image smoothed by [1 1 1; 1 5 1; 1 1 1] / 13; the border is not smoothed."""
    height, width = images.shape[2:]
    if min(height, width) < 3:
        return images
    smooth = images.copy()
    # All rows of all images form one line, because long runs are fast. Wrong sums at the border are unused.
    line, edge = images.ravel().astype(np.uint16), width + 1
    across = line[:-2] + line[1:-1]
    across += line[2:]
    sums = 4 * line[edge:-edge]
    for rows in (across[: -2 * width], across[width:-width], across[2 * width :]):
        sums += rows
    smooth.ravel()[edge:-edge] = (sums + 6) // 13  # rounded to the nearest
    smooth[:, :, :: height - 1] = images[:, :, :: height - 1]
    smooth[..., :: width - 1] = images[..., :: width - 1]
    return _blend(smooth, images.astype(np.float32), factor)


def _planes(images: Bytes) -> Bytes:
    return images.reshape(-1, images.shape[2] * images.shape[3])


def _grey(images: NDArray[np.float32]) -> Bytes:
    """Pillow's conversion from RGB to L: sums below 2^8 in steps of 2^-16, exact in single precision."""
    if images.shape[1] == 1:
        return images.astype(np.uint8)
    grey = LUMA @ images.reshape(len(images), 3, -1) + np.float32(0.5)
    return grey.astype(np.uint8).reshape(-1, 1, *images.shape[2:])


def _blend(start: NDArray[Any], end: NDArray[np.float32], factor: Factor) -> NDArray[np.float32]:
    """`start` + `factor` · (`end` − `start`), in single precision as in Pillow. Overwrites `end`.

    PyTorch is faster than NumPy at broadcasting and at `clamp_`.
    """
    first = torch.from_numpy(start).float()
    return torch.from_numpy(end).sub_(first).mul_(factor).add_(first).clamp_(0, 255).numpy()


# ------------------------------------------------------------------ operations on positions


def _rotate(images: Bytes, degrees: float) -> Bytes:
    """Rotates counter-clockwise about the centre."""
    # The matrix is rounded to 15 digits as in Pillow, so that ties fall on the same side.
    angle = -math.radians(degrees % 360.0)
    cos, sin = round(math.cos(angle), 15), round(math.sin(angle), 15)
    x, y = images.shape[3] / 2, images.shape[2] / 2
    return _transform(images, (cos, sin, -cos * x - sin * y + x, -sin, cos, sin * x - cos * y + y))


def _transform(images: Bytes, matrix: AffineMatrix) -> Bytes:
    """Output pixel (x, y) is the input pixel (ax + by + c, dx + ey + f), or black if that is outside."""
    source, inside, runs = _affine_map(matrix, *images.shape[2:])
    planes = _planes(images)
    if len(runs) > images.shape[2]:
        result = planes.take(source, axis=1)
    else:
        result = np.empty_like(planes)
        for start, stop, shift in runs:
            result[:, start:stop] = planes[:, start + shift : stop + shift]
    result &= inside
    return result.reshape(images.shape)


@lru_cache(maxsize=512)
def _affine_map(
    matrix: AffineMatrix, height: int, width: int
) -> tuple[Indices, Bytes, list[tuple[int, int, int]]]:
    """The source index [H * W] of each output pixel, a mask that is 0 where the source is outside, and runs.

    A run (start, stop, shift) is a range of output pixels with their sources `shift` pixels further on. A
    translation is one run and a shear along the rows a few, which are faster to copy than to gather.
    """

    def fixed_point(value: float) -> int:  # 16 fractional bits, as in Pillow
        return math.floor(value * 65536 + 0.5)

    a, b, c, d, e, f = matrix
    x, y = np.arange(width), np.arange(height)[:, None]
    from_x = (fixed_point(a) * x + fixed_point(b) * y + fixed_point(c + a * 0.5 + b * 0.5)) >> 16
    from_y = (fixed_point(d) * x + fixed_point(e) * y + fixed_point(f + d * 0.5 + e * 0.5)) >> 16
    inside = (from_x >= 0) & (from_x < width) & (from_y >= 0) & (from_y < height)
    source, pixels = (from_y * width + from_x).ravel(), height * width
    shifts = source - np.arange(pixels)
    starts = [0, *(np.flatnonzero(np.diff(shifts)) + 1).tolist(), pixels]
    runs = [
        (max(start, -shift), min(stop, pixels - shift), shift)
        for start, stop, shift in zip(starts, starts[1:], shifts[starts[:-1]].tolist(), strict=False)
        if max(start, -shift) < min(stop, pixels - shift)
    ]
    return source.clip(0, pixels - 1), _mask(inside.ravel()), runs


def _mask(where: NDArray[np.bool_]) -> Bytes:
    return -where.view(np.uint8)  # 255 or 0


ENHANCEMENTS = ("color", "contrast", "brightness", "sharpness")  # these accept one factor per image
_ON_ARRAYS: dict[str, Callable[[Bytes, Any], NDArray[Any]]] = {
    "identity": lambda images, _: images,
    "auto_contrast": _auto_contrast,
    "equalize": _equalize,
    "rotate": _rotate,
    "solarize": lambda images, threshold: images ^ _mask(images >= math.ceil(threshold)),
    "color": _color,
    "posterize": lambda images, bits: images & np.uint8(256 - 2 ** (8 - int(bits))),
    "contrast": _contrast,
    "brightness": _brightness,
    "sharpness": _sharpness,
    "shear_x": lambda images, slope: _transform(images, (1, slope, 0, 0, 1, 0)),
    "shear_y": lambda images, slope: _transform(images, (1, 0, 0, slope, 1, 0)),
    "translate_x": lambda images, pixels: _transform(images, (1, 0, int(pixels), 0, 1, 0)),
    "translate_y": lambda images, pixels: _transform(images, (1, 0, 0, 0, 1, int(pixels))),
}


def _on_tensors(name: str) -> Callable[[Tensor, float], Tensor]:
    def operation(images: Tensor, magnitude: float) -> Tensor:
        return torch.from_numpy(_ON_ARRAYS[name](images.contiguous().numpy(), magnitude).astype(np.uint8))

    return operation


# Each takes uint8 images and a magnitude in its own unit: degrees counter-clockwise, slope, whole pixels to
# the left or up, bits kept, lowest grey value inverted, or factor of enhancement (1 changes nothing).
OPERATIONS = {name: _on_tensors(name) for name in _ON_ARRAYS}
