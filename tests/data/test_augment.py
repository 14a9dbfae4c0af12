"""The weak augmentation: shifts and mirroring."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from fedseal.data.augment import weak

NUMBERED = torch.arange(225, dtype=torch.uint8).view(1, 15, 15)  # all pixels differ


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(channels: int) -> Tensor:
    return torch.randint(0, 256, (18, channels, 28, 28), generator=seeded(channels), dtype=torch.uint8)


def as_key(image: Tensor) -> bytes:
    return image.numpy().tobytes()


def moved(image: Tensor, down: int, right: int, *, mirror: bool) -> Tensor:
    """The image [1, H, W] shifted by (down, right), with NumPy's reflection padding."""
    reach = 3
    padded = np.pad(image.numpy()[0], reach, mode="reflect")
    height, width = image.shape[1:]
    crop = padded[reach - down : reach - down + height, reach - right : reach - right + width]
    return torch.from_numpy(crop[:, ::-1].copy() if mirror else crop.copy()).unsqueeze(0)


@pytest.mark.parametrize("shift", [0, 1, 3])
@pytest.mark.parametrize("flip", [False, True])
def test_weak_draws_all_shifts_and_mirrorings_uniformly(flip: bool, shift: int) -> None:
    reach = range(-shift, shift + 1)
    mirrorings = (False, True) if flip else (False,)
    expected = {
        as_key(moved(NUMBERED, down, right, mirror=mirror)): (down, right, mirror)
        for down, right, mirror in product(reach, reach, mirrorings)
    }
    assert len(expected) == (2 * shift + 1) ** 2 * len(mirrorings)
    count = 100 * len(expected)
    result = weak(NUMBERED.expand(count, -1, -1, -1), seeded(7), flip=flip, shift=shift)
    drawn = Counter(expected[as_key(one)] for one in result)
    assert set(drawn) == set(expected.values())
    assert all(60 <= times <= 140 for times in drawn.values())
    if flip:
        mirrored = sum(times for (_, _, mirror), times in drawn.items() if mirror)
        assert abs(mirrored - count / 2) < 2 * count**0.5


def test_weak_moves_the_channels_of_an_image_together() -> None:
    image = torch.cat([NUMBERED, NUMBERED + 10, 255 - NUMBERED])
    result = weak(image.expand(50, -1, -1, -1), seeded(0), flip=True, shift=3)
    assert torch.equal(result[:, 1], result[:, 0] + 10)
    assert torch.equal(result[:, 2], 255 - result[:, 0])
    assert len({as_key(one) for one in result}) > 25


def test_weak_keeps_every_image_in_its_place() -> None:
    images = torch.arange(200, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 28, 28)
    assert torch.equal(weak(images, seeded(0), flip=True, shift=3), images)


def test_weak_without_shift_and_flip_returns_a_copy() -> None:
    images = noise(3)
    result = weak(images, seeded(0), flip=False, shift=0)
    assert torch.equal(result, images)
    assert result.data_ptr() != images.data_ptr()


def test_weak_depends_only_on_the_generator() -> None:
    images = noise(3)
    before = images.clone()
    global_state = torch.get_rng_state()
    first = weak(images, seeded(3), flip=True, shift=4)
    assert torch.equal(torch.get_rng_state(), global_state)
    assert torch.equal(weak(images, seeded(3), flip=True, shift=4), first)
    assert not torch.equal(weak(images, seeded(4), flip=True, shift=4), first)
    assert first.dtype == torch.uint8 and first.shape == images.shape
    assert torch.equal(images, before)


def test_channels_last_images() -> None:
    images = noise(3)
    other_layout = images.contiguous(memory_format=torch.channels_last)
    expected = weak(images, seeded(1), flip=True, shift=3)
    assert torch.equal(weak(other_layout, seeded(1), flip=True, shift=3), expected)


@pytest.mark.parametrize("channels", [1, 3])
def test_empty_batch(channels: int) -> None:
    empty = torch.zeros(0, channels, 28, 28, dtype=torch.uint8)
    assert weak(empty, seeded(0), flip=True, shift=3).shape == empty.shape


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
        weak(wrong, seeded(0), flip=True, shift=1)


@pytest.mark.parametrize("shift", [-1, 28])
def test_out_of_range_shifts_are_refused(shift: int) -> None:
    with pytest.raises(ValueError, match="shift"):
        weak(noise(1), seeded(0), flip=True, shift=shift)
