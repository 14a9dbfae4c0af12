"""The commands evaluate, report, predict and export, for finished runs."""

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fedseal.cli.common import console, escape
from fedseal.errors import printable
from fedseal.system.files import write_atomic
from fedseal.system.lazy import LazyModule

if TYPE_CHECKING:
    from fedseal.report import write
    from fedseal.storage import export as exporting
    from fedseal.storage import model_file
    from fedseal.training import evaluate as evaluation
else:
    evaluation = LazyModule("fedseal.training.evaluate")
    exporting = LazyModule("fedseal.storage.export")
    model_file = LazyModule("fedseal.storage.model_file")
    write = LazyModule("fedseal.report.write")


OwnNetwork = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Python file of your own network. Default: the one that the run's config.toml names.",
    ),
]


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
        typer.echo(printable(write.rewrite_report(runs[0], out)))
    else:
        typer.echo(printable(write.compare_runs(runs, out or Path("comparison.html"))))


def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    images: Annotated[
        list[Path], typer.Argument(metavar="IMAGE...", help="Image files, or folders of them.")
    ],
    adapt: Annotated[
        bool, typer.Option("--adapt", help="Estimate how often each class occurs here, and use it.")
    ] = False,
    min_confidence: Annotated[
        float,
        typer.Option(
            metavar="P",
            help="Give no class to images with a lower confidence (0 to 1): they are 'unsure', with an empty"
            " class in the CSV file.",
        ),
    ] = 0.0,
    out: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write file, class and confidence as CSV.")
    ] = None,
    network: OwnNetwork = None,
) -> None:
    """Predict the class of images, with the model's confidence.

    Folders are searched with all folders below. Files that are not readable images are named and skipped.

    If the given images have other class proportions than the server's, use --adapt: it estimates the
    proportions from all given images, without labels. Give it at least twenty images.
    """
    model = model_file.load(run, network)
    skip = len(images) > 1  # otherwise the one file's own error says what is wrong with it
    found = model.predict(images, adapt=adapt, min_confidence=min_confidence, skip=skip, progress=True)
    rows = list(zip(found.files, found.labels, found.confidences, strict=True))
    if out is not None:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["file", "class", "confidence"])
        writer.writerows((file, name, f"{confidence:.4f}") for file, name, confidence in rows)
        write_atomic(out, text.getvalue().encode("utf-8", "surrogateescape"))  # names need not be UTF-8
        console.print(f"{len(rows):,} predictions: {escape(out)}", soft_wrap=True)
    else:
        for file, name, confidence in rows:
            shown = f"[bold]{escape(name)}[/]" if name else "[dim]unsure[/]"
            console.print(f"{escape(file)}  {shown}  {confidence:.1%}", soft_wrap=True)
    if adapt:
        table = Table("class", "share, as seen plainly", "share, as estimated", box=None, header_style="bold")
        for name, plain, share in zip(model.classes, found.plain_mix, found.mix, strict=True):
            table.add_row(escape(name), f"{plain:.1%}", f"{share:.1%}")
        console.print(table)


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    format: Annotated[
        str, typer.Option(metavar="FORMAT", help="onnx (needs the extra 'onnx'), torchscript or safetensors.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write. It must not exist.")],
    licence: Annotated[
        str, typer.Option(metavar="TEXT", help="The licence of the model, for its card.")
    ] = "not stated",
    network: OwnNetwork = None,
) -> None:
    """Write a run's model for use without fedseal, with a model card.

    The folder holds the model, model.json (classes, input and calibration), README.md, the card, and
    predict.py, which predicts an image without fedseal.
    """
    folder = exporting.export(run, format, out, licence=licence, network=network)
    typer.echo(printable(f"model card: {folder / 'README.md'}"))
