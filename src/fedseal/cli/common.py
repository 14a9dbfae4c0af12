"""Options and consoles that several commands share."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import markup
from rich.console import Console

from fedseal.errors import UserError, printable
from fedseal.system.lazy import LazyModule
from fedseal.system.processes import Stopped

if TYPE_CHECKING:
    from fedseal.config import load
    from fedseal.config.config import Config
    from fedseal.training import dashboard, mlflow_tracker
    from fedseal.training.observers import Observer
else:
    load = LazyModule("fedseal.config.load")
    dashboard = LazyModule("fedseal.training.dashboard")
    mlflow_tracker = LazyModule("fedseal.training.mlflow_tracker")

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

Mlflow = Annotated[
    str | None,
    typer.Option("--mlflow", metavar="URI|DIR", help="Also log the run to an MLflow server or folder."),
]
DashboardPort = Annotated[
    int | None,
    typer.Option(
        "--dashboard",
        metavar="PORT",
        min=1,
        max=65535,
        help="Show the run at http://localhost:PORT while it goes on, on this machine only.",
    ),
]
MAX_SECONDS = 1e9

console = Console(highlight=False)


def escape(text: object) -> str:
    """Text in which neither Rich nor the terminal finds instructions, such as the name of a file."""
    return markup.escape(printable(text))


@contextmanager
def open_observers(
    config: "Config", folder: Path, mlflow: str | None, port: int | None
) -> "Iterator[list[Observer]]":
    """The observers that the options --mlflow and --dashboard ask for."""
    with ExitStack() as stack:
        observers: list[Observer] = []
        if port is not None:
            observers.append(dashboard.Dashboard(port, config, folder))
            stack.callback(observers[-1].close)
        if mlflow is not None:
            observers.append(mlflow_tracker.MLflow(mlflow, config, folder))  # training closes it
        yield observers


def mlflow_folder(where: str | None) -> Path | None:
    """The folder that --mlflow names; None for a server."""
    return None if where is None or "://" in where else Path(where)


@contextmanager
def continue_by(hint: Callable[[], str]) -> Iterator[None]:
    """Says how to continue if the command is stopped by Ctrl-C or SIGTERM."""
    try:
        yield
    except Stopped as stop:
        stop.hint = stop.hint or hint()
        raise


def check_seconds(value: float) -> float:
    """Refuses what is not a time to wait, such as nan and inf."""
    if not 0 <= value <= MAX_SECONDS:
        raise UserError(f"--wait is {value}, but must be a number of seconds from 0 to {MAX_SECONDS:g}.")
    return value


def parse_assignments(texts: list[str] | None) -> dict[str, Any]:
    """The keys and values of all `--set` options."""
    return dict(load.parse_assignment(text) for text in texts or [])
