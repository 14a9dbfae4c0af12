"""When the certificates of a deployment expire."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from fedseal.deploy.keys import read_certificate
from fedseal.errors import UserError

SOON = timedelta(days=30)  # before a certificate expires


def expiry(folder: Path) -> datetime:
    """When the first of the deployment's certificates expires."""
    return min(read_certificate(folder / name).not_valid_after_utc for name in ("ca.crt", "server.crt"))


def is_soon(expiry: datetime) -> bool:
    """True if a certificate that is still valid expires within 30 days."""
    return timedelta(0) < expiry - datetime.now(UTC) < SOON


def warn_of_expiry(folder: Path) -> str:
    """What to do if a certificate expires within 30 days; otherwise empty."""
    for file, how in _renewals(folder).items():
        last = read_certificate(file).not_valid_after_utc
        if is_soon(last):
            return f"the certificate {file} expires on {last:%Y-%m-%d}: {how}"
    return ""


def check_dates(folder: Path) -> None:
    """Raises if one of the deployment's certificates has expired, or is not valid yet."""
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


def _renewals(folder: Path) -> dict[Path, str]:
    """The certificates, and how to renew each of them."""
    return {
        folder / "ca.crt": f"run 'fedseal keys renew {folder} --ca', and give each client its new file",
        folder / "server.crt": f"run 'fedseal keys renew {folder}'",
    }
