"""`fedseal data clean`: what is shown, what is removed, and what is kept."""

import os
import re
import time
from pathlib import Path

import numpy as np
import pytest

from conftest import Command
from fedseal.data import cache
from fedseal.data.folders import read_folders
from fedseal.data.pool import Pool
from fedseal.errors import UserError


@pytest.fixture
def filled(shapes: Path) -> list[str]:
    """A cache with two states of a folder, of which the first is 40 days old, and an old published set."""
    read_folders(shapes, size=8, channels=3)
    [first] = names()
    (shapes / "clients" / "north" / "new.png").write_bytes((shapes / "test/circle/0.png").read_bytes())
    read_folders(shapes, size=8, channels=3)
    [second] = names() - {first}
    pixels, labels = np.zeros((10, 1, 28, 28), np.uint8), np.zeros(10, np.int64)
    cache.store("fashion-mnist", Pool("f", pixels, labels, ("a",), {"train": range(10)}, True), "a test")
    for name in (first, "fashion-mnist"):
        os.utime(cache.root() / name, (time.time() - 40.5 * 86_400,) * 2)
    return [first, second]


def names() -> set[str]:
    return {path.name for path in cache.entries()}


def row(text: str, name: str) -> str:
    [found] = [line.strip() for line in text.splitlines() if line.strip().startswith(name)]
    return found


def test_files_of_others_in_the_same_folder_are_kept(filled: list[str], fedseal: Command) -> None:
    for path in (cache.root() / "thesis", cache.root() / "my photos"):
        path.mkdir()
        (path / "a.txt").touch()
        (path / "about.json").write_text('{"about": "me"}')
        os.utime(path, (0, 0))
    for option in ("--days=1", "--all"):
        assert "thesis" not in fedseal("data", "clean", option).out
    assert not names() and (cache.root() / "thesis" / "a.txt").exists()


def test_old_images_are_removed_and_published_ones_kept(filled: list[str], fedseal: Command) -> None:
    first, second = filled
    shown = fedseal("data", "clean", "--dry-run").out
    assert "would be removed" in row(shown, first) and "40 days ago" in row(shown, first)
    assert "freed 0.0 MB" in shown and names() == {first, second, "fashion-mnist"}
    out = fedseal("data", "clean").out
    assert row(out, first).endswith("removed")
    assert re.search(r"today +the folder .*/shapes$", row(out, second))
    assert "40 days ago" in row(out, "fashion-mnist") and "removed" not in row(out, "fashion-mnist")
    assert re.search(r"freed 0\.\d MB, 0\.\d MB are left in ", out) and str(cache.root()) in out
    assert names() == {second, "fashion-mnist"}
    assert cache.load_cached(second) is not None  # it has files of its own
    fedseal("data", "clean", "--days", "0")
    assert names() == {"fashion-mnist"}


def test_named_ones_are_removed(filled: list[str], shapes: Path, fedseal: Command) -> None:
    first, second = filled
    assert fedseal("data", "clean", "fashion-mnist").code == 0
    assert names() == {first, second}
    fedseal("data", "clean", first, "nothing").refuses("The cache has nothing of 'nothing'", "--dry-run")
    assert names() == {first, second}
    assert fedseal("data", "clean", shapes).out.count(" removed") == 2
    assert names() == set()
    assert "freed 0.0 MB, 0.0 MB are left" in fedseal("data", "clean").out


def test_all_are_removed_except_those_in_use(filled: list[str], fedseal: Command) -> None:
    _, second = filled
    used = cache.load_cached(second)
    assert row(fedseal("data", "clean", "--all").out, second).endswith("in use, kept")
    assert names() == {second}
    del used
    fedseal("data", "clean", "--all")
    assert names() == set()


def test_an_entry_that_cannot_be_removed_does_not_stop_the_others(
    filled: list[str], fedseal: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = filled
    remove = cache.remove

    def refuse_first(path: Path) -> bool:
        if path.name == first:
            raise UserError(f"Cannot remove {path} (Permission denied): remove it as the user that owns it.")
        return remove(path)

    monkeypatch.setattr(cache, "remove", refuse_first)
    answer = fedseal("data", "clean", "--all")
    assert answer.code == 0 and "warning: Cannot remove" in answer.err
    assert row(answer.out, first).endswith("kept") and row(answer.out, second).endswith("removed")
    assert names() == {first}
