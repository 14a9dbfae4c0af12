"""Processes that end with the one that started them, and when they may be interrupted."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PARENT = "FEDSEAL_PARENT"  # in the environment of such a process: the number of the one that started it


def end_with_parent() -> None:
    """Ends this process, in good order if it can, when the one that started it and said so is gone."""
    if PARENT not in os.environ:
        return
    parent = int(os.environ.pop(PARENT))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the end of this: while files are written, and locks of other threads are held, which
    an exception at the wrong moment could leave locked for ever."""
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            before(came[0], None)
