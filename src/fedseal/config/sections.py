"""The sections of a configuration file, one class each; a method's section is the method's own class."""

import os
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

# Own folders define these counts themselves, so the keys are 0 there.
FOLDER_COUNTS = ("labels", "clients", "images_per_client")
TEST_COUNTS = ("test_per_client", "held_out_test")

# Far above what is of use, and far below what overflows or exhausts the memory of a machine.
MAX_NUMBER = 10**9
MAX_SIZE = 4096
MAX_THREADS = 1024
DEFAULT_GATE = 3.0
MIN_PRIVACY = 1e-3  # as noise, ε is above 500,000


class Settings(BaseModel):
    """Base of all sections: typed, frozen, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _reject_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation in (int, float):
            raise ValueError("a number is needed, not true or false")
        if isinstance(value, int) and abs(value) > MAX_NUMBER and info.field_name != "seed":
            raise ValueError(f"the number must be at most {MAX_NUMBER:,}")
        return value


def _absolute(path: str | os.PathLike[str]) -> str:
    home = os.path.expanduser(path)  # noqa: PTH111 - Path.expanduser raises for an unknown user
    return str(Path(home).absolute())


class DataSettings(Settings):
    """The `[data]` section. The defaults are the paper's Fashion-MNIST split."""

    source: str = Field("fashion-mnist", description="the data set; parquet and folders read your own images")
    path: str = Field("", description="the folder of your own images (parquet and folders)")
    labels: int = Field(
        500, ge=0, description="labelled images at the server, equal per class; 0 with folders: all of them"
    )
    validation: int = Field(
        200,
        ge=0,
        description="validation images at the server, equal per class; with folders and no validation folder:"
        " images held out of server/, 0 for a fifth",
    )
    clients: int = Field(10, ge=0, description="number of clients; 0 with folders: one per client folder")
    images_per_client: int = Field(
        1200, ge=0, description="unlabelled images of each client; 0 with folders: all in its folder"
    )
    test_per_client: int = Field(
        0,
        ge=0,
        description="test images per client, in the client's class mix, drawn from the test set; 0: the"
        " whole test set",
    )
    held_out_test: int = Field(
        0,
        ge=0,
        description="test images held out of training and test set together, in proportion to the classes;"
        " 0: the official test set",
    )
    partition: Literal["iid", "dirichlet", "fedmatch"] = Field(
        "dirichlet", description="how classes are spread over clients; not used with folders"
    )
    alpha: float = Field(
        0.3, gt=0, allow_inf_nan=False, description="Dirichlet parameter; smaller means more skewed clients"
    )
    size: int = Field(
        0,
        ge=0,
        le=MAX_SIZE,
        description="height and width to which images are resized; 0: the data set's own, folders: 32",
    )
    channels: Literal[0, 1, 3] = Field(
        0, description="1 for grey, 3 for colour; 0: the data set's own, folders: 3"
    )

    @model_validator(mode="before")
    @classmethod
    def _folders_default_to_all(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("source") == "folders":
            return dict.fromkeys((*FOLDER_COUNTS, "validation"), 0) | values
        return values

    @model_validator(mode="before")
    @classmethod
    def _make_path_absolute(cls, values: Any) -> Any:
        """A run can then be resumed from any folder."""
        if not isinstance(values, dict) or values.get("source") not in ("parquet", "folders"):
            return values
        path = values.get("path")
        if not isinstance(path, str | os.PathLike) or not str(path):
            return values
        return values | {"path": _absolute(path)}

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.source in ("parquet", "folders") and not self.path:
            raise ValueError(f'source = "{self.source}" needs path')
        for key in FOLDER_COUNTS:
            if self.source != "folders" and getattr(self, key) == 0:
                raise ValueError(f"{key} must be at least 1")
        for key in (*FOLDER_COUNTS, *TEST_COUNTS):
            if self.source == "folders" and getattr(self, key) != 0:
                raise ValueError(f"{key} does not apply to folders, whose content decides it: leave it out")
        return self


class ModelSettings(Settings):
    """The `[model]` section."""

    name: str = Field("lenet", description="the network, FILE.py:function for your own")
    norm: Literal["none", "batch", "group"] = Field(
        "none", description="normalisation after convolutions: none, batch or group"
    )
    width: int = Field(64, ge=4, le=512, multiple_of=4, description="channels of a ResNet's first layer")
    stem: Literal["small", "large"] = Field(
        "small",
        description="first layer of ResNet-18: small (3×3, stride 1) or large (7×7, stride 2, max-pool)",
    )
    resize: int = Field(
        0, ge=0, le=4096, description="enlarge images to this height and width for the network; 0: do not"
    )
    weights: str = Field(
        "", description="file with pretrained weights: safetensors, or a state_dict that torch.save wrote"
    )
    freeze: bool = Field(
        False,
        description="train the last layer only. The others see each image once; their output, its features,"
        " is kept on disk and never sent",
    )
    views: int = Field(
        0,
        ge=0,
        le=64,
        description="with freeze: this many weakly and as many strongly augmented copies of each image, whose"
        " features are kept; 0: no augmentation",
    )

    @model_validator(mode="before")
    @classmethod
    def _make_path_absolute(cls, values: Any) -> Any:
        """A run can then be resumed from any folder."""
        path = values.get("weights") if isinstance(values, dict) else None
        return (
            values | {"weights": _absolute(path)} if path and isinstance(path, str | os.PathLike) else values
        )

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.views and not self.freeze:
            raise ValueError("views is for freeze = true: without it, images are augmented afresh")
        return self


class AugmentSettings(Settings):
    """The `[augment]` section: weak and strong augmentation."""

    flip: bool | None = Field(
        None, description="mirror images at random; left out: the data set's default (no for digits)"
    )
    shift: int = Field(4, ge=0, description="weak: shift by up to this many pixels in each direction")
    weak_first: bool = Field(True, description="strong: apply the weak augmentation before RandAugment")
    n: int = Field(2, ge=0, description="strong: RandAugment operations per image")
    m: int = Field(10, ge=0, le=30, description="strong: RandAugment magnitude, 0 to 30")


class TrainingSettings(Settings):
    """How a participant trains: the `[client]` section."""

    lr: float = Field(0.001, gt=0, description="learning rate of round 1")
    decay: float = Field(0.995, gt=0, le=1, description="learning rate factor per round")
    momentum: float = Field(0.9, ge=0, lt=1, description="SGD momentum, reset each round")
    weight_decay: float = Field(0.0, ge=0, description="SGD weight decay")
    epochs: int = Field(5, ge=0, description="epochs per round")
    batch: int = Field(32, ge=1, description="batch size")
    threads: int = Field(
        1, ge=1, le=MAX_THREADS, description="CPU threads; the last bit of a sum depends on their number"
    )


class ServerTrainingSettings(TrainingSettings):
    """The `[server]` section."""

    threads: int = Field(
        0,
        ge=0,
        le=MAX_THREADS,
        description="CPU threads; 0: one per core, and config.toml records that number",
    )
    augment: Literal["none", "weak", "strong"] = Field(
        "weak", description="augmentation of the labelled images"
    )


class BootstrapSettings(Settings):
    """The `[bootstrap]` section: supervised epochs at the server before round 1.

    FedSEAL has its own, `fedseal.bootstrap_epochs`, with the learning rates of the rounds as in the paper.
    """

    epochs: int = Field(0, ge=0, description="supervised epochs before round 1; 0: none")
    lr: float = Field(0.01, gt=0, description="learning rate of the first epoch")
    decay: float = Field(0.996, gt=0, le=1, description="learning rate factor per epoch")
    augment: Literal["none", "weak", "strong"] = Field(
        "strong", description="augmentation of the labelled images"
    )


class AggregateSettings(Settings):
    """The `[aggregate]` section: how the server averages, and whom it leaves out."""

    rule: Literal["mean", "clip", "median", "trimmed-mean", "multi-krum", "fltrust"] = Field(
        "mean",
        description="mean; clip (updates longer than the median are shortened to it); median and trimmed-mean"
        " (of every weight); multi-krum (without the models farthest from the others); fltrust (by agreement"
        " with the server's own update)",
    )
    gate: float = Field(
        DEFAULT_GATE,
        ge=0,
        description="updates longer than this many times the median are left out, and shorter ones if they go"
        " across or against the others; 0: none (the paper)",
    )
    malicious: float = Field(
        0.2,
        gt=0,
        lt=0.5,
        description="the share of clients that may be malicious: trimmed-mean leaves out as many values at"
        " both ends, multi-krum as many clients; at least one",
    )


class SimulateSettings(Settings):
    """The `[simulate]` section: clients that attack. It is for `fedseal train` only."""

    malicious: int = Field(0, ge=0, description="number of malicious clients, chosen by the seed")
    attack: Literal["scale", "sign-flip", "noise", "zeros", "huge", "class-swap", "statistics", "nan"] = (
        Field("scale", description="what malicious clients send instead of what they have learned")
    )
    strength: float = Field(
        10.0,
        gt=0,
        le=1e6,
        description="length of a forged update (scale, sign-flip, noise, class-swap), 1: as long as an honest"
        " one",
    )


class SecureSettings(Settings):
    """The `[secure]` section: secure aggregation, by which the server sees only the sum of the updates."""

    enabled: bool = Field(
        False, description="secure aggregation: the server learns the clients' sum, and no single update"
    )
    threshold: int = Field(
        0,
        ge=0,
        description="clients that must stay until the end of a round; 0: two thirds of those asked, and at"
        " least 2",
    )
    clip: float = Field(
        16.0, gt=0, le=1e6, description="range of a weight's change in a round; larger ones are clipped"
    )

    @model_validator(mode="after")
    def _check_threshold(self) -> Self:
        if self.threshold == 1:
            raise ValueError("threshold must be at least 2: the sum of one client hides nothing")
        return self


class PrivacySettings(Settings):
    """The `[privacy]` section: differential privacy for clients (docs/privacy.md)."""

    mode: Literal["none", "central", "local"] = Field(
        "none",
        description="who adds noise to the clients' updates: none, central (the server, to their sum) or"
        " local (each client, before it uploads)",
    )
    clip: float = Field(
        1.0, gt=0, le=MAX_NUMBER, description="C: maximum L2 norm of a client's update; others are scaled"
    )
    noise: float = Field(
        1.0, ge=0, le=MAX_NUMBER, description="σ: the noise has deviation σ·C; 0: clip only, not private"
    )
    epsilon: float = Field(0.0, ge=0, le=MAX_NUMBER, description="budget ε of the run; 0: only report ε")
    delta: float = Field(1e-5, ge=1e-12, lt=1, description="δ: set it well below 1 / number of clients")

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.mode == "none" and self.model_dump(exclude_defaults=True):
            raise ValueError("mode is none, so the other keys have no effect: set it to central or local")
        if self.epsilon and not self.noise:
            raise ValueError("epsilon is a budget, but without noise every budget is exceeded: raise noise")
        if 0 < self.noise < MIN_PRIVACY or 0 < self.epsilon < MIN_PRIVACY:
            raise ValueError(f"noise and epsilon must be 0 or at least {MIN_PRIVACY}")
        return self


class EngineSettings(Settings):
    """The `[engine]` section: how a run is executed.

    It does not change the result, except for the last bits on another device or with another arithmetic, and
    for clients that miss a deadline.
    """

    name: str = Field(
        "local", description="where clients run: local (worker processes) or flower (simulation)"
    )
    workers: int = Field(
        0, ge=0, le=MAX_THREADS, description="worker processes for the clients; 0: one per core"
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = Field("auto", description="device of all tensors")
    arithmetic: Literal["portable", "native"] = Field(
        "portable",
        description="portable: AVX2 only, so that processors with AVX2 agree to the last bit; native: all"
        " instructions of the processor",
    )
    checkpoint_every: int = Field(1, ge=1, description="rounds between checkpoints")
    deadline: float = Field(
        600, gt=0, le=MAX_NUMBER, description="seconds that a round waits for clients on other machines"
    )
    min_replies: int | None = Field(
        None,
        ge=0,
        description="usable replies that a round needs, or the run stops; left out: more than half of three"
        " or more clients, one of two",
    )
    counts: bool | None = Field(
        None,
        description="ask clients for counts of their images, such as |D⁺|; left out: yes in a simulation, no"
        " with clients on other machines",
    )

    @property
    def asks_for_counts(self) -> bool:
        """`counts`, which `serve` sets to false if it is left out."""
        return self.counts is not False
