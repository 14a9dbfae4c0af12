"""The command line: collects the commands, and turns errors into one sentence and an exit code."""

import atexit
import io
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from typing import Annotated, NoReturn

import typer

from fedseal.cli import data, deploy, doctor, keys, reproduce, runs, train
from fedseal.errors import UserError
from fedseal.system import logs
from fedseal.system.crash import (
    EXIT_CODE,
    NOT_ENOUGH_MEMORY,
    describe_crash,
    describe_own_error,
    is_out_of_memory,
)
from fedseal.system.environment import set_up_process
from fedseal.system.processes import SIGNALS, Stopped, end_with_parent, stop_on_signals

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="""Semi-supervised federated learning: a few labels at the server, many unlabelled images at clients.

    First run:  [bold]fedseal train demo --baseline[/]

    Your own images:  [bold]fedseal train folders --set data.path=my-images[/]
    """,
    epilog="Exit codes: 0 success, 2 bad input, 3 folder in use, 70 unexpected error, 75 Flower's SuperLink"
    " has ended, 130 or 143 stopped.",
)
app.command(epilog="Example:  fedseal train fmnist-lenet --seed 1 --set fedseal.theta=0.05 --out runs/theta")(
    train.train
)
app.command(epilog="Example:  fedseal presets")(train.presets)
app.command(epilog="Example:  fedseal show fmnist-lenet --set method=semifl > mine.toml")(train.show)
app.command(epilog="Example:  fedseal evaluate runs/demo-seed0")(runs.evaluate)
app.command(epilog="Example:  fedseal report runs/demo-seed0 runs/demo-semifl-seed0 --out comparison.html")(
    runs.report
)
app.command(epilog="Example:  fedseal predict runs/demo-seed0 shoe.png shirt.jpg")(runs.predict)
app.command(epilog="Example:  fedseal export runs/demo-seed0 --format onnx --out model")(runs.export)
app.add_typer(data.app, name="data")
app.command(epilog="Example:  fedseal reproduce table-fmnist-lenet --seeds 3 --jobs 2")(reproduce.reproduce)
app.add_typer(keys.app, name="keys")
deploy.add_to(app)
app.command(epilog="Example:  fedseal doctor --keys keys --port 8000")(doctor.doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedseal {version('fedseal')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def run_safely(command: Callable[[], None]) -> int:
    """Runs a command and returns its exit code; an error is one sentence on stderr, never a traceback."""
    try:
        command()
        sys.stdout.flush()  # a full disk shows itself here
    except UserError as error:
        return _fail(str(error), error.exit_code)
    except OSError as error:  # disk, permissions
        return _fail(str(UserError(error)))
    except Stopped as stop:
        logs.log.warning("%s", f"Stopped. {stop.hint}".strip(), extra=logs.about(logs.STOPPED))
        return stop.exit_code
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else 1
    except Exception as error:
        if is_out_of_memory(error):
            return _fail(NOT_ENOUGH_MEMORY)
        if sentence := describe_own_error(error):
            return _fail(sentence)
        return _fail(describe_crash(error), EXIT_CODE)
    return 0


def _fail(sentence: str, code: int = UserError.exit_code) -> int:
    logs.log.error("%s", sentence, extra=logs.about(logs.ERROR))
    return code


def ignore_disk_errors(error: threading.ExceptHookArgs) -> None:
    """Prints no traceback if TensorBoard's thread meets a full disk: the run reports it as well."""
    if not isinstance(error.exc_value, OSError):
        threading.__excepthook__(error)


def main() -> None:
    """Runs the command that the words after `fedseal` name, and ends the process."""
    _make_output_safe()
    logs.set_up_logs()
    set_up_process()
    end_with_parent()
    threading.excepthook = ignore_disk_errors
    leave(run_safely(_run_command))


def _run_command() -> None:
    stop_on_signals()
    app(prog_name="fedseal")


def _make_output_safe() -> None:
    """Lets a terminal without Unicode, and names that are not UTF-8, print escapes instead of an error."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the shell
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115 - open until the end
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def leave(code: int) -> NoReturn:
    """Ends the process without taking PyTorch's modules apart, which lasts half a second."""
    for number in SIGNALS:  # nothing is left to stop
        signal.signal(number, lambda *_: os._exit(code))
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the reader is gone, or the disk is full
            stream.flush()
    os._exit(code)
