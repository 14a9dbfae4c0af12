"""The command line of a deployment: keys, serve, join."""

import re
import signal
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedseal.errors import UserError
from fedseal.later import Later

if TYPE_CHECKING:
    from fedseal import api
    from fedseal import config as configs
else:
    api, configs = map(Later, ("api", "config"))

keys_app = typer.Typer(
    no_args_is_help=True,
    help="Make the keys of a deployment.",
    epilog="Example:  fedseal keys init keys --host server.example --client north --client south",
)

PRESET = "A name from 'fedseal presets', or a file."
Keys = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of all keys.")]
Names = Annotated[list[str], typer.Argument(metavar="NAME...", help="The new clients' names.")]


def add_to(app: typer.Typer) -> None:
    """Adds these commands to the command line."""
    app.add_typer(keys_app, name="keys")
    app.command(epilog="Example:  fedseal serve folders --labels labels --keys keys --host 0.0.0.0")(serve)
    app.command(epilog="Example:  fedseal join server.example:8000 --images photos --key north.key")(join)


@keys_app.command("init", epilog="Example:  fedseal keys init keys --host 10.0.0.1 --client north")
def keys_init(
    folder: Keys,
    host: Annotated[
        list[str] | None, typer.Option(metavar="HOST", help="A name or address that clients reach it by.")
    ] = None,
    client: Annotated[list[str] | None, typer.Option(metavar="NAME", help="A client.")] = None,
) -> None:
    """Make a CA, the server's certificate, and a key pair for each client."""
    _say(_part("keys").init(folder, host or [], client or []), folder)


@keys_app.command("add-client", epilog="Example:  fedseal keys add-client keys west")
def keys_add(folder: Keys, names: Names) -> None:
    """Make the key pairs of more clients."""
    _say(_part("keys").add_clients(folder, names), folder)


def _say(files: list[Path], folder: Path) -> None:
    typer.echo(f"{folder}: keep it to yourself")
    for file in files:
        typer.echo(f"{file}: give it to client {file.stem}, and to nobody else")


def serve(
    source: Annotated[str, typer.Argument(metavar="PRESET|FILE.toml", help=PRESET)],
    labels: Annotated[Path, typer.Option(metavar="DIR", help="The labelled images, a folder per class.")],
    keys: Annotated[Path | None, typer.Option(metavar="DIR", help="As made by 'fedseal keys init'.")] = None,
    host: Annotated[str, typer.Option(metavar="HOST", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", help="The port to listen on.", min=1, max=65535)] = 8000,
    clients: Annotated[
        int | None, typer.Option(metavar="N", help="Begin when so many are there; left out: all.", min=1)
    ] = None,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", help="Give up if they are not there by then.")
    ] = 600,
    test: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Labelled images to measure with, a folder per class.")
    ] = None,
    validation: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Left out: some of --labels are held out.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace a key.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The run's folder; left out: runs/PRESET-served-seedN."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Without TLS and keys: anybody can take part and listen.")
    ] = False,
    name: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A client's name, with --insecure.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no summary.")] = False,
) -> None:
    """Train with clients on other machines; this one holds the labels, and gets the model."""
    deploy = _part("deploy")
    if insecure == (keys is not None):
        raise UserError("Give --keys DIR ('fedseal keys init' makes one), or say --insecure instead.")
    if insecure and not name:
        raise UserError("With --insecure, give each client's --name.")
    names = sorted(_part("keys").registered(keys)) if keys else sorted(set(name or []))
    number = len(names) if clients is None else clients
    if number > len(names):
        raise UserError(f"--clients is {number}, but there are {len(names)}: {', '.join(names)}.")
    config = configs.load_config(source, dict(configs.assignment(text) for text in set_ or []))
    folder = out or api.run_folder(source, config, "-served")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends in order, as with Ctrl-C
    result = deploy.serve(
        config,
        folder,
        deploy.Where(host, port, keys),
        deploy.Labels(labels, validation, test),
        names,
        number=number,
        wait=wait,
        resume=resume,
        console=Console(quiet=quiet, highlight=False),
    )
    if not quiet:
        typer.echo(f"accuracy {result.accuracy:.2%}, run folder: {result.folder}")


def join(
    server: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where 'fedseal serve' runs.")],
    images: Annotated[Path, typer.Option(metavar="DIR", help="The images, which stay here.")],
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="What 'fedseal keys' made.")] = None,
    memory: Annotated[
        Path, typer.Option(metavar="DIR", help="What this client remembers between rounds.")
    ] = Path("fedseal-memory"),
    wait: Annotated[float, typer.Option(metavar="SECONDS", help="How long to wait for the server.")] = 600,
    insecure: Annotated[bool, typer.Option("--insecure", help="Without TLS and key.")] = False,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="With --insecure: who this is.")] = None,
    method: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Copy of the server's file, for a method of one's own."),
    ] = None,
) -> None:
    """Take part with the images of a folder, which never leave this machine."""
    if insecure == (key is not None):
        raise UserError("Give --key FILE, or say --insecure instead.")
    if insecure and not name:
        raise UserError("With --insecure, give this client's --name.")
    if not re.fullmatch(r".+:\d{1,5}", server) or "/" in server:
        raise UserError(f"The server is HOST:PORT, such as 10.0.0.1:8000, and not '{server}'.")
    if not images.is_dir():
        raise UserError(f"There is no folder {images}: give one with images.")
    if method and not method.is_file():
        raise UserError(f"There is no file {method}: give a copy of the server's.")
    found = _part("keys").client_key(key) if key else None
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends in order, as with Ctrl-C
    _part("join").Client(server, images, memory, name or "", found, method).join(wait, typer.echo)


def _part(name: str) -> ModuleType:
    """A module that needs Flower, which is there only if it was asked for and takes seconds to load."""
    try:
        return import_module(f"fedseal.{name}")
    except ImportError as error:
        raise UserError(f"{error.name} is not installed: install fedseal with its extra 'flower'.") from error
