"""Commands that are disturbed: real processes with everything that they start.

A command carries a mark in its environment, by which all of its processes are found, whatever their parent.
"""

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

HANG_SECONDS = 300.0  # without progress, on a busy machine
ORPHAN_SECONDS = 30.0  # for processes to notice that their parent was killed
MARK = "FEDSEAL_TORTURE"
# Files that a round writes, and those that a run writes once. A kill while one of them is new hits a
# half-finished checkpoint, summary or model.
ROUND_FILES = (
    "events.jsonl",
    "checkpoint/.next.safetensors-*",
    "checkpoint/next.safetensors",
    "checkpoint/memories.sqlite-wal",
    "checkpoint/state.safetensors",
)
RUN_FILES = (".config.toml-*", ".events.jsonl-*", ".model.safetensors-*", ".summary.json-*", ".report.html-*")


class LostError(Exception):
    """A run hangs, fails without a clear sentence, or cannot be continued."""


class DifferentError(Exception):
    """A run that was disturbed has another result."""


class Victim:
    """A `fedseal` command and its processes."""

    def __init__(
        self,
        words: Iterable[object],
        log: Path,
        namespace: str = "",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.words = list(map(str, words))
        self.name, self.mark, self.log = self.words[0], uuid.uuid4().hex, log
        self.killed = False
        self.code: int | None = None  # once it has ended
        environment = os.environ | {MARK: self.mark, "OMP_NUM_THREADS": "1"} | dict(variables or {})
        before = ["ip", "netns", "exec", namespace] if namespace else []
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [*before, sys.executable, "-m", "fedseal", *self.words],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing outlives the torture."""
        while left := self.processes():
            self.kill(left)
            time.sleep(0.05)
        self.process.wait()

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def output(self) -> str:
        return self.log.read_text("utf-8", "replace")

    def processes(self) -> dict[int, str]:
        """All processes of the command, and what each of them is."""
        mark, found = f"{MARK}={self.mark}".encode(), dict[int, str]()
        for folder in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                number = int(folder.name)
                if mark in (folder / "environ").read_bytes():
                    found[number] = self._role(number)
        return found

    def _role(self, number: int) -> str:
        line = Path(f"/proc/{number}/cmdline").read_bytes()
        if b"resource_tracker" in line:
            return "resource tracker"
        if b"multiprocessing.forkserver" in line:
            parent = Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()[1]
            inherited = b"multiprocessing.forkserver" in Path(f"/proc/{parent}/cmdline").read_bytes()
            return "worker" if inherited else "fork server"
        if b"flower_program" in line:
            return "SuperLink"
        return self.name if number == self.process.pid else "cell"

    def kill(self, numbers: Iterable[int]) -> None:
        """Kills processes as the kernel does when memory is short: without a chance to tidy up."""
        for number in numbers:
            self.killed |= number == self.process.pid
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)

    def pause(self, numbers: Iterable[int], seconds: float) -> None:
        """Stops processes for a while, as a suspended machine or a debugger does."""
        numbers = list(numbers)
        for action in (signal.SIGSTOP, signal.SIGCONT):
            for number in numbers:
                with suppress(ProcessLookupError):
                    os.kill(number, action)
            if action == signal.SIGSTOP:
                time.sleep(seconds)

    def wait_for_end(self) -> int:
        """The exit code, once all processes have ended by themselves; checks how the command ended."""
        if self.code is not None:
            return self.code
        try:
            code = self.process.wait(HANG_SECONDS)
        except subprocess.TimeoutExpired:
            raise LostError(f"'{self.name}' hangs: {self.output[-2000:]}") from None
        end = time.monotonic() + ORPHAN_SECONDS
        while left := self.processes():
            if time.monotonic() > end:
                raise LostError(f"'{self.name}' has ended, but left {sorted(left.values())}")
            time.sleep(0.02)
        text = self.output
        if not self.killed and (code not in (0, 2, 75) or "Traceback" in text):
            raise LostError(f"'{self.name}' ended with exit code {code}: {text[-3000:]}")
        self.code = code
        return code

    def wait_until(self, condition: Callable[[], object], seconds: float = HANG_SECONDS) -> bool:
        """Waits for a condition; False if the command ends first, or if it takes longer."""
        end = time.monotonic() + seconds
        while self.running and time.monotonic() < end:
            if condition():
                return True
            time.sleep(0.002)
        return False

    def wait_for_rounds(self, run: Path, number: int) -> None:
        """Waits for further rounds, or for the end."""
        start = count_lines(run)
        if not self.wait_until(lambda: count_lines(run) >= start + number) and self.running:
            raise LostError(f"'{self.name}' makes no progress: {self.output[-2000:]}")

    def wait_for_moment(self, rng: random.Random, run: Path, seconds: float) -> str:
        """Waits for a random moment, and says which: after some time, in a round, or when a file is new."""
        kind = rng.choice(("time", "round", "file"))
        if kind == "time":
            delay = rng.uniform(0, seconds)
            self.wait_until(lambda: False, delay)
            return f"{delay:.2f} s after the start"
        if kind == "round":
            before, delay = count_lines(run), rng.uniform(0, seconds / 4)
            self.wait_until(lambda: count_lines(run) > before, 2 * seconds)
            self.wait_until(lambda: False, delay)
            return f"{delay:.2f} s after round {count_lines(run)}"
        pattern = rng.choice(ROUND_FILES if seconds < 1 else ROUND_FILES + RUN_FILES)
        known = times(run, pattern)
        new = self.wait_until(lambda: times(run, pattern) - known, 2 * seconds)
        return f"{'at a new' if new else 'while waiting for'} {pattern}"


def times(run: Path, pattern: str) -> set[tuple[str, int]]:
    """Files that match a pattern, each with the time of its last change."""
    found = set()
    for path in run.glob(pattern):
        with suppress(OSError):  # it has just been renamed
            found.add((path.name, path.stat().st_mtime_ns))
    return found


def count_lines(run: Path) -> int:
    """The rounds in the events of a run."""
    try:
        return (run / "events.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0
