"""Training, reproducing and exporting: disturbed and continued until they end."""

import json
import math
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from victims import DifferentError, LostError, Victim

from fedseal.storage.events_file import read_events

SMALL = {
    "data.size": 12,
    "data.channels": 1,
    "method": "fedseal",
    "evaluate": "model",
    "model.width": 4,
    "bootstrap.epochs": 0,
    "fedseal.bootstrap_epochs": 20,
    "server.lr": 0.02,
    "server.epochs": 1,
    "server.threads": 1,
    "client.epochs": 1,
}
NAMES = ("north", "south", "west")
WORKER_WEIGHT = 30  # a worker is killed more often than the process that it is forked from
DISK_BYTES = 4_000_000  # of the small file system on which a run's folder is filled up
FIGURE = "figure-correct-rates"  # one cell of a few seconds
PREPARATION = threading.RLock()
FORMATS = ("safetensors", "torchscript")
START_SECONDS = 4.0  # in which a command starts
ROUND_SECONDS = 0.1  # of a few rounds


@dataclass
class Torture:
    """A run that is disturbed: where, how often, and until when."""

    work: Path  # of all runs
    folder: Path  # of this one
    rng: random.Random
    report: Callable[[str, str], None]  # of a kind of disturbance: what was done
    rounds: int
    left: int = 0  # disturbances
    end: float = math.inf  # when the last one may begin

    @property
    def images(self) -> Path:
        """Small images of three classes for a server and its clients, always the same."""
        folder = self.work / "images"
        with PREPARATION:
            if not folder.exists():
                draw_images(folder)
        return folder

    @property
    def goes_on(self) -> bool:
        return self.left > 0 and time.monotonic() < self.end

    def reference(self, name: str, make: Callable[[Path], None]) -> Path:
        """The folder of an undisturbed run, which is made once."""
        folder = self.work / "undisturbed" / name
        with PREPARATION:
            if not folder.exists():
                work = folder.with_name(f".{name}")
                shutil.rmtree(work, ignore_errors=True)
                work.mkdir(parents=True)
                make(work)
                work.rename(folder)
        return folder

    def start(self, words: list[object], *, own_cache: bool = True) -> Victim:
        """Starts a command. With an own cache it decodes its images, so that kills can hit that too."""
        variables = {"FEDSEAL_DATA": str(self.folder / "cache")} if own_cache else {}
        return Victim(words, self.folder / "output.txt", variables=variables)

    def run(self, words: list[object], *, own_cache: bool = True) -> None:
        """Runs a command undisturbed."""
        with self.start(words, own_cache=own_cache) as command:
            if command.wait_for_end():
                raise LostError(command.output)


def draw_images(root: Path) -> None:
    rng, work = np.random.default_rng(0), root.with_name(".images")
    shutil.rmtree(work, ignore_errors=True)
    for place, number in (("server", 8), ("test", 5), *((f"clients/{name}", 6) for name in NAMES)):
        for label in range(3):
            folder = work / place / ("" if place.startswith("clients") else f"class-{label}")
            folder.mkdir(parents=True, exist_ok=True)
            for i in range(number):
                pixels = rng.integers(0, 120, (12, 12)) + 60 * label
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{label}-{i}.png")
    work.rename(root)


def settings(keys: dict[str, Any]) -> list[str]:
    """The words `--set key=value` for each key."""
    return [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]


# ------------------------------------------------------------------ disturbances


def run_disturbed(
    torture: Torture, start: Callable[[], Victim], disturb: Callable[[Victim, float], None]
) -> None:
    """Starts a command again and again, and disturbs it, until it succeeds.

    `disturb` gets the command and the seconds in which something is to happen: many after a start.
    """
    while True:
        before = torture.left
        with start() as command:
            while command.running and torture.goes_on:
                disturb(command, START_SECONDS if torture.left == before else ROUND_SECONDS)
                torture.left -= 1
            if command.wait_for_end() == 0:
                return
            if torture.left == before:
                raise LostError(f"'{command.name}' cannot be continued: {command.output[-2000:]}")


def disturb_run(torture: Torture, command: Victim, run: Path, disk: Path | None, seconds: float) -> None:
    """Kills a run or one of its processes, pauses it, or fills its disk."""
    rng, moment = torture.rng, command.wait_for_moment(torture.rng, run, seconds)
    found = command.processes()
    if not command.running or not found:
        return
    own = command.process.pid
    others = [number for number in found if number != own]
    what = rng.choices(("all", "main", "other", "pause", "disk"), (1, 1, 16, 1, 0.3 if disk else 0))[0]
    if what == "disk" and disk:
        torture.report("disk full", f"{command.name}, {moment}")
        wait_on_full_disk(command, disk)
    elif what == "pause":
        chosen = rng.choice((list(found), [own], [rng.choice(list(found))]))
        torture.report("pause", f"{command.name}, {len(chosen)} of {len(found)} processes, {moment}")
        command.pause(chosen, rng.uniform(0.1, 1.5))
    elif what == "other" and others:
        chosen = rng.choices(others, [WORKER_WEIGHT if found[n] == "worker" else 1 for n in others])
        torture.report(f"kill {found[chosen[0]]}", f"of {command.name}, {moment}")
        command.kill(chosen)
        command.wait_for_rounds(run, 2)  # a client whose worker is killed twice in a round is left out
    else:
        chosen = list(found) if what == "all" else [own]
        torture.report(f"kill {command.name}", f"{len(chosen)} of {len(found)} processes, {moment}")
        command.kill(chosen)


@contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """A file system of a few megabytes in a folder; None if this user may not mount one."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "torture", str(folder)]
    mounted = bool(shutil.which("mount")) and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield folder if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def wait_on_full_disk(command: Victim, disk: Path) -> None:
    """Fills a disk, waits for the end of a command, and frees the disk."""
    ballast = disk / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize or 1))
    try:
        if command.wait_for_end() == 2 and "No space left" not in command.output:
            raise LostError(f"'{command.name}' does not name the reason: {command.output[-2000:]}")
    finally:
        ballast.unlink()


# ------------------------------------------------------------------ commands


def torture_training(torture: Torture) -> None:
    """`fedseal train` with two workers."""
    with small_disk(torture.folder / "disk") as disk:
        run = torture.folder / "disk" / "run"
        run_disturbed(
            torture,
            lambda: torture.start(training(torture, run)),
            lambda command, seconds: disturb_run(torture, command, run, disk, seconds),
        )
        compare_runs(run, undisturbed_training(torture))


def training(torture: Torture, run: Path) -> list[object]:
    keys = SMALL | {"rounds": torture.rounds, "data.path": torture.images, "engine.workers": 2}
    return ["train", "folders", "--out", run, "--resume", "--quiet", *settings(keys)]


def undisturbed_training(torture: Torture) -> Path:
    """The folder of a run of the same configuration."""
    name = f"train-{torture.rounds}"
    return torture.reference(name, lambda place: torture.run(training(torture, place / "run"))) / "run"


def torture_reproducing(torture: Torture) -> None:
    """`fedseal reproduce` with one cell, which is a process of its own."""
    folder = torture.folder

    def words(place: Path) -> list[object]:
        places = ["--results", place / "results", "--work", place / "work"]
        return ["reproduce", FIGURE, "--scale", "smoke", *places]

    def disturb(command: Victim, seconds: float) -> None:
        delay = torture.rng.uniform(0, 1.5 * START_SECONDS)  # the command starts, then its cell
        command.wait_until(lambda: False, delay)
        found = command.processes()
        if command.running and found:
            own = [number for number, role in found.items() if role in (command.name, "cell")]
            chosen = torture.rng.choice((list(found), [torture.rng.choice(own)]))
            what = command.name if command.process.pid in chosen else "cell"
            torture.report(f"kill {what}", f"{len(chosen)} of {len(found)} processes, {delay:.2f} s later")
            command.kill(chosen)

    whole = torture.reference("reproduce", lambda place: torture.run(words(place), own_cache=False))
    while True:
        run_disturbed(torture, lambda: torture.start(words(folder), own_cache=False), disturb)
        pair = [[path.parent for path in place.glob("results/**/summary.json")] for place in (folder, whole)]
        [result], [expected] = pair
        compare_runs(result, expected, model=False)
        if not torture.goes_on:
            return
        for name in ("results", "work"):
            shutil.rmtree(folder / name, ignore_errors=True)


def torture_exporting(torture: Torture) -> None:
    """`fedseal export`: the new folder is complete, or it does not exist."""
    run, form = undisturbed_training(torture), torture.rng.choice(FORMATS)
    model = torture.folder / "model"

    def words(out: Path) -> list[object]:
        return ["export", run, "--format", form, "--out", out]

    whole = torture.reference(f"export-{form}", lambda place: torture.run(words(place / "model"))) / "model"

    def disturb(command: Victim, seconds: float) -> None:
        if torture.rng.random() < 0.5:
            moment = "at a new .model-*"
            command.wait_until(lambda: list(torture.folder.glob(".model-*")))
        else:
            delay = torture.rng.uniform(0, seconds)
            moment = f"{delay:.2f} s after the start"
            command.wait_until(lambda: False, delay)
        if command.running:
            torture.report("kill export", moment)
            command.kill(command.processes())
            if command.wait_for_end() and model.exists():  # killed after its work, before its end
                compare_files(model, whole)
                shutil.rmtree(model)

    while True:
        run_disturbed(torture, lambda: torture.start(words(model)), disturb)
        compare_files(model, whole)
        if not torture.goes_on:
            return
        shutil.rmtree(model)


# ------------------------------------------------------------------ comparison


def compare_runs(run: Path, whole: Path, *, model: bool = True) -> None:
    """Raises unless weights, events and summary are the same to the bit; times may differ."""
    for name, read in (("events.jsonl", _read_events), ("summary.json", _read_summary)):
        found, expected = read(run / name), read(whole / name)
        if found != expected:
            pairs = zip(found, expected, strict=False)
            where = next((f"{one} instead of {other}" for one, other in pairs if one != other), "length")
            raise DifferentError(f"{run / name}: {where}")
    if model and (run / "model.safetensors").read_bytes() != (whole / "model.safetensors").read_bytes():
        raise DifferentError(f"{run}: other weights")


def compare_files(folder: Path, whole: Path) -> None:
    """Raises unless two folders have the same files with the same content."""
    found, expected = ({p.name: p.read_bytes() for p in place.iterdir()} for place in (folder, whole))
    if found != expected:
        names = [name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)]
        raise DifferentError(f"{folder}: {', '.join(sorted(names))}")


def _read_events(path: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in event.items() if k != "seconds"} for event in read_events(path)]


def _read_summary(path: Path) -> list[tuple[str, Any]]:
    return sorted((k, v) for k, v in json.loads(path.read_text("utf-8")).items() if k != "seconds")
