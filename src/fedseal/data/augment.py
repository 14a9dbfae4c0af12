"""Weak and strong augmentation of whole batches of uint8 images [N, C, H, W] on the CPU."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedseal.config.sections import AugmentSettings
from fedseal.data.rand_augment import check_images, rand_augment

MAX_INDICES = 2**23  # of pixels that are looked up at once: 64 MB


@dataclass(frozen=True)
class Augmenter:
    """The augmentation of the `[augment]` section; `flip` comes from there or from the data set."""

    settings: AugmentSettings
    flip: bool

    def weak(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """a(x) of Eq. 3: random shift and flip."""
        return weak(images, generator, flip=self.flip, shift=self.settings.shift)

    def strong(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """A(x) of Eq. 14: RandAugment, by default of the weakly augmented image."""
        if self.settings.weak_first:
            images = self.weak(images, generator)
        return rand_augment(images, generator, n=self.settings.n, m=self.settings.m)


def weak(images: Tensor, generator: torch.Generator, *, flip: bool, shift: int) -> Tensor:
    """Shifts each image by up to `shift` pixels each way; if `flip`, also mirrors it with probability 1/2.

    The border is padded by reflection, as in FixMatch: black bars would add edges that no photograph has. For
    images with a black border (digits, clothes), both paddings are the same.
    """
    check_images(images)
    height, width = images.shape[2:]
    if not 0 <= shift < min(height, width):
        raise ValueError(f"shift must be in 0..{min(height, width) - 1} for {height}x{width} images: {shift}")
    maps = _weak_maps(height, width, flip, shift)
    choice = torch.randint(len(maps), (len(images),), generator=generator)
    moved = []
    block = max(MAX_INDICES // (height * width), 1)  # an index has eight times the bytes of a pixel
    for part, chosen in zip(images.flatten(2).split(block), choice.split(block), strict=True):
        source = maps.index_select(0, chosen).unsqueeze(1).expand(-1, images.shape[1], -1)
        moved.append(part.gather(2, source))
    return torch.cat(moved).view(images.shape)


@lru_cache(maxsize=16)
def _weak_maps(height: int, width: int, flip: bool, shift: int) -> Tensor:
    """The source index of each output pixel, for every shift and mirroring: [variants, H * W]."""
    pixels = torch.arange(height * width).view(1, height, width)
    # Reflection padding does not support integers; as doubles, the indices stay exact.
    padded = pad(pixels.double(), (shift,) * 4, mode="reflect").long()[0]
    crops = padded.unfold(0, height, 1).unfold(1, width, 1).reshape(-1, height, width)
    if flip:
        crops = torch.cat([crops, crops.flip(2)])
    return crops.flatten(1).contiguous()
