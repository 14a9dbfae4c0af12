"""Weak and strong augmentation of whole batches of uint8 images [N, C, H, W], C = 1 or 3, on the CPU.

The strong one is RandAugment of Cubuk, Zoph, Shlens and Le, "RandAugment: Practical automated data
augmentation with a reduced search space" (2020), with the fourteen operations of that paper.

Each operation gives the pixels that Pillow gives (nearest sampling, black outside).  What makes it fast:
all images of a batch that drew the same operation and sign share one transformation, so a geometric
operation is one gather through a cached map of pixels, and most others are one gather through a table of
256 grey values.  All chance comes from the generator that is passed in.
"""

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

HIGHEST_MAGNITUDE = 30  # of the scale on which the paper gives M

GREYS = torch.arange(256)

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
    variants = [
        (operation, table[name][sign % len(table[name])])
        for name, operation in OPERATIONS.items()
        for sign in (0, 1)
    ]
    signed = torch.tensor([len(table[name]) - 1 for name in OPERATIONS])
    drawn = torch.randint(len(OPERATIONS), (n, len(images)), generator=generator)
    signs = torch.randint(2, (n, len(images)), generator=generator)

    result = images.clone(memory_format=torch.contiguous_format)
    if len(images) == 0:
        return result
    for chosen in 2 * drawn + signs * signed[drawn]:
        order = chosen.argsort()
        sizes = chosen.bincount(minlength=len(variants)).tolist()
        groups = result.index_select(0, order).split_with_sizes(sizes)
        changed = [
            operation(group, magnitude)
            for (operation, magnitude), group in zip(variants, groups, strict=True)
            if len(group)
        ]
        result = torch.cat(changed).index_select(0, order.argsort())
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


def _identity(images: Tensor, _: float) -> Tensor:
    return images.clone()


def _auto_contrast(images: Tensor, _: float) -> Tensor:
    planes = images.flatten(2)
    darkest, brightest = planes.amin(2, keepdim=True).double(), planes.amax(2, keepdim=True).double()
    # A true division: `255 / tensor` multiplies by the reciprocal, which rounds differently from Pillow.
    scale = torch.full_like(darkest, 255).div_((brightest - darkest).clamp_min(1))
    stretched = (GREYS * scale + -darkest * scale).clamp(0, 255)
    return _look_up(images, torch.where(brightest > darkest, stretched, GREYS))


