"""The store of the clients' memories: what a commit keeps, what a kill undoes, and damaged files."""

import os
import random
import signal
import sqlite3
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from conftest import contents
from fedseal.engines.memory_store import PAGE, MemoryStore
from fedseal.errors import FolderInUseError, UserError

ROWS = 20_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of a store with 20,000 memories of 300 bytes, committed as those after round 4."""
    path = tmp_path / "checkpoint" / "memories.sqlite"
    path.parent.mkdir()
    with closing(MemoryStore(path, "mine")) as store:
        for client in range(ROWS):
            store.put(client, client.to_bytes(4, "little") * 75)
        store.commit(4)
    return path


@pytest.fixture
def store(path: Path) -> Iterator[MemoryStore]:
    """The same store, open."""
    with closing(MemoryStore(path, "mine")) as store:
        yield store


def test_memories_are_kept_to_the_byte(store: MemoryStore) -> None:
    assert store.t == 4
    assert store.get(17) == (17).to_bytes(4, "little") * 75 and store.get(ROWS) == b""
    store.put(17, b"\x00short")
    store.put(ROWS, b"\xff" * 100_000)
    assert store.get(17) == b"\x00short" and store.get(ROWS) == b"\xff" * 100_000


def test_store_in_ram() -> None:
    with closing(MemoryStore()) as store:
        store.put(3, b"memory")
        store.commit(1)
        assert (store.get(3), store.get(4), store.t) == (b"memory", b"", 1)


def test_changes_since_the_last_commit_are_dropped(tmp_path: Path) -> None:
    """Random changes, commits and restarts, compared with a dictionary."""
    path, draw = tmp_path / "memories.sqlite", random.Random(0)
    store, current, committed, t = MemoryStore(path, "mine"), dict[int, bytes](), dict[int, bytes](), 0
    for _ in range(400):
        if (action := draw.random()) < 0.7:
            client, memory = draw.randrange(30), draw.randbytes(draw.choice((1, 300, 9000)))
            store.put(client, memory)
            current[client] = memory
        elif action < 0.85:
            store.commit(t := t + 1)
            committed = dict(current)
        else:
            store.close()
            store, current = MemoryStore(path, "mine"), dict(committed)
            assert store.t == t
        assert {client: store.get(client) for client in range(30)} == dict.fromkeys(range(30), b"") | current
    store.close()
    assert [file.name for file in tmp_path.iterdir()] == ["memories.sqlite"]


@pytest.mark.parametrize("size", [100, 300_000])  # the larger one exceeds SQLite's cache
def test_kill_undoes_changes_since_the_last_commit(path: Path, size: int) -> None:
    script = f"""
        import os, signal
        from pathlib import Path
        from fedseal.engines.memory_store import MemoryStore
        store = MemoryStore(Path({str(path)!r}), "mine")
        store.put(0, b"five" * {size})
        store.commit(5)
        for client in range(10):
            store.put(client, b"six" * {size})
        os.kill(os.getpid(), signal.SIGKILL)
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(script)])
    assert killed.returncode == -signal.SIGKILL
    with closing(MemoryStore(path, "mine")) as store:
        assert store.t == 5 and store.get(0) == b"five" * size
        assert store.get(1) == (1).to_bytes(4, "little") * 75


def test_opening_and_reading_do_not_change_the_file(path: Path) -> None:
    before = contents(path.parent)
    with closing(MemoryStore(path, "mine")) as store:
        assert store.get(5)
    assert contents(path.parent) == before


