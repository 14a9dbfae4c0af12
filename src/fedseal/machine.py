"""What this machine has, and how much of it is used."""

import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import torch

from fedseal.errors import UserError

SAME_ARITHMETIC = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
AS_IT_IS = {"ONEDNN_MAX_CPU_ISA": "DEFAULT"}


def round_alike() -> None:
    """Computes here, and in processes started from here, with AVX2 even where there is AVX-512.

    Sums in vectors of another width round otherwise, and so a run would end elsewhere. Whoever sets one of
    these variables has the processor as it is. So has whoever computed with PyTorch before: it is too late
    for this process, and those that it starts should compute alike.
    """
    if any(key in os.environ for key in SAME_ARITHMETIC) or not torch.cpu._is_avx2_supported():
        return
    os.environ |= SAME_ARITHMETIC
    if torch.backends.cpu.get_cpu_capability() != "AVX2":
        for key in SAME_ARITHMETIC:
            del os.environ[key]
        os.environ |= AS_IT_IS


round_alike()


def find_device(wanted: str) -> torch.device:
    """The device asked for, or the best one there is."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if wanted == "auto":
        return torch.device(next(name for name, found in there.items() if found))
    if not there[wanted]:
        raise UserError(f"engine.device is '{wanted}', which this machine does not have: use 'auto'.")
    return torch.device(wanted)


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """The processor's name and the instructions used of it: others round sums otherwise."""
    listed = Path("/proc/cpuinfo")
    text = listed.read_text("utf-8", "replace") if listed.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    name = found[1].strip() if found else platform.processor() or platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def versions() -> dict[str, str]:
    """What the numbers were made with."""
    packages = {name: version(name) for name in ("fedseal", "torch", "numpy")}
    return packages | {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": processor(),
    }


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Computes with so many threads. Sums come out the same to the bit only for the same number."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
