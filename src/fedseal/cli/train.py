"""The commands train, presets and show."""

import shlex
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from fedseal.cli.common import (
    PRESET_HELP,
    Assignments,
    DashboardPort,
    JsonLogs,
    Log,
    Mlflow,
    console,
    continue_by,
    escape,
    mlflow_folder,
    open_observers,
    parse_assignments,
)
from fedseal.errors import UserError
from fedseal.system.lazy import LazyModule
from fedseal.system.logs import set_up_logs
from fedseal.system.workers import prepare_workers

if TYPE_CHECKING:
    from fedseal.config import load
    from fedseal.config.config import Config
    from fedseal.data import federation
    from fedseal.data.pool import Federation
    from fedseal.report import run as report_run
    from fedseal.report import titles, write
    from fedseal.storage import accuracies, run_folder
    from fedseal.training import train as training
else:
    load = LazyModule("fedseal.config.load")
    federation = LazyModule("fedseal.data.federation")
    report_run = LazyModule("fedseal.report.run")
    titles = LazyModule("fedseal.report.titles")
    write = LazyModule("fedseal.report.write")
    accuracies = LazyModule("fedseal.storage.accuracies")
    run_folder = LazyModule("fedseal.storage.run_folder")
    training = LazyModule("fedseal.training.train")


def train(
    source: Annotated[str, typer.Argument(metavar="[PRESET|FILE.toml]", help=PRESET_HELP)] = "demo",
    set_: Assignments = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Run folder. Default: runs/PRESET-seedN, or runs/PRESET-METHOD-seedN with another method.",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Seed of the split, the weights and all random draws.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(metavar="N", help="Worker processes. Default: one per core.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(metavar="NAME", help="local, or flower for Flower's simulation.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the folder.")] = False,
    baseline: Annotated[
        bool, typer.Option("--baseline", help="Also train Server-SL on the same split, for comparison.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress and no summary.")] = False,
    log: Log = None,
    json_logs: JsonLogs = False,
    dashboard: DashboardPort = None,
    mlflow: Mlflow = None,
) -> None:
    """Train a preset or a configuration file.

    The run folder then holds the model, the metrics of every round, a checkpoint and an HTML report. Stop a
    run at any time with Ctrl-C or SIGTERM (exit codes 130 and 143), and continue it with --resume.
    """
    set_up_logs(long=True, quiet=quiet, file=log, json_lines=json_logs)
    if workers != 1 and engine in (None, "local"):
        prepare_workers("fedseal.engines.local")  # it and this process import PyTorch at the same time
    changes = parse_assignments(set_)
    if seed is not None:
        changes["seed"] = seed
    if workers is not None:
        changes["engine.workers"] = workers
    if engine is not None:
        changes["engine.name"] = engine
    config = load.load_config(source, changes)
    folder = out or run_folder.default_folder(source, config)
    terminal = Console(quiet=quiet or json_logs, highlight=False)

    def how_to_continue() -> str:
        words = ["fedseal", "train", str(folder / "config.toml"), "--out", str(folder), "--resume"]
        command = shlex.join(words + ["--baseline"] * baseline)
        return f"Continue with: {command}" if (folder / "config.toml").exists() else ""

    @cache
    def load_images() -> "Federation":
        """Both runs and the report have the same images, also if some are added in the meantime."""
        return federation.load_federation(config.data, config.seed, progress=not terminal.quiet)

    def run(config: "Config", folder: Path, resume: bool) -> "run_folder.Result":
        with open_observers(config, folder, mlflow, dashboard) as observers:
            return training.run_training(
                config,
                folder,
                resume=resume,
                console=terminal,
                observers=observers,
                load_images=load_images,
                open_files=[log, mlflow_folder(mlflow)],
            )

    with continue_by(how_to_continue):
        compared = None
        result = run(config, folder, resume)
        if baseline and config.method != "server-sl":
            below = folder / "server-sl"
            begun = (below / "config.toml").exists()
            compared = run(training.server_only(config), below, resume or begun)
            if compared.summary["split"] != result.summary["split"]:
                raise UserError(
                    f"The data have changed since the run in {folder}: start it in another --out."
                )
        _show_result(terminal, result, compared)
        if compared and _time(folder / "report.html") < _time(compared.folder / "summary.json"):
            write.rewrite_report(folder, federation=load_images())  # now with the baseline


def _time(path: Path) -> float:
    return path.stat().st_mtime


def _show_result(
    terminal: Console, result: "run_folder.Result", compared: "run_folder.Result | None"
) -> None:
    """The accuracy, and Server-SL's beside it: after as many rounds, and after as many supervised epochs."""
    summary = result.summary
    rounds, images = summary["rounds"], "test" if "test_accuracy" in summary else "validation"
    table = Table("", f"{images} accuracy", "margin", box=None, header_style="bold")
    adapted = result.accuracy_on("client", rounds)
    if adapted is not None:
        table.add_column("with each client's class mix")
    row = [f"{summary['method']}, {rounds} rounds", f"[bold]{result.accuracy:.2%}[/]", ""]
    table.add_row(*row, f"[bold]{adapted:.2%}[/]" if adapted is not None else "")
    if compared is not None:
        longest = compared.summary["rounds"]
        notes = {rounds: ""} | {longest: ", as many supervised epochs"}
        for t, note in notes.items():
            accuracy = compared.accuracy_after(t)
            margin = f"{100 * (result.accuracy - accuracy):+.2f} points"
            other = compared.accuracy_on("client", t)
            row = [f"Server-SL, {t} rounds{note}", f"{accuracy:.2%}", margin]
            table.add_row(*row, f"{other:.2%}" if other is not None else "")
    terminal.print()
    terminal.print(table)
    labels, seconds = summary["labels"], summary["seconds"]
    terminal.print(
        f"accuracy of {titles.MODELS[summary['evaluate']]}, {accuracies.averaged_over(rounds)};"
        f" {labels['total']} labels ({labels['training']} for training, {labels['validation']} for"
        f" validation); {seconds:.0f} s"
    )
    if missed := report_run.format_left_out(summary):
        terminal.print(f"replies left out: {escape(missed)}; events.jsonl says why", soft_wrap=True)
    terminal.print(f"run folder: {escape(result.folder)}", soft_wrap=True)
    terminal.print(f"report: {escape(result.folder / 'report.html')}", soft_wrap=True)


def presets() -> None:
    """List the built-in configurations."""
    table = Table(box=None, show_header=False)
    for name, title in load.list_presets().items():
        table.add_row(f"[bold]{name}[/]", escape(title))
    console.print(table)


def show(
    source: Annotated[str, typer.Argument(metavar="PRESET|FILE.toml", help=PRESET_HELP)],
    set_: Assignments = None,
) -> None:
    """Print a configuration with every key, its value and its meaning.

    Save the output to a file, edit it, and train it with 'fedseal train FILE.toml'.
    """
    typer.echo(load.load_config(source, parse_assignments(set_)).to_annotated_toml(), nl=False)
