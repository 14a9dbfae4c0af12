"""A run's whole configuration: all sections, validated, and a fingerprint of what decides the result."""

import difflib
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import tomli_w
from pydantic import BaseModel, Field, SerializeAsAny, ValidationError, model_validator
from pydantic.fields import FieldInfo

from fedseal.config.sections import (
    AggregateSettings,
    AugmentSettings,
    BootstrapSettings,
    DataSettings,
    EngineSettings,
    ModelSettings,
    PrivacySettings,
    SecureSettings,
    ServerTrainingSettings,
    Settings,
    SimulateSettings,
    TrainingSettings,
)
from fedseal.core import Method
from fedseal.data.sources import SOURCES
from fedseal.errors import UserError, printable
from fedseal.methods import METHODS
from fedseal.methods.loader import find_method, section_name
from fedseal.models import MODELS
from fedseal.system.files import hash_file
from fedseal.system.own_code import pin, read_texts, source_hash, split_path

# Keys whose values are the names in a dictionary of the package.
CHOICES: dict[str, Collection[str]] = {"data.source": SOURCES, "model.name": MODELS}


class Config(Settings):
    """A run. Its result depends on this, except for `[engine]`, and on nothing else."""

    method: str = Field("fedseal", description=f"the method: {', '.join(METHODS)}, or FILE.py:Class")
    seed: int = Field(
        0, ge=0, lt=2**63, description="determines the split, the initial weights and all random draws"
    )
    rounds: int = Field(150, ge=1, description="number of rounds")
    cohort: int = Field(0, ge=0, description="clients sampled per round; 0: all")
    evaluate: Literal["model", "average"] = Field(
        "model",
        description="the model that is judged and saved: model (w^t, after the server's step) or average (w̄,"
        " the clients' average that ends the round)",
    )
    evaluate_every: int = Field(
        1, ge=1, description="rounds between evaluations; the last ten rounds are always evaluated"
    )
    data: DataSettings = Field(default_factory=DataSettings)
    model: ModelSettings = Field(default_factory=ModelSettings)
    augment: AugmentSettings = Field(default_factory=AugmentSettings)
    server: ServerTrainingSettings = Field(default_factory=ServerTrainingSettings)
    bootstrap: BootstrapSettings = Field(default_factory=BootstrapSettings)
    client: TrainingSettings = Field(default_factory=TrainingSettings)
    aggregate: AggregateSettings = Field(default_factory=AggregateSettings)
    simulate: SimulateSettings = Field(default_factory=SimulateSettings)
    secure: SecureSettings = Field(default_factory=SecureSettings)
    privacy: PrivacySettings = Field(default_factory=PrivacySettings)
    engine: EngineSettings = Field(default_factory=EngineSettings)
    options: dict[str, SerializeAsAny[Method]] = Field(
        default_factory=dict, description="the methods' own sections by name"
    )

    @model_validator(mode="before")
    @classmethod
    def _collect_method_sections(cls, raw: Any) -> Any:
        """Moves `[fedseal]` and the like into `options`."""
        if not isinstance(raw, dict) or "options" in raw:
            return raw
        method = raw.get("method", "fedseal")
        classes = METHODS | {section_name(method): find_method(method)}
        options = {
            name: _validate(found, raw.get(name, {}), name)
            for name, found in classes.items()
            if name in raw or name == section_name(method)
        }
        return {k: v for k, v in raw.items() if k not in classes} | {"options": options}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as keys and values, with your own files, so that a worker process loads the same code."""
        return _unpickle, (self.to_dict(), read_texts(self.method, self.model.name))

    def selected_method(self) -> Method:
        """The method with its hyper-parameters."""
        return self.options[section_name(self.method)]

    def with_threads(self, number: int) -> "Config":
        """With `server.threads` set, if it is 0: the last bit of the server's sums depends on it."""
        server = self.server.model_copy(update={"threads": self.server.threads or number})
        return self.model_copy(update={"server": server})

    def own_files(self) -> list[str]:
        """Your own files that the result depends on."""
        code = [str(path) for path in read_texts(self.method, self.model.name)]
        return [*code, *([self.model.weights] if self.model.weights else [])]

    def to_dict(self) -> dict[str, Any]:
        """All keys, in the form that `parse` takes."""
        raw: dict[str, Any] = self.model_dump(mode="json", exclude_none=True)
        options: dict[str, Any] = raw.pop("options")
        return raw | options

    def to_toml(self) -> str:
        """A configuration file with all keys."""
        return tomli_w.dumps(self.to_dict())

    def to_annotated_toml(self) -> str:
        """The same file with the meaning of each key as a comment; keys without a value are commented out."""
        lines: list[str] = []
        model: type[BaseModel] = type(self)
        section = ""
        for line in self.to_toml().splitlines():
            if line.startswith("["):
                section = line.strip("[]")
                found = self.options.get(section) or getattr(self, section, None)
                model = type(found) if isinstance(found, BaseModel) else BaseModel
                unset = [key for key in model.model_fields if getattr(found, key) is None]
                lines += [line, *(f"# {key} =  # {_describe(model, key)}" for key in unset)]
            else:
                key = line.partition(" = ")[0]
                text = _describe(model, key, section) if key in model.model_fields else ""
                lines.append(f"{line}  # {text}" if text else line)
        return "\n".join(lines) + "\n"

    def _robustness(self) -> dict[str, Any]:
        """What differs from the plain mean, which all results before this section used."""
        used = self.aggregate.model_dump()
        if self.aggregate.rule not in ("trimmed-mean", "multi-krum"):
            del used["malicious"]
        return {} if used == {"rule": "mean", "gate": 0} else used

    def _attack(self) -> dict[str, Any]:
        return self.simulate.model_dump() if self.simulate.malicious else {}

    def fingerprint(self, *, ignore: Iterable[str] = ()) -> str:
        """A hash of every setting that affects the result and differs from its default.

        A new option with a default therefore leaves the fingerprints of recorded results valid. Sections of
        other methods and `[engine]` do not affect the result.
        """
        method = self.selected_method()
        changed: dict[str, Any] = self.model_dump(mode="json", exclude_defaults=True, exclude={"options"})
        changed["method"] = section_name(self.method)
        changed["options"] = method.model_dump(mode="json", exclude_defaults=True)
        if code := source_hash(self.method):
            changed["code"] = code
        if model := changed.get("model"):  # the content of your own files counts, not their path
            if own := split_path(self.model.name):
                model |= {"name": own[1], "code": source_hash(self.model.name)}
            if self.model.weights:
                model["weights"] = hash_file(Path(self.model.weights))
        changed |= {"aggregate": self._robustness(), "simulate": self._attack()}
        if not method.uses_clients:
            clients = ("cohort", "client", "aggregate", "simulate", "secure", "privacy")
            changed = {k: v for k, v in changed.items() if k not in clients}
        strong_start = self.bootstrap.epochs > 0 and self.bootstrap.augment == "strong"
        if not (method.strong_views or strong_start or self.server.augment == "strong"):
            weak = {k: v for k, v in changed.get("augment", {}).items() if k in ("flip", "shift")}
            changed["augment"] = weak
        relevant = {k: v for k, v in changed.items() if v != {} and k not in {"engine", *ignore}}
        return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()[:16]


