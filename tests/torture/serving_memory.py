"""Measures the memory of `fedseal serve`, Flower's SuperLink and `fedseal join` over many rounds.

`make torture` writes the result to results/bench/serving-memory.json.
"""

import argparse
import json
import random
import sys
import tempfile
from datetime import date
from functools import partial
from pathlib import Path

from deployed import CLIENTS, Deployment, finish, free_port
from single import Torture
from victims import count_lines

from fedseal.system.files import write_atomic
from fedseal.system.machine import cores, versions

MEASUREMENTS = 5
MAX_GROWTH = 1.05  # from the first measurement to the last


def measure(work: Path, rounds: int) -> list[dict[str, float]]:
    """Resident megabytes of each program after each part of the rounds, without pages of files."""
    torture = Torture(work, work, random.Random(0), print, rounds)
    deployment = Deployment(torture, work, work / "run", free_port())
    table = []
    try:
        deployment.start_all()
        for t in range(rounds // MEASUREMENTS, rounds + 1, rounds // MEASUREMENTS):
            last = min(t, rounds - 1)  # the programs end after the last round
            deployment.victims["server"].wait_until(partial(has_rounds, work / "run", last), 2 * rounds)
            table.append({"round": count_lines(work / "run")} | memory(deployment))
            print(table[-1], flush=True)
        finish(deployment)
    finally:
        deployment.close()
    return table


def has_rounds(run: Path, number: int) -> bool:
    return count_lines(run) >= number


def is_flat(table: list[dict[str, float]]) -> bool:
    """True if no program's memory has grown by more than a twentieth."""
    first, last = table[0], table[-1]
    return all(last[role] <= MAX_GROWTH * first[role] for role in first if role != "round")


def memory(deployment: Deployment) -> dict[str, float]:
    found = {}
    for name in ("server", CLIENTS[0]):
        for number, role in deployment.victims[name].processes().items():
            status = Path(f"/proc/{number}/status").read_text()
            found[role] = round(int(status.partition("RssAnon:")[2].split()[0]) / 1024, 1)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--out", type=Path, help="file for the result")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        table = measure(Path(folder), options.rounds)
    if options.out:
        about = {"date": str(date.today()), "versions": versions(), "cores": cores(), "megabytes": table}
        write_atomic(options.out, json.dumps(about, indent=1) + "\n")
    return 0 if is_flat(table) else 1


if __name__ == "__main__":
    sys.exit(main())
