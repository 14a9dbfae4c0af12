"""fedseal: `fedseal train` with its default engine, checkpoints and report.

Usage: run_fedseal.py OUT SETTING...

It imports nothing large, so that the seconds of the whole process are those of the command.
"""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

folder, settings = Path(sys.argv[1]), sys.argv[2:]
command = [str(Path(sys.executable).with_name("fedseal")), "train", "fmnist-lenet", "--out", str(folder)]
for setting in settings:
    command += ["--set", setting]
subprocess.run(command, check=True, stdout=sys.stderr)
rounds = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
seconds = [sum(rounds[0]["seconds"].values())]
seconds += [after["clock"] - before["clock"] for before, after in pairwise(rounds)]
(folder / "model.json").write_text(json.dumps({"seconds": seconds}))
