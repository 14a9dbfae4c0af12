"""What this machine has, and how much of it is used."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedseal.errors import UserError


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


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Computes with so many threads. Sums come out the same to the bit only for the same number."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
