"""When the certificates of a deployment expire, and the keys of its clients."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fedseal.deploy.certificates import read_certificate, read_required
from fedseal.errors import UserError

SOON = timedelta(days=30)  # before a certificate or a key expires


def expiry(folder: Path) -> datetime:
    """When the first of the deployment's certificates expires."""
    return min(read_certificate(folder / name).not_valid_after_utc for name in ("ca.crt", "server.crt"))


def is_soon(expiry: datetime) -> bool:
    """True if a certificate or key that is still valid expires within 30 days."""
    return timedelta(0) < expiry - datetime.now(UTC) < SOON


def warn_of_expiry(folder: Path) -> str:
    """What to do if a certificate expires within 30 days; otherwise empty."""
    for file, how in _renewals(folder).items():
        last = read_certificate(file).not_valid_after_utc
        if is_soon(last):
            return f"the certificate {file} expires on {last:%Y-%m-%d}: {how}"
    return ""


def check_dates(folder: Path) -> None:
    """Raises if one of the deployment's certificates has expired, or is not valid yet.

    It also raises if the expiry date of a client's key is damaged. Expired clients are refused one by one.
    """
    now = datetime.now(UTC)
    for file, how in _renewals(folder).items():
        certificate = read_certificate(file)
        first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        if now > last:
            raise UserError(f"The certificate {file} expired on {last:%Y-%m-%d}: {how}.")
        if now < first:
            raise UserError(
                f"The certificate {file} is valid only from {first:%Y-%m-%d}: check this machine's clock,"
                f" which says {now:%Y-%m-%d}."
            )
    client_expiries(folder)


def _renewals(folder: Path) -> dict[Path, str]:
    """The certificates, and how to renew each of them."""
    return {
        folder / "ca.crt": f"run 'fedseal keys renew {folder} --ca', and give each client its new file",
        folder / "server.crt": f"run 'fedseal keys renew {folder}'",
    }


# ---- clients' keys --------------------------------------------------------------------------------------


def expiry_line(days: int) -> bytes:
    """The line after a client's key that says when it expires."""
    return f"expires: {datetime.now(UTC) + timedelta(days=days):%Y-%m-%dT%H:%M:%SZ}\n".encode()


def parse_expiry(text: bytes, file: Path) -> datetime | None:
    """When a client's key expires, from the text after the key; None: never."""
    if not text.strip():  # the key is of an earlier version
        return None
    try:
        word, date = text.decode("ascii").split()
        if word != "expires:":
            raise ValueError("another line")
        found = datetime.fromisoformat(date)
    except ValueError as error:
        raise UserError(
            f"The text after the key in {file} is not a date such as 'expires: 2030-12-31': correct it, or"
            " renew the key with 'fedseal keys renew DIR --client NAME'."
        ) from error
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def read_expiry(public: Path) -> datetime | None:
    """When a client's key expires, from its file NAME.pub; None: never."""
    return parse_expiry(read_required(public).partition(b"\n")[2], public)


def client_expiries(folder: Path) -> dict[str, datetime | None]:
    """When the key of each client expires, by name; None: never."""
    return {file.stem: read_expiry(file) for file in sorted((folder / "clients").glob("*.pub"))}


def describe_end(last: datetime | None) -> str:
    """The date of a key that has expired or expires within 30 days; otherwise empty."""
    if last is None or last - datetime.now(UTC) >= SOON:
        return ""
    return f"{'expires' if is_soon(last) else 'expired'} on {last:%Y-%m-%d}"


def explain_expired(folder: Path, expiries: Mapping[str, datetime | None]) -> dict[str, str]:
    """Why clients are refused whose keys have expired, and what to do, by name."""
    now = datetime.now(UTC)
    return {
        name: f"{name} cannot take part, because its key expired on {last:%Y-%m-%d}: {_renewal(folder, name)}"
        for name, last in expiries.items()
        if last is not None and last <= now
    }


def warn_of_clients(folder: Path) -> list[str]:
    """What to do about clients' keys that expire within 30 days or never."""
    expiries = client_expiries(folder)
    warnings = [
        f"the key of {name} expires on {last:%Y-%m-%d}: {_renewal(folder, name)}"
        for name, last in expiries.items()
        if last is not None and is_soon(last)
    ]
    if endless := [name for name, last in expiries.items() if last is None]:
        warnings.append(
            f"keys of an earlier version, which never expire: {', '.join(endless)}; renew each with 'fedseal"
            f" keys renew {folder} --client NAME'"
        )
    return warnings


def _renewal(folder: Path, name: str) -> str:
    return f"run 'fedseal keys renew {folder} --client {name}', and give it its new file"
