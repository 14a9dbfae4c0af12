"""The commands evaluate, report and predict, for finished runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from fedseal.cli.common import console
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
        console.print(f"{name.replace('_', ' '):22} {value:.2%}")


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
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Image files.")],
) -> None:
    """Predict the class of image files, with the model's confidence."""
    for path, (name, confidence) in zip(images, model_file.load(run).predict(images), strict=True):
        console.print(f"{escape(str(path))}  [bold]{escape(name)}[/]  {confidence:.1%}", soft_wrap=True)
