"""What it costs to round alike on every processor: a step with AVX2 beside one with all that this one has."""

import os
import subprocess
import sys

from fedseal.system.machine import AS_IT_IS, SAME_ARITHMETIC

REPEATS = 3
STEPS = """
import sys
from fedseal.data.sources import SOURCES
from fedseal.reproduce.estimate import seconds_per_image
config = load_config(sys.argv[1])
shape = SOURCES[config.data.source].shape
print(min(seconds_per_image.__wrapped__(config.model, shape) for _ in range(int(sys.argv[2]))))
"""


def run() -> list[tuple[str, float, str]]:
    """Rows of name, measured ratio of a step's seconds, and target."""
    rows = []
    for preset, network, steps in (("fmnist-lenet", "LeNet", 50), ("svhn-resnet9", "ResNet-9", 2)):
        times = [[seconds(preset, steps, v) for v in (SAME_ARITHMETIC, AS_IT_IS)] for _ in range(REPEATS)]
        alike, own = map(min, zip(*times, strict=True))
        rows.append((f"{network} step, AVX2 / all instructions", alike / own, "<= 1.6"))
    return rows


def seconds(preset: str, steps: int, variables: dict[str, str]) -> float:
    """To learn from one image, in a process of its own: instructions are chosen once."""
    words = [sys.executable, "-c", STEPS, preset, str(steps)]
    others = {key: value for key, value in os.environ.items() if key not in SAME_ARITHMETIC}
    done = subprocess.run(words, env=others | variables, capture_output=True, text=True, check=True)
    return float(done.stdout)


if __name__ == "__main__":
    for name, ratio, target in run():
        print(f"{name}: {ratio:.2f} ({target})")
