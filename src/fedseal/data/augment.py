"""Weak and strong augmentation of whole batches of uint8 images [N, C, H, W], C = 1 or 3, on the CPU.

The strong one is RandAugment of Cubuk, Zoph, Shlens and Le, "RandAugment: Practical automated data
augmentation with a reduced search space" (2020), with the fourteen operations of that paper.

Each operation gives the pixels that Pillow gives (nearest sampling, black outside).  What makes it fast:
the images are sorted by the operation and sign they drew, so that all of a kind lie side by side and go
through it together, in a few passes of NumPy over memory that fits the cache.  NumPy, because on arrays of
this size its calls cost less than torch's and it turns floats into bytes several times faster.  All chance
comes from the generator that is passed in.
"""

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

HIGHEST_MAGNITUDE = 30  # of the scale on which the paper gives M

GREYS = np.arange(256, dtype=np.uint8)

LUMA = np.array([19595, 38470, 7471], np.float32)  # Pillow's weights of red, green and blue, of 65536

Bytes = NDArray[np.uint8]
Indices = NDArray[np.int64]
Factor = float | Tensor  # for all images, or [k, 1, 1, 1]
AffineMatrix = tuple[float, float, float, float, float, float]


# ------------------------------------------------------------------ weak


def weak(images: Tensor, generator: torch.Generator, *, flip: bool, shift: int) -> Tensor:
    """Move each image by up to `shift` pixels each way and, if `flip`, mirror it with probability 1/2.

    Pixels that enter from outside are reflections of the image about its border pixels, as in FixMatch:
    black bars would be edges that no real photograph has, and where the border is black (digits, clothes)
    reflected and black padding are the same.
    """
    _check(images)
    height, width = images.shape[2:]
    if not 0 <= shift < min(height, width):
        raise ValueError(f"shift must be in 0..{min(height, width) - 1} for {height}x{width} images: {shift}")
    maps = _weak_maps(height, width, flip, shift)
    choice = torch.randint(len(maps), (len(images),), generator=generator)
    source = maps.index_select(0, choice).unsqueeze(1).expand(-1, images.shape[1], -1)
    return images.flatten(2).gather(2, source).view(images.shape)


@lru_cache(maxsize=16)
def _weak_maps(height: int, width: int, flip: bool, shift: int) -> Tensor:
    """Where each output pixel comes from, for every shift and mirroring: [variants, H * W]."""
    pixels = torch.arange(height * width).view(1, height, width)
    # Indices are padded as doubles since reflection is not offered for integers; they stay exact.
    padded = pad(pixels.double(), (shift,) * 4, mode="reflect").long()[0]
    crops = padded.unfold(0, height, 1).unfold(1, width, 1).reshape(-1, height, width)
    if flip:
        crops = torch.cat([crops, crops.flip(2)])
    return crops.flatten(1).contiguous()


# ------------------------------------------------------------------ RandAugment


def rand_augment(images: Tensor, generator: torch.Generator, *, n: int = 2, m: int = 10) -> Tensor:
    """RandAugment(N, M): each image goes through `n` operations drawn uniformly, with replacement.

    `m` in 0..30 is the one strength of all operations (see `magnitudes`); those with a direction take
    either sign with equal chance.
    """
    _check(images)
    if n < 0:
        raise ValueError(f"n must not be negative: {n}")
    table = magnitudes(m, *images.shape[2:])
    drawn = torch.randint(len(OPERATIONS), (n, len(images)), generator=generator).numpy()
    signs = torch.randint(2, (n, len(images)), generator=generator).numpy()
    signed = np.array([len(values) - 1 for values in table.values()])

    result = images.clone(memory_format=torch.contiguous_format)
    everything = result.numpy()  # the same memory
    for variants in (2 * drawn + signs * signed[drawn]).astype(np.uint8):
        for name, magnitude, those in _groups(variants, table):
            everything[those] = _ON_ARRAYS[name](everything.take(those, axis=0), magnitude)
    return result


def _groups(variants: Bytes, table: dict[str, tuple[float, ...]]) -> Iterator[tuple[str, Factor, Indices]]:
    """Operation, magnitude and images of each group; `variants` are 2 * operation, + 1 if the sign is minus."""
    order = variants.argsort(kind="stable")
    bounds = np.searchsorted(variants[order], np.arange(2 * len(table) + 1)).tolist()
    for i, (name, values) in enumerate(table.items()):
        start, middle, stop = bounds[2 * i : 2 * i + 3]
        if name in ENHANCEMENTS and start < stop:
            factors = np.repeat(np.array(values, np.float32), (middle - start, stop - middle))
            yield name, torch.from_numpy(factors).view(-1, 1, 1, 1), order[start:stop]
        elif name != "identity":
            if start < middle:
                yield name, values[0], order[start:middle]
            if middle < stop:
                yield name, values[-1], order[middle:stop]


