"""Configurations from presets, TOML files and single keys."""

import os
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from fedseal.config.config import Config, did_you_mean, parse
from fedseal.errors import UserError
from fedseal.system.environment import set_up_process
from fedseal.system.own_code import make_absolute, split_path

PRESETS = resources.files("fedseal.config") / "presets"
MAX_EXTENDED = 50


def load_config(source: str | os.PathLike[str], overrides: Mapping[str, Any] | None = None) -> Config:
    """A preset by name or a TOML file by path, with single keys ("fedseal.theta") replaced."""
    raw = _read(source)
    for key, value in (overrides or {}).items():
        _put(raw, key, value)
    for section, key in ((raw, "method"), (raw.get("model"), "name")):
        if isinstance(section, dict) and isinstance(section.get(key), str) and split_path(section[key]):
            if "\0" in section[key]:
                raise UserError(f"{source}: {section[key]!r} has a null character: give the path of a file.")
            section[key] = make_absolute(section[key])
            engine = raw.get("engine")  # a file of your own may compute when it is loaded
            set_up_process(engine.get("arithmetic", "portable") if isinstance(engine, dict) else "portable")
    return parse(raw, str(source))


def list_presets() -> dict[str, str]:
    """Name and title of every preset; the title is its first comment. Bases of other presets are left out."""
    files = sorted((f for f in PRESETS.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    titles = {f.name.removesuffix(".toml"): f.read_text("utf-8").splitlines()[0].lstrip("# ") for f in files}
    return {name: title for name, title in titles.items() if not name.startswith("base-")}


def default_method(source: str | os.PathLike[str]) -> str:
    """The method that a preset or a file names itself."""
    return make_absolute(str(_read(source).get("method", "fedseal")))


def parse_assignment(text: str) -> tuple[str, Any]:
    """The key and the value of `--set KEY=VALUE`; the value is TOML if possible, else the text itself."""
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise UserError(f"--set takes KEY=VALUE, not '{text}'.")
    try:
        return key.strip(), tomllib.loads(f"value = {value.strip()}")["value"]
    except (ValueError, RecursionError):  # not TOML, or too many digits or brackets
        return key.strip(), value.strip()


def _read(source: str | os.PathLike[str], below: tuple[Path, ...] = ()) -> dict[str, Any]:
    path = Path(source)
    if path.is_file() and path.resolve() in below:
        raise UserError(f"{source} extends itself through {below[-1]}: remove one 'extends'.")
    if len(below) > MAX_EXTENDED:
        raise UserError(f"{below[0]} extends more than {MAX_EXTENDED} files in a row: join some of them.")
    if path.suffix == ".toml" or path.is_file():
        if not path.is_file():
            raise UserError(
                f"There is no configuration file {path}; 'fedseal presets' lists the built-in ones."
            )
        try:
            text, base = path.read_text("utf-8-sig"), path.parent
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise UserError(f"Cannot read {source} ({reason}): give a TOML file.") from error
    else:
        file = PRESETS / f"{source}.toml"
        if not file.is_file():
            hint = did_you_mean(str(source), list_presets())
            raise UserError(f"There is no preset '{source}'{hint}; the name of a file ends in .toml.")
        text, base = file.read_text("utf-8"), None
    try:
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also too many digits or brackets
        raise UserError(f"{source} is not valid TOML: {str(error).rstrip('.')}.") from None
    if path.is_file() and not raw:
        raise UserError(f"{source} is empty: 'fedseal show fmnist-lenet' prints a complete file.")
    parent = raw.pop("extends", None)
    if parent is None:
        return raw
    if not isinstance(parent, str):
        raise UserError(f"{source}: extends is {parent!r}, but must name a preset or a file.")
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
