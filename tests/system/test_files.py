"""A new folder is complete, or not there. Private files are not readable for others."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedseal.errors import UserError
from fedseal.system.files import lock_run, make_private, write_atomic, write_new_folder


def test_new_folder(tmp_path: Path) -> None:
    write_new_folder(tmp_path / "a" / "b", {"one": b"1", "two": b"2"})
    assert {file.name: file.read_bytes() for file in (tmp_path / "a" / "b").iterdir()} == {
        "one": b"1",
        "two": b"2",
    }
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


@pytest.mark.parametrize("place", [".", "/", ""])
def test_a_folder_is_no_file_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        write_atomic(Path(place), "text")
    assert str(caught.value) == f"Cannot write {Path(place)} (Is a directory): choose another folder."
    assert list(tmp_path.iterdir()) == []


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


@pytest.fixture
def open_mask() -> Iterator[None]:
    """A umask that lets everybody read and write new files."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_private_files_are_for_their_owner_only(tmp_path: Path, open_mask: None) -> None:
    write_atomic(tmp_path / "new" / "private", b"1", private=True)
    write_atomic(tmp_path / "other" / "public", b"1")
    assert (mode(tmp_path / "new"), mode(tmp_path / "new" / "private")) == (0o700, 0o600)
    assert (mode(tmp_path / "other"), mode(tmp_path / "other" / "public")) == (0o777, 0o666)
    write_atomic(tmp_path / "other" / "public", b"2", private=True)
    assert mode(tmp_path / "other" / "public") == 0o600
    make_private(tmp_path / "other")
    make_private(tmp_path / "missing")
    assert mode(tmp_path / "other") == 0o700 and not (tmp_path / "missing").exists()


def test_a_new_run_folder_is_private_and_an_old_one_keeps_its_rights(tmp_path: Path, open_mask: None) -> None:
    with lock_run(tmp_path / "new"):
        assert mode(tmp_path / "new") == mode(tmp_path / "new" / "checkpoint") == 0o700
    (tmp_path / "old" / "checkpoint").mkdir(parents=True)
    with lock_run(tmp_path / "old"):
        assert mode(tmp_path / "old") == 0o777 and mode(tmp_path / "old" / "checkpoint") == 0o700
