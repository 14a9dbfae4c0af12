"""Worker processes. On Linux they are forked from a process that has already imported PyTorch."""

import multiprocessing
import os
import signal
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess, SpawnProcess
from multiprocessing.process import BaseProcess
from typing import Any

from fedseal.errors import UserError

FORKS = sys.platform == "linux"
ATTEMPTS, PAUSE = 10, 0.1  # to start a worker; seconds between two of them


def prepare_workers(module: str) -> None:
    """Starts the process that workers are forked from, if it is not there.

    It imports the module in the background. Started before this process does the same, it saves time.
    """
    if not FORKS:
        return
    multiprocessing.set_forkserver_preload([module])
    before = os.environ.get("OPENBLAS_NUM_THREADS")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # a process with threads must not fork
    try:
        with _without_interrupts():
            forkserver.ensure_running()
    except OSError as error:
        if "AF_UNIX path too long" not in str(error):
            raise
        raise UserError(
            f"The path of the temporary folder {tempfile.gettempdir()} is too long for worker processes: set"
            " TMPDIR to a shorter one, such as /tmp."
        ) from error
    finally:
        if before is None:
            del os.environ["OPENBLAS_NUM_THREADS"]
        else:
            os.environ["OPENBLAS_NUM_THREADS"] = before


def start_worker(target: Callable[..., None], *args: Any) -> BaseProcess:
    """Starts a process that ignores Ctrl-C, which is meant for the run; the run ends its workers.

    If the process that workers are forked from is killed meanwhile, it is started again.
    """
    for _ in range(ATTEMPTS):
        prepare_workers(target.__module__)
        process = (ForkServerProcess if FORKS else SpawnProcess)(
            target=_work, args=(dict(os.environ), target, args), daemon=True
        )
        with suppress(EOFError, ConnectionError), _without_main_module(), _without_interrupts():
            process.start()
            return process
        time.sleep(PAUSE)  # a killed process can still look alive
    raise UserError("Worker processes cannot be started: they are killed at once.")


def _work(environment: Mapping[str, str], target: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment)  # of the run, not of the process that this one was forked from
    target(*args)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Blocks Ctrl-C, also in processes that start inside. In this process it is delayed, not lost."""
    resource_tracker.ensure_running()  # it would unblock the signal if it started later
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _without_main_module() -> Iterator[None]:
    """Keeps a new process from importing the user's script, which would start the run once more."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
