"""The commands evaluate, report and predict, for finished runs."""

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from fedseal.cli.common import console
from fedseal.system.files import write_atomic
from fedseal.system.lazy import LazyModule

if TYPE_CHECKING:
    from fedseal.report import write
    from fedseal.storage import model_file
    from fedseal.training import evaluate as evaluation
else:
    evaluation = LazyModule("fedseal.training.evaluate")
    model_file = LazyModule("fedseal.storage.model_file")
    write = LazyModule("fedseal.report.write")


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    test: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Labelled images, one folder per class. Default: the run's own split."
        ),
    ] = None,
) -> None:
    """Measure the accuracy of a finished run's model."""
    for name, value in evaluation.evaluate(run, test).items():
        console.print(f"{name.removeprefix('average_').replace('_', ' '):22} {value:.2%}")


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="The runs' folders.")],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Default: report.html in the run's folder; for several runs, comparison.html.",
        ),
    ] = None,
) -> None:
    """Make an HTML report of a run, or of several runs side by side."""
    if len(runs) == 1:
        typer.echo(write.rewrite_report(runs[0], out))
    else:
        typer.echo(write.compare_runs(runs, out or Path("comparison.html")))


def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    images: Annotated[
        list[Path], typer.Argument(metavar="IMAGE...", help="Image files, or folders of them.")
    ],
    adapt: Annotated[
        bool, typer.Option("--adapt", help="Estimate how often each class occurs here, and use it.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write file, class and confidence as CSV.")
    ] = None,
) -> None:
    """Predict the class of images, with the model's confidence.

    Where classes are mixed otherwise than in the server's images, --adapt makes better predictions: it
    estimates the mix of all given images together, without labels. It needs some twenty images or more.
    """
    model = model_file.load(run)
    found = model.predict(images, adapt=adapt)
    rows = list(zip(found.files, found.labels, found.confidences, strict=True))
    if out is not None:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["file", "class", "confidence"])
        writer.writerows((file, name, f"{confidence:.4f}") for file, name, confidence in rows)
        write_atomic(out, text.getvalue())
        console.print(f"{len(rows):,} predictions: {escape(str(out))}", soft_wrap=True)
    else:
        for file, name, confidence in rows:
            console.print(f"{escape(str(file))}  [bold]{escape(name)}[/]  {confidence:.1%}", soft_wrap=True)
    if adapt:
        table = Table("class", "share, as seen plainly", "share, as estimated", box=None, header_style="bold")
        for name, plain, share in zip(model.classes, found.plain_mix, found.mix, strict=True):
            table.add_row(escape(name), f"{plain:.1%}", f"{share:.1%}")
        console.print(table)
