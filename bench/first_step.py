"""Runs `fedseal train demo` up to its first training step; prints when each stage of the start ended.

Times are seconds since the process was started. For `bench/startup.py`.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any


def now() -> float:
    """Seconds since the start of this process."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")")[-1].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return uptime - ticks / os.sysconf("SC_CLK_TCK")


ends = {"Python": now()}

import torch  # noqa: E402, F401

ends["import torch"] = now()

import fedseal.learn  # noqa: E402
import fedseal.training.train as training  # noqa: E402
from fedseal.cli.main import main  # noqa: E402

ends["import fedseal"] = now()
load_federation = training.load_federation


def load_data(*arguments: Any, **options: Any) -> Any:
    ends["configuration"] = now()
    federation = load_federation(*arguments, **options)
    ends["data"] = now()
    return federation


def end_here(*arguments: Any, **options: Any) -> None:
    ends["network and first batch"] = now()
    print(json.dumps(ends), flush=True)
    os._exit(0)


training.load_federation = load_data
fedseal.learn.sgd = end_here
sys.argv = ["fedseal", "train", "demo", "--quiet", "--out", sys.argv[1]]
main()
