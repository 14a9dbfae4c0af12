"""The README's table, from the measured runs that lie under `results/`.

`python -m fedseal.results README.md` writes it between its two marks.
"""

import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from fedseal.api import Result
from fedseal.files import write_atomic

BEGIN, END = "<!-- results: made from results/ -->", "<!-- end of results -->"
PAPER = {"fmnist-lenet": (0.7495, 0.7862)}  # Server-SL, FedSEAL


def read_run(folder: Path) -> Result:
    """A run as it is kept under `results/`: config.toml, events.jsonl and summary.json."""
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text("utf-8"))
    return Result(folder, summary)


def table(results: Path, name: str) -> str:
    """FedSEAL beside Server-SL for every seed, with the mean and the paper's numbers."""
    rows: list[tuple[str, float, float, float]] = []
    for folder in sorted((results / name).glob("fedseal-seed*")):
        method = read_run(folder)
        alone = read_run(folder.with_name(folder.name.replace("fedseal", "server-sl")))
        same_rounds = alone.accuracy_after(method.summary["rounds"])
        rows.append((str(method.summary["seed"]), same_rounds, alone.accuracy, method.accuracy))
    rounds, most = method.summary["rounds"], alone.summary["rounds"]
    head = ["seed", f"Server-SL, {rounds} rounds", f"Server-SL, {most} rounds", "FedSEAL"]
    lines = ["| " + " | ".join([*head, "margin", f"margin over {most} rounds"]) + " |", "|---" * 6 + "|"]
    rows.append(("**mean**", mean(r[1] for r in rows), mean(r[2] for r in rows), mean(r[3] for r in rows)))
    for label, short, long, ours in rows:
        margins = f"{100 * (ours - short):+.2f} | {100 * (ours - long):+.2f}"
        lines.append(f"| {label} | {short:.2%} | {long:.2%} | {ours:.2%} | {margins} |")
    below, above = PAPER[name]
    lines.append(f"| paper | {below:.2%} | – | {above:.2%} | {100 * (above - below):+.2f} | – |")
    return "\n".join(lines)


def refresh(text: str, content: str) -> str:
    """A page with what stands between its marks replaced."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{content}\n{END}{after}"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    write_atomic(page, refresh(page.read_text("utf-8"), table(Path("results"), "fmnist-lenet")))
