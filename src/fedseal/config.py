"""Typed configuration from TOML: presets, files, single keys; every mistake named in one sentence."""

import difflib
import hashlib
import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import tomli_w
from pydantic import BaseModel, Field, SerializeAsAny, ValidationError, model_validator
from pydantic.fields import FieldInfo

from fedseal.core import Augmentation, Learning, Method, ServerLearning
from fedseal.data.splits import DataSettings
from fedseal.errors import UserError
from fedseal.methods import METHODS, absolute, code, find, section
from fedseal.models import ModelSettings
from fedseal.settings import Settings


class EngineSettings(Settings):
    """The `[engine]` section: how a run is carried out.

    It does not change the result, but for last bits on another device, and for clients that miss a deadline.
    """

    name: Literal["local", "flower"] = Field(
        "local", description="clients in worker processes of this machine, or on Flower (its simulation)"
    )
    workers: int = Field(0, ge=0, description="worker processes for the clients; 0: one per core")
    device: Literal["auto", "cpu", "cuda", "mps"] = Field("auto", description="where tensors live")
    checkpoint_every: int = Field(1, ge=1, description="rounds between checkpoints")
    deadline: float = Field(
        600, gt=0, description="seconds that a round waits for clients on other machines; then without them"
    )
    min_replies: int = Field(
        1, ge=0, description="usable replies that a round needs, where so many are asked; fewer end the run"
    )


class Config(Settings):
    """A whole run. Its result depends on this, without `[engine]`, and on nothing else."""

    method: str = Field("fedseal", description=f"the method: {', '.join(METHODS)}, or FILE.py:Class")
    seed: int = Field(0, ge=0, description="decides split, initial weights and every draw")
    rounds: int = Field(150, ge=1, description="rounds of training")
    cohort: int = Field(0, ge=0, description="clients sampled in a round; 0: all")
    evaluate: Literal["model", "average"] = Field(
        "model",
        description="what the run is judged by and keeps: w^t, the global model after the server's step, or"
        " w̄, the average that the round ends with",
    )
    evaluate_every: int = Field(
        1, ge=1, description="rounds between evaluations; the last ten are evaluated all"
    )
    data: DataSettings = Field(default_factory=DataSettings)
    model: ModelSettings = Field(default_factory=ModelSettings)
    augment: Augmentation = Field(default_factory=Augmentation)
    server: ServerLearning = Field(default_factory=ServerLearning)
    client: Learning = Field(default_factory=Learning)
    engine: EngineSettings = Field(default_factory=EngineSettings)
    options: dict[str, SerializeAsAny[Method]] = Field(
        default_factory=dict, description="each method's own section, under the method's name"
    )

    @model_validator(mode="before")
    @classmethod
    def _methods_sections(cls, raw: Any) -> Any:
        """Moves `[fedseal]` and the like into `options`."""
        if not isinstance(raw, dict) or "options" in raw:
            return raw
        method = raw.get("method", "fedseal")
        classes = METHODS | {section(method): find(method)}
        options = {
            name: _validate(found, raw.get(name, {}), name)
            for name, found in classes.items()
            if name in raw or name == section(method)
        }
        return {k: v for k, v in raw.items() if k not in classes} | {"options": options}

    def __reduce__(self) -> tuple[Any, ...]:
        """To another process: anew from its keys, so that a method's own file is loaded there, too."""
        return parse, (self.to_dict(), "the configuration")

    def chosen(self) -> Method:
        """The method with its hyper-parameters."""
        return self.options[section(self.method)]

    def with_threads(self, number: int) -> "Config":
        """With the server's threads settled, if they are not: they decide the last bit of its sums."""
        server = self.server.model_copy(update={"threads": self.server.threads or number})
        return self.model_copy(update={"server": server})

    def to_dict(self) -> dict[str, Any]:
        """What `parse` takes, with every key present."""
        raw: dict[str, Any] = self.model_dump(mode="json", exclude_none=True)
        options: dict[str, Any] = raw.pop("options")
        return raw | options

    def to_toml(self) -> str:
        """A file that runs again as it is."""
        return tomli_w.dumps(self.to_dict())

    def explained(self) -> str:
        """The same file with what each key means behind it; keys that are left out are comments."""
        lines: list[str] = []
        model: type[BaseModel] = type(self)
        for line in self.to_toml().splitlines():
            key = line.partition(" = ")[0]
            if line.startswith("["):
                found = self.options.get(line.strip("[]")) or getattr(self, line.strip("[]"), None)
                model = type(found) if isinstance(found, BaseModel) else BaseModel  # a table among options
                unset = {k: about for k, about in model.model_fields.items() if getattr(found, k) is None}
                lines += [line, *(f"# {k} =  # {_about(about)}" for k, about in unset.items())]
            else:
                about = _about(model.model_fields[key]) if key in model.model_fields else ""
                lines.append(f"{line}  # {about}" if about else line)
        return "\n".join(lines) + "\n"

    def fingerprint(self, *, ignore: Iterable[str] = ()) -> str:
        """A hash of all that decides the result; other methods' sections and `[engine]` do not."""
        chosen, method = section(self.method), self.chosen()
        skip = {"engine", *ignore, *(name for name in self.options if name != chosen)}
        if not method.asks_clients:
            skip |= {"cohort", "client"}
        relevant = {k: v for k, v in self.to_dict().items() if k not in skip}
        if not method.strong_views and self.server.augment != "strong":
            relevant["augment"] = {k: relevant["augment"].get(k) for k in ("flip", "shift")}
        relevant["method"] = chosen + code(self.method)  # wherever its file is, whatever it is called
        return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()[:16]


