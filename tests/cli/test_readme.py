"""The README's commands for your own images, from photographs to a prediction without fedseal."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from conftest import SHAPES, draw

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """The folders that the commands name, with images of 224 pixels."""
    rng = np.random.default_rng(0)
    for shape in SHAPES:
        for part in ("images/server", "images/test", "more-labelled-images"):
            for i in range(5):
                draw(tmp_path / part / shape / f"{i}.jpg", shape, rng, size=224)
        for client in ("north", "south"):
            for i in range(4):
                draw(tmp_path / "images" / "clients" / client / f"{shape}-{i}.jpg", shape, rng, size=224)
        draw(tmp_path / "new-images" / f"{shape}.jpg", shape, rng, size=224)
    draw(tmp_path / "new.jpg", "circle", rng, size=224)
    return tmp_path


def test_six_commands_from_photographs_to_onnxruntime(photographs: Path) -> None:
    for package in ("efficientnet_lite_pytorch", "onnxruntime"):
        pytest.importorskip(package)
    [block] = [
        text
        for text in re.findall(r"```\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
        if "new.jpg" in text
    ]
    commands = [line.partition("#")[0].strip() for line in block.splitlines()]
    assert len(commands) == 6
    programs = {"fedseal": f"{sys.executable} -m fedseal", "python": sys.executable}
    output = ""
    for command in commands:
        line = re.sub(r"\b(fedseal|python) ", lambda found: f"{programs[found[1]]} ", command, count=1)
        done = subprocess.run(
            line,
            shell=True,
            cwd=photographs,
            env={**os.environ, "FEDSEAL_DATA": str(photographs / "cache")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        output = done.stdout
    name, confidence = output.split()
    assert name in SHAPES and 1 / 3 <= float(confidence) <= 1
    assert len((photographs / "out.csv").read_text("utf-8").splitlines()) == 1 + len(SHAPES)