def magnitudes(m: int, height: int, width: int) -> dict[str, tuple[float, ...]]:
    """What strength `m` means to each operation: one value, or two if it goes in two directions.

    The ranges are those of AutoAugment in torchvision's reading: a translation of at most 150/331 of the
    side, cut to whole pixels, and a number of bits rounded to the nearest.  Solarize alone begins at 256,
    not 255, so that it does nothing at m = 0.
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


def _check(images: Tensor) -> None:
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3):
        raise ValueError(f"images must be uint8 [N, 1 or 3, H, W], not {images.dtype} {list(images.shape)}")


# ------------------------------------------------------------------ operations on grey values

# Each takes uint8 images [k, C, H, W], in order, and does not change them.  Its result has that shape and
# values from 0 to below 256, whose fractions are dropped when they are stored as bytes.


def _identity(images: Bytes, _: float) -> Bytes:
    return images


def _auto_contrast(images: Bytes, _: float) -> NDArray[np.float64]:
    planes = _planes(images)
    darkest, brightest = planes.min(1, keepdims=True), planes.max(1, keepdims=True)
    flat = darkest == brightest  # to be left alone
    darkest[flat], brightest[flat] = 0, 255
    scale = 255.0 / (brightest - darkest)
    values = torch.from_numpy(planes.astype(np.float64))
    values.mul_(torch.from_numpy(scale)).sub_(torch.from_numpy(darkest * scale))
    return values.numpy().reshape(images.shape)


def _equalize(images: Bytes, _: float) -> Bytes:
    planes = _planes(images)
    count, pixels = planes.shape
    places = planes.astype(np.int32)  # in a line of all tables, 256 places for each plane
    places += np.arange(0, 256 * count, 256, dtype=np.int32)[:, None]
    line = torch.from_numpy(places.ravel())
    histogram = line.bincount(minlength=256 * count).numpy().reshape(count, 256)
    of_brightest = histogram[np.arange(count), planes.max(1)]
    pixels_per_level = (pixels - of_brightest[:, None]) // 255
    step = np.maximum(pixels_per_level, 1)
    levels = (histogram.cumsum(1) - histogram + step // 2).astype(np.float32)  # of the darker pixels
    levels /= step.astype(np.float32)
    tables = torch.from_numpy(levels).clamp_(max=255).numpy().astype(np.uint8)
    tables[pixels_per_level[:, 0] == 0] = GREYS
    return torch.from_numpy(tables.ravel()).index_select(0, line).numpy().reshape(images.shape)


def _solarize(images: Bytes, threshold: float) -> Bytes:
    return images ^ _mask(images >= math.ceil(threshold))


def _posterize(images: Bytes, bits: float) -> Bytes:
    return images & np.uint8(256 - 2 ** (8 - int(bits)))


def _color(images: Bytes, factor: Factor) -> NDArray[Any]:
    return images if images.shape[1] == 1 else _blend(_grey(images), images, factor)


def _contrast(images: Bytes, factor: Factor) -> NDArray[np.float32]:
    total = _grey(images).astype(np.uint32).sum((2, 3), keepdims=True, dtype=np.uint32)
    return _blend(np.floor(total / images[0, 0].size + 0.5), images, factor)


def _brightness(images: Bytes, factor: Factor) -> NDArray[np.float32]:
    return torch.from_numpy(images.astype(np.float32)).mul_(factor).clamp_(0, 255).numpy()


def _sharpness(images: Bytes, factor: Factor) -> NDArray[Any]:
    """Away from, or towards, the image smoothed by [1 1 1; 1 5 1; 1 1 1] / 13; the border is not smoothed."""
    height, width = images.shape[2:]
    if min(height, width) < 3:
        return images
    smooth = images.copy()
    # All rows of all images in one line, since long runs are fast; only the border gets wrong sums by that.
    line, edge = images.ravel().astype(np.uint16), width + 1
    across = line[:-2] + line[1:-1]
    across += line[2:]
    sums = 4 * line[edge:-edge]
    for rows in (across[: -2 * width], across[width:-width], across[2 * width :]):
        sums += rows
    sums += 6
    sums //= 13
    smooth.ravel()[edge:-edge] = sums
    smooth[:, :, :: height - 1] = images[:, :, :: height - 1]
    smooth[..., :: width - 1] = images[..., :: width - 1]
    return _blend(smooth, images, factor)


def _planes(images: Bytes) -> Bytes:
    return images.reshape(-1, images.shape[2] * images.shape[3])


def _grey(images: Bytes) -> NDArray[Any]:
    """Luma as Pillow makes L of RGB: in integers, all below 2^24 and so exact in single precision."""
    if images.shape[1] == 1:
        return images
    grey = LUMA @ images.reshape(len(images), 3, -1).astype(np.float32)
    grey += 0x8000
    grey *= 2**-16
    return np.floor(grey, out=grey).reshape(-1, 1, *images.shape[2:])


def _blend(start: NDArray[Any], end: Bytes, factor: Factor) -> NDArray[np.float32]:
    """The point at `factor` on the line from `start` (0) to `end` (1), in Pillow's single precision."""
    # By torch, which is faster than NumPy at broadcasting and at `clamp_`.
    first = torch.from_numpy(start.astype(np.float32))
    line = torch.from_numpy(end.astype(np.float32))
    return line.sub_(first).mul_(factor).add_(first).clamp_(0, 255).numpy()


