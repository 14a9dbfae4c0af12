"""How much faster `rand_augment` is than kornia's RandAugment, both with n = 2, m = 10 and one thread.

Kornia draws one pair of operations per batch, where the paper, and `rand_augment`, draw a pair for each
image.  So there are two comparisons: with kornia on whole batches, an easier task, and with kornia on batches
of one image, the same task.  Since kornia's time depends on the pair, one measurement is the time of many
batches.  Kornia gets its images as floats in [0, 1], made outside the measured time.

Kornia's colour operation takes 3 channels only.  So grey images are compared with kornia on the image
repeated to 3 channels, which is what its user has to do, and with kornia on 1 channel without that operation.
"""

import statistics
import time
from collections.abc import Callable

import torch
from kornia.augmentation.auto import RandAugment
from kornia.augmentation.auto.rand_augment.rand_augment import default_policy
from torch import Tensor

from fedseal.data.augment import rand_augment

BATCH = 600
BATCHES = 12  # in one measurement
SINGLES = 150  # images in one measurement of batches of one
REPEATS = 5


def run() -> list[tuple[str, float, str]]:
    """Rows of name, measured ratio of images per second, and target."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # kornia draws from the global generator
            return _rows()
    finally:
        torch.set_num_threads(threads)


def _rows() -> list[tuple[str, float, str]]:
    every_operation = RandAugment(n=2, m=10)
    no_color = RandAugment(n=2, m=10, policy=[step for step in default_policy if step[0][0] != "color"])
    grey, color = _images(1, 28), _images(3, 32)
    repeated = grey.expand(-1, 3, -1, -1)
    return [
        _compare("28x28x1, kornia on 3 equal channels", grey, every_operation, repeated, ">= 3"),
        _compare("28x28x1, kornia without its colour operation", grey, no_color, grey, ">= 2"),
        _compare("32x32x3", color, every_operation, color, ">= 2"),
        _compare(
            "32x32x3, kornia drawing for each image", color, every_operation, color, ">= 20", single=True
        ),
    ]


def _images(channels: int, side: int) -> Tensor:
    generator = torch.Generator().manual_seed(side)
    return torch.randint(0, 256, (BATCH, channels, side, side), generator=generator, dtype=torch.uint8)


def _compare(
    what: str, ours: Tensor, kornia: RandAugment, kornias: Tensor, target: str, *, single: bool = False
) -> tuple[str, float, str]:
    generator = torch.Generator().manual_seed(0)
    floats = kornias.float().div(255).contiguous()
    kornia_batches = [image.unsqueeze(0) for image in floats[:SINGLES]] if single else [floats] * BATCHES
    our_speeds, kornia_speeds = [], []
    for _ in range(REPEATS):  # taking turns, so that a busy machine slows down both
        our_speeds.append(
            _images_per_second(lambda batch: rand_augment(batch, generator, n=2, m=10), [ours] * BATCHES)
        )
        kornia_speeds.append(_images_per_second(kornia, kornia_batches))
    our_speed, kornia_speed = statistics.median(our_speeds), statistics.median(kornia_speeds)
    print(f"{what}: rand_augment {our_speed:,.0f} img/s, kornia {kornia_speed:,.0f} img/s")
    return f"rand_augment / kornia, {what}", our_speed / kornia_speed, target


def _images_per_second(augment: Callable[[Tensor], object], batches: list[Tensor]) -> float:
    augment(batches[0])
    start = time.process_time()  # of one thread: waiting for a core that others use does not count
    for batch in batches:
        augment(batch)
    return sum(map(len, batches)) / (time.process_time() - start)


if __name__ == "__main__":
    for name, ratio, target in run():
        print(f"{name}: {ratio:.1f} ({target})")
