"""Kills fedseal at random moments, continues it, and compares the results with undisturbed ones to the bit.

`make torture` runs this file with 1,000 kills, `make test` some of each kind. Commands are real processes:
`train` with its workers, `serve` with Flower's SuperLink, `join`, `reproduce` with its cells, and `export`. A
kill is a SIGKILL to all processes of a command, to the command alone, or to another one of its processes, as
the kernel does when memory is short. It comes after a random time, after a round, while a reply is sent, or
when a file of a checkpoint is new. Further, processes are stopped for a while, the disk is full, the network
is cut, and messages are late, come twice, or have no answer.

A run is lost if it hangs, ends with a traceback, leaves a process behind, or cannot be continued. It is
different if its weights, its events or its summary differ from those of an undisturbed run; times may differ.

With `--work DIR`, the same command continues where the last one ended.
"""

import argparse
import json
import math
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from deployed import torture_deployment, torture_messages
from single import Torture, torture_exporting, torture_reproducing, torture_training
from victims import DifferentError, LostError

from fedseal.system.environment import set_up_process
from fedseal.system.files import write_atomic
from fedseal.system.machine import cores, versions

STATE = "tally.json"


@dataclass(frozen=True)
class Turn:
    """A kind of runs: how it is disturbed, how often, and the number of its rounds."""

    kind: str
    torture: Callable[[Torture], None]
    disturbances: int
    rounds: int


TRAIN = Turn("train", torture_training, 100, 300)
DEPLOYMENT = Turn("deployment", torture_deployment, 12, 20)
EXPORT = Turn("export", torture_exporting, 12, 300)
REPRODUCE = Turn("reproduce", torture_reproducing, 12, 2)
MESSAGES = Turn("messages", torture_messages, 0, 20)
TURNS = (TRAIN, DEPLOYMENT, TRAIN, EXPORT, TRAIN, MESSAGES, TRAIN, DEPLOYMENT, TRAIN, REPRODUCE)


@dataclass
class Tally:
    """What was done so far, and what came of it."""

    seed: int = 0
    begun: int = 0  # runs
    seconds: float = 0.0
    runs: Counter[str] = field(default_factory=Counter)
    disturbances: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)

    @staticmethod
    def read(path: Path) -> "Tally":
        about = json.loads(path.read_text("utf-8"))
        return Tally(**about | {name: Counter(about[name]) for name in ("runs", "disturbances")})

    @property
    def kills(self) -> int:
        return sum(n for name, n in self.disturbances.items() if name.startswith("kill "))

    def summary(self) -> dict[str, object]:
        kinds = {name: self.disturbances[name] for name in sorted(self.disturbances)}
        return {
            "date": str(date.today()),
            "versions": versions(),
            "cores": cores(),
            "seed": self.seed,
            "seconds": round(self.seconds),
            "runs": dict(sorted(self.runs.items())),
            "kills": self.kills,
            "disturbances": kinds,
            "lost": len(self.lost),
            "different": len(self.different),
        }


def torture(
    work: Path,
    tally: Tally,
    *,
    kills: int,
    minutes: float = math.inf,
    runs: float = math.inf,
    jobs: int = 1,
    turns: Sequence[Turn] = TURNS,
) -> None:
    """Disturbs runs until there were as many kills or runs, or until the time is over."""
    start, lock = time.monotonic(), threading.Lock()
    end, before = start + 60 * minutes, tally.seconds

    def disturb_runs() -> None:
        while time.monotonic() < end and tally.kills < kills:
            with lock:
                number, tally.begun = tally.begun, tally.begun + 1
            if number >= runs:
                return
            plan = turns[number % len(turns)]
            name = f"run {number}, {plan.kind}"

            def report(what: str, how: str, name: str = name) -> None:
                with lock:
                    tally.disturbances[what] += 1
                    print(f"{name}: {what}, {how}", flush=True)

            folder = Path(tempfile.mkdtemp(dir=work, prefix=f"run-{number}-"))
            rng = random.Random(f"{tally.seed}-{number}")
            result = "the same as undisturbed"
            try:
                plan.torture(Torture(work, folder, rng, report, plan.rounds, plan.disturbances, end))
                shutil.rmtree(folder)
            except LostError as error:
                result = f"LOST, in {folder}: {error}"
                tally.lost.append(f"{name}: {result}")
            except DifferentError as error:
                result = f"DIFFERENT: {error}"
                tally.different.append(f"{name}: {result}")
            print(f"{name}: {result}", flush=True)
            with lock:
                tally.runs[plan.kind] += 1
                tally.seconds = before + time.monotonic() - start
                write_atomic(work / STATE, json.dumps(vars(tally)))

    with ThreadPoolExecutor(jobs) as pool:
        for job in [pool.submit(disturb_runs) for _ in range(jobs)]:
            job.result()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=math.inf, help="no disturbance after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time; many of them wait often")
    parser.add_argument("--work", type=Path, help="folder of the runs, and of what was done so far")
    parser.add_argument("--out", type=Path, help="file for the summary, such as results/bench/torture.json")
    options = parser.parse_args()
    set_up_process("portable")  # as the commands do, for the processor's name in the summary
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        tally = Tally.read(work / STATE) if (work / STATE).exists() else Tally(options.seed)
        torture(work, tally, kills=options.kills, minutes=options.minutes, jobs=options.jobs)
    summary = json.dumps(tally.summary(), indent=1)
    print("\n".join([summary, *tally.lost, *tally.different]))
    if options.out:
        write_atomic(options.out, f"{summary}\n")
    return 1 if tally.lost or tally.different else 0


if __name__ == "__main__":
    sys.exit(main())
