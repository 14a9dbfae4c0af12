"""Accuracies: their names, and their summary over a run's rounds.

An accuracy is named `test_accuracy`, `official_accuracy` or `validation_accuracy` after its images.
`client_accuracy` is that of the test images, predicted with each client's own class mix. The prefix
`average_` marks that of the clients' average w̄; without it, it is that of the global model w^t.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedseal.errors import UserError
from fedseal.rounds import LAST_ROUNDS

PREFIXES = {"model": "", "average": "average_"}  # by the state's group

Event = Mapping[str, Any]


def accuracy_name(model: str, images: str) -> str:
    """The name of a model's accuracy on a set of images."""
    return f"{PREFIXES[model]}{images}_accuracy"


def judged_by(measured: Mapping[str, Any], model: str) -> str:
    """The accuracy by which a model is judged: on the test images, or on validation if there are none.

    A run without an average is judged by the global model.
    """
    if accuracy_name(model, "validation") not in measured:
        model = "model"
    test = accuracy_name(model, "test")
    return test if test in measured else accuracy_name(model, "validation")


def averaged_over(rounds: int) -> str:
    """Over which rounds the accuracy of a run with this number of rounds is a mean."""
    number = min(rounds, LAST_ROUNDS)
    return f"mean of the last {number} rounds" if number > 1 else "after one round"


def summarize(events: Sequence[Event]) -> dict[str, dict[str, Any]]:
    """For every accuracy: of the last round, the mean of the last ten rounds, and of the round that is best
    on validation (the first of equal ones)."""
    evaluated = [event for event in events if "validation_accuracy" in event]
    names = [name for name in evaluated[-1] if name.endswith("accuracy")] if evaluated else []
    if not names or any(name not in event for event in evaluated for name in names):
        raise UserError(
            "events.jsonl lacks accuracies of some rounds: delete the run's folder to run it again."
        )
    last = [event for event in evaluated if event["t"] > evaluated[-1]["t"] - LAST_ROUNDS]
    result = {}
    for name in names:
        prefix = "average_" if name.startswith("average_") else ""
        best = max(evaluated, key=lambda event: (event[f"{prefix}validation_accuracy"], -event["t"]))
        result[name] = {
            "last": evaluated[-1][name],
            "mean_last_10": float(np.mean([event[name] for event in last])),
            "best_on_validation": best[name],
            "best_round": best["t"],
        }
    return result
