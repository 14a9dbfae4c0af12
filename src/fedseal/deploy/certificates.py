"""X.509 certificates of a deployment: a CA's, the server's, which the CA has signed, and revoked ones."""

import ipaddress
import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedseal.errors import UserError
from fedseal.system.files import read_file

CA_NAME, SERVER_NAME = "fedseal CA", "fedseal server"
LOOPBACK = ("localhost", "127.0.0.1", "::1")  # the server's own programs use these addresses


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def read_certificate(file: Path) -> x509.Certificate:
    """A certificate from its file."""
    try:
        return x509.load_pem_x509_certificate(read_required(file))
    except ValueError as error:
        raise UserError(f"{file} is damaged: restore it, or create keys in a new folder.") from error


def read_required(path: Path) -> bytes:
    """The content of a file that a folder of keys must have."""
    try:
        return read_file(path)
    except OSError as error:
        raise UserError(
            f"Cannot read {path} ({error.strerror}): create keys with 'fedseal keys init'."
        ) from error


def certify_ca(key: ec.EllipticCurvePrivateKey, days: int) -> x509.Certificate:
    """A CA's certificate, signed with its own key."""
    return _certify(CA_NAME, key.public_key(), key, _end(days), hosts=None)


def certify_server(
    key: ec.EllipticCurvePublicKey,
    hosts: Iterable[str],
    days: int,
    ca: x509.Certificate,
    ca_key: ec.EllipticCurvePrivateKey,
    crl: str = "",
) -> x509.Certificate:
    """A server's certificate for some hosts. It ends with that of its CA, or earlier.

    `crl` is the address of the list of revoked certificates, if it has one.
    """
    end = min(_end(days), ca.not_valid_after_utc)
    names = [alternative_name(host) for host in dict.fromkeys((*hosts, *LOOPBACK))]
    return _certify(SERVER_NAME, key, ca_key, end, hosts=names, crl=crl)


def certified_hosts(certificate: x509.Certificate) -> list[str]:
    """The hosts that a server's certificate is for."""
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in names]


def revocation_address(certificate: x509.Certificate) -> str:
    """The address of the list of revoked certificates that a certificate names; empty if it names none."""
    try:
        points = certificate.extensions.get_extension_for_class(x509.CRLDistributionPoints).value
    except x509.ExtensionNotFound:
        return ""
    return next((str(name.value) for point in points for name in point.full_name or ()), "")


def revocation_list(
    serials: Iterable[int], ca: x509.Certificate, ca_key: ec.EllipticCurvePrivateKey
) -> x509.CertificateRevocationList:
    """The revoked certificates of a CA. The list is valid as long as the CA's certificate."""
    now = datetime.now(UTC)
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(ca.subject)
        .last_update(now - timedelta(days=1))  # the machines' clocks differ
        .next_update(ca.not_valid_after_utc)
        .add_extension(x509.CRLNumber(int(now.timestamp())), critical=False)
    )
    for serial in serials:
        revoked = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now).build()
        builder = builder.add_revoked_certificate(revoked)
    return builder.sign(ca_key, hashes.SHA384())


def alternative_name(host: str) -> x509.GeneralName:
    """A name or an address in the form of certificates."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not re.fullmatch(r"(?!-)[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*", host) or len(host) > 253:
        raise UserError(f"--host takes the name or address by which clients reach the server, not '{host}'.")
    return x509.DNSName(host)


def _end(days: int) -> datetime:
    return datetime.now(UTC) + timedelta(days=days)


def _certify(
    subject: str,
    key: ec.EllipticCurvePublicKey,
    ca_key: ec.EllipticCurvePrivateKey,
    end: datetime,
    hosts: list[x509.GeneralName] | None,
    crl: str = "",
) -> x509.Certificate:
    """A server's certificate for these hosts, or a CA's certificate without any."""
    ca = hosts is None
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
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, CA_NAME)]))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - timedelta(days=1))  # the machines' clocks differ
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=ca, path_length=0 if ca else None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
    )
    if hosts is not None:
        server = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        builder = builder.add_extension(server, critical=False)
    if crl:
        point = x509.DistributionPoint([x509.UniformResourceIdentifier(crl)], None, None, None)
        builder = builder.add_extension(x509.CRLDistributionPoints([point]), critical=False)
    return builder.sign(ca_key, hashes.SHA384())
