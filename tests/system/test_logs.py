"""Log messages on a terminal, in a pipe and in a file."""

import json
import logging
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedseal.errors import UserError
from fedseal.system import logs
from fedseal.system.logs import about, log, progress_log, remove_logs, set_up_logs
from fedseal.system.progress import RateLimit, format_duration

STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d"


@pytest.fixture(autouse=True)
def removed() -> Iterator[None]:
    yield
    remove_logs()


def say_something() -> None:
    progress_log.info("round %d of %d", 1, 2, extra=about("round", round=1, loss=float("nan"), level=9))
    log.info("joined\nthe server")
    log.warning("north is left out")
    log.warning("Stopped. Go on.", extra=about(logs.STOPPED))
    log.error("[no] such file", extra=about(logs.ERROR))


def test_without_a_terminal_every_line_has_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs(long=True)
    say_something()
    out, err = capsys.readouterr()
    assert re.fullmatch(f"{STAMP} info: round 1 of 2\n{STAMP} info: joined\\\\nthe server\n", out)
    assert re.fullmatch(
        f"{STAMP} warning: north is left out\nStopped. Go on.\nerror: \\[no\\] such file\n", err
    )


def test_a_short_command_shows_no_progress_and_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs()
    say_something()
    out, err = capsys.readouterr()
    assert out == "joined\\nthe server\n"
    assert err == "warning: north is left out\nStopped. Go on.\nerror: [no] such file\n"


def test_quiet_shows_only_warnings(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    set_up_logs(long=True, quiet=True, file=tmp_path / "log")
    say_something()
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 3
    assert (tmp_path / "log").read_text().count("\n") == 5


def test_json_lines(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    set_up_logs(json_lines=True, file=tmp_path / "new" / "log")
    say_something()
    out, err = capsys.readouterr()
    shown = [json.loads(line) for line in (out + err).splitlines()]
    kept = [json.loads(line) for line in (tmp_path / "new" / "log").read_text().splitlines()]
    assert shown == kept
    first = kept[0]
    assert re.fullmatch(STAMP, first.pop("time"))
    assert first == {
        "level": "info", "event": "round", "message": "round 1 of 2", "round": 1, "loss": None,
    }  # fmt: skip
    assert [line["event"] for line in kept] == ["round", "message", "message", "stopped", "error"]
    assert [line["level"] for line in kept] == ["info", "info", "warning", "warning", "error"]


def test_a_terminal_shows_messages_without_time_and_leaves_progress_to_the_bar() -> None:
    code = "from fedseal.system.logs import *; set_up_logs(long=True);"
    code += "progress_log.info('bar'); log.info('joined')"
    reader, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    subprocess.run([sys.executable, "-c", code], stdout=terminal, check=True, env=environment)
    os.close(terminal)
    assert os.read(reader, 1000) == b"joined\r\n"
    os.close(reader)


def test_a_file_is_appended_to_and_may_be_rotated(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("before\n")
    set_up_logs(long=True, quiet=True, file=path)
    log.info("one")
    path.rename(tmp_path / "log.1")
    log.info("two")
    assert re.fullmatch(f"before\n{STAMP} info: one\n", (tmp_path / "log.1").read_text())
    assert re.fullmatch(f"{STAMP} info: two\n", path.read_text())


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    set_up_logs()
    with pytest.raises(UserError, match=f"Cannot write {tmp_path}/file/log"):
        set_up_logs(file=tmp_path / "file" / "log")
    log.error("this is still shown", extra=about(logs.ERROR))
    assert capsys.readouterr().err == "error: this is still shown\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_reported_once_and_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs(long=True, file=Path("/dev/full"))
    log.info("one")
    log.info("two")
    out, err = capsys.readouterr()
    assert out.count("\n") == 2
    assert err.count("\n") == 1 and "cannot write /dev/full any more ([Errno 28] No space" in err


def test_a_file_whose_folder_is_removed_is_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "log"
    set_up_logs(long=True, file=path)
    log.info("one")
    path.unlink()
    path.parent.rmdir()
    log.info("two")
    log.info("three")
    out, err = capsys.readouterr()
    assert out.count("\n") == 3
    assert err.count("\n") == 1 and f"cannot write {path} any more ([Errno 2] No such" in err


def test_nothing_is_set_up_twice() -> None:
    set_up_logs()
    set_up_logs()
    assert sum(isinstance(handler, logs.ConsoleHandler) for handler in log.handlers) == 1
    remove_logs()
    assert not any(isinstance(handler, logs.ConsoleHandler) for handler in log.handlers)
    assert log.level == logging.INFO


def test_messages_are_not_printed_twice(capsys: pytest.CaptureFixture[str]) -> None:
    """MLflow logs to the root logger, which then prints on stderr whatever reaches it."""
    root, handler = logging.getLogger(), logging.StreamHandler()
    root.addHandler(handler)
    try:
        set_up_logs()
        log.warning("once")
        assert capsys.readouterr().err == "warning: once\n"
    finally:
        root.removeHandler(handler)
    remove_logs()
    assert log.propagate


def test_rate_limit() -> None:
    limit = RateLimit(1000)
    assert [limit.allows(), limit.allows(), limit.allows(always=True), limit.allows()] == [
        True, False, True, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (200_000, "2 days")]
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_a_name_that_is_not_utf8_is_escaped_in_the_file(tmp_path: Path) -> None:
    set_up_logs(long=True, quiet=True, file=tmp_path / "log")
    log.info("skipped %s", "caf\udce9.png")
    assert (tmp_path / "log").read_text("utf-8").endswith("info: skipped caf\\udce9.png\n")


EVIL = "a\x1b[2J\x9b1m\u202egnp.exe\n.png"
SHOWN = r"a\x1b[2J\x9b1m\u202egnp.exe\n.png"


@pytest.mark.parametrize("json_lines", [False, True])
@pytest.mark.parametrize("long", [False, True])
def test_a_name_cannot_control_the_terminal(
    json_lines: bool, long: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    set_up_logs(long=long, file=tmp_path / "log", json_lines=json_lines)
    for level, event in (
        (logging.INFO, "message"),
        (logging.WARNING, logs.STOPPED),
        (logging.ERROR, logs.ERROR),
    ):
        log.log(level, "skipped %s", EVIL, extra=about(event))
    out, err = capsys.readouterr()
    written = (tmp_path / "log").read_text("utf-8")
    for text in (out, err, written):
        assert not set(EVIL.replace("\n", "")) & set(text) - set(SHOWN)
    lines = (out + err).splitlines()
    assert len(lines) == len(written.splitlines()) == 3
    if json_lines:
        assert {json.loads(line)["message"] for line in lines} == {f"skipped {EVIL}"}
    else:
        assert all(f"skipped {SHOWN}" in line for line in lines)
