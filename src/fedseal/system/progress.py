"""A progress bar for work of known length."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress_bar(title: str, total: int, *, show: bool = True) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr. Yields a function that advances it; a total of 0 means unknown."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not show) as progress:
        task = progress.add_task(title, total=total or None)
        yield lambda amount: progress.advance(task, amount)
