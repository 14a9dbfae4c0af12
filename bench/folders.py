"""Own image folders: starts after the first one, and the memory that 100,000 images need.

`python -m bench.folders` makes 2,000 JPEG files of 224 pixels. It compares the start after one image was
added, and the start without a change, with the first one, which decodes all images. The three take turns.

`python -m bench.folders --images 100000` makes that number of files, runs `fedseal` on them and writes
results/bench/folders.json. The pixels of 100,000 images are 15 GB on disk. Memory is the highest sum of
RssAnon over the process and its workers: all memory that does not belong to a file. The resident memory
(VmRSS) also counts pages of memory-mapped files, which the kernel drops when it needs the memory. To see
that, run it in a control group with a hard limit, which the results then name.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from bench.page import Found, grid, measured_on, save, write_page
from fedseal.data.folders import read_folders
from fedseal.system.machine import cores

SIZE, CHANNELS = 224, 3
IMAGES, REPEATS = 2000, 3
CLASSES, CLIENTS = ("a", "b"), 100
LABELLED = 200  # images of the server; as many are for testing
TRAINING = {
    "method": "fedseal",
    "evaluate": "model",
    "rounds": 1,
    "cohort": 1,
    "bootstrap.epochs": 0,
    "fedseal.bootstrap_epochs": 1,
    "fedseal.scope": "sampled",
    "server.epochs": 1,
    "client.epochs": 1,
}

Measured = dict[str, float]


def run() -> list[tuple[str, float, str]]:
    """Rows of name, measured ratio of seconds, and target."""
    seconds: dict[str, list[float]] = {"first": [], "one new image": [], "no change": []}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        make_images(data, IMAGES)
        before = os.environ.get("FEDSEAL_DATA")
        for repeat in range(REPEATS):
            os.environ["FEDSEAL_DATA"] = str(Path(folder) / f"cache-{repeat}")
            for name, taken in seconds.items():
                if name == "one new image":
                    draw(data / "clients" / "client-0" / f"new-{repeat}.jpg", IMAGES + repeat)
                start = time.perf_counter()
                read_folders(data, size=SIZE, channels=CHANNELS, progress=False)
                taken.append(time.perf_counter() - start)
        os.environ.pop("FEDSEAL_DATA") if before is None else os.environ.update(FEDSEAL_DATA=before)
    median = {name: statistics.median(taken) for name, taken in seconds.items()}
    print(", ".join(f"{name} {value:.2f} s" for name, value in median.items()))
    what = f"{IMAGES:,} own images of {SIZE} px, seconds to read"
    return [
        (f"{what}, one new image / first start", median["one new image"] / median["first"], "<= 0.5"),
        (f"{what}, no change / first start", median["no change"] / median["first"], "<= 0.5"),
    ]


def make_images(data: Path, number: int) -> None:
    """Distinct images in the layout of the source "folders"."""
    paths = [data / "server" / CLASSES[i % 2] / f"{i}.jpg" for i in range(LABELLED)]
    paths += [data / "test" / CLASSES[i % 2] / f"{i}.jpg" for i in range(LABELLED)]
    paths += [data / "clients" / f"client-{i % CLIENTS}" / f"{i}.jpg" for i in range(number - 2 * LABELLED)]
    for folder in {path.parent for path in paths}:
        folder.mkdir(parents=True)
    with ProcessPoolExecutor(cores()) as pool:
        for _ in pool.map(draw, paths, range(number), chunksize=500):
            pass


def draw(path: Path, number: int) -> None:
    """A gradient whose direction and offset depend on the number."""
    across, down, start = (np.array([number * prime % m for prime in (7, 11, 13)]) for m in (5, 7, 251))
    steps = np.arange(SIZE)[:, None]
    x, y = ((steps * slope // 8).astype(np.uint8) for slope in (across, down))
    Image.fromarray(x[None] + y[:, None] + start.astype(np.uint8)).save(path)


def measure(images: int) -> Iterator[tuple[str, Measured]]:
    """Seconds and memory of a user's commands, one after another."""
    with tempfile.TemporaryDirectory() as folder:
        data, out = Path(folder) / "data", Path(folder) / "run"
        make_images(data, images)
        os.environ["FEDSEAL_DATA"] = str(Path(folder) / "cache")
        settings = {"data.path": data, "data.size": SIZE, "data.channels": CHANNELS}
        show = ["data", "show", "folders", *assign(settings)]
        train = ["train", "folders", "--out", str(out), *assign(settings | TRAINING)]
        yield "first start: decode and split all images", watch(show)
        yield "run: one round of one client, and the report", watch(train)
        draw(data / "clients" / "client-0" / "new.jpg", images)
        yield "start after one new image", watch(show)


