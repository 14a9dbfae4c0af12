"""The commands of a deployment: serve and join."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
import typer
from rich.console import Console

from fedseal.cli import keys as cli_keys
from fedseal.cli.common import (
    PRESET_HELP,
    Assignments,
    DashboardPort,
    JsonLogs,
    Log,
    Mlflow,
    check_seconds,
    continue_by,
    mlflow_folder,
    open_observers,
    parse_assignments,
)
from fedseal.errors import UserError
from fedseal.system.environment import set_up_process
from fedseal.system.lazy import LazyModule
from fedseal.system.logs import log as messages
from fedseal.system.logs import set_up_logs

if TYPE_CHECKING:
    from fedseal.config import load
    from fedseal.deploy import client as deploy_client
    from fedseal.deploy import expiry, superlink
    from fedseal.deploy import keys as deploy_keys
    from fedseal.deploy import server as deploy_server
    from fedseal.engines.flower import client_app, consent
    from fedseal.storage import run_folder
else:
    load = LazyModule("fedseal.config.load")
    deploy_client = LazyModule("fedseal.deploy.client")
    deploy_keys = LazyModule("fedseal.deploy.keys")
    expiry = LazyModule("fedseal.deploy.expiry")
    deploy_server = LazyModule("fedseal.deploy.server")
    superlink = LazyModule("fedseal.deploy.superlink")
    client_app = LazyModule("fedseal.engines.flower.client_app")
    consent = LazyModule("fedseal.engines.flower.consent")
    run_folder = LazyModule("fedseal.storage.run_folder")


def add_to(app: typer.Typer) -> None:
    """Adds these commands to the command line."""
    app.command(epilog="Example:  fedseal serve folders --labels labels --keys keys --host 0.0.0.0")(serve)
    app.command(epilog="Example:  fedseal join server.example:8000 --images photos --key north.key")(join)


@continue_by(lambda: "Continue with the same command and --resume.")
def serve(
    source: Annotated[str, typer.Argument(metavar="PRESET|FILE.toml", help=PRESET_HELP)],
    labels: Annotated[Path, typer.Option(metavar="DIR", help="Labelled images, one folder per class.")],
    keys: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder that 'fedseal keys init' created.")
    ] = None,
    host: Annotated[
        str, typer.Option(metavar="HOST", help="Address to listen on; 0.0.0.0 for all interfaces.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", help="Port to listen on.", min=1, max=65535)] = 8000,
    clients: Annotated[
        int | None,
        typer.Option(metavar="N", help="Start when N clients are connected. Default: all clients.", min=1),
    ] = None,
    wait: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", callback=check_seconds, help="Give up if they do not connect in this time."
        ),
    ] = 600,
    test: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Labelled test images, one folder per class.")
    ] = None,
    validation: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Labelled validation images. Default: some of --labels are held out."
        ),
    ] = None,
    set_: Assignments = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Run folder. Default: runs/PRESET-served-seedN.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the folder.")] = False,
    without: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="With --resume: expel a client from the run, for good. Repeatable."
        ),
    ] = None,
    counts: Annotated[
        bool,
        typer.Option(
            "--counts",
            help="Ask clients for counts of images, such as |D⁺|. A client sends them with --share-counts.",
        ),
    ] = False,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="No TLS and no keys: anyone can listen and take part."),
    ] = False,
    name: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Name of a client, with --insecure. Repeatable.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress and no summary.")] = False,
    log: Log = None,
    json_logs: JsonLogs = False,
    dashboard: DashboardPort = None,
    mlflow: Mlflow = None,
) -> None:
    """Train with clients on other machines.

    This machine holds the labelled images and gets the model. Start 'fedseal join' on each client. The run
    folder is the same as that of 'fedseal train'. See docs/deploy.md for a complete example.
    """
    set_up_logs(long=True, quiet=quiet, file=log, json_lines=json_logs)
    set_up_process()
    if insecure == (keys is not None):
        raise UserError("Give either --keys DIR ('fedseal keys init' creates it) or --insecure.")
    if insecure and not name:
        raise UserError("With --insecure, give the --name of each client.")
    if insecure:
        messages.warning(
            "--insecure: anyone who reaches %s:%d can take part in the run and get its model, and anyone on"
            " the network can read and change everything that is sent",
            *(host, port),
        )
    config = load.load_config(source, parse_assignments(set_) | ({"engine.counts": True} if counts else {}))
    folder = out or run_folder.default_folder(source, config, "-served")
    known = set(deploy_keys.read_registered(keys) if keys else name or [])
    expelled = set(run_folder.read_expelled(folder))
    revoked = deploy_keys.revoked_clients(keys) if keys else set()
    begun = run_folder.read_clients(folder) if resume else set()
    _check_expelled(without or [], begun or known | expelled | revoked, resume)
    if begun and (new := sorted(known - begun)):
        messages.warning("the run in %s began without %s: only a new run has them", folder, ", ".join(new))
        known &= begun
    expelled |= set(without or [])
    if gone := sorted(begun - known - expelled):
        raise UserError(
            f"The run in {folder} began with {', '.join(gone)}, now without a key: continue with --without"
            f" {gone[0]}, or restore the key."
        )
    active = sorted(known - expelled)
    if not active:
        raise UserError(f"All clients are expelled from {folder}: at least one must remain.")
    number = len(active) if clients is None else clients
    if number > len(active):
        raise UserError(f"--clients is {number}, but only {len(active)} may take part: {', '.join(active)}.")
    with open_observers(config, folder, mlflow, dashboard) as observers:
        deploy_server.serve(
            config,
            folder,
            superlink.Endpoint(host, port, keys),
            deploy_server.LabelledFolders(labels, validation, test),
            sorted(known | expelled),
            clients=number,
            wait=wait,
            resume=resume,
            without=without or [],
            console=Console(quiet=quiet or json_logs, highlight=False),
            observers=observers,
            open_files=[log, mlflow_folder(mlflow)],
        )


def _check_expelled(without: list[str], known: set[str], resume: bool) -> None:
    if without and not resume:
        raise UserError(
            "--without needs --resume. To start a run without a client, move its NAME.pub and NAME.key out of"
            " the folder of keys."
        )
    for name in without:
        if name not in known:
            raise UserError(f"--without names {name}, but the clients are {', '.join(sorted(known))}.")


@continue_by(lambda: "Take part again with the same command.")
def join(
    server: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Address of 'fedseal serve'.")],
    images: Annotated[
        Path, typer.Option(metavar="DIR", help="This client's images, in any subfolders. They stay here.")
    ],
    key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="NAME.key that 'fedseal keys' created; '-' or /dev/fd/N: a pipe."),
    ] = None,
    passphrase_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=f"File with the passphrase of the key. Default: {cli_keys.PASSPHRASE}, or you are asked.",
        ),
    ] = None,
    crl: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="ca.crl of the server: refuse a server whose key was stolen."),
    ] = None,
    memory: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for what this client remembers between rounds.")
    ] = Path("fedseal-memory"),
    wait: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            callback=check_seconds,
            help="Give up if the server does not answer in this time.",
        ),
    ] = 600,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS and no key.")] = False,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="This client's name, with --insecure.")
    ] = None,
    method: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Copy of the server's method file, if it uses its own method."),
    ] = None,
    network: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Copy of the server's network file, if it uses its own network."),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Copy of the server's pretrained weights, if they are frozen."),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            click_type=click.Choice(["auto", "cpu", "cuda", "mps"]),
            help="Device that computes. Other devices than cpu change the last bits of the result.",
        ),
    ] = "auto",
    threads: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="CPU threads. Default: the server's client.threads. Another number changes the last bits of"
            " the result.",
        ),
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Accept more, or less, from the server than epochs=100, batch=1024, threads=64, size=512"
            " (pixels), classes=1000, operations=10 (RandAugment), views=16 (frozen networks) or request=1000"
            " (MB). Repeatable.",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="METHOD", help="Take part only if the server uses this method. Repeatable."),
    ] = None,
    share_counts: Annotated[
        bool,
        typer.Option(
            "--share-counts",
            help="Send counts of images if the server asks for them. They tell how many images you have.",
        ),
    ] = False,
    masked: Annotated[
        bool,
        typer.Option(
            "--masked",
            help="Take part only if the server uses secure aggregation, which hides this client's model.",
        ),
    ] = False,
    log: Log = None,
    json_logs: JsonLogs = False,
) -> None:
    """Take part in a run with the images of a folder, which never leave this machine.

    Ends when the run ends. If the connection breaks, it waits for the server and continues.
    """
    set_up_logs(long=True, file=log, json_lines=json_logs)
    set_up_process()
    if insecure == (key is not None):
        raise UserError("Give either --key FILE or --insecure.")
    if insecure and crl:
        raise UserError("--crl needs TLS: leave out --insecure.")
    if insecure and not name:
        raise UserError("With --insecure, give this client's --name.")
    if not re.fullmatch(r".+:\d{1,5}", server, re.ASCII) or "/" in server:
        raise UserError(f"The server's address must be HOST:PORT, such as 10.0.0.1:8000, not '{server}'.")
    for file in (method, network, weights):
        if file and not file.is_file():
            raise UserError(f"There is no file {file}: give a copy of the server's file.")
    client_key = _read_key(key, passphrase_file, crl) if key else None
    files = client_app.OwnFiles(*(str(file.resolve()) if file else "" for file in (method, network, weights)))
    allowed = consent.parse_consent(
        parse_assignments(limit), only or [], share_counts, masked, own_method=method is not None
    )
    if insecure:
        messages.warning(
            "--insecure: anyone on the network can read and change everything that this client sends, and"
            " anyone can pretend to be the server"
        )
    client = deploy_client.Client(
        server, images, memory, name or "", client_key, files, device, threads or 0, allowed
    )
    client.join(wait, messages.info)


def _read_key(file: Path, passphrase_file: Path | None, crl: Path | None) -> "deploy_keys.ClientKey":
    key = deploy_keys.read_client_key(
        file, lambda: cli_keys.find_passphrase(passphrase_file, f"passphrase of {file}"), crl
    )
    if expiry.is_soon(key.expiry):
        messages.warning(
            "the certificate in %s expires on %s: ask for a new file, from 'fedseal keys renew --ca'",
            *(file, f"{key.expiry:%Y-%m-%d}"),
        )
    if ends := expiry.describe_end(key.key_expiry):
        messages.warning(
            "the key in %s %s: ask for a new file, from 'fedseal keys renew --client'", file, ends
        )
    return key
