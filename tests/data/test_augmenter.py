"""Weak and strong augmentation as the configuration asks for them."""

import torch
from torch import Tensor

from fedseal.config.sections import AugmentSettings
from fedseal.data.augment import Augmenter, weak
from fedseal.data.rand_augment import rand_augment


def pictures() -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(256, (6, 3, 16, 16), dtype=torch.uint8, generator=draw)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def test_strong_is_weak_then_rand_augment() -> None:
    """Or RandAugment alone."""
    images, draws = pictures(), seeded()
    expected = rand_augment(weak(images, draws, flip=True, shift=2), draws, n=3, m=7)
    settings = AugmentSettings(shift=2, weak_first=True, n=3, m=7)
    strong = Augmenter(settings, flip=True).strong(images, seeded())
    assert torch.equal(strong, expected) and not torch.equal(strong, images)
    alone = settings.model_copy(update={"weak_first": False})
    assert torch.equal(
        Augmenter(alone, flip=True).strong(images, seeded()), rand_augment(images, seeded(), n=3, m=7)
    )


def test_augmentation_can_be_switched_off() -> None:
    """Without shift, flip and operations the images stay the same."""
    nothing = Augmenter(AugmentSettings(shift=0, n=0), flip=False)
    assert torch.equal(nothing.weak(pictures(), seeded()), pictures())
    assert torch.equal(nothing.strong(pictures(), seeded()), pictures())
