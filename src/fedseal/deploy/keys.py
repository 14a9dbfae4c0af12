"""The keys of a deployment: a CA, the server's certificate, and a key pair for each client.

DIR/ca.crt, ca.key            the CA that clients trust; ca.key signs the server's certificate
DIR/ca.crl                    former certificates of the server that clients must not accept
DIR/server.crt, server.key    the server's certificate and private key
DIR/clients/NAME.pub          the public key of a client; only clients with such a file may take part
DIR/clients/NAME.key          the file for that client: its private key and ca.crt
                              both say when the key expires, in a line after the key
DIR/revoked/NAME.pub          the public key of a former client
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)

from fedseal.deploy import certificates
from fedseal.deploy.certificates import read_certificate, read_required
from fedseal.deploy.expiry import expiry_line, parse_expiry
from fedseal.errors import UserError
from fedseal.system.files import cannot_write, write_atomic
from fedseal.system.secret_files import check_secret, read_secret

DAYS = 365  # for which certificates and clients' keys are valid by default
PEM_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"
PEM_ENCRYPTED = b"-----BEGIN ENCRYPTED PRIVATE KEY-----"


def create_keys(
    folder: Path,
    hosts: Iterable[str],
    clients: Iterable[str],
    days: int = DAYS,
    passphrase: bytes = b"",
    crl: str = "",
) -> list[Path]:
    """Creates all keys of a deployment and returns the clients' files. It overwrites nothing.

    All are valid for this number of days. With a passphrase, the clients' files are encrypted.
    `crl` is the address at which ca.crl will be published, if it will be.
    """
    if any((folder / name).exists() for name in ("ca.crt", "ca.key", "server.crt", "server.key")):
        raise UserError(f"{folder} already holds keys: add clients with 'fedseal keys add-client'.")
    clients = _check_names(clients)
    ca_key, server_key = certificates.new_key(), certificates.new_key()
    ca = certificates.certify_ca(ca_key, days)
    server = certificates.certify_server(server_key.public_key(), hosts, days, ca, ca_key, crl)
    files = {"ca.key": _pem(ca_key), "ca.crt": _pem(ca), "server.key": _pem(server_key)}
    for name, content in (files | {"server.crt": _pem(server)}).items():
        _write(folder / name, content)
    _write_revocations(folder)
    return add_clients(folder, clients, passphrase, days)


def add_clients(
    folder: Path, clients: Iterable[str], passphrase: bytes = b"", days: int = DAYS
) -> list[Path]:
    """Creates the keys of more clients and returns their files."""
    ca_certificate, names = read_required(folder / "ca.crt"), _check_names(clients)
    for name in names:
        if (folder / "clients" / f"{name}.pub").exists():
            raise UserError(f"{folder} already has a client '{name}': use another name, or revoke it first.")
        if (file := folder / "clients" / f"{name}.key").exists():
            raise UserError(f"{file} exists, and keys are never overwritten: move it away first.")
    return [_write_client(folder, name, ca_certificate, passphrase, days) for name in names]


def renew_client(folder: Path, name: str, passphrase: bytes = b"", days: int = DAYS) -> Path:
    """Replaces the key of a client, and returns its file. The former key is no longer accepted."""
    _require_client(folder, name)
    return _write_client(folder, name, read_required(folder / "ca.crt"), passphrase, days)


def revoke_client(folder: Path, name: str) -> None:
    """Excludes a client, also from a run that is going on."""
    public = _require_client(folder, name)
    try:
        (folder / "revoked").mkdir(mode=0o700, exist_ok=True)
        public.replace(folder / "revoked" / public.name)
        public.with_suffix(".key").unlink(missing_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from error


def renew_server(folder: Path, days: int = DAYS, *, revoke: bool = False) -> None:
    """Replaces the server's key and certificate. Clients need nothing new, since the CA stays the same.

    With `revoke`, the former certificate is added to ca.crl, which each client then needs.
    """
    (ca, ca_key), former = _load_ca(folder), read_certificate(folder / "server.crt")
    if ca.not_valid_after_utc <= datetime.now(UTC):
        raise UserError(
            f"The CA's certificate {folder / 'ca.crt'} expired on {ca.not_valid_after_utc:%Y-%m-%d}: renew it"
            f" with 'fedseal keys renew {folder} --ca'."
        )
    try:
        hosts, crl = certificates.certified_hosts(former), certificates.revocation_address(former)
    except (ValueError, x509.ExtensionNotFound) as error:
        raise UserError(f"{folder / 'server.crt'} is not a server's certificate: restore it.") from error
    key = certificates.new_key()
    server = certificates.certify_server(key.public_key(), hosts, days, ca, ca_key, crl)
    if revoke:
        _write_revocations(folder, [former.serial_number])
    _write(folder / "server.key", _pem(key))
    _write(folder / "server.crt", _pem(server))


def renew_ca(folder: Path, days: int = DAYS) -> list[Path]:
    """Replaces the certificates of the CA and the server, and returns the clients' files with the new CA's.

    The CA keeps its key, so that clients with the former file accept the server until that one's CA expires.
    """
    _, ca_key = _load_ca(folder)
    certificate = _pem(certificates.certify_ca(ca_key, days))
    _write(folder / "ca.crt", certificate)
    _write_revocations(folder)
    renew_server(folder, days)
    files = sorted((folder / "clients").glob("*.key"))
    for file in files:
        _write(file, read_secret(file).partition(PEM_CERTIFICATE)[0] + certificate)
    return files


def read_registered(folder: Path) -> dict[str, bytes]:
    """The registered clients: their public keys, in Flower's form, by name in alphabetical order."""
    files = sorted((folder / "clients").glob("*.pub"), key=lambda path: path.stem)
    if not (folder / "ca.crt").exists():
        raise UserError(f"There are no keys in {folder}: create them with 'fedseal keys init {folder}'.")
    if not files:
        raise UserError(f"{folder} has no client keys: add clients with 'fedseal keys add-client {folder}'.")
    return {path.stem: read_public_key(path) for path in files}


