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
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

HIGHEST_MAGNITUDE = 30  # of the scale on which the paper gives M

GREYS = np.arange(256, dtype=np.float32)

CHUNK = 2**16  # bytes of images that go through an operation together: as doubles they still fit the cache

FEW_SHIFTS = 6  # up to this many, shifting a whole batch is faster than gathering its pixels

Bytes = NDArray[np.uint8]
AffineMatrix = tuple[float, float, float, float, float, float]
Shifts = list[tuple[int, Bytes]]


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
    variants = [
        (operation, table[name][sign % len(table[name])])
        for name, operation in _ON_ARRAYS.items()
        for sign in (0, 1)
    ]
    signed = torch.tensor([len(table[name]) - 1 for name in OPERATIONS])
    drawn = torch.randint(len(OPERATIONS), (n, len(images)), generator=generator)
    signs = torch.randint(2, (n, len(images)), generator=generator)
    chosen = (2 * drawn + signs * signed[drawn]).to(torch.uint8).numpy()

    result = images.clone(memory_format=torch.contiguous_format)
    everything = result.numpy()  # the same memory
    chunk = max(1, CHUNK // max(1, everything[:1].size))
    for variant in chosen:
        order = variant.argsort(kind="stable")
        stops = np.bincount(variant, minlength=len(variants)).cumsum().tolist()
        for (operation, magnitude), start, stop in zip(variants, [0, *stops], stops, strict=False):
            for first in range(start, stop, chunk):
                those = order[first : min(first + chunk, stop)]
                group = everything.take(those, axis=0)
                group[...] = operation(group, magnitude)
                everything[those] = group
    return result


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
    flat = darkest == brightest
    scale = np.where(flat, 1.0, 255 / np.where(flat, 1.0, brightest.astype(float) - darkest))
    stretched = planes * scale
    stretched += np.where(flat, 0.0, -darkest.astype(float) * scale)
    return stretched.reshape(images.shape)


def _equalize(images: Bytes, _: float) -> Bytes:
    planes = _planes(images)
    count, pixels = planes.shape
    values = planes.astype(np.int64)
    values += np.arange(0, 256 * count, 256)[:, None]  # so that each plane has 256 of its own
    flat = torch.from_numpy(values.ravel())
    histogram = flat.bincount(minlength=256 * count).numpy()
    histogram = histogram.reshape(count, 256)
    of_brightest = histogram[np.arange(count), planes.max(1)]
    pixels_per_level = ((pixels - of_brightest) // 255)[:, None]
    step = np.maximum(pixels_per_level, 1)
    darker = histogram.cumsum(1) - histogram
    levels = (darker + step // 2).astype(np.float32) / step.astype(np.float32)
    tables = np.where(pixels_per_level > 0, np.minimum(levels, 255), GREYS).astype(np.uint8)
    return tables.ravel().take(values).reshape(images.shape)


def _solarize(images: Bytes, threshold: float) -> Bytes:
    return images ^ _mask(images >= math.ceil(threshold))


def _posterize(images: Bytes, bits: float) -> Bytes:
    return images & np.uint8(256 - 2 ** (8 - int(bits)))


def _color(images: Bytes, factor: float) -> NDArray[Any]:
    return images if images.shape[1] == 1 else _blend(_grey(images), images, factor)


def _contrast(images: Bytes, factor: float) -> NDArray[np.float32]:
    total = _grey(images).sum((2, 3), keepdims=True, dtype=np.uint32)
    return _blend(np.floor(total / images[0, 0].size + 0.5), images, factor)


def _brightness(images: Bytes, factor: float) -> NDArray[np.float32]:
    return _blend(np.zeros((1, 1, 1, 1)), images, factor)


def _sharpness(images: Bytes, factor: float) -> NDArray[Any]:
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
    for border in (np.s_[:, :, 0], np.s_[:, :, -1], np.s_[..., 0], np.s_[..., -1]):
        smooth[border] = images[border]
    return _blend(smooth, images, factor)


def _planes(images: Bytes) -> Bytes:
    return images.reshape(-1, images.shape[2] * images.shape[3])


def _grey(images: Bytes) -> NDArray[Any]:
    """Luma as Pillow makes L of RGB."""
    if images.shape[1] == 1:
        return images
    red, green, blue = (images[:, i : i + 1].astype(np.uint32) for i in range(3))
    return (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16


def _blend(start: NDArray[Any], end: Bytes, factor: float) -> NDArray[np.float32]:
    """The point at `factor` on the line from `start` (0) to `end` (1), in Pillow's single precision."""
    first = start.astype(np.float32)
    line = end.astype(np.float32)
    line -= first
    line *= factor
    line += first
    if not 0 <= factor <= 1:
        torch.from_numpy(line).clamp_(0, 255)  # faster than NumPy's
    return line


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
    source, inside, shifts = _affine_map(matrix, *images.shape[2:])
    planes = _planes(images)
    if len(shifts) > FEW_SHIFTS:
        return (planes.take(source, axis=1) & inside).reshape(images.shape)
    pixels = len(source)
    line = np.zeros(planes.size + 2 * pixels, np.uint8)  # all planes, with room for a shift to either side
    line[pixels:-pixels] = planes.ravel()
    result = np.zeros_like(planes)
    for shift, mask in shifts:
        shifted = line[pixels + shift :][: planes.size].reshape(planes.shape)
        result |= shifted & mask
    return result.reshape(images.shape)


@lru_cache(maxsize=512)
def _affine_map(matrix: AffineMatrix, height: int, width: int) -> tuple[NDArray[np.int64], Bytes, Shifts]:
    """For each output pixel the index of its source and 255, or 0 and 0 if the source is outside: [H * W].

    And the same as shifts: how far on the source is, with the mask, 255 or 0, of the pixels so served.
    """

    def fixed_point(value: float) -> int:  # 16 bits after the point, as in Pillow
        return math.floor(value * 65536 + 0.5)

    a, b, c, d, e, f = matrix
    x, y = np.arange(width), np.arange(height)[:, None]
    from_x = (fixed_point(a) * x + fixed_point(b) * y + fixed_point(c + a * 0.5 + b * 0.5)) >> 16
    from_y = (fixed_point(d) * x + fixed_point(e) * y + fixed_point(f + d * 0.5 + e * 0.5)) >> 16
    inside = ((from_x >= 0) & (from_x < width) & (from_y >= 0) & (from_y < height)).ravel()
    source = np.where(inside, (from_y * width + from_x).ravel(), 0)
    steps = source - np.arange(len(source))
    shifts = [(int(step), _mask(inside & (steps == step))) for step in np.unique(steps[inside])]
    return source, _mask(inside), shifts


def _mask(where: NDArray[np.bool_]) -> Bytes:
    return -where.view(np.uint8)  # 255 or 0


_ON_ARRAYS: dict[str, Callable[[Bytes, float], NDArray[Any]]] = {
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


def _on_tensors(operation: Callable[[Bytes, float], NDArray[Any]]) -> Callable[[Tensor, float], Tensor]:
    def on_tensors(images: Tensor, magnitude: float) -> Tensor:
        before = images.contiguous().numpy()
        return torch.from_numpy(np.array(operation(before, magnitude)).astype(np.uint8))

    return on_tensors


# Each takes uint8 images and a magnitude in its own unit: degrees counter-clockwise, slope, whole pixels to
# the left or up, bits kept, lowest grey value inverted, or factor of enhancement, 1 for none.
OPERATIONS = {name: _on_tensors(operation) for name, operation in _ON_ARRAYS.items()}
