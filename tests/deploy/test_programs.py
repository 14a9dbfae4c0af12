"""The SuperLink's log."""

import io
from logging.handlers import RotatingFileHandler
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedseal.deploy.programs import write_log


def test_the_log_is_limited_and_ends_with_the_last_lines(tmp_path: Path) -> None:
    lines = [b"line %d" % number for number in range(5000)]
    endless = b"x" * 300_000  # without an end of line
    printed = io.BytesIO(b"\n".join([*lines, endless, b"not UTF-8: \xff", b"the last one", b""]))
    write_log(printed, RotatingFileHandler(tmp_path / "flower.log", maxBytes=50_000, backupCount=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["flower.log", "flower.log.1"]
    assert all(path.stat().st_size <= 50_000 for path in tmp_path.iterdir())
    assert (tmp_path / "flower.log").read_text("utf-8").endswith("not UTF-8: �\nthe last one\n")
