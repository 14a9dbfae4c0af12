"""Child processes that end with their parent, and delayed interrupts."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PARENT = "FEDSEAL_PARENT"  # environment variable with the parent's process number


def end_with_parent() -> None:
    """Ends this process, gracefully if possible, when the parent named in its environment is gone."""
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
def defer_interrupts() -> Iterator[None]:
    """Delays Ctrl-C until the end of the context.

    An exception while files are written or locks are held could leave a lock closed forever.
    """
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