def assign(settings: dict[str, object]) -> list[str]:
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def watch(arguments: Sequence[str]) -> Measured:
    """Runs `fedseal`: its seconds, and the highest memory of it and its workers together."""
    start, anonymous, resident = time.perf_counter(), 0.0, 0.0
    process = subprocess.Popen([sys.executable, "-m", "fedseal", *arguments], stdout=subprocess.DEVNULL)
    while process.poll() is None:
        sizes = [memory(pid) for pid in family(process.pid)]
        anonymous = max(anonymous, sum(size[0] for size in sizes))
        resident = max(resident, sum(size[1] for size in sizes))
        time.sleep(0.02)
    if process.returncode:
        raise RuntimeError(f"fedseal {' '.join(arguments)} failed")
    gigabytes = {"gigabytes": round(anonymous, 2), "gigabytes with mapped files": round(resident, 2)}
    return {"seconds": round(time.perf_counter() - start, 1), **gigabytes}


def family(pid: int) -> list[int]:
    """A process and all processes below it."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it has just ended
        return []
    return [pid, *(member for child in children for member in family(int(child)))]


def memory(pid: int) -> tuple[float, float]:
    """RssAnon and RSS of a process in gigabytes."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0, 0.0
    fields = dict(line.split(":", 1) for line in lines)
    kilobytes = (int(fields.get(name, "0 kB").split()[0]) for name in ("RssAnon", "VmRSS"))
    anonymous, resident = kilobytes
    return anonymous * 1024 / 1e9, resident * 1024 / 1e9


def memory_limit() -> float:
    """The limit in gigabytes of this process's control group, 0 if there is none."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        names = {"memory": "memory/{}/memory.limit_in_bytes", "": "{}/memory.max"}
        file = Path("/sys/fs/cgroup") / names.get(controllers, "none").format(group.strip("/"))
        if file.is_file() and (text := file.read_text().strip()).isdigit() and int(text) < 2**60:
            return round(int(text) / 1e9, 2)
    return 0.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int)
    images = parser.parse_args().images
    if not images:
        for name, ratio, target in run():
            print(f"{name}: {ratio:.2f} ({target})")
        return
    pixels = images * CHANNELS * SIZE * SIZE / 1e9
    about: Found = {"images": images, "gigabytes of pixels": round(pixels, 2), "steps": {}}
    if limit := memory_limit():
        about["gigabytes allowed"] = limit
    for step, measured in measure(images):
        print(f"{step}: " + ", ".join(f"{value} {name}" for name, value in measured.items()), flush=True)
        about["steps"][step] = measured
        save("folders", about)
    write_page()


def table(found: Found) -> list[str]:
    """The table of docs/benchmarks.md."""
    names = ("gigabytes", "gigabytes with mapped files")
    rows = [[step, *(f"{size[name]:.1f} GB" for name in names)] for step, size in found["steps"].items()]
    what = f"{found['images']:,} images of {SIZE}×{SIZE}×{CHANNELS}"
    pixels = f"{found['gigabytes of pixels']:.1f} GB of pixels"
    limit = found.get("gigabytes allowed")
    allowed = f" The kernel allowed {limit:.1f} GB in all, mapped files included." if limit else ""
    lines = grid(["", "memory", "with mapped files"], rows)
    return [*lines, "", f"{what}, {pixels}.{allowed} {measured_on(found)}"]


if __name__ == "__main__":
    main()
