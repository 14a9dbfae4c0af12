"""Sections reject unknown keys and impossible values, and are frozen."""

import pytest
from pydantic import ValidationError

from fedseal.config.sections import AugmentSettings, ServerTrainingSettings, Settings, TrainingSettings
from fedseal.methods import METHODS


@pytest.mark.parametrize(
    "section", [Settings, TrainingSettings, ServerTrainingSettings, AugmentSettings, *METHODS.values()]
)
def test_settings_reject_unknown_keys(section: type[Settings]) -> None:
    with pytest.raises(ValidationError) as caught:
        section.model_validate({"no_such_key": 1})
    (error,) = caught.value.errors()
    assert (error["type"], error["loc"]) == ("extra_forbidden", ("no_such_key",))


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": 0},
        {"decay": 1.1},
        {"decay": 0},
        {"momentum": 1},
        {"weight_decay": -1},
        {"epochs": -1},
        {"batch": 0},
    ],
)
def test_training_settings_reject_impossible_values(wrong: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        TrainingSettings.model_validate(wrong)


def test_settings_are_frozen() -> None:
    section = TrainingSettings()
    with pytest.raises(ValidationError):
        section.lr = 1.0  # type: ignore[misc]
    assert section.lr == 0.001
