"""Log messages: on the terminal or in a pipe, in a file, as text or as JSON.

Modules log to the logger "fedseal". What a progress bar shows as well goes to "fedseal.progress". A message
may carry `extra=about(EVENT, KEY=VALUE, ...)`, which becomes part of its JSON object.
"""

import json
import logging
import math
import sys
from contextlib import suppress
from datetime import datetime
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from fedseal.errors import UNSAFE, printable
from fedseal.system.files import cannot_write

log = logging.getLogger("fedseal")
progress_log = logging.getLogger("fedseal.progress")

ERROR, STOPPED = "error", "stopped"  # the events that end a command early


def about(event: str, /, **fields: Any) -> dict[str, Any]:
    """The `extra` of a message about an event."""
    return {"event": event, "fields": fields}


def set_up_logs(
    *, long: bool = False, quiet: bool = False, file: Path | None = None, json_lines: bool = False
) -> None:
    """Sends messages to the terminal or pipe, and to a file. Replaces an earlier set-up.

    Without a terminal, a long command writes its progress and the time of each message.
    """
    handlers: list[logging.Handler] = [ConsoleHandler(long, quiet, json_lines)]
    if file is not None:
        handlers.append(open_log_file(file))
    remove_logs()
    log.setLevel(logging.INFO)
    log.propagate = False  # other packages may send what reaches the root logger to the terminal as well
    for handler in handlers:
        handler.setFormatter(JsonFormatter() if json_lines else TextFormatter())
        log.addHandler(handler)


def remove_logs() -> None:
    """Undoes `set_up_logs`."""
    log.propagate = True
    for handler in [h for h in log.handlers if isinstance(h, ConsoleHandler | LogFile)]:
        log.removeHandler(handler)
        handler.close()


class ConsoleHandler(logging.Handler):
    """Prints warnings and errors on stderr, and the rest on stdout. A terminal shows no time stamps."""

    def __init__(self, long: bool, quiet: bool, json_lines: bool) -> None:
        super().__init__(logging.WARNING if quiet else logging.INFO)
        self.json_lines = json_lines
        self.stamped = json_lines or (long and not Console().is_terminal)

    def emit(self, record: logging.LogRecord) -> None:
        if not self.stamped and record.name == progress_log.name:  # a progress bar shows that
            return
        # A progress bar replaces both streams, to stay below the messages.
        stream = sys.stderr if record.levelno > logging.INFO else sys.stdout
        event, text = getattr(record, "event", ""), printable(record.getMessage())
        with suppress(OSError, ValueError):  # a reader that is gone must not end the run
            if event == ERROR and not self.json_lines:
                line = f"[bold red]error:[/] {escape(text)}"
                Console(stderr=True, highlight=False).print(line, soft_wrap=True)
            elif event == STOPPED and not self.json_lines:
                print(text, file=stream, flush=True)
            elif not self.stamped:
                level = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
                print(f"{level}{text}", file=stream, flush=True)
            else:
                print(self.format(record), file=stream, flush=True)


class LogFile(WatchedFileHandler):
    """Appends to a file, and opens it again if logrotate has moved it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # it cannot be opened again
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """A file that can no longer be written does not end the run, and is reported once."""
        log.removeHandler(self)
        log.warning("cannot write %s any more (%s)", self.baseFilename, sys.exc_info()[1])


def open_log_file(path: Path) -> LogFile:
    """Opens a file for log messages; raises before the run if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return LogFile(path, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise cannot_write(path, error) from error


class TextFormatter(logging.Formatter):
    """Time, level and message in one line."""

    def format(self, record: logging.LogRecord) -> str:
        return f"{_time(record)} {record.levelname.lower()}: {printable(record.getMessage())}"


class JsonFormatter(logging.Formatter):
    """A JSON object in one line; numbers that JSON does not have are null."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": _time(record), "level": record.levelname.lower()}
        line |= {"event": getattr(record, "event", "message"), "message": record.getMessage()}
        fields = _finite(getattr(record, "fields", {}))
        text = json.dumps(line | fields | line, ensure_ascii=False, default=str)
        return UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="seconds")


def _finite(fields: dict[str, Any]) -> dict[str, Any]:
    def check(value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {name: check(value) for name, value in fields.items()}
