"""The keys of a deployment: a CA, the server's certificate, and a key pair for each client.

DIR/ca.crt, ca.key            the CA that clients trust; ca.key is used only when the folder is created
DIR/server.crt, server.key    the server's certificate and private key
DIR/clients/NAME.pub          the public key of a client; only clients with such a file may take part
DIR/clients/NAME.key          the file for that client: its private key and ca.crt
"""

import ipaddress
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedseal.errors import UserError
from fedseal.system.files import cannot_write, read_file

VALIDITY = timedelta(days=3650)
LOOPBACK = ("localhost", "127.0.0.1", "::1")  # the server's own programs use these addresses
CERTIFICATE = b"-----BEGIN CERTIFICATE-----"


def create_keys(folder: Path, hosts: Iterable[str], clients: Iterable[str]) -> list[Path]:
    """Creates all keys of a deployment and returns the clients' files. It overwrites nothing."""
    if (folder / "ca.crt").exists() or (folder / "ca.key").exists():
        raise UserError(f"{folder} already holds keys: add clients with 'fedseal keys add-client'.")
    clients = _check_names(clients)
    names = [_alternative_name(host) for host in dict.fromkeys((*hosts, *LOOPBACK))]
    ca_key, server_key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    ca = _certificate("fedseal CA", ca_key, "fedseal CA", ca_key, names=None)
    _write(folder / "ca.key", _pem(ca_key), secret=True)
    _write(folder / "ca.crt", ca.public_bytes(Encoding.PEM))
    server = _certificate("fedseal server", server_key, "fedseal CA", ca_key, names=names)
    _write(folder / "server.key", _pem(server_key), secret=True)
    _write(folder / "server.crt", server.public_bytes(Encoding.PEM))
    (folder / "clients").mkdir(exist_ok=True)
    return add_clients(folder, clients)


def add_clients(folder: Path, clients: Iterable[str]) -> list[Path]:
    """Creates the keys of more clients and returns their files."""
    ca_certificate, names = _read(folder / "ca.crt"), _check_names(clients)
    for name in names:
        if (folder / "clients" / f"{name}.pub").exists():
            raise UserError(f"{folder} already has a client '{name}': use another name, or delete its files.")
    return [_add_client(folder / "clients", name, ca_certificate) for name in names]


def _add_client(folder: Path, name: str, ca_certificate: bytes) -> Path:
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    _write(folder / f"{name}.key", private + ca_certificate, secret=True)
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    _write(folder / f"{name}.pub", public + b" " + name.encode() + b"\n")
    return folder / f"{name}.key"


def read_registered(folder: Path) -> dict[str, bytes]:
    """The registered clients: their public keys, in Flower's form, by name in alphabetical order."""
    files = sorted((folder / "clients").glob("*.pub"), key=lambda path: path.stem)
    if not files:
        raise UserError(f"{folder} has no client keys: add clients with 'fedseal keys add-client {folder}'.")
    registered = {}
    for path in files:
        try:
            key = load_ssh_public_key(_read(path))
            if not isinstance(key, ec.EllipticCurvePublicKey):
                raise TypeError("another kind of key")
        except Exception as error:
            raise UserError(
                f"{path} is not a client's public key: delete it, or create a new one."
            ) from error
        registered[path.stem] = _public_bytes(key)
    return registered


@dataclass(frozen=True)
class ClientKey:
    """The file that a client was given, with its public key and the CA's certificate."""

    file: Path
    public: bytes
    ca_certificate: bytes


def read_client_key(file: Path) -> ClientKey:
    """Reads the file that a client was given."""
    private, marker, rest = _read(file).partition(CERTIFICATE)
    try:
        key = load_ssh_private_key(private, None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise TypeError("another kind of key")
        x509.load_pem_x509_certificate(marker + rest)
    except Exception as error:
        raise UserError(
            f"{file} is not a client's key: give the file clients/NAME.key that 'fedseal keys' created."
        ) from error
    return ClientKey(file, _public_bytes(key.public_key()), marker + rest)


def certified_hosts(folder: Path) -> list[str]:
    """The hosts for which the server's certificate is valid; raises if the files do not belong together."""
    try:
        certificate = x509.load_pem_x509_certificate(_read(folder / "server.crt"))
        key = load_pem_private_key(_read(folder / "server.key"), None)
        certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(_read(folder / "ca.crt")))
        if key.public_key() != certificate.public_key():
            raise ValueError("another certificate's key")
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, TypeError, x509.ExtensionNotFound, InvalidSignature) as error:
        raise UserError(
            f"ca.crt, server.crt and server.key in {folder} do not belong together, or one is damaged:"
            " restore them, or create keys in a new folder."
        ) from error
    return [str(name.value) for name in names]


def expiry(folder: Path) -> datetime:
    """When the first of the deployment's certificates expires."""
    certificates = [x509.load_pem_x509_certificate(_read(folder / name)) for name in ("ca.crt", "server.crt")]
    return min(certificate.not_valid_after_utc for certificate in certificates)


def check_dates(folder: Path) -> None:
    """Raises if one of the deployment's certificates has expired, or is not valid yet."""
    now = datetime.now(UTC)
    for file in (folder / "ca.crt", folder / "server.crt"):
        certificate = x509.load_pem_x509_certificate(_read(file))
        first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        if now > last:
            raise UserError(
                f"The certificate {file} expired on {last:%Y-%m-%d}: create keys in a new folder with"
                " 'fedseal keys init', and give each client its new key."
            )
        if now < first:
            raise UserError(
                f"The certificate {file} is valid only from {first:%Y-%m-%d}: check this machine's clock,"
                f" which says {now:%Y-%m-%d}."
            )


def _public_bytes(key: ec.EllipticCurvePublicKey) -> bytes:
    """A public key in the form that Flower sends and stores."""
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _certificate(
    subject: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    issuer_key: ec.EllipticCurvePrivateKey,
    names: list[x509.GeneralName] | None,
) -> x509.Certificate:
    """A server's certificate for these hosts, or a CA's certificate without any."""
    ca, now = names is None, datetime.now(UTC)
    usage = x509.KeyUsage(
        digital_signature=not ca,
        key_cert_sign=ca,
        crl_sign=ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # the machines' clocks differ
        .not_valid_after(now + VALIDITY)
        .add_extension(x509.BasicConstraints(ca=ca, path_length=0 if ca else None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False
        )
    )
    if names is not None:
        server = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(server, critical=False)
    return builder.sign(issuer_key, hashes.SHA384())


def _alternative_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not re.fullmatch(r"(?!-)[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*", host) or len(host) > 253:
        raise UserError(f"--host takes the name or address by which clients reach the server, not '{host}'.")
    return x509.DNSName(host)


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


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _read(path: Path) -> bytes:
    try:
        return read_file(path)
    except OSError as error:
        raise UserError(
            f"Cannot read {path} ({error.strerror}): create keys with 'fedseal keys init'."
        ) from error


def _write(path: Path, content: bytes, *, secret: bool = False) -> None:
    """Creates a file; only its owner can ever read a secret one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
        with os.fdopen(number, "wb") as file:
            file.write(content)
    except FileExistsError:
        raise UserError(f"{path} exists, and keys are never overwritten: move it away first.") from None
    except OSError as error:
        raise cannot_write(path, error) from error
