"""Options and consoles that several commands share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedseal.system.lazy import LazyModule
from fedseal.system.processes import Stopped

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

Log = Annotated[
    Path | None,
    typer.Option("--log", metavar="FILE", help="Also append all messages and the progress to a file."),
]
JsonLogs = Annotated[
    bool,
    typer.Option("--json-logs", help="Write each message as a JSON object, and show no progress bar."),
]

console = Console(highlight=False)


@contextmanager
def continue_by(hint: Callable[[], str]) -> Iterator[None]:
    """Says how to continue if the command is stopped by Ctrl-C or SIGTERM."""
    try:
        yield
    except Stopped as stop:
        stop.hint = stop.hint or hint()
        raise


def parse_assignments(texts: list[str] | None) -> dict[str, Any]:
    """The keys and values of all `--set` options."""
    return dict(load.parse_assignment(text) for text in texts or [])
