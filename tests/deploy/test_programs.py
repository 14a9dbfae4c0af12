"""The SuperLink's log, and its end."""

import io
import subprocess
from logging.handlers import RotatingFileHandler
from pathlib import Path

import httpx
import pytest

pytest.importorskip("flwr")

from fedseal.deploy.programs import SuperLink, write_log
from fedseal.engines.flower.engine import flower_errors
from fedseal.errors import SuperLinkLostError


def test_the_log_is_limited_and_ends_with_the_last_lines(tmp_path: Path) -> None:
    lines = [b"line %d" % number for number in range(5000)]
    endless = b"x" * 300_000  # without an end of line
    printed = io.BytesIO(b"\n".join([*lines, endless, b"not UTF-8: \xff", b"the last one", b""]))
    write_log(printed, RotatingFileHandler(tmp_path / "flower.log", maxBytes=50_000, backupCount=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["flower.log", "flower.log.1"]
    assert all(path.stat().st_size <= 50_000 for path in tmp_path.iterdir())
    assert (tmp_path / "flower.log").read_text("utf-8").endswith("not UTF-8: �\nthe last one\n")


def test_a_lost_superlink_has_an_exit_code_after_which_a_service_restarts(tmp_path: Path) -> None:
    link = SuperLink.__new__(SuperLink)
    link.log, link.process = tmp_path / "flower.log", subprocess.Popen(["false"])
    link.process.wait()
    with pytest.raises(SuperLinkLostError, match=r"has ended: see the end of .*flower\.log"):
        link.check()
    with (
        pytest.raises(SuperLinkLostError, match=r"broke \(refused\): continue with --resume"),
        flower_errors(),
    ):
        raise httpx.ConnectError("refused")
    assert SuperLinkLostError.exit_code == 75
