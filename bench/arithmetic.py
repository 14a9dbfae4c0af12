"""The cost of portable arithmetic: a training step with AVX2 against one with all instructions."""

import os
import subprocess
import sys

from fedseal.system.environment import AVX2

REPEATS = 3
STEPS = """
import sys
from fedseal.config.load import load_config
from fedseal.data.catalogue import PUBLISHED
from fedseal.reproduce.estimate import seconds_per_image
config = load_config(sys.argv[1])
shape = PUBLISHED[config.data.source].shape
print(min(seconds_per_image.__wrapped__(config.model, shape) for _ in range(int(sys.argv[2]))))
"""


def run() -> list[tuple[str, float, str]]:
    """Rows of name, measured ratio of a step's seconds, and target."""
    rows = []
    for preset, network, steps, target in (
        ("fmnist-lenet", "LeNet", 50, "<= 1.05"),
        ("svhn-resnet9", "ResNet-9", 2, "<= 1.6"),
    ):
        times = [[seconds(preset, steps, v) for v in (AVX2, {})] for _ in range(REPEATS)]
        portable, fastest = map(min, zip(*times, strict=True))
        rows.append((f"{network} step, AVX2 / all instructions", portable / fastest, target))
    return rows


def seconds(preset: str, steps: int, variables: dict[str, str]) -> float:
    """Seconds to train on one image, in a new process, since PyTorch chooses its instructions only once."""
    words = [sys.executable, "-c", STEPS, preset, str(steps)]
    others = {key: value for key, value in os.environ.items() if key not in AVX2}
    done = subprocess.run(words, env=others | variables, capture_output=True, text=True, check=True)
    return float(done.stdout)


if __name__ == "__main__":
    for name, ratio, target in run():
        print(f"{name}: {ratio:.2f} ({target})")
