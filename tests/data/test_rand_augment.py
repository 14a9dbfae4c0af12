"""RandAugment against Pillow and against its docstrings.

All fourteen operations must give exactly Pillow's pixels (`torch.equal`), at every strength and sign.
"""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from fedseal.data.rand_augment import OPERATIONS, magnitudes, rand_augment

SIZES = [(28, 28), (32, 32), (24, 32)]  # [height, width]; the last one reveals swapped axes
STRENGTHS = [0, 1, 5, 10, 17, 30]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def affine(image: Image.Image, *matrix: float) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST, fillcolor=0)


PILLOW: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "identity": lambda image, _: image,
    "auto_contrast": lambda image, _: ImageOps.autocontrast(image),
    "equalize": lambda image, _: ImageOps.equalize(image),
    "rotate": lambda image, degrees: image.rotate(degrees, Image.Resampling.NEAREST, fillcolor=0),
    "solarize": lambda image, threshold: ImageOps.solarize(image, threshold),  # type: ignore[arg-type]
    "color": lambda image, factor: ImageEnhance.Color(image).enhance(factor),
    "posterize": lambda image, bits: ImageOps.posterize(image, int(bits)),
    "contrast": lambda image, factor: ImageEnhance.Contrast(image).enhance(factor),
    "brightness": lambda image, factor: ImageEnhance.Brightness(image).enhance(factor),
    "sharpness": lambda image, factor: ImageEnhance.Sharpness(image).enhance(factor),
    "shear_x": lambda image, slope: affine(image, 1, slope, 0, 0, 1, 0),
    "shear_y": lambda image, slope: affine(image, 1, 0, 0, slope, 1, 0),
    "translate_x": lambda image, pixels: affine(image, 1, 0, pixels, 0, 1, 0),
    "translate_y": lambda image, pixels: affine(image, 1, 0, 0, 0, 1, pixels),
}
GEOMETRIC = ["rotate", "shear_x", "shear_y", "translate_x", "translate_y"]


def by_pillow(name: str, images: Tensor, magnitude: float) -> Tensor:
    results = []
    for image in images:
        before = Image.fromarray(image[0].numpy() if len(image) == 1 else image.permute(1, 2, 0).numpy())
        assert before.mode == ("L" if len(image) == 1 else "RGB")
        after = torch.from_numpy(np.array(PILLOW[name](before, magnitude)))
        results.append(after.unsqueeze(0) if len(image) == 1 else after.permute(2, 0, 1))
    return torch.stack(results)


