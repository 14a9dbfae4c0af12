"""The keys of a deployment: a CA, the server's certificate, and a key pair for each client.

DIR/ca.crt, ca.key            whom clients trust; ca.key is not needed again
DIR/server.crt, server.key    the server's
DIR/clients/NAME.pub          a client that may take part; without this file it may not
DIR/clients/NAME.key          what is given to that client, and to nobody else: its key and ca.crt
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
from fedseal.files import cannot_write

LIFE = timedelta(days=3650)
ALWAYS = ("localhost", "127.0.0.1", "::1")  # the server's own programs talk to one another there
CERTIFICATE = b"-----BEGIN CERTIFICATE-----"


def init(folder: Path, hosts: Iterable[str], clients: Iterable[str]) -> list[Path]:
    """Makes all keys of a deployment; gives the clients' files. Nothing that is there is overwritten."""
    if (folder / "ca.crt").exists() or (folder / "ca.key").exists():
        raise UserError(f"{folder} holds keys already: add clients with 'fedseal keys add-client'.")
    names = _checked(clients)
    sans = [_san(host) for host in dict.fromkeys((*hosts, *ALWAYS))]
    authority, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    root = _certificate("fedseal CA", authority, "fedseal CA", authority, sans=None)
    _write(folder / "ca.key", _pem(authority), secret=True)
    _write(folder / "ca.crt", root.public_bytes(Encoding.PEM))
    leaf = _certificate("fedseal server", server, "fedseal CA", authority, sans=sans)
    _write(folder / "server.key", _pem(server), secret=True)
    _write(folder / "server.crt", leaf.public_bytes(Encoding.PEM))
    (folder / "clients").mkdir(exist_ok=True)
    return add_clients(folder, names)


def add_clients(folder: Path, clients: Iterable[str]) -> list[Path]:
    """Makes more clients' keys; gives the files to hand to them."""
    root, names = _read(folder / "ca.crt"), _checked(clients)
    for name in names:
        if (folder / "clients" / f"{name}.pub").exists():
            raise UserError(
                f"{folder} has a client '{name}' already: choose another name, or delete its files."
            )
    return [_add_client(folder / "clients", name, root) for name in names]


def _add_client(folder: Path, name: str, root: bytes) -> Path:
    key = ec.generate_private_key(ec.SECP384R1())
    handed = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()) + root
    _write(folder / f"{name}.key", handed, secret=True)
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    _write(folder / f"{name}.pub", public + b" " + name.encode() + b"\n")
    return folder / f"{name}.key"


def registered(folder: Path) -> dict[str, bytes]:
    """The clients that may take part: names, in order, and public keys as Flower knows them."""
    files = sorted((folder / "clients").glob("*.pub"), key=lambda path: path.stem)
    if not files:
        raise UserError(f"{folder} has no client's key: add clients with 'fedseal keys add-client {folder}'.")
    found = {}
    for path in files:
        try:
            key = load_ssh_public_key(_read(path))
            assert isinstance(key, ec.EllipticCurvePublicKey)
        except Exception as error:
            raise UserError(f"{path} is no client's public key: delete it, or make a new one.") from error
        found[path.stem] = public_bytes(key)
    return found


def public_bytes(key: ec.EllipticCurvePublicKey) -> bytes:
    """A public key in the form that Flower sends and stores."""
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


@dataclass(frozen=True)
class ClientKey:
    """What a client was given: a file with its private key; also its public key and the CA's certificate."""

    file: Path
    public: bytes
    root: bytes


def client_key(file: Path) -> ClientKey:
    """Reads the file that a client was given."""
    private, sign, rest = _read(file).partition(CERTIFICATE)
    try:
        key = load_ssh_private_key(private, None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        x509.load_pem_x509_certificate(sign + rest)
    except Exception as error:
        raise UserError(
            f"{file} is no client's key: take the file clients/NAME.key that 'fedseal keys' made."
        ) from error
    return ClientKey(file, public_bytes(key.public_key()), sign + rest)


def certified(folder: Path) -> list[str]:
    """The hosts that the server's certificate is for; raises if it, its key or its CA is no good."""
    try:
        certificate = x509.load_pem_x509_certificate(_read(folder / "server.crt"))
        key = load_pem_private_key(_read(folder / "server.key"), None)
        certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(_read(folder / "ca.crt")))
        if key.public_key() != certificate.public_key():
            raise ValueError("they are no pair")
        sans = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, TypeError, x509.ExtensionNotFound, InvalidSignature) as error:
        raise UserError(
            f"ca.crt, server.crt or server.key in {folder} is damaged, or not of the same making: restore it,"
            " or make keys in a new folder."
        ) from error
    return [str(san.value) for san in sans]


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    signer: ec.EllipticCurvePrivateKey,
    sans: list[x509.GeneralName] | None,
) -> x509.Certificate:
    """A server's certificate for some hosts, or a CA's without them."""
    ca, now = sans is None, datetime.now(UTC)
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
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # clocks differ
        .not_valid_after(now + LIFE)
        .add_extension(x509.BasicConstraints(ca=ca, path_length=0 if ca else None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
    )
    if sans is not None:
        server = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        builder = builder.add_extension(x509.SubjectAlternativeName(sans), critical=False)
        builder = builder.add_extension(server, critical=False)
    return builder.sign(signer, hashes.SHA384())


def _san(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not re.fullmatch(r"(?!-)[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*", host) or len(host) > 253:
        raise UserError(f"--host takes a name or an address that clients reach the server by, not '{host}'.")
    return x509.DNSName(host)


def _checked(clients: Iterable[str]) -> list[str]:
    names = list(clients)
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
            raise UserError(f"A client's name has letters, digits, '.', '_' and '-', unlike '{name}'.")
        if names.count(name) > 1:
            raise UserError(f"Two clients are called '{name}': give each a name of its own.")
    return names


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}): make keys with 'fedseal keys init'."
        ) from error


def _write(path: Path, content: bytes, *, secret: bool = False) -> None:
    """A new file; a secret one is for its owner alone from the first moment."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
        with os.fdopen(number, "wb") as file:
            file.write(content)
    except FileExistsError:
        raise UserError(
            f"{path} is there already, and keys are never overwritten: move it away first."
        ) from None
    except OSError as error:
        raise cannot_write(path, error) from error
