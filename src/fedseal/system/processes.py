"""Child processes that end with their parent; Ctrl-C and SIGTERM, which end a command in the same way."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PARENT = "FEDSEAL_PARENT"  # environment variable with the parent's process number


def end_with_parent(clean_up: Callable[[], object] = lambda: None) -> None:
    """Ends this process, gracefully if possible, when the parent named in its environment is gone.

    `clean_up` does what the parent no longer can.
    """
    if PARENT not in os.environ:
        return
    parent = int(os.environ.pop(PARENT))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        clean_up()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class Stopped(BaseException):
    """Ctrl-C or SIGTERM. Command-line libraries handle KeyboardInterrupt themselves; this one reaches us."""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number  # 130 or 143, as in a shell
        self.hint = ""  # how to continue


def leave_on_signals() -> None:
    """Makes Ctrl-C and SIGTERM end the process at once, in one sentence: there is nothing to tidy up yet."""
    _handle_signals(_leave)


def stop_on_signals() -> None:
    """Makes Ctrl-C and SIGTERM raise `Stopped`; a second one ends the process at once."""
    stopping = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        if stopping:
            _leave(number, frame)
        if not _is_importing(frame):
            stopping = True
            raise Stopped(number)
        again = threading.Timer(0.1, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()

    _handle_signals(stop)


def _handle_signals(handler: Callable[[int, FrameType | None], None]) -> None:
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as with nohup, or as a background job
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    with suppress(OSError):
        os.write(2, b"Stopped.\n")
    os._exit(128 + number)


def _is_importing(frame: FrameType | None) -> bool:
    """True within an import: PyTorch would swallow an exception, and go on with half of NumPy."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Delays Ctrl-C and SIGTERM until the end of the context.

    An exception while files are written or locks are held could leave a lock closed forever.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[signal.Signals] = []
    before = {number: handler for number in SIGNALS if callable(handler := signal.getsignal(number))}
    for number in before:
        signal.signal(number, lambda number, frame: came.append(signal.Signals(number)))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            before[came[0]](came[0], None)
