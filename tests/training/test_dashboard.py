"""The dashboard during real runs, also in a browser."""

import http.client
import shutil
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conftest import Command, same_weights
from fedseal.config.load import load_config
from fedseal.core import Problem
from fedseal.rounds import ClientDone, Event, LeftOut, RoundDone
from fedseal.storage.events_file import read_rounds
from fedseal.training.dashboard import Dashboard, clients
from fedseal.training.train import train

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--enable-logging=stderr"]


class CountingDashboard(Dashboard):
    """Counts how often its page was asked for."""

    shown = 0

    def page(self) -> str:
        self.shown += 1
        return super().page()


class Visitor:
    """Looks at the dashboard after round 1, while the run waits."""

    def __init__(self, port: int, dashboard: CountingDashboard, folder: Path) -> None:
        self.port, self.dashboard, self.folder = port, dashboard, folder
        self.answers: dict[str, tuple[int, str]] = {}
        self.drawn = ""

    def __call__(self, event: Event) -> None:
        if not isinstance(event, RoundDone) or event.t != 1:
            return
        self.headers = self.ask("/")
        self.ask("/events.jsonl")
        self.ask("/", host="elsewhere.example")
        if CHROMIUM is None:
            return
        url, profile = f"http://localhost:{self.port}/", f"--user-data-dir={self.folder / 'profile'}"
        done = subprocess.run(
            [CHROMIUM, *FLAGS, profile, "--dump-dom", url], capture_output=True, text=True, timeout=200
        )
        assert "CONSOLE" not in done.stderr, done.stderr
        self.drawn = done.stdout
        before = self.dashboard.shown
        browser = subprocess.Popen(
            [CHROMIUM, *FLAGS, profile, "--remote-debugging-port=0", url],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            end = time.monotonic() + 200
            while self.dashboard.shown < before + 3:  # the page asks for itself again
                assert time.monotonic() < end
                time.sleep(0.1)
        finally:
            browser.terminate()
            browser.wait()

    def ask(self, path: str, host: str = "localhost") -> dict[str, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", path, headers={"Host": f"{host}:{self.port}"})
        answer = connection.getresponse()
        self.answers[f"{host}{path}"] = answer.status, answer.read().decode()
        connection.close()
        return dict(answer.getheaders())

    def close(self) -> None: ...


def test_the_page_shows_a_real_run_and_changes_nothing(
    tiny: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fedseal")  # as the commands do
    config = load_config("fmnist-lenet", tiny | {"fedseal.bootstrap_epochs": 1})
    run, port = tmp_path / "run", free_port()
    dashboard = CountingDashboard(port, config, run)
    visitor = Visitor(port, dashboard, tmp_path)
    train(config, out=run, observers=[dashboard, visitor])

    status, page = visitor.answers["localhost/"]
    accuracy = read_rounds(run)[0]["test_accuracy"]
    assert status == 200 and "1 of 2 rounds, round 2 has begun, about " in page
    assert f"<td>{accuracy:.2%}</td>" in page and 'class="c0 line"' in page
    assert all(f"<tr><td>client-{k}</td><td>round 1</td><td>0</td>" in page for k in range(3))
    assert "info: fedseal: rounds 1 to 2 with 3 clients" in page
    assert visitor.headers["Refresh"] == "3" and "'none'" in visitor.headers["Content-Security-Policy"]
    assert "://" not in page.replace("http://www.w3.org", "") and "<script" not in page
    assert visitor.answers["localhost/events.jsonl"][0] == 404
    assert visitor.answers["elsewhere.example/"][0] == 403
    if CHROMIUM is not None:
        assert "1 of 2 rounds" in visitor.drawn and "<svg" in visitor.drawn

    with pytest.raises(ConnectionRefusedError):
        visitor.ask("/")  # it ends with the run
    train(config, out=tmp_path / "plain")
    assert same_weights(run, tmp_path / "plain")


def test_before_the_first_round(tmp_path: Path) -> None:
    config = load_config("demo")
    dashboard = Dashboard(free_port(), config, tmp_path / "run")
    page = dashboard.page().decode()
    dashboard(LeftOut(1, "north", Problem("it was too slow")))
    dashboard(ClientDone(1, "north", 1, 2))
    dashboard(ClientDone(1, "south", 2, 2))
    assert dashboard.replies == {"south": 1} and b"round 1: 2 of 2 clients are done" in dashboard.page()
    dashboard.close()
    dashboard.close()  # the command and the training both close it
    assert f"0 of {config.rounds} rounds, starting." in page and "No client has replied yet." in page


def test_clients_that_were_left_out_come_first_with_the_reason() -> None:
    left_out = [
        {"t": 1, "client": "south", "reason": "it was too slow"},
        {"t": 3, "client": "south", "reason": "<b>"},
    ]
    rows = clients({"north": 3, "east": 3, "south": 2}, left_out).split("<tr>")[2:]
    assert [row.split("<td>")[1].removesuffix("</td>") for row in rows] == ["south", "east", "north"]
    assert rows[0].startswith("<td>south</td><td>round 2</td><td>2</td><td>round 3: &lt;b&gt;</td>")


@pytest.mark.parametrize("command", ["train", "serve"])
def test_a_busy_port_is_named_before_training(
    command: str, fedseal: Command, own: dict[str, Any], shapes: Path, tmp_path: Path
) -> None:
    more = [] if command == "train" else ["--insecure", "--name", "north", "--labels", shapes / "server"]
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        words = (command, "folders", "--out", tmp_path / "run", "--dashboard", port, *more)
        answer = fedseal(*words, options=own)
        last = replace(answer, err=answer.err.splitlines(keepends=True)[-1])  # after a warning of --insecure
        last.refuses(f"127.0.0.1:{port} (Address already in use)", "--dashboard")
    assert not (tmp_path / "run").exists()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
