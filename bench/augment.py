"""Speed of `rand_augment` relative to kornia's RandAugment, both with n = 2, m = 10 and one thread.

Kornia's task is easier: it draws one pair of operations per batch, while the paper and `rand_augment` draw a
pair for each image. In the first two rows, both get one batch of 600 images. The third row is the situation
in training: kornia needs mini-batches to draw more than one pair, while `rand_augment` takes all images of a
client at once.

Kornia's time depends on the pair that it draws, so each measurement covers many batches. Kornia gets its
images as floats in [0, 1]; the conversion is not measured. Its colour operation needs 3 channels, so grey
images are repeated to 3 channels for it.
"""

import statistics
import time
from collections.abc import Callable

import torch
from kornia.augmentation.auto import RandAugment
from torch import Tensor

from fedseal.data.rand_augment import rand_augment

IMAGES = 600
MINI_BATCH = 32
ROUNDS = 12  # through all images in one measurement
REPEATS = 7


def run() -> list[tuple[str, float, str]]:
    """Rows of name, measured ratio of images per second, and target."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # kornia draws from the global generator
            return [
                _compare("28x28x1, one batch of 600, kornia on 3 equal channels", _images(1, 28), IMAGES),
                _compare("32x32x3, one batch of 600", _images(3, 32), IMAGES),
                _compare(
                    "32x32x3, as in training: kornia on mini-batches of 32, ours on a client's whole set",
                    _images(3, 32),
                    MINI_BATCH,
                ),
            ]
    finally:
        torch.set_num_threads(threads)


def _images(channels: int, side: int) -> Tensor:
    generator = torch.Generator().manual_seed(side)
    return torch.randint(0, 256, (IMAGES, channels, side, side), generator=generator, dtype=torch.uint8)


def _compare(what: str, images: Tensor, kornias_batch: int) -> tuple[str, float, str]:
    generator = torch.Generator().manual_seed(0)
    kornia = RandAugment(n=2, m=10)
    floats = images.float().div(255).expand(-1, 3, -1, -1).contiguous()
    our_speeds, kornia_speeds = [], []
    for _ in range(REPEATS):  # alternating, so that a busy machine slows down both
        our_speeds.append(
            _images_per_second(lambda batch: rand_augment(batch, generator, n=2, m=10), [images])
        )
        kornia_speeds.append(_images_per_second(kornia, list(floats.split(kornias_batch))))
    our_speed, kornia_speed = statistics.median(our_speeds), statistics.median(kornia_speeds)
    print(f"{what}: rand_augment {our_speed:,.0f} img/s, kornia {kornia_speed:,.0f} img/s")
    return f"rand_augment / kornia, {what}", our_speed / kornia_speed, ">= 5"


def _images_per_second(augment: Callable[[Tensor], object], batches: list[Tensor]) -> float:
    augment(batches[0])
    start = time.process_time()  # CPU time: waiting for a busy core does not count
    for batch in batches * ROUNDS:
        augment(batch)
    return ROUNDS * sum(map(len, batches)) / (time.process_time() - start)


if __name__ == "__main__":
    for name, ratio, target in run():
        print(f"{name}: {ratio:.1f} ({target})")
