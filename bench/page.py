"""Writes measured tables into docs/benchmarks.md, between the marks <!-- bench NAME --> and <!-- end -->."""

from pathlib import Path

from fedseal.system.files import write_atomic

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"


def write_block(name: str, lines: list[str]) -> None:
    """Replaces the content between the marks."""
    begin, end = f"<!-- bench {name} -->\n", "<!-- end -->"
    before, _, rest = PAGE.read_text("utf-8").partition(begin)
    after = rest.partition(end)[2]
    write_atomic(PAGE, before + begin + "\n".join(lines) + f"\n{end}{after}")
