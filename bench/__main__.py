"""All benchmarks, and their ratios in one table."""

from rich.console import Console
from rich.table import Table

from bench import arithmetic, augment, fleet, flower, methods, predict
from bench import round as one_round


def reached(ratio: float, target: str) -> bool:
    """True if a ratio meets a target such as "<= 1.3"."""
    sign, bound = target.split()
    return ratio >= float(bound) if sign == ">=" else ratio <= float(bound)


def main() -> None:
    rows = []
    for part in (arithmetic, augment, predict, one_round, fleet, flower, methods):
        rows += part.run()
    table = Table("what", title="Ratios, each measured side by side on this machine")
    for column in ("measured", "target", ""):
        table.add_column(column, justify="right")
    for what, ratio, target in rows:
        mark = "[green]ok[/]" if reached(ratio, target) else "[red]miss[/]"
        table.add_row(what, f"{ratio:.2f}", target, mark)
    Console().print(table)


if __name__ == "__main__":
    main()
