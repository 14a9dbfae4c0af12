"""What benchmarks measured: one file for each below results/bench, and docs/benchmarks.md made from them.

    python -m bench.page

writes the page again. A block between <!-- bench NAME --> and <!-- end --> has the tables of `BLOCKS[NAME]`.
"""

import json
import re
from collections.abc import Callable
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import Any

from fedseal.system.files import write_atomic
from fedseal.system.machine import cores, versions

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "benchmarks.md", ROOT / "results" / "bench"
MARKED = re.compile(r"(<!-- bench (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
# The function that makes a block's lines, and the files that it takes.
BLOCKS = {
    "limit": ("ratios:limit_table", "ratios"),
    "start": ("ratios:start_table", "ratios"),
    "augmentation": ("ratios:augmentation_table", "ratios"),
    "scale": ("ratios:scale_table", "ratios"),
    "deployment": ("flower:table", "deployment"),
    "methods": ("methods:table", "methods"),
    "secure": ("secure:table", "secure"),
    "folders": ("folders:table", "folders"),
    "tls": ("tls:table", "tls"),
    "attacks": ("attacks:tables", "attacks"),
    "robustness": ("robustness:tables", "torture", "serving-memory", "fuzz", "fuzz-packets"),
    "peers": ("peers.__main__:table", "peers"),
}

Found = dict[str, Any]


def save(name: str, found: Found) -> None:
    """Writes what a benchmark has measured, with the date and the machine, to its file."""
    about = {"date": str(date.today()), "versions": versions(), "cores": cores()}
    RESULTS.mkdir(parents=True, exist_ok=True)
    write_atomic(RESULTS / f"{name}.json", json.dumps(about | found, indent=1, ensure_ascii=False) + "\n")


def read(name: str) -> Found:
    """What a benchmark has measured."""
    found: Found = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    return found


def grid(head: list[str], rows: list[list[str]]) -> list[str]:
    """A table in Markdown, with numbers in all columns but the first."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---", *["---:"] * (len(head) - 1)], *rows)]


def measured_on(found: Found, packages: tuple[str, ...] = ("fedseal", "torch")) -> str:
    """When and on which machine a benchmark was run."""
    about = found["versions"]
    names = ", ".join(f"{name} {about[name]}" for name in packages)
    return f"Measured on {found['date']}: {found['cores']} cores, {about['processor']}; {names}."


def block(name: str) -> str:
    """The tables of a block."""
    place, *files = BLOCKS[name]
    module, _, function = place.partition(":")
    write: Callable[..., list[str]] = getattr(import_module(f"bench.{module}"), function)
    return "\n".join(write(*map(read, files)))


def refresh(text: str) -> str:
    """The page with new content between its marks."""
    return MARKED.sub(lambda match: f"{match[1]}{block(match[2])}\n{match[3]}", text)


def write_page() -> None:
    """Writes the page from all files."""
    write_atomic(PAGE, refresh(PAGE.read_text("utf-8")))


if __name__ == "__main__":
    write_page()
