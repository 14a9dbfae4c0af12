"""What a report reads from a run's files."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fedseal.errors import UserError
from fedseal.report.run import Run, format_left_out, format_rounds
from fedseal.storage.events_file import read_events


def change_events(run: Path, **values: list[Any]) -> Run:
    """The run with further numbers, one value per round."""
    path = run / "events.jsonl"
    events = read_events(path)
    for name, column in values.items():
        for event, value in zip(events, column, strict=True):
            event[name] = value
    path.write_text("".join(json.dumps(event) + "\n" for event in events), "utf-8")
    return Run.read(run)


def test_the_kind_of_a_metric_follows_from_its_values(copy: Path) -> None:
    run = change_events(copy, whole=[3, 4], mixed=[1, 0.5], later=[0.5, 1], several=[[1, 2], [3, 4]])
    kinds = run.metrics
    assert kinds["whole"] == "count" and kinds["several"] == "list"
    assert kinds["mixed"] == kinds["later"] == "number"
    assert kinds["positive"] == "count" and kinds["tau"] == "list" and kinds["lambda"] == "number"
    assert kinds.keys() == {"positive", "negative", "tau", "lambda", "whole", "mixed", "later", "several"}
    assert run.correct_rates == ["positive", "negative"]


def test_values_that_are_not_finite_are_left_out(copy: Path) -> None:
    run = change_events(copy, loss=[math.nan, 0.5], parts=[[1.0, math.inf], [2.0, 3.0]])
    assert run.points("loss") == [(2, 0.5)]
    assert run.points_by_class("parts") == {"0": [(1, 1.0), (2, 2.0)], "1": [(2, 3.0)]}


def test_classes_have_their_names(copy: Path) -> None:
    run = Run.read(copy)
    assert run.class_names(10)[-1] == "Ankle boot"
    (copy / "model.safetensors").unlink()
    assert run.class_names(10)[-1] == "Ankle boot"  # known for published data sets
    assert run.class_names(3) == ["0", "1", "2"]


def test_a_damaged_summary_is_refused(copy: Path) -> None:
    (copy / "summary.json").write_text("{}")
    with pytest.raises(UserError, match="does not contain a finished run"):
        Run.read(copy)


def test_replies_left_out_are_listed_by_client() -> None:
    assert format_left_out({"left_out": {"north": 2, "south": 1}}) == "2 of north, 1 of south"
    assert format_left_out({}) == ""


def test_rounds_are_written_as_spans() -> None:
    assert format_rounds([1, 2, 3, 5, 8, 9]) == "1–3, 5, 8–9" and format_rounds([4]) == "4"
