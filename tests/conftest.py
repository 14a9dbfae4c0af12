"""Shared fixtures: runs that take about a second, the command line, and small image folders."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; child processes inherit it
os.environ["COLUMNS"] = "200"  # so that commands do not wrap their output

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings as hypothesis_settings
from PIL import Image, ImageDraw
from safetensors.torch import load_file

from fedseal.cli import main
from fedseal.reproduce.cells import SMOKE
from fedseal.system.environment import set_up_process
from fedseal.system.logs import remove_logs, set_up_logs
from fedseal.training.train import train

set_up_process("portable")  # before the first computation, as the entry points do
hypothesis_settings.register_profile("fedseal", deadline=None)  # no test depends on the machine's speed
hypothesis_settings.load_profile("fedseal")

TINY: dict[str, Any] = SMOKE | {"engine.workers": 1, "fedseal.bootstrap_epochs": 5}


WAITING = (
    "torture",
    "test_resume.py",
    "test_packets.py",
    "deploy",
)  # tests that start many processes and mostly wait for them
COSTLY = (  # files whose tests take most of the processor's time
    *("test_every_method.py", "test_reproduce_command.py", "test_own_network.py", "test_stop.py"),
    *("test_environment.py", "test_run_cells.py", "test_readme.py", "test_golden.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each worker of pytest-xdist gets an equal part: waiting tests, costly ones, and the rest."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    waiting = [i for name in WAITING for i in items if name in (i.path.parent.name, i.path.name)]
    parts = [waiting[w::workers] for w in range(workers)]
    for i, name in enumerate(COSTLY):
        parts[i % workers] += [item for item in items if item.path.name == name]
    chosen = {item for part in parts for item in part}
    rest = iter([item for item in items if item not in chosen])
    for w, part in enumerate(parts):
        end = len(items) * (w + 1) // workers - len(items) * w // workers
        part += islice(rest, max(0, end - len(part)))
    items[:] = [item for part in parts for item in part]


@pytest.fixture
def tiny() -> dict[str, Any]:
    """Options that turn `fmnist-lenet` into a run of about a second on real Fashion-MNIST images."""
    return dict(TINY)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, trained enough to have some pseudo-labels. Tests must not modify it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    training = {"server.batch": 10, "server.lr": 0.02, "fedseal.bootstrap_epochs": 8}
    train("fmnist-lenet", out=folder, options={**TINY, **training})
    return folder


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run that tests may modify."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@dataclass(frozen=True)
class Answer:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    def refuses(self, *parts: str) -> None:
        """Asserts exit code 2 and a single line on stderr that contains these parts."""
        assert self.code == 2
        assert self.err.startswith("error: ") and self.err.count("\n") == 1, self.err
        for part in parts:
            assert part in self.err


Command = Callable[..., Answer]


@pytest.fixture
def fedseal(capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """Runs the command line in this process, with words as in a shell and `options` for `--set`."""

    def command(*words: object, options: Mapping[str, Any] | None = None) -> Answer:
        capsys.readouterr()
        set_up_logs()
        line = [*map(str, words), *settings(options or {})]
        code = main.run_safely(lambda: main.app(line, prog_name="fedseal"))
        return Answer(code, *capsys.readouterr())

    yield command
    remove_logs()


def settings(keys: Mapping[str, Any]) -> list[str]:
    """The words `--set key=value` for each key."""
    return [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Bytes and modification time of every file below a folder, to check that nothing changed."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def same_weights(one: Path, other: Path) -> bool:
    """True if the models of two runs are identical to the bit."""
    a, b = (load_file(run / "model.safetensors") for run in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# `folders` with the paper's method
PAPERS_METHOD = {"method": "fedseal", "evaluate": "model", "bootstrap.epochs": 0}
SHAPES = ("circle", "square", "triangle")


def draw(path: Path, shape: str, rng: np.random.Generator, size: int = 20) -> None:
    """Saves an image of a coloured shape on a dark background."""
    image = Image.new("RGB", (20, 20), tuple(rng.integers(0, 60, 3).tolist()))
    pen, colour = ImageDraw.Draw(image), tuple(rng.integers(120, 256, 3).tolist())
    left, top, side = *rng.integers(0, 6, 2).tolist(), int(rng.integers(10, 14))
    box = (left, top, left + side, top + side)
    if shape == "circle":
        pen.ellipse(box, fill=colour)
    elif shape == "square":
        pen.rectangle(box, fill=colour)
    else:
        pen.polygon([(left, top + side), (left + side, top + side), (left + side / 2, top)], fill=colour)
    path.parent.mkdir(parents=True, exist_ok=True)
    (image if size == 20 else image.resize((size, size))).save(path)


@pytest.fixture
def shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Image folders with three classes, two clients and test images; the data cache is temporary."""
    monkeypatch.setenv("FEDSEAL_DATA", str(tmp_path / "cache"))
    root, rng = tmp_path / "shapes", np.random.default_rng(0)
    for shape in SHAPES:
        for part, number in (("server", 8), ("test", 5)):
            for i in range(number):
                draw(root / part / shape / f"{i}.png", shape, rng)
        for client in ("north", "south"):
            for i in range(6):
                draw(root / "clients" / client / f"{shape}-{i}.png", shape, rng)
    return root


@pytest.fixture
def own(shapes: Path) -> dict[str, Any]:
    """Options that turn `folders` into a run of about a second on these images."""
    return {
        "rounds": 2,
        "data.path": shapes,
        "data.size": 16,
        **PAPERS_METHOD,
        "fedseal.bootstrap_epochs": 2,
        "server.epochs": 1,
        "client.epochs": 1,
        "engine.workers": 1,
    }


def children(pid: int) -> list[int]:
    """The child processes of a process."""
    listing = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in listing.read_text().split()] if listing.exists() else []


def alive(pid: int) -> bool:
    """True if a process is running; a zombie is not."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.fixture
def own_method(tmp_path: Path) -> Path:
    """The example method of docs/new-method.md, as a file."""
    page = Path(__file__).parents[1] / "docs" / "new-method.md"
    [text] = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    assert text.count("\n") < 70
    path = tmp_path / "fedprox.py"
    path.write_text(text, "utf-8")
    return path


@pytest.fixture
def own_network(tmp_path: Path) -> Path:
    """The first example of docs/new-model.md, as a file."""
    page = Path(__file__).parents[1] / "docs" / "new-model.md"
    text = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)[0]
    path = tmp_path / "my_net.py"
    path.write_text(text, "utf-8")
    return path
