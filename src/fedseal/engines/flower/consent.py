"""What the operator of a client allows: how much a server may ask for, and what may be sent to it."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field, ValidationError

from fedseal.config.config import Config, did_you_mean, explain
from fedseal.config.sections import Settings
from fedseal.engines.flower.task import ClientTask
from fedseal.errors import UserError
from fedseal.methods import METHODS


class Limits(Settings):
    """The largest values that a client accepts from a server: `join --limit KEY=VALUE`."""

    epochs: int = Field(100, ge=0, description="client.epochs")
    batch: int = Field(1024, ge=1, description="client.batch")
    threads: int = Field(64, ge=1, description="client.threads")
    size: int = Field(512, ge=1, description="the height and width of images")
    classes: int = Field(1000, ge=1, description="the number of classes")
    operations: int = Field(10, ge=0, description="augment.n")
    views: int = Field(16, ge=0, description="model.views")
    request: int = Field(1000, ge=1, description="the size of a request in MB")


class Consent(Settings):
    """The choices of a client's operator."""

    limits: Limits = Field(default_factory=Limits)
    methods: tuple[str, ...] = ()  # empty: every method
    share_counts: bool = False
    masked: bool = False  # only with secure aggregation

    def find_refusal(self, task: ClientTask, config: Config) -> str:
        """Why the client does not do a task, in words for both machines; empty if it does."""
        asked = {
            "epochs": config.client.epochs,
            "batch": config.client.batch,
            "threads": config.client.threads,
            "size": max(task.size, config.model.resize),
            "classes": task.classes,
            "operations": config.augment.n,
            "views": config.model.views,
        }
        for name, value in asked.items():
            if refusal := self.compare(name, value):
                return refusal
        if config.augment.shift >= task.size:
            return f"the server sets augment.shift to {config.augment.shift} for images of {task.size} pixels"
        return ""

    def find_method_refusal(self, method: str) -> str:
        """Why the client does not take part in a method; empty if it does."""
        if not self.methods or method in self.methods:
            return ""
        return (
            f"this client accepts only the method {' or '.join(self.methods)}, but the server uses {method}:"
            f" join with --only {method} to accept it"
        )

    def compare(self, name: str, value: int) -> str:
        """Why a value is too large for this client; empty if it is not."""
        limit = getattr(self.limits, name)
        if value <= limit:
            return ""
        what = Limits.model_fields[name].description
        return (
            f"this client accepts at most {limit} for {what}, but the server asks for {value}: join with"
            f" --limit {name}={value} to accept it"
        )


def parse_consent(
    limits: Mapping[str, Any],
    methods: Sequence[str],
    share_counts: bool,
    masked: bool = False,
    own_method: bool = False,
) -> Consent:
    """The consent that the options of `join` give. Without a method of your own, only built-in ones exist."""
    for name in () if own_method else methods:
        if name not in METHODS:
            raise UserError(f"--only: there is no method '{name}'{did_you_mean(name, METHODS)}.")
    try:
        accepted = Limits.model_validate(dict(limits))
    except ValidationError as error:
        raise UserError(f"--limit: {explain(error, Limits)}") from None
    return Consent(limits=accepted, methods=tuple(methods), share_counts=share_counts, masked=masked)
