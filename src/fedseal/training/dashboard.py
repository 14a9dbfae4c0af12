"""A page that shows a run while it goes on. It is read-only, and only this machine can open it."""

import logging
import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

from fedseal.config.config import Config
from fedseal.core import PreparationStep
from fedseal.errors import UserError
from fedseal.report import charts
from fedseal.report.page import render_page, section, table
from fedseal.report.run import finite_points
from fedseal.report.titles import accuracy_title
from fedseal.rounds import ClientDone, Event, LeftOut, RoundDone
from fedseal.storage.events_file import read_events
from fedseal.system.logs import TextFormatter, log
from fedseal.system.progress import format_duration
from fedseal.training.observers import TimeLeft

HOST = "127.0.0.1"
LOCAL_NAMES = ("localhost", HOST, "[::1]")
REFRESH_SECONDS = 3
MESSAGES = 20  # the last ones are shown
MAX_CLIENTS = 100  # rows
HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Refresh": str(REFRESH_SECONDS),
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
}

Events = Sequence[Mapping[str, Any]]


class Dashboard:
    """Observes a run, and shows it at http://127.0.0.1:PORT until it is closed."""

    def __init__(self, port: int, config: Config, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.phase, self.left = "starting", ""
        self.replies: dict[str, int] = {}  # the last round with a usable reply, by client
        self.unusable = ""  # the client that was last left out
        self.clock, self.messages = TimeLeft(config.rounds), LastMessages()
        try:
            self.server = Server((HOST, port), Handler)
        except OSError as error:
            raise UserError(
                f"Cannot show the dashboard on {HOST}:{port} ({error.strerror}): choose another --dashboard."
            ) from error
        self.server.dashboard = self
        log.addHandler(self.messages)
        threading.Thread(target=self.server.serve_forever, name="dashboard", daemon=True).start()

    def __call__(self, event: Event) -> None:
        if isinstance(event, PreparationStep):
            self.phase = f"{event.what}: {event.done} of {event.total}"
        elif isinstance(event, LeftOut):
            self.unusable = event.client
        elif isinstance(event, ClientDone):  # comes also after a client was left out
            self.phase = f"round {event.t}: {event.done} of {event.total} clients are done"
            if event.client != self.unusable:
                self.replies[event.client] = event.t
            self.unusable = ""
        elif isinstance(event, RoundDone):
            left = self.clock.after(event.metrics)
            self.left = f"about {format_duration(left)} left" if left else ""
            last = event.t == self.config.rounds
            self.phase = "writing the model and the report" if last else f"round {event.t + 1} has begun"

    def close(self) -> None:
        log.removeHandler(self.messages)
        self.server.shutdown()
        self.server.server_close()

    def page(self) -> bytes:
        """The page as it is now. The numbers come from the run's events file."""
        events = read_events(self.folder / "events.jsonl")
        rounds = [event for event in events if event["event"] == "round"]
        done = rounds[-1]["t"] if rounds else 0
        spent = f"ε {rounds[-1]['epsilon']:.3g} spent" if rounds and "epsilon" in rounds[-1] else ""
        words = [f"{done} of {self.config.rounds} rounds", self.phase, self.left, spent]
        state = f"<p>{escape(', '.join(filter(None, words)))}.</p>"
        sections = [section("State", state), *accuracies(rounds)]
        left_out = [event for event in events if event["event"] == "left-out"]
        sections.append(section("Clients", clients(dict(self.replies), left_out)))
        lines = "\n".join(self.messages.lines)
        sections.append(section("Last messages", f"<pre>{escape(lines)}</pre>"))
        return render_page(f"{self.config.method}: {self.folder}", sections)


def accuracies(rounds: Events) -> list[str]:
    """The last accuracies and their curves; nothing before the first evaluation."""
    names = dict.fromkeys(name for event in rounds for name in event if name.endswith("accuracy"))
    series = {accuracy_title(name): finite_points(rounds, name) for name in names}
    series = {title: points for title, points in series.items() if points}
    if not series:
        return []
    rows = [["accuracy", "round", ""]]
    rows += [[title, f"{points[-1][0]}", f"{points[-1][1]:.2%}"] for title, points in series.items()]
    return [section("Accuracy", table(rows) + charts.line_chart(series, percent=True))]


def clients(replies: Mapping[str, int], left_out: Events) -> str:
    """When each client last replied, and why it was last left out; those with problems come first."""
    problems = {event["client"]: event for event in left_out}
    if not replies and not problems:
        return "<p>No client has replied yet.</p>"
    number = Counter(event["client"] for event in left_out)
    rows = [["client", "last reply", "times left out", "last reason"]]
    for name in sorted({**replies, **problems}, key=lambda name: (-number[name], name))[:MAX_CLIENTS]:
        reply = f"round {replies[name]}" if name in replies else "–"
        problem = problems.get(name)
        reason = f"round {problem['t']}: {problem['reason']}" if problem else ""
        rows.append([name, reply, str(number[name]), reason])
    return table(rows)


class LastMessages(logging.Handler):
    """Keeps the last log messages."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = deque[str](maxlen=MESSAGES)
        self.setFormatter(TextFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


class Server(ThreadingHTTPServer):
    """Serves the page of a dashboard."""

    dashboard: Dashboard

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser that goes away is no error of the run."""


class Handler(BaseHTTPRequestHandler):
    """Answers a request for the page."""

    timeout = 10

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if host not in LOCAL_NAMES:  # a page from elsewhere whose name was pointed to this machine
            self.send_error(403)
        elif self.path != "/":
            self.send_error(404)
        else:
            body = cast(Server, self.server).dashboard.page()
            self.send_response(200)
            for name, value in {**HEADERS, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged."""