def test_commit_writes_only_what_has_changed(path: Path, store: MemoryStore) -> None:
    """Ten memories on different pages of a file with more than 1,500: ten pages, and one with the round."""
    assert path.stat().st_size > 1500 * PAGE
    for client in range(0, ROWS, ROWS // 10):
        store.put(client, b"\x01" * 300)
    store.commit(5)
    written = path.with_name("memories.sqlite-wal").stat().st_size
    assert 11 * PAGE < written < 12 * PAGE


def test_store_of_another_run_is_refused(path: Path) -> None:
    with pytest.raises(UserError, match=r"memories\.sqlite belongs to another configuration"):
        MemoryStore(path, "other")


def test_store_in_use_is_refused(path: Path, store: MemoryStore) -> None:
    store.put(0, b"")
    script = f"""
        from pathlib import Path
        from fedseal.engines.memory_store import MemoryStore
        MemoryStore(Path({str(path)!r}), "mine")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert f"{FolderInUseError.__name__}: {path} is in use by another process." in done.stderr


def overwrite(start: int, end: int) -> Callable[[Path], None]:
    """Replaces bytes in the middle of a file."""

    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[start:end] = b"\xaa" * (end - start)
        path.write_bytes(data)

    return damage


def other_tables(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE something (else_)")
        db.commit()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_text("no database"),
        lambda path: os.truncate(path, PAGE * 100),
        lambda path: os.truncate(path, path.stat().st_size - 1),
        overwrite(0, 100),
        overwrite(100, PAGE),
        other_tables,
    ],
    ids=["empty", "text", "pages missing", "byte missing", "header", "first page", "other tables"],
)
def test_damaged_store_is_refused(path: Path, damage: Callable[[Path], None]) -> None:
    damage(path)
    before = contents(path.parent)
    with pytest.raises(UserError) as caught:
        MemoryStore(path, "mine")
    assert str(caught.value).startswith(f"{path} is damaged (")
    assert str(caught.value).endswith(f"): delete {path.parent} to start again.")
    assert contents(path.parent) == before


def test_damage_found_during_a_run_is_reported(path: Path) -> None:
    overwrite(5 * PAGE, 1500 * PAGE)(path)
    with (
        closing(MemoryStore(path, "mine")) as store,
        pytest.raises(UserError, match=r"memories\.sqlite is damaged .*to start again\."),
    ):
        for client in range(ROWS):
            store.get(client)


def test_every_changed_byte_is_refused_or_harmless(tmp_path: Path) -> None:
    """Changes single bytes of a store with 3 of 5 clients' memories, and reads all of them."""
    path, memories = tmp_path / "memories.sqlite", {0: b"a" * 90, 3: b"b" * 5000, 4: b"c" * 700}
    with closing(MemoryStore(path, "mine")) as store:
        for client, memory in memories.items():
            store.put(client, memory)
        store.commit(7)
    whole, draw, refused = path.read_bytes(), random.Random(0), 0
    used = [place for place, byte in enumerate(whole) if byte]
    for place in sorted({*range(120), *draw.sample(used, 400), *draw.sample(range(len(whole)), 100)}):
        data = bytearray(whole)
        data[place] ^= draw.randrange(1, 256)
        path.write_bytes(data)
        try:
            with closing(MemoryStore(path, "mine")) as store:
                found = {client: store.get(client) for client in range(5)}
                assert store.t == 7
        except UserError as error:
            assert str(path) in str(error)
            refused += 1
            continue
        assert found == dict.fromkeys(range(5), b"") | memories
    assert refused > 300


def test_a_lost_memory_is_noticed(path: Path) -> None:
    """SQLite finds nothing wrong with a row that is gone or has another number."""
    for change in (
        "DELETE FROM memories WHERE client = 9",
        "UPDATE memories SET client = -1 WHERE client = 9",
    ):
        with closing(sqlite3.connect(path)) as db:
            db.execute(change)
            db.commit()
        with closing(MemoryStore(path, "mine")) as store:
            assert store.get(8)
            with pytest.raises(UserError, match=r"memories\.sqlite is damaged \(memories are lost\): delete"):
                store.get(9)


def test_a_store_without_checksums_is_continued(tmp_path: Path) -> None:
    """As versions before 0.3 wrote it."""
    path = tmp_path / "memories.sqlite"
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE memories (client INTEGER PRIMARY KEY, memory BLOB NOT NULL)")
        db.execute("CREATE TABLE run (fingerprint TEXT NOT NULL, t INTEGER NOT NULL)")
        db.execute("INSERT INTO run VALUES ('mine', 4)")
        db.execute("INSERT INTO memories VALUES (1, ?)", (b"one",))
        db.commit()
    with closing(MemoryStore(path, "mine")) as store:
        assert (store.t, store.get(0), store.get(1)) == (4, b"", b"one")
        store.put(0, b"zero")
        store.commit(5)
    with closing(MemoryStore(path, "mine")) as store:
        assert (store.t, store.get(0), store.get(1)) == (5, b"zero", b"one")


def test_full_disk_is_reported_and_the_last_commit_stays(path: Path) -> None:
    with closing(MemoryStore(path, "mine")) as store:
        store._db.execute(f"PRAGMA max_page_count = {path.stat().st_size // PAGE}")
        with pytest.raises(UserError, match=r"No space left to write .*memories\.sqlite: free some space"):
            store.put(1, b"x" * 10 * PAGE)
            store.commit(5)
    with closing(MemoryStore(path, "mine")) as store:
        assert store.t == 4 and store.get(1) == (1).to_bytes(4, "little") * 75


def test_path_that_cannot_be_opened_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Cannot read or write .*none.memories\.sqlite \(unable to open"):
        MemoryStore(tmp_path / "none" / "memories.sqlite")


def test_the_file_is_private_and_an_old_one_becomes_so(tmp_path: Path) -> None:
    path, before = tmp_path / "memories.sqlite", os.umask(0)
    try:
        with closing(MemoryStore(path, "mine")) as store:
            store.put(1, b"x")
            store.commit(1)
            files = list(tmp_path.iterdir())
            assert len(files) == 2  # with SQLite's log
            assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    finally:
        os.umask(before)
    path.chmod(0o644)
    MemoryStore(path, "mine").close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