def revoked_clients(folder: Path) -> set[str]:
    """The names of clients whose keys were revoked."""
    return {path.stem for path in (folder / "revoked").glob("*.pub")}


def read_public_key(path: Path) -> bytes:
    """A client's public key in Flower's form."""
    try:
        key = load_ssh_public_key(read_required(path).partition(b"\n")[0])
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise TypeError("another kind of key")
    except Exception as error:
        raise UserError(f"{path} is not a client's public key: delete it, or create a new one.") from error
    return _public_bytes(key)


@dataclass(frozen=True)
class ClientKey:
    """The content of the file that a client was given: its private key, and the CA's certificate."""

    private: ec.EllipticCurvePrivateKey = field(repr=False)
    ca_certificate: bytes
    crl: Path | None = None  # certificates of the CA that were revoked
    key_expiry: datetime | None = None  # None: never

    @property
    def public(self) -> bytes:
        """The public key in Flower's form."""
        return _public_bytes(self.private.public_key())

    @property
    def expiry(self) -> datetime:
        """When the CA's certificate expires."""
        return x509.load_pem_x509_certificate(self.ca_certificate).not_valid_after_utc


def read_client_key(
    file: Path, ask_passphrase: Callable[[], bytes] | None = None, crl: Path | None = None
) -> ClientKey:
    """Reads the file that a client was given; `ask_passphrase` is called if it is encrypted.

    `crl` is the list of the CA's revoked certificates, if the client was given one.
    """
    if crl is not None:
        read_revocations(crl)  # refuses another file
    try:
        private, marker, rest = read_secret(file).partition(PEM_CERTIFICATE)
    except OSError as error:
        raise UserError(f"Cannot read {file} ({error.strerror}): give the client's key file.") from error
    encrypted = private.lstrip().startswith(PEM_ENCRYPTED)
    passphrase = ask_passphrase() if encrypted and ask_passphrase else None
    try:
        load = load_pem_private_key if encrypted else load_ssh_private_key
        key = load(private, passphrase)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise TypeError("another kind of key")
        x509.load_pem_x509_certificate(marker + rest)
    except Exception as error:
        if encrypted:
            raise UserError(f"The passphrase does not open {file}: give the right one.") from error
        raise UserError(
            f"{file} is not a client's key: give the file clients/NAME.key that 'fedseal keys' created."
        ) from error
    return ClientKey(key, marker + rest, crl, parse_expiry(private.rpartition(b"KEY-----")[2], file))