def samples(channels: int, height: int, width: int) -> Tensor:
    """Noise of several ranges, and structures that reveal rounding errors and special cases."""
    shape = (channels, height, width)
    generator = seeded(height * 100 + width + channels)

    def noise(low: int, high: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

    x, y = torch.arange(width).expand(shape), torch.arange(height).unsqueeze(1).expand(shape)
    tint = torch.tensor([1.0, 0.6, 0.3])[:channels].view(-1, 1, 1)
    inside = ((x - width / 2) ** 2 + (y - height / 2) ** 2 < 60).byte()
    one_pixel = torch.zeros(shape, dtype=torch.uint8)
    one_pixel[:, height // 2, width // 2] = 255
    few_bright = noise(0, 256) * (noise(0, 256) < 90)
    return torch.stack(
        [
            *(noise(0, 256) for _ in range(4)),
            noise(90, 131),
            noise(200, 256),
            noise(7, 9),
            few_bright,  # mostly black, like a digit
            inside * noise(100, 256),
            (x * 255 / (width - 1) * tint).byte(),
            (y * 255 / (height - 1) * tint).byte(),
            ((x + y) % 2 * 255).byte(),
            ((x // 4 + y // 4) % 2 * 100 + 50).byte(),
            torch.zeros(shape, dtype=torch.uint8),
            torch.full(shape, 255, dtype=torch.uint8),
            torch.full(shape, 77, dtype=torch.uint8),
            one_pixel,
            255 - one_pixel,
        ]
    )


# ------------------------------------------------------------------ each operation against Pillow


def test_the_operations_are_the_fourteen_of_the_paper() -> None:
    assert list(OPERATIONS) == list(PILLOW)
    assert list(magnitudes(10, 28, 28)) == list(PILLOW)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", PILLOW)
def test_operation_equals_pillow_at_every_strength_and_sign(
    name: str, channels: int, size: tuple[int, int]
) -> None:
    images = samples(channels, *size)
    before = images.clone()
    for magnitude in {value for m in STRENGTHS for value in magnitudes(m, *size)[name]}:
        result = OPERATIONS[name](images, magnitude)
        assert result.dtype == torch.uint8
        assert torch.equal(result, by_pillow(name, images, magnitude)), magnitude
        assert result.data_ptr() != images.data_ptr()
    assert torch.equal(images, before)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(["rotate", "shear_x", "shear_y", "color", "contrast", "brightness", "sharpness"]),
    channels=st.sampled_from([1, 3]),
    seed=st.integers(0, 2**32),
    position=st.floats(-1, 1),
)
def test_operation_equals_pillow_anywhere_in_its_range(
    name: str, channels: int, seed: int, position: float
) -> None:
    reach = {"rotate": 30.0, "shear_x": 0.3, "shear_y": 0.3}
    magnitude = position * reach[name] if name in reach else 1 + 0.9 * position
    images = torch.randint(0, 256, (4, channels, 28, 28), generator=seeded(seed), dtype=torch.uint8)
    assert torch.equal(OPERATIONS[name](images, magnitude), by_pillow(name, images, magnitude))


@pytest.mark.parametrize("bits", range(1, 9))
def test_posterize_equals_pillow_for_every_number_of_bits(bits: int) -> None:
    images = samples(1, 28, 28)
    assert torch.equal(OPERATIONS["posterize"](images, bits), by_pillow("posterize", images, bits))


def test_solarize_equals_pillow_for_every_threshold() -> None:
    every_grey = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    for threshold in range(257):
        expected = by_pillow("solarize", every_grey, threshold)
        assert torch.equal(OPERATIONS["solarize"](every_grey, threshold), expected)


def test_color_leaves_grey_images_unchanged() -> None:
    images = samples(1, 28, 28)
    for factor in (0.1, 1.9):
        assert torch.equal(OPERATIONS["color"](images, factor), images)


def test_signs_have_the_stated_directions() -> None:
    image = torch.zeros(1, 1, 5, 5, dtype=torch.uint8)
    image[0, 0, 2, 3] = 9  # right of the centre

    def where(name: str, magnitude: float) -> list[list[int]]:
        return OPERATIONS[name](image, magnitude)[0, 0].nonzero().tolist()

    assert where("translate_x", 1) == [[2, 2]] and where("translate_x", -1) == [[2, 4]]
    assert where("translate_y", 1) == [[1, 3]] and where("translate_y", -1) == [[3, 3]]
    assert where("rotate", 90) == [[1, 2]] and where("rotate", -90) == [[3, 2]]


def test_channels_last_images() -> None:
    images = samples(3, 28, 28)
    other_layout = images.contiguous(memory_format=torch.channels_last)
    for name, operation in OPERATIONS.items():
        magnitude = magnitudes(20, 28, 28)[name][0]
        assert torch.equal(operation(other_layout, magnitude), operation(images, magnitude)), name
    assert torch.equal(rand_augment(other_layout, seeded(1)), rand_augment(images, seeded(1)))


# ------------------------------------------------------------------ strengths


def test_magnitudes_span_the_ranges_of_the_paper() -> None:
    lowest, highest = magnitudes(0, 32, 64), magnitudes(30, 32, 64)
    assert {name: lowest[name] for name in GEOMETRIC} == dict.fromkeys(GEOMETRIC, (0.0, -0.0))
    assert highest["rotate"] == (30.0, -30.0)
    assert highest["shear_x"] == highest["shear_y"] == (0.3, -0.3)
    assert highest["translate_x"] == (29.0, -29.0)  # 150/331 of 64 is 29.003
    assert highest["translate_y"] == (14.0, -14.0)  # 150/331 of 32 is 14.50
    for name in ("color", "contrast", "brightness", "sharpness"):
        assert lowest[name] == (1.0, 1.0)
        assert highest[name] == pytest.approx((1.9, 0.1))
    assert (lowest["posterize"], highest["posterize"]) == ((8.0,), (4.0,))
    assert (lowest["solarize"], highest["solarize"]) == ((256.0,), (0.0,))


def test_magnitudes_of_strength_ten() -> None:
    table = magnitudes(10, 28, 32)
    assert table["rotate"] == pytest.approx((10.0, -10.0))
    assert table["shear_x"] == pytest.approx((0.1, -0.1))
    assert (table["translate_x"], table["translate_y"]) == ((4.0, -4.0), (4.0, -4.0))
    assert table["contrast"] == pytest.approx((1.3, 0.7))
    assert table["posterize"] == (7.0,)
    assert table["solarize"] == pytest.approx((170.667,), abs=1e-3)


@pytest.mark.parametrize("name", [name for name in PILLOW if name not in ("auto_contrast", "equalize")])
def test_strength_zero_changes_nothing(name: str) -> None:
    images = samples(3, 28, 28)
    for magnitude in magnitudes(0, 28, 28)[name]:
        assert torch.equal(OPERATIONS[name](images, magnitude), images)


# ------------------------------------------------------------------ RandAugment

VARIANTS = [(name, magnitude) for name, values in magnitudes(10, 32, 32).items() for magnitude in values]


def noisy(count: int, seed: int = 0) -> Tensor:
    """Images for which the 23 variants (9 operations with a sign, 5 without) have different results."""
    return torch.randint(20, 230, (count, 3, 32, 32), generator=seeded(seed), dtype=torch.uint8)


def as_key(image: Tensor) -> bytes:
    return image.numpy().tobytes()


def outcomes(image: Tensor) -> dict[bytes, tuple[str, float]]:
    """Pillow's results of all operations at strength 10, each with its operation."""
    return {as_key(by_pillow(name, image[None], size)[0]): (name, size) for name, size in VARIANTS}


def test_operations_and_signs_are_drawn_uniformly() -> None:
    image = noisy(1)[0]
    possible = outcomes(image)
    assert len(possible) == len(VARIANTS) == 23
    count = 7000
    result = rand_augment(image.expand(count, -1, -1, -1), seeded(5), n=1, m=10)
    drawn = Counter(
        possible[as_key(one)] for one in result
    )  # a KeyError means that the result is not Pillow's
    for name, magnitude in VARIANTS:
        share = 1 / 14 / len(magnitudes(10, 32, 32)[name])
        spread = (count * share * (1 - share)) ** 0.5
        assert abs(drawn[name, magnitude] - count * share) < 4 * spread, (name, magnitude)


def test_every_image_keeps_its_place() -> None:
    images = noisy(60)
    result = rand_augment(images, seeded(1), n=1, m=10)
    drawn = {outcomes(image)[as_key(after)][0] for image, after in zip(images, result, strict=True)}
    assert len(drawn) > 10


def test_two_operations_are_drawn_independently_and_with_replacement() -> None:
    image = noisy(1)[0]
    once = torch.stack([OPERATIONS[name](image[None], size)[0] for name, size in VARIANTS])
    possible: dict[bytes, set[tuple[str, str]]] = {}
    for second, size in VARIANTS:
        for (first, _), after in zip(VARIANTS, OPERATIONS[second](once, size), strict=True):
            possible.setdefault(as_key(after), set()).add((first, second))
    result = rand_augment(image.expand(5000, -1, -1, -1), seeded(2), n=2, m=10)
    drawn = {as_key(one) for one in result}
    assert drawn <= possible.keys()
    assert len(drawn) > 0.95 * len(possible)
    pairs = {pair for key in drawn for pair in possible[key]}
    assert len(pairs) > 0.98 * 14**2
    assert ("rotate", "rotate") in pairs


def test_zero_operations_return_a_copy() -> None:
    images = samples(3, 28, 28)
    result = rand_augment(images, seeded(0), n=0, m=10)
    assert torch.equal(result, images)
    assert result.data_ptr() != images.data_ptr()


@pytest.mark.parametrize("channels", [1, 3])
def test_rand_augment_depends_only_on_the_generator(channels: int) -> None:
    images = samples(channels, 28, 28)
    before = images.clone()
    global_state = torch.get_rng_state()
    first = rand_augment(images, seeded(3))
    assert torch.equal(torch.get_rng_state(), global_state)
    torch.manual_seed(99)
    assert torch.equal(rand_augment(images, seeded(3)), first)
    assert not torch.equal(rand_augment(images, seeded(4)), first)
    assert first.dtype == torch.uint8 and first.shape == images.shape
    assert torch.equal(images, before)
    torch.set_rng_state(global_state)


def test_every_call_advances_the_generator() -> None:
    images, generator = samples(1, 28, 28), seeded(3)
    assert not torch.equal(rand_augment(images, generator), rand_augment(images, generator))


# ------------------------------------------------------------------ edge cases and invalid arguments


@pytest.mark.parametrize("channels", [1, 3])
def test_empty_batch(channels: int) -> None:
    empty = torch.zeros(0, channels, 28, 28, dtype=torch.uint8)
    assert rand_augment(empty, seeded(0)).shape == empty.shape


@pytest.mark.parametrize("size", [(1, 1), (2, 5)], ids=str)
def test_tiny_images_equal_pillow(size: tuple[int, int]) -> None:
    images = torch.randint(0, 256, (8, 3, *size), generator=seeded(0), dtype=torch.uint8)
    for name, operation in OPERATIONS.items():
        for magnitude in magnitudes(20, *size)[name]:
            assert torch.equal(operation(images, magnitude), by_pillow(name, images, magnitude)), name


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(2, 1, 28, 28),
        torch.zeros(1, 28, 28, dtype=torch.uint8),
        torch.zeros(2, 28, 28, 3, dtype=torch.uint8),
    ],
    ids=["float", "no batch", "channels last"],
)
def test_other_tensors_are_refused(wrong: Tensor) -> None:
    with pytest.raises(ValueError, match="uint8"):
        rand_augment(wrong, seeded(0))


def test_out_of_range_values_are_refused() -> None:
    images = samples(1, 28, 28)
    for m in (-1, 31):
        with pytest.raises(ValueError, match=r"0\.\.30"):
            rand_augment(images, seeded(0), m=m)
    with pytest.raises(ValueError, match="negative"):
        rand_augment(images, seeded(0), n=-1)
