"""Reads `summary.json`, and checks what it holds."""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from fedseal.system.files import read_file

STRICT = ConfigDict(strict=True)


class Accuracy(BaseModel):
    """One accuracy (accuracies.py)."""

    model_config = STRICT

    last: float
    mean_last_10: float
    best_on_validation: float
    best_round: int


class Labels(BaseModel):
    """The number of labelled images."""

    model_config = STRICT

    training: int
    validation: int
    total: int


class Summary(BaseModel):
    """The keys that every summary has, and their types. Further keys are allowed."""

    model_config = STRICT | ConfigDict(extra="allow")

    method: str
    evaluate: Literal["model", "average"]
    rounds: int = Field(ge=1)
    clients: int
    labels: Labels
    split: str
    seconds: float = Field(allow_inf_nan=False)
    versions: dict[str, str]
    left_out: dict[str, int] = Field(default_factory=dict)
    validation_accuracy: Accuracy


def read_summary_file(path: Path) -> dict[str, Any]:
    """A summary; an OSError or a ValueError if the file is missing or damaged."""
    try:
        found: dict[str, Any] = json.loads(read_file(path))
    except RecursionError as error:
        raise ValueError("too many brackets") from error
    Summary.model_validate(found)
    for name, value in found.items():
        if name.endswith("accuracy"):
            Accuracy.model_validate(value)
    return found
