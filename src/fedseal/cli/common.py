"""Options and consoles that several commands share."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedseal.system.lazy import LazyModule

if TYPE_CHECKING:
    from fedseal.config import load
else:
    load = LazyModule("fedseal.config.load")

PRESET_HELP = "A name from 'fedseal presets', or a TOML file."

Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a setting, e.g. rounds=20 or fedseal.theta=0.05. Repeatable.",
    ),
]

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)


def parse_assignments(texts: list[str] | None) -> dict[str, Any]:
    """The keys and values of all `--set` options."""
    return dict(load.parse_assignment(text) for text in texts or [])
