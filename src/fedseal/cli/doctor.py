"""The command doctor: checks whether this machine can train."""

import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fedseal.cli.common import console, escape
from fedseal.errors import UserError
from fedseal.system.lazy import LazyModule
from fedseal.system.ports import check_port

if TYPE_CHECKING:
    import torch

    from fedseal.data import cache, catalogue
    from fedseal.deploy import expiry
    from fedseal.deploy import keys as deploy_keys
    from fedseal.system import machine
else:
    torch = LazyModule("torch")
    cache = LazyModule("fedseal.data.cache")
    catalogue = LazyModule("fedseal.data.catalogue")
    deploy_keys = LazyModule("fedseal.deploy.keys")
    expiry = LazyModule("fedseal.deploy.expiry")
    machine = LazyModule("fedseal.system.machine")

GB = 1e9
DEFAULT_PORT = 8000  # of `fedseal serve`
NEEDED_MEMORY, GOOD_MEMORY = 0.5 * GB, 2 * GB
NEEDED_DISK, GOOD_DISK = 0.1 * GB, 2 * GB  # the largest data set takes some 300 MB

Verdict = Literal["ok", "note", "fail"]
COLOURS: dict[Verdict, str] = {"ok": "green", "note": "yellow", "fail": "red"}
Finding = tuple[Verdict, str, str]  # with the name of what was checked, and a text


def doctor(
    keys: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also check the keys of a deployment.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(metavar="N", help="Port of 'fedseal serve'. Default: 8000.", min=1, max=65535),
    ] = None,
) -> None:
    """Check whether this machine can train: versions, memory, disk, port, certificates, data.

    Prints a line for each check: ok, note (it works, but read the line) or fail (do what the line says). The
    exit code is 2 if a check failed, otherwise 0.
    """
    failed = False
    for verdict, name, text in examine(keys, port):
        failed |= verdict == "fail"
        mark = f"[{COLOURS[verdict]}]{verdict:4}[/]"
        console.print(f"{mark}  {name:18} {escape(text)}", soft_wrap=True)
    if failed:
        raise typer.Exit(UserError.exit_code)


def examine(keys: Path | None, port: int | None) -> Iterator[Finding]:
    """All checks, one after the other."""
    yield "ok", "python", platform.python_version()
    yield "ok", "fedseal", version("fedseal")
    yield (found := find_torch())
    if found[0] == "fail":
        return
    yield find_package("flwr", "flower", "serve, join and --engine flower")
    yield find_package("mlflow-skinny", "mlflow", "--mlflow")
    yield find_package("dp-accounting", "privacy", "privacy.mode")
    yield find_gpu()
    yield "ok", "cores", str(machine.cores())
    yield judge_size("memory", available_memory(), NEEDED_MEMORY, GOOD_MEMORY, "end other programs")
    yield find_disk("disk, data cache", cache.root(), "set FEDSEAL_DATA to another folder")
    yield find_disk("disk, this folder", Path.cwd(), "train in another folder")
    yield find_data()
    yield find_port(port)
    if keys is not None:
        yield from find_keys(keys)


def find_torch() -> Finding:
    """Imports PyTorch, since an installation can be broken."""
    try:
        return "ok", "torch", str(torch.__version__)
    except Exception as error:
        return "fail", "torch", f"cannot be imported ({error}): install fedseal again"


def find_package(name: str, extra: str, purpose: str) -> Finding:
    try:
        return "ok", extra, version(name)
    except PackageNotFoundError:
        return "note", extra, f"not installed: for {purpose}, install fedseal with its extra '{extra}'"


def find_gpu() -> Finding:
    if torch.cuda.is_available():
        return "ok", "GPU", torch.cuda.get_device_name()
    return "ok", "GPU", "Apple's MPS" if torch.backends.mps.is_available() else "none: trains on the CPU"


def available_memory() -> float:
    """Bytes that this process can still use: of the machine, and of its container if that has a limit."""
    limits = []
    listed = Path("/proc/meminfo")
    if listed.exists():
        lines = dict(line.split(":") for line in listed.read_text().splitlines())
        limits.append(1024.0 * int(lines["MemAvailable"].split()[0]))
    else:
        limits.append(float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")))
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        limits.append(float(text) - float(used.read_text()))
    return min(limits)


def judge_size(name: str, size: float, needed: float, good: float, advice: str) -> Finding:
    """Compares free memory or disk space with what is needed, and with what is comfortable."""
    text = f"{size / GB:.1f} GB free"
    if size < needed:
        return "fail", name, f"{text}, but training needs {needed / GB:.1f} GB: {advice}"
    return ("ok", name, text) if size >= good else ("note", name, f"{text}: may be too little; {advice}")


def find_disk(name: str, folder: Path, advice: str) -> Finding:
    """The free space of a folder, which need not exist yet; it must be writable."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        return "fail", name, f"cannot write to {there} ({error.strerror}): {advice}"
    verdict, name, text = judge_size(name, shutil.disk_usage(there).free, NEEDED_DISK, GOOD_DISK, advice)
    return verdict, name, f"{text} ({folder})"


def find_data() -> Finding:
    """The published data sets in the cache, with their sizes."""
    found = []
    for name in catalogue.PUBLISHED:
        if cache.origin(name) is not None:
            files = (cache.root() / name).rglob("*")
            size = sum(file.stat().st_size for file in files if file.is_file())
            found.append(f"{name} ({size / 1e6:.0f} MB)")
    if not found:
        return "note", "data", "no data set is here yet: get one with 'fedseal data get fashion-mnist'"
    return "ok", "data", ", ".join(found)


def find_port(port: int | None) -> Finding:
    """Whether `fedseal serve` can listen. Without --port, a busy port is no obstacle to training."""
    number = port or DEFAULT_PORT
    try:
        check_port("0.0.0.0", number)
    except UserError as error:
        return "fail" if port else "note", "port", str(error)
    return "ok", "port", f"{number} is free"


def find_keys(folder: Path) -> Iterator[Finding]:
    """The server's certificate and the clients' keys of a deployment."""
    try:
        hosts = deploy_keys.certified_hosts(folder)
        expiry.check_dates(folder)
        deploy_keys.check_secrets(folder)
        until = expiry.expiry(folder)
        names = deploy_keys.read_registered(folder)
        expired = expiry.explain_expired(folder, expiry.client_expiries(folder))
        soon = expiry.warn_of_clients(folder)
    except UserError as error:
        yield "fail", "keys", str(error)
        return
    if warning := expiry.warn_of_expiry(folder):
        yield "note", "certificates", warning
    else:
        yield "ok", "certificates", f"valid until {until:%Y-%m-%d} for {', '.join(hosts)}"
    for text in expired.values():
        yield "fail", "client keys", text
    for text in soon:
        yield "note", "client keys", text
    if valid := [name for name in names if name not in expired]:
        yield "ok", "client keys", ", ".join(valid)
