"""The commands keys …: create, renew and revoke the keys of a deployment."""

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedseal.errors import UserError, printable
from fedseal.system.lazy import LazyModule
from fedseal.system.secret_files import read_secret

if TYPE_CHECKING:
    from fedseal.deploy import expiry
    from fedseal.deploy import keys as deploy_keys
else:
    deploy_keys = LazyModule("fedseal.deploy.keys")
    expiry = LazyModule("fedseal.deploy.expiry")

PASSPHRASE = "FEDSEAL_PASSPHRASE"  # environment variable

app = typer.Typer(
    no_args_is_help=True,
    help="Create, renew and revoke the keys of a deployment.",
    epilog="Example:  fedseal keys init keys --host server.example --client north --client south",
)

KeysFolder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of all keys.")]
Days = Annotated[
    int,
    typer.Option(
        metavar="N", min=1, max=3650, help="Days for which certificates and clients' keys are valid."
    ),
]
Encrypt = Annotated[
    bool,
    typer.Option(
        "--encrypt",
        help=f"Encrypt clients' files with a passphrase: that of --passphrase-file or of {PASSPHRASE}, or"
        " one that you type.",
    ),
]
PassphraseFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="File with the passphrase of clients' files.")
]


@app.command("init", epilog="Example:  fedseal keys init keys --host 10.0.0.1 --client north")
def init(
    folder: KeysFolder,
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST",
            help="Name or address by which clients reach the server, besides localhost. Repeatable.",
        ),
    ] = None,
    client: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Name of a client. Repeatable.")
    ] = None,
    days: Days = 365,
    crl: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Address at which you will publish ca.crl, the list of revoked certificates of the server.",
        ),
    ] = "",
    encrypt: Encrypt = False,
    passphrase_file: PassphraseFile = None,
) -> None:
    """Create a CA, the server's certificate, and a key pair for each client.

    Give each client its file DIR/clients/NAME.key. 'fedseal serve' needs the folder.
    """
    passphrase = new_passphrase(encrypt, passphrase_file)
    if crl and not re.fullmatch(r"https?://[!-~]{1,190}", crl):
        raise UserError(f"--crl takes an address such as http://example.org/ca.crl, not '{crl}'.")
    _print_files(deploy_keys.create_keys(folder, host or [], client or [], days, passphrase, crl), folder)
    if host:
        typer.echo(f"clients reach the server as {', '.join(host)} or localhost")
    else:
        typer.echo(
            "The server's certificate is for localhost only. For clients on other machines, create the keys"
            " in another folder with --host and the server's name or address."
        )


@app.command("add-client", epilog="Example:  fedseal keys add-client keys west")
def add_client(
    folder: KeysFolder,
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names of the new clients.")],
    days: Days = 365,
    encrypt: Encrypt = False,
    passphrase_file: PassphraseFile = None,
) -> None:
    """Create key pairs for more clients. They can take part in runs that start afterwards."""
    passphrase = new_passphrase(encrypt, passphrase_file)
    _print_files(deploy_keys.add_clients(folder, names, passphrase, days), folder)


@app.command("renew", epilog="Example:  fedseal keys renew keys")
def renew(
    folder: KeysFolder,
    ca: Annotated[bool, typer.Option("--ca", help="Also renew the certificate of the CA.")] = False,
    client: Annotated[
        str | None, typer.Option(metavar="NAME", help="Renew the key of this client instead.")
    ] = None,
    revoke: Annotated[
        bool, typer.Option("--revoke", help="Also revoke the server's old certificate: its key was stolen.")
    ] = False,
    days: Days = 365,
    encrypt: Encrypt = False,
    passphrase_file: PassphraseFile = None,
) -> None:
    """Create a new certificate for the server, before the old one expires. Clients need nothing new.

    With --ca, the clients need new files. The old ones work until the old certificate of the CA expires.

    With --client, the old key of the client is no longer accepted, not even by a server that is running.

    With --revoke, DIR/ca.crl lists the old certificate. Give this file to every client for join --crl.
    """
    if ca + revoke + bool(client) > 1:
        raise UserError("Give either --ca, --revoke or --client.")
    if (encrypt or passphrase_file) and not client:
        raise UserError("--encrypt and --passphrase-file are for a client's file: give its --client NAME.")
    if client:
        file = deploy_keys.renew_client(folder, client, new_passphrase(encrypt, passphrase_file), days)
        _print_files([file], folder)
        return
    if ca:
        _print_files(deploy_keys.renew_ca(folder, days), folder)
        typer.echo("If a client's file is not listed, replace the certificate at its end by the new ca.crt.")
    else:
        deploy_keys.renew_server(folder, days, revoke=revoke)
    if revoke:
        typer.echo(printable(f"{folder / 'ca.crl'}: give this file to every client, for join --crl"))
    until = expiry.expiry(folder)
    typer.echo(
        f"valid until {until:%Y-%m-%d}; 'fedseal serve' uses the new certificate when it is next started"
    )


@app.command("revoke", epilog="Example:  fedseal keys revoke keys north")
def revoke(
    folder: KeysFolder,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the client.")],
) -> None:
    """Exclude a client. A run that is going on excludes it within seconds and continues without it."""
    deploy_keys.revoke_client(folder, name)
    typer.echo(f"{name} can no longer take part")


def new_passphrase(encrypt: bool, file: Path | None) -> bytes:
    """The passphrase for new files of clients; empty if they are not encrypted."""
    if not encrypt and file is None:
        return b""
    return find_passphrase(file, "new passphrase of the clients' files", confirm=True)


def find_passphrase(file: Path | None, prompt: str, *, confirm: bool = False) -> bytes:
    """A passphrase from a file, from the environment, or typed on the terminal."""
    if file is not None:
        try:
            passphrase = read_secret(file).rstrip(b"\r\n")
        except OSError as error:
            raise UserError(f"Cannot read {file} ({error.strerror}): check --passphrase-file.") from error
    elif PASSPHRASE in os.environ:
        passphrase = os.environb[PASSPHRASE.encode()]
    elif sys.stdin is not None and sys.stdin.isatty():
        typed = typer.prompt(prompt, hide_input=True, confirmation_prompt=confirm, err=True)
        passphrase = str(typed).encode()
    else:
        raise UserError(f"A passphrase is needed: give --passphrase-file, or set {PASSPHRASE}.")
    if not passphrase:
        raise UserError("The passphrase is empty: give another one.")
    return passphrase


def _print_files(files: list[Path], folder: Path) -> None:
    typer.echo(printable(f"{folder}: keep this folder secret"))
    for file in files:
        typer.echo(printable(f"{file}: give this file to client {file.stem} only"))