def _unpickle(raw: Mapping[str, Any], files: Mapping[Path, str]) -> Config:
    pin(files)
    return parse(raw, "the configuration")


def parse(raw: Mapping[str, Any], where: str) -> Config:
    """A validated configuration; an error message starts with `where`."""
    try:
        method = raw.get("method", "fedseal")
        if not isinstance(method, str):
            raise UserError(f"method must be one of {', '.join(METHODS)}, or FILE.py:Class, not {method!r}.")
        known = [*dict.fromkeys([*Config.model_fields, *METHODS, section_name(method)])]
        known.remove("options")
        if section_name(method) in Config.model_fields:
            raise UserError(
                f"rename the class {section_name(method)}: the configuration has a key of that name."
            )
        for key in raw:
            if key not in known:
                raise UserError(f"unknown key '{key}'{did_you_mean(key, known)}.")
        for path, value in flatten(raw).items():
            if (shown := str(value)) != shown.encode("utf-8", "replace").decode():
                raise UserError(
                    f"'{path}' is '{printable(shown)}', which is not UTF-8: rename the file or folder."
                )
        config = Config.model_validate(dict(raw))
        for path, names in CHOICES.items():
            section, key = path.split(".")
            value = getattr(getattr(config, section), key)
            own = ["FILE.py:function"] if path == "model.name" else []
            if value not in names and not (own and split_path(value)):
                raise UserError(f"'{path}' is '{value}'{did_you_mean(value, [*names, *own])}.")
        return config
    except ValidationError as error:
        raise UserError(f"{where}: {explain(error, Config)}") from None
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The settings of all sections by dotted name, as in `--set`."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def explain(error: ValidationError, model: type[BaseModel], prefix: str = "") -> str:
    """The first mistake that pydantic found, in one sentence."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    key = ".".join(([prefix] if prefix else []) + path)
    if first["type"] == "extra_forbidden":
        for part in path[:-1]:
            annotation = model.model_fields[part].annotation
            assert isinstance(annotation, type) and issubclass(annotation, BaseModel)
            model = annotation
        return f"unknown key '{key}'{did_you_mean(path[-1], model.model_fields)}."
    if first["type"] == "missing":
        return f"'{key}' has no default: set {key}."
    if first["type"] == "model_type":
        return f"'{key}' is {first['input']!r}, but must be a section with keys of its own."
    if first["type"] == "value_error":
        return f"in '{key}', {first['ctx']['error']}."
    message = first["msg"][0].lower() + first["msg"][1:]
    return f"'{key}' is {first['input']!r}, but {message.replace('input', 'it', 1)}."


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The closest known word, or all of them, to end an error message with."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean '{close[0]}'?)" if close else f"; choose from {', '.join(known)}"


def _validate(model: type[Method], raw: Any, section: str) -> Method:
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise UserError(explain(error, model, section)) from None


def _describe(model: type[BaseModel], key: str, section: str = "") -> str:
    """The meaning of a key, with its possible values unless the text names them already."""
    field: FieldInfo = model.model_fields[key]
    text, choices = field.description or "", [str(choice) for choice in get_args(field.annotation)]
    if get_origin(field.annotation) is not Literal:
        choices = [*CHOICES.get(f"{section}.{key}", ())]
    if all(choice in text for choice in choices):
        return text
    return f"{text}; one of {', '.join(choices)}"
