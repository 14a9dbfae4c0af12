"""The machine: device, cores, threads, versions."""

import os
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import torch

from fedseal.errors import UserError

if sys.platform == "linux":
    import resource


def find_device(wanted: str, option: str = "engine.device") -> torch.device:
    """The device that an option requests; "auto" is the best one available."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if wanted == "auto":
        return torch.device(next(name for name, found in there.items() if found))
    if not there[wanted]:
        raise UserError(f"{option} is '{wanted}', but this machine has no such device: use 'auto'.")
    return torch.device(wanted)


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """The processor's name and the SIMD instructions in use, on which rounding depends."""
    listed = Path("/proc/cpuinfo")
    text = listed.read_text("utf-8", "replace") if listed.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    name = found[1].strip() if found else platform.processor() or platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def versions() -> dict[str, str]:
    """The versions and the machine on which a result depends."""
    packages = {name: version(name) for name in ("fedseal", "torch", "numpy")}
    return packages | {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": processor(),
    }


@contextmanager
def limited_memory(size: int) -> Iterator[None]:
    """On Linux, this process can allocate `size` further bytes in the context; more is a `MemoryError`."""
    if sys.platform != "linux":
        yield
        return
    status = Path("/proc/self/status").read_text("utf-8")
    used = 1024 * int(status.partition("VmData:")[2].split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [limit for limit in (used + size, soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Computes with this number of threads inside the context; the last bit of a sum depends on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
