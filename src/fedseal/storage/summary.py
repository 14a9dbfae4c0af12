"""Reads `summary.json`, and checks what it holds."""

import json
from collections.abc import Mapping
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


class Privacy(BaseModel):
    """Differential privacy (privacy_ledger.py)."""

    model_config = STRICT

    mode: Literal["central", "local"]
    clip: float
    noise: float
    delta: float
    epsilon: float | None  # None: without noise
    uploads: int  # of the client that was asked most often


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
    privacy: Privacy | None = None


def describe_privacy(summary: Mapping[str, Any]) -> str:
    """The guarantee of a run with differential privacy, in a few words; empty for another run."""
    if (found := summary.get("privacy")) is None:
        return ""
    if found["epsilon"] is None:
        return f"none: updates are clipped to {found['clip']:g}, but there is no noise"
    return (
        f"ε = {found['epsilon']:.3g} at δ = {found['delta']:g} for each client ({found['mode']}, clip"
        f" {found['clip']:g}, noise {found['noise']:g}, up to {found['uploads']} uploads)"
    )


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
