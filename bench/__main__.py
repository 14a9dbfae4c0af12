"""All benchmarks, and their ratios in one table; also written to `results/bench` and docs/benchmarks.md."""

import json
from datetime import date
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.page import write_block
from fedseal.config.sections import EngineSettings
from fedseal.system.environment import set_up_process
from fedseal.system.files import write_atomic
from fedseal.system.machine import cores, processor, versions

PARTS = (
    "startup",
    "arithmetic",
    "augment",
    "predict",
    "folders",
    "round",
    "fleet",
    "flower",
    "methods",
    "secure",
)
RESULTS = Path("results/bench/ratios.json")


def reached(ratio: float, target: str) -> bool:
    """True if a ratio meets a target such as "<= 1.3"."""
    sign, bound = target.split()
    return ratio >= float(bound) if sign == ">=" else ratio <= float(bound)


def main() -> None:
    set_up_process(EngineSettings().arithmetic)  # before a part imports what computes with PyTorch
    rows = []
    for part in PARTS:
        rows += import_module(f"bench.{part}").run()
    table = Table("what", title="Ratios, each measured side by side on this machine")
    for column in ("measured", "target", ""):
        table.add_column(column, justify="right")
    for what, ratio, target in rows:
        mark = "[green]ok[/]" if reached(ratio, target) else "[red]miss[/]"
        table.add_row(what, f"{ratio:.2f}", target, mark)
    Console().print(table)
    measured = [{"what": what, "ratio": round(ratio, 3), "target": target} for what, ratio, target in rows]
    about = {"date": str(date.today()), "versions": versions(), "cores": cores()}
    write_atomic(RESULTS, json.dumps(about | {"ratios": measured}, indent=1, ensure_ascii=False) + "\n")
    lines = ["| what | measured | target |", "|---|---:|---:|"]
    lines += [f"| {what} | {ratio:.2f} | {target} |" for what, ratio, target in rows]
    write_block("ratios", [*lines, "", f"Measured on {about['date']}: {cores()} cores, {processor()}."])


if __name__ == "__main__":
    main()
