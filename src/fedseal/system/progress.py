"""Progress of long work: a bar on a terminal, otherwise a line from time to time."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from fedseal.errors import printable
from fedseal.system.logs import about, progress_log


class RateLimit:
    """Allows a message if the last one was some seconds ago."""

    def __init__(self, seconds: float = 5.0) -> None:
        self.seconds, self.last = seconds, -math.inf

    def allows(self, *, always: bool = False) -> bool:
        now = time.monotonic()
        if not always and now - self.last < self.seconds:
            return False
        self.last = now
        return True


@contextmanager
def progress_bar(title: str, total: int, *, show: bool = True) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr. Yields a function that advances it; a total of 0 means unknown."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    limit, done = RateLimit(), 0
    limit.allows()  # short work needs no line

    def advance(amount: int) -> None:
        nonlocal done
        done += amount
        bar.advance(task, amount)
        if limit.allows():
            share = f"{done / total:.0%}" if total else f"{done:,}"
            progress_log.info("%s: %s", title, share, extra=about("loading", done=done, total=total or None))

    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not show) as bar:
        task = bar.add_task(escape(printable(title)), total=total or None)
        yield advance


def format_duration(seconds: float) -> str:
    """A time in its largest fitting unit, such as "12 min"."""
    for unit, size in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