def _about(field: FieldInfo) -> str:
    """What a key means, with the values that it can have if they are few and not named there."""
    text, choices = field.description or "", get_args(field.annotation)
    if get_origin(field.annotation) is not Literal or all(str(choice) in text for choice in choices):
        return text
    return f"{text}; one of {', '.join(map(str, choices))}"


def presets() -> dict[str, str]:
    """Name and first comment line of every preset, bases (which other presets extend) left out."""
    folder = resources.files("fedseal.presets")
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    titles = {f.name.removesuffix(".toml"): f.read_text("utf-8").splitlines()[0].lstrip("# ") for f in files}
    return {name: title for name, title in titles.items() if not name.startswith("base-")}


def load_config(source: str | os.PathLike[str], overrides: Mapping[str, Any] | None = None) -> Config:
    """A preset's name or a TOML file's path, with single keys ("fedseal.theta") replaced."""
    raw = _read(source)
    for key, value in (overrides or {}).items():
        _put(raw, key, value)
    if isinstance(raw.get("method"), str):
        raw["method"] = absolute(raw["method"])
    return parse(raw, str(source))


def method_of(source: str | os.PathLike[str]) -> str:
    """The method that a preset or a file names itself."""
    return absolute(str(_read(source).get("method", "fedseal")))


def parse(raw: Mapping[str, Any], where: str) -> Config:
    """A validated configuration; `where` is named in the error if there is one."""
    try:
        method = raw.get("method", "fedseal")
        if not isinstance(method, str):
            raise UserError(f"method must be one of {', '.join(METHODS)}, or FILE.py:Class, not {method!r}.")
        known = [*dict.fromkeys([*Config.model_fields, *METHODS, section(method)])]
        known.remove("options")
        if section(method) in Config.model_fields:
            raise UserError(f"a method's class cannot be called {section(method)}, as a key is: rename it.")
        for key in raw:
            if key not in known:
                raise UserError(f"unknown key '{key}'{_did_you_mean(key, known)}.")
        return Config.model_validate(dict(raw))
    except ValidationError as error:
        raise UserError(f"{where}: {explain(error, Config)}") from None
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def parse_value(text: str) -> Any:
    """The value of `--set KEY=VALUE`: TOML where it is TOML, else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def assignment(text: str) -> tuple[str, Any]:
    """The key and the value of `--set KEY=VALUE`."""
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise UserError(f"--set takes KEY=VALUE, not '{text}'.")
    return key.strip(), parse_value(value.strip())


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
        return f"unknown key '{key}'{_did_you_mean(path[-1], model.model_fields)}."
    if first["type"] == "value_error":
        return f"in '{key}', {first['ctx']['error']}."
    message = first["msg"][0].lower() + first["msg"][1:]
    return f"'{key}' is {first['input']!r}, but {message.replace('input', 'it', 1)}."


def _validate(model: type[Method], raw: Any, section: str) -> Method:
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise UserError(explain(error, model, section)) from None


def _did_you_mean(key: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(key, list(known), n=1)
    return f" (did you mean '{close[0]}'?)" if close else f"; known are {', '.join(known)}"


def _read(source: str | os.PathLike[str], below: tuple[Path, ...] = ()) -> dict[str, Any]:
    path = Path(source)
    if path.is_file() and path.resolve() in below:
        raise UserError(f"{source} extends itself through {below[-1]}: remove one 'extends'.")
    if path.suffix == ".toml" or path.is_file():
        if not path.is_file():
            raise UserError(
                f"There is no configuration file {path}; 'fedseal presets' lists the built-in ones."
            )
        try:
            text, base = path.read_text("utf-8"), path.parent
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
            raise UserError(f"{source} cannot be read ({reason}): give a TOML file.") from error
    else:
        file = resources.files("fedseal.presets") / f"{source}.toml"
        if not file.is_file():
            hint = _did_you_mean(str(source), presets())
            raise UserError(f"There is no preset '{source}'{hint}; a file's name ends in .toml.")
        text, base = file.read_text("utf-8"), None
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{source} is not valid TOML: {error}.") from None
    parent = raw.pop("extends", None)
    if parent is None:
        return raw
    if not isinstance(parent, str):
        raise UserError(f"{source}: extends is {parent!r}, but must be a preset's name or a file's.")
    found = base / parent if base is not None and parent.endswith(".toml") else parent
    return _merge(_read(found, (*below, path.resolve())), raw)


def _merge(base: dict[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in top.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value
    return base


def _put(raw: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for name in sections:
        raw = raw.setdefault(name, {})
        if not isinstance(raw, dict):
            raise UserError(f"'{key}' cannot be set: '{name}' is not a section.")
    raw[last] = value