def check_secrets(folder: Path) -> None:
    """Raises if other users can read one of the private keys."""
    for file in (folder / "ca.key", folder / "server.key", *sorted((folder / "clients").glob("*.key"))):
        if file.exists():
            check_secret(file)


def certified_hosts(folder: Path) -> list[str]:
    """The hosts for which the server's certificate is valid; raises if the files do not belong together."""
    try:
        certificate = read_certificate(folder / "server.crt")
        key = load_pem_private_key(read_required(folder / "server.key"), None)
        certificate.verify_directly_issued_by(read_certificate(folder / "ca.crt"))
        if key.public_key() != certificate.public_key():
            raise ValueError("another certificate's key")
        return certificates.certified_hosts(certificate)
    except (ValueError, TypeError, x509.ExtensionNotFound, InvalidSignature) as error:
        raise UserError(
            f"ca.crt, server.crt and server.key in {folder} do not belong together, or one is damaged:"
            f" restore them, run 'fedseal keys renew {folder}', or create keys in a new folder."
        ) from error


def _load_ca(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    if not (folder / "ca.key").exists():
        raise UserError(f"There is no {folder / 'ca.key'}, which signs certificates: copy it back for this.")
    try:
        certificate = read_certificate(folder / "ca.crt")
        key = load_pem_private_key(read_secret(folder / "ca.key"), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise ValueError("another CA's key")
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"ca.crt and ca.key in {folder} do not belong together, or one is damaged: restore them."
        ) from error
    return certificate, key


def read_revocations(file: Path) -> list[int]:
    """The serial numbers in a list of revoked certificates."""
    try:
        return [entry.serial_number for entry in x509.load_pem_x509_crl(read_required(file))]
    except ValueError as error:
        raise UserError(f"{file} is not a list of revoked certificates: give the server's ca.crl.") from error


def _write_revocations(folder: Path, serials: Iterable[int] = ()) -> None:
    """Adds certificates to ca.crl, which is created if an earlier version has not done so."""
    file = folder / "ca.crl"
    known = read_revocations(file) if file.exists() else []
    _write(file, _pem(certificates.revocation_list([*known, *serials], *_load_ca(folder))))


def _public_bytes(key: ec.EllipticCurvePublicKey) -> bytes:
    """A public key in the form that Flower sends and stores."""
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _write_client(folder: Path, name: str, ca_certificate: bytes, passphrase: bytes, days: int) -> Path:
    key, expires = certificates.new_key(), expiry_line(days)
    private, public = folder / "clients" / f"{name}.key", folder / "clients" / f"{name}.pub"
    if passphrase:
        encryption = BestAvailableEncryption(passphrase)
        content = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)
    else:
        content = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    _write(private, content + expires + ca_certificate)
    line = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    _write(public, line + b" " + name.encode() + b"\n" + expires)
    return private


def _check_names(clients: Iterable[str]) -> list[str]:
    names = list(clients)
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
            raise UserError(
                f"'{name}' is not a valid client name: use up to 64 letters, digits, '.', '_' and '-'."
            )
        if names.count(name) > 1:
            raise UserError(f"Two clients are named '{name}': give each client its own name.")
    return names


def _require_client(folder: Path, name: str) -> Path:
    """The public key file of a client, which must be registered."""
    registered = read_registered(folder)
    if name not in registered:
        raise UserError(f"{folder} has no client '{name}': its clients are {', '.join(registered)}.")
    return folder / "clients" / f"{name}.pub"


def _pem(item: ec.EllipticCurvePrivateKey | x509.Certificate | x509.CertificateRevocationList) -> bytes:
    if isinstance(item, x509.Certificate | x509.CertificateRevocationList):
        return item.public_bytes(Encoding.PEM)
    return item.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(path: Path, content: bytes) -> None:
    """Writes a file in a folder that only its owner can read."""
    write_atomic(path, content, private=True)
