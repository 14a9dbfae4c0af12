"""events.jsonl: checksums notice every damage, and files of older versions are still read."""

import json
import math
from pathlib import Path

import pytest

from fedseal.errors import UserError
from fedseal.storage.events_file import format_line, format_lines, read_events, read_rounds_until

EVENTS = [
    {"event": "round", "t": 1, "test_accuracy": 0.1 + 0.2, "lambda": 1e-300},
    {"event": "left-out", "t": 2, "client": "Zoë \u2028", "reason": 'a "checksum": "0123456789abcdef"}'},
    {"event": "round", "t": 2, "left_out": ["Zoë"], "seconds": {"server": 0.5}},
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "events.jsonl"
    path.write_text(format_lines(EVENTS)[0])
    return path


def test_events_are_read_back(path: Path) -> None:
    assert read_events(path) == EVENTS and read_events(path.with_name("none")) == []
    for line, event in zip(path.read_text().splitlines(), EVENTS, strict=True):
        found = json.loads(line)
        assert list(found)[-1] == "checksum" and len(found.pop("checksum")) == 16
        assert found == event
    path.write_text(format_lines([{"event": "round", "t": 1, "x": math.nan}])[0])
    assert math.isnan(read_events(path)[0]["x"])


def test_lines_are_added_one_by_one(path: Path) -> None:
    checksum, text = "", ""
    for event in EVENTS:
        line, checksum = format_line(event, checksum)
        text += line
    assert text == path.read_text() and checksum == format_lines(EVENTS)[1]


def test_files_without_checksums_are_read(path: Path) -> None:
    path.write_text("".join(json.dumps(event) + "\n" for event in EVENTS))
    assert read_events(path) == EVENTS


@pytest.mark.parametrize("change", [0x01, 0x02, 0x20, 0x80])
def test_every_changed_byte_is_refused_or_harmless(path: Path, change: int) -> None:
    whole, refused = path.read_bytes(), 0
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= change
        path.write_bytes(data)
        try:
            found = read_rounds_until(path.parent, 2)
        except UserError as error:
            assert str(error).startswith(f"{path} is damaged")
            refused += 1
            continue
        assert found == [EVENTS[0], EVENTS[2]]
    assert refused == len(whole)


def test_lost_swapped_and_repeated_lines_are_refused(path: Path) -> None:
    one, two, three = path.read_text().splitlines(keepends=True)
    for lines in ((one, three), (two, one, three), (one, one, two, three), (two, three)):
        path.write_text("".join(lines))
        with pytest.raises(UserError, match=r"events\.jsonl is damaged in line [12]: restore it, or delete"):
            read_events(path)


def test_a_line_that_was_cut_off_is_left_out(path: Path) -> None:
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        kept = whole[:length].count(b"\n")
        assert read_events(path) == EVENTS[:kept]


@pytest.mark.parametrize(
    "line",
    [
        "7",
        "[]",
        "{}",
        '{"event": 3, "t": 1}',
        '{"event": "round", "t": true}',
        '{"event": "round", "t": "1"}',
        '{"event": "round", "t": ' + "9" * 5000 + "}",
        "[" * 5000,
        "\x00",
        "",
    ],
)
def test_other_lines_are_refused(path: Path, line: str) -> None:
    path.write_text(line + "\n")
    with pytest.raises(UserError, match=r"events\.jsonl is damaged in line 1"):
        read_events(path)