# ------------------------------------------------------------------ operations on positions


def _rotate(images: Bytes, degrees: float) -> Bytes:
    """Counter-clockwise about the centre."""
    # Pillow's way of making the matrix, down to its 15 digits: a pixel at a tie must fall on the same side.
    angle = -math.radians(degrees % 360.0)
    cos, sin = round(math.cos(angle), 15), round(math.sin(angle), 15)
    x, y = images.shape[3] / 2, images.shape[2] / 2
    return _transform(images, (cos, sin, -cos * x - sin * y + x, -sin, cos, sin * x - cos * y + y))


def _shear_x(images: Bytes, slope: float) -> Bytes:
    return _transform(images, (1, slope, 0, 0, 1, 0))


def _shear_y(images: Bytes, slope: float) -> Bytes:
    return _transform(images, (1, 0, 0, slope, 1, 0))


def _translate_x(images: Bytes, pixels: float) -> Bytes:
    return _transform(images, (1, 0, int(pixels), 0, 1, 0))


def _translate_y(images: Bytes, pixels: float) -> Bytes:
    return _transform(images, (1, 0, 0, 0, 1, int(pixels)))


def _transform(images: Bytes, matrix: AffineMatrix) -> Bytes:
    """The pixel at (x, y) becomes that at (ax + by + c, dx + ey + f), or black if that is outside."""
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
    """For each output pixel the index of its source and 255, or any and 0 if that is outside: [H * W].

    And the same as runs: from where, up to where, the source is how many pixels further on.  A translation
    is one run, and a shear along the rows a few: these are faster to copy than to gather.
    """

    def fixed_point(value: float) -> int:  # 16 bits after the point, as in Pillow
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


ENHANCEMENTS = ("color", "contrast", "brightness", "sharpness")  # these take a factor for each image, too

_ON_ARRAYS: dict[str, Callable[[Bytes, Any], NDArray[Any]]] = {
    "identity": _identity,
    "auto_contrast": _auto_contrast,
    "equalize": _equalize,
    "rotate": _rotate,
    "solarize": _solarize,
    "color": _color,
    "posterize": _posterize,
    "contrast": _contrast,
    "brightness": _brightness,
    "sharpness": _sharpness,
    "shear_x": _shear_x,
    "shear_y": _shear_y,
    "translate_x": _translate_x,
    "translate_y": _translate_y,
}


def _on_tensors(operation: Callable[[Bytes, Any], NDArray[Any]]) -> Callable[[Tensor, float], Tensor]:
    def on_tensors(images: Tensor, magnitude: float) -> Tensor:
        before = images.contiguous().numpy()
        return torch.from_numpy(np.array(operation(before, magnitude)).astype(np.uint8))

    return on_tensors


# Each takes uint8 images and a magnitude in its own unit: degrees counter-clockwise, slope, whole pixels to
# the left or up, bits kept, lowest grey value inverted, or factor of enhancement, 1 for none.
OPERATIONS = {name: _on_tensors(operation) for name, operation in _ON_ARRAYS.items()}
