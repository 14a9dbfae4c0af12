"""The file `events.jsonl`: one JSON object per line, written while a run goes on.

The last key of each line, "checksum", covers the line and all lines before it. Files of older versions have
no checksums.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedseal.errors import UserError
from fedseal.system.files import read_file

CHECKED_LINE = re.compile(r'(.*), "checksum": "([0-9a-f]{16})"}', re.DOTALL)


Number = Annotated[int, Field(ge=-(2**63), lt=2**63)] | float


class Event(BaseModel):
    """The keys that every event has, and the types of all others."""

    model_config = ConfigDict(strict=True, extra="allow")
    __pydantic_extra__: dict[str, Number | str | bool | list[Number | str] | dict[str, Number]]

    event: str
    t: int = Field(ge=0, lt=2**63)
    left_out: list[str] = Field(default_factory=list)
    seconds: dict[str, Number] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_accuracies(self) -> Self:
        for name, value in self.__pydantic_extra__.items():
            if name.endswith("accuracy") and not (isinstance(value, int | float) and 0 <= value <= 1):
                raise ValueError(f"{name} must be a number from 0 to 1")
        return self


def format_line(event: Mapping[str, Any], before: str) -> tuple[str, str]:
    """An event as a line of the file, and its checksum; `before` is the checksum of the line before it."""
    content = json.dumps(event)[:-1]
    checksum = _checksum(content, before)
    return f'{content}, "checksum": "{checksum}"}}\n', checksum


def format_lines(events: Iterable[Mapping[str, Any]]) -> tuple[str, str]:
    """The content of a file with these events, and the checksum of its last line."""
    lines, checksum = [], ""
    for event in events:
        line, checksum = format_line(event, checksum)
        lines.append(line)
    return "".join(lines), checksum


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a run; a last line that was cut off by a kill is left out. Refuses a damaged file."""
    events: list[dict[str, Any]] = []
    try:
        *lines, _ = read_file(path).split(b"\n")
    except FileNotFoundError:
        return events
    except OSError as error:
        raise UserError(f"Cannot read {path} ({error.strerror}): check the file.") from error
    checksum = ""
    for number, line in enumerate(lines, 1):
        try:
            event, checksum = _parse(line.decode(), checksum, first=number == 1)
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{path} is damaged in line {number}: restore it, or delete {path.parent} to run it again."
            ) from error
        events.append(event)
    return events


def read_rounds(folder: Path) -> list[dict[str, Any]]:
    """The rounds of the run in a folder; empty if there is no run."""
    return [event for event in read_events(folder / "events.jsonl") if event["event"] == "round"]


def read_rounds_until(folder: Path, t: int) -> list[dict[str, Any]]:
    """Rounds 1 to t of a run; an error if one is missing."""
    events = [event for event in read_rounds(folder) if event["t"] <= t]
    if len(events) != t or any(event["t"] != number for number, event in enumerate(events, 1)):
        path = folder / "events.jsonl"
        raise UserError(f"{path} is damaged, or a round is missing: delete {folder} to run it again.")
    return events


def _parse(line: str, before: str, *, first: bool) -> tuple[dict[str, Any], str]:
    """The event in a line, and the line's checksum; empty in a file without checksums."""
    checksum = ""
    if found := CHECKED_LINE.fullmatch(line):
        content, checksum = found.groups()
        if checksum != _checksum(content, before):
            raise ValueError("the checksum does not match")
        line = content + "}"
    if not first and bool(checksum) != bool(before):
        raise ValueError("some lines have checksums and some have none")
    event = json.loads(line)
    Event.model_validate(event)
    return event, checksum


def _checksum(content: str, before: str) -> str:
    return hashlib.sha256(f"{before}{content}".encode()).hexdigest()[:16]
