"""All benchmarks, and their ratios in one table; also written to `results/bench` and docs/benchmarks.md."""

from importlib import import_module

from rich.console import Console
from rich.table import Table

from bench.page import save, write_page
from bench.ratios import reached
from fedseal.config.sections import EngineSettings
from fedseal.system.environment import set_up_process

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


def main() -> None:
    set_up_process(EngineSettings().arithmetic)  # before a part imports what computes with PyTorch
    ratios = []
    table = Table("what", title="Ratios, each measured side by side on this machine")
    for column in ("measured", "target", ""):
        table.add_column(column, justify="right")
    for part in PARTS:
        for what, ratio, target in import_module(f"bench.{part}").run():
            ratios.append({"part": part, "what": what, "ratio": round(ratio, 3), "target": target})
            mark = "[green]ok[/]" if reached(ratio, target) else "[red]miss[/]"
            table.add_row(what, f"{ratio:.2f}", target, mark)
    Console().print(table)
    save("ratios", {"ratios": ratios})
    write_page()


if __name__ == "__main__":
    main()
