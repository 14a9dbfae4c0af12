"""A new folder is complete, or not there."""

from pathlib import Path

import pytest

from fedseal.errors import UserError
from fedseal.system.files import write_new_folder


def test_new_folder(tmp_path: Path) -> None:
    write_new_folder(tmp_path / "a" / "b", {"one": b"1", "two": b"2"})
    assert {file.name: file.read_bytes() for file in (tmp_path / "a" / "b").iterdir()} == {
        "one": b"1",
        "two": b"2",
    }
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


def test_failure_leaves_nothing(tmp_path: Path) -> None:
    folder, too_long = tmp_path / "b", 300 * "x"
    with pytest.raises(UserError) as caught:
        write_new_folder(folder, {"one": b"1", too_long: b"2"})
    assert str(caught.value) == f"Cannot write {folder} (File name too long): choose another folder."
    assert list(tmp_path.iterdir()) == []


def test_existing_files_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "b"
    write_new_folder(folder, {"one": b"1"})
    with pytest.raises(UserError, match="Cannot write"):
        write_new_folder(folder, {"two": b"2"})
    assert [(file.name, file.read_bytes()) for file in folder.iterdir()] == [("one", b"1")]
    assert list(tmp_path.iterdir()) == [folder]
