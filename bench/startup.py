"""Start-up: `fedseal --help`, and `fedseal train` until its first training step.

Each is a new process. They take turns with an empty Python process and with `import torch`, which no training
can avoid.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPEATS = 5
CASES = {
    "python": ["-c", "pass"],
    "import torch": ["-c", "import torch"],
    "fedseal --help": ["-m", "fedseal", "--help"],
}


def run() -> list[tuple[str, float, str]]:
    """Rows of name, measured ratio of seconds, and target."""
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    starts: list[dict[str, float]] = []
    for _ in range(REPEATS):
        for name, arguments in CASES.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
            seconds[name].append(time.perf_counter() - start)
        starts.append(first_step())
    median = {name: statistics.median(values) for name, values in seconds.items()}
    ends = {stage: statistics.median(start[stage] for start in starts) for stage in starts[0]}
    print(", ".join(f"{name} {value:.2f} s" for name, value in median.items()))
    stages = zip(ends, [0.0, *ends.values()], ends.values(), strict=False)
    print("train to its first step: " + ", ".join(f"{stage} {b - a:.2f} s" for stage, a, b in stages))
    torch, train = median["import torch"], list(ends.values())[-1]
    return [
        ("fedseal --help / import torch, seconds", median["fedseal --help"] / torch, "<= 0.5"),
        ("train to its first step / import torch, seconds", train / torch, "<= 2.5"),
    ]


def first_step() -> dict[str, float]:
    """Seconds from the start of `fedseal train demo` to the end of each stage."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bench.first_step", str(Path(folder) / "run")]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    ends: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return ends


if __name__ == "__main__":
    for name, ratio, target in run():
        print(f"{name}: {ratio:.2f} ({target})")
