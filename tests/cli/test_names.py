"""Names of classes, clients and files cannot control the terminal, nor the page of a report."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from conftest import Command
from fedseal.cli.common import escape

EVIL, SHOWN = "\x1b[2J\x9b1m<b>", r"\x1b[2J\x9b1m<b>"


def test_escape() -> None:
    assert escape("a\x1b]0;x\x07[red]\n\u202e") == r"a\x1b]0;x\x07\[red]\n\u202e"
    assert escape(Path("größe 漢字.png")) == "größe 漢字.png"


def test_names_are_shown_escaped(shapes: Path, own: dict[str, Any], tmp_path: Path, fedseal: Command) -> None:
    for part in ("server", "test"):
        (shapes / part / "circle").rename(shapes / part / f"circle{EVIL}")
    (shapes / "clients" / "north").rename(shapes / "clients" / f"north{EVIL}")
    (shapes / "clients" / "south" / f"notes{EVIL}").write_text("no image")
    run = tmp_path / f"run{EVIL}"
    images = shapes / "test" / f"circle{EVIL}"
    answers = [
        fedseal("data", "show", "folders", options={"data.path": shapes, "data.size": 16}),
        fedseal("train", "folders", "--out", run, options=own),
        fedseal("predict", run, images, "--adapt"),
        fedseal("evaluate", run, "--test", images),
    ]
    text = "".join(answer.out + answer.err for answer in answers)
    assert [answer.code for answer in answers] == [0, 0, 0, 2]
    assert not set("\x1b\x9b") & set(text)
    for name in ("circle", "north", "notes", "run"):
        assert name + SHOWN in text
    page = (run / "report.html").read_text("utf-8")
    assert "circle\x1b[2J\x9b1m&lt;b&gt;" in page and "<b>\n" not in page and "m<b>" not in page


def test_no_process_writes_an_escape(shapes: Path) -> None:
    """Neither on stdout nor on stderr: names of a client, of a file and of a class."""
    (shapes / "clients" / "north").rename(shapes / "clients" / f"north{EVIL}")
    (shapes / "clients" / "south" / f"notes{EVIL}").write_text("no image")
    show = ("data", "show", "folders", "--set", f"data.path={shapes}", "--set", "data.size=16")

    def check(code: int, *names: str) -> None:
        done = subprocess.run([sys.executable, "-m", "fedseal", *show], capture_output=True)
        output = done.stdout + done.stderr
        assert done.returncode == code and b"Traceback" not in output, output
        assert b"\x1b" not in output and "\x9b".encode() not in output
        for name in names:
            assert (name + SHOWN).encode() in output

    check(0, "north", "notes")
    (shapes / "test" / "circle").rename(shapes / "test" / f"circle{EVIL}")  # the server has no such class
    check(2, "circle")
