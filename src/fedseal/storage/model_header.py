"""The header of a model file, checked before anything is built from it."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedseal.config.sections import MAX_SIZE

Numbers = list[float]


class Header(BaseModel):
    """The keys that every model file has, and their types. Further keys are allowed."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")

    model: dict[str, Any]
    classes: list[str] = Field(min_length=1)
    channels: Literal[1, 3]
    size: int = Field(ge=1, le=MAX_SIZE)
    mean: Numbers
    std: list[Annotated[float, Field(gt=0)]]
    calibration: "CalibrationHeader | None" = None  # files written before version 0.2 have none

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        found: list[tuple[Numbers, int]] = [(self.mean, self.channels), (self.std, self.channels)]
        if self.calibration:
            found += [(self.calibration.bias, len(self.classes)), (self.calibration.mix, len(self.classes))]
        if any(len(values) != length for values, length in found):
            raise ValueError("a list has another length")
        return self


class CalibrationHeader(BaseModel):
    """The keys of `calibration`."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    temperature: float = Field(gt=0)
    bias: Numbers
    mix: Numbers
    images: int = Field(ge=0)


def read_header(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The header in the metadata of a safetensors file; a ValueError or KeyError if it is not one."""
    about: dict[str, Any] = json.loads(metadata["fedseal"])
    Header.model_validate(about)
    return about
