"""Reads `events.jsonl`: one JSON object per line, written while a run goes on."""

import json
from pathlib import Path
from typing import Any

from fedseal.errors import UserError


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a run; a line that was cut off by a kill is left out."""
    events = []
    for line in path.read_text("utf-8", "replace").splitlines() if path.exists() else []:
        try:
            event = json.loads(line)
            event["event"], event["t"]
        except (ValueError, KeyError, TypeError):
            break
        events.append(event)
    return events


def read_rounds(folder: Path) -> list[dict[str, Any]]:
    """The rounds of the run in a folder; empty if there is no run."""
    return [event for event in read_events(folder / "events.jsonl") if event["event"] == "round"]


def read_rounds_until(folder: Path, t: int) -> list[dict[str, Any]]:
    """Rounds 1 to t of a run; an error if one is missing."""
    events = [event for event in read_rounds(folder) if event["t"] <= t]
    if [event["t"] for event in events] != list(range(1, t + 1)):
        path = folder / "events.jsonl"
        raise UserError(f"{path} is damaged, or a round is missing: delete {folder} to run it again.")
    return events