def _equalize(images: Tensor, _: float) -> Tensor:
    planes = images.flatten(2).long()
    histogram = torch.zeros(*images.shape[:2], 256, dtype=torch.int32)
    histogram.scatter_add_(2, planes, torch.ones_like(planes, dtype=torch.int32))
    of_brightest = histogram.gather(2, planes.amax(2, keepdim=True))
    pixels_per_level = (planes.shape[2] - of_brightest) // 255
    step = pixels_per_level.clamp_min(1)
    darker = histogram.cumsum(2) - histogram
    levels = ((darker + step // 2) / step).clamp_max(255)
    return _look_up(images, torch.where(pixels_per_level > 0, levels, GREYS))


def _solarize(images: Tensor, threshold: float) -> Tensor:
    return _look_up(images, torch.where(GREYS.lt(threshold), GREYS, 255 - GREYS))


def _posterize(images: Tensor, bits: float) -> Tensor:
    return images.bitwise_and(256 - 2 ** (8 - int(bits)))


def _color(images: Tensor, factor: float) -> Tensor:
    return images.clone() if images.shape[1] == 1 else _blend(_grey(images), images, factor)


def _contrast(images: Tensor, factor: float) -> Tensor:
    mean = (_grey(images).flatten(2).mean(2, keepdim=True, dtype=torch.double) + 0.5).floor_()
    return _look_up(images, _blend(mean, GREYS, factor))


def _brightness(images: Tensor, factor: float) -> Tensor:
    return _look_up(images, _blend(torch.zeros(()), GREYS, factor))


def _sharpness(images: Tensor, factor: float) -> Tensor:
    """Away from, or towards, the image smoothed by [1 1 1; 1 5 1; 1 1 1] / 13; the border is not smoothed."""
    sums = images.short()
    sums = sums[:, :, :-2] + sums[:, :, 1:-1] + sums[:, :, 2:]
    sums = sums[..., :-2] + sums[..., 1:-1] + sums[..., 2:]
    inner = images[:, :, 1:-1, 1:-1]
    result = images.clone()
    smooth = (sums + 4 * inner.short()).float().div_(13).add_(0.5).floor_()
    result[:, :, 1:-1, 1:-1] = _blend(smooth, inner, factor)
    return result


def _grey(images: Tensor) -> Tensor:
    """Luma as Pillow makes L of RGB: in integers, all below 2^24 and so exact in single precision."""
    if images.shape[1] == 1:
        return images.float()
    red, green, blue = images.float().split_with_sizes([1, 1, 1], dim=1)
    return ((red * 19595).add_(green * 38470).add_(blue * 7471).add_(0x8000) / 65536).floor_()


def _blend(start: Tensor, end: Tensor, factor: float) -> Tensor:
    """The point at `factor` on the line from `start` (0) to `end` (1), in Pillow's single precision."""
    first = start.float()
    return (end.float() - first).mul_(factor).add_(first).clamp_(0, 255).to(torch.uint8)


def _look_up(images: Tensor, tables: Tensor) -> Tensor:
    """Replace grey values by those in `tables`, cut to integers.

    A table has 256 entries; there is one for all, one for each image or one for each of its channels.
    """
    planes = images.flatten(2).long()
    return tables.to(torch.uint8).expand(*planes.shape[:2], 256).gather(2, planes).view(images.shape)


# ------------------------------------------------------------------ operations on positions


def _rotate(images: Tensor, degrees: float) -> Tensor:
    """Counter-clockwise about the centre."""
    # Pillow's way of making the matrix, down to its 15 digits: a pixel at a tie must fall on the same side.
    angle = -math.radians(degrees % 360.0)
    cos, sin = round(math.cos(angle), 15), round(math.sin(angle), 15)
    x, y = images.shape[3] / 2, images.shape[2] / 2
    return _transform(images, (cos, sin, -cos * x - sin * y + x, -sin, cos, sin * x - cos * y + y))


def _shear_x(images: Tensor, slope: float) -> Tensor:
    return _transform(images, (1, slope, 0, 0, 1, 0))


def _shear_y(images: Tensor, slope: float) -> Tensor:
    return _transform(images, (1, 0, 0, slope, 1, 0))


def _translate_x(images: Tensor, pixels: float) -> Tensor:
    return _transform(images, (1, 0, int(pixels), 0, 1, 0))


def _translate_y(images: Tensor, pixels: float) -> Tensor:
    return _transform(images, (1, 0, 0, 0, 1, int(pixels)))


def _transform(images: Tensor, matrix: AffineMatrix) -> Tensor:
    """The pixel at (x, y) becomes that at (ax + by + c, dx + ey + f), or black if that is outside."""
    source, inside = _affine_map(matrix, *images.shape[2:])
    planes = images.flatten(2)
    return planes.gather(2, source.expand_as(planes)).mul_(inside).view(images.shape)


@lru_cache(maxsize=512)
def _affine_map(matrix: AffineMatrix, height: int, width: int) -> tuple[Tensor, Tensor]:
    """For each output pixel the index of its source and 1, or 0 and 0 if the source is outside: [H * W]."""

    def fixed_point(value: float) -> int:  # 16 bits after the point, as in Pillow
        return math.floor(value * 65536 + 0.5)

    a, b, c, d, e, f = matrix
    x, y = torch.arange(width), torch.arange(height).unsqueeze(1)
    from_x = (fixed_point(a) * x + fixed_point(b) * y + fixed_point(c + a * 0.5 + b * 0.5)) >> 16
    from_y = (fixed_point(d) * x + fixed_point(e) * y + fixed_point(f + d * 0.5 + e * 0.5)) >> 16
    inside = (from_x >= 0) & (from_x < width) & (from_y >= 0) & (from_y < height)
    source = torch.where(inside, from_y * width + from_x, 0)
    return source.flatten(), inside.to(torch.uint8).flatten()


# Each takes uint8 images and a magnitude in its own unit: degrees counter-clockwise, slope, whole pixels
# to the left or up, bits kept, lowest grey value inverted, or factor of enhancement, 1 for none.
OPERATIONS: dict[str, Callable[[Tensor, float], Tensor]] = {
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
