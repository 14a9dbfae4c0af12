"""Feeds generated input to the command line, and counts what is neither a success nor one clear sentence.

`make fuzz` runs this file with 10,000 inputs, `make test` a few hundred. Hypothesis generates the inputs,
always the same ones: configurations, settings, command lines, damaged run folders, images and keys. A command
runs in this process, with a time limit. A few dozen inputs also run in processes of their own.

An input is good if the command succeeds, or refuses it with one sentence and exit code 2. It is bad if
anything else happens: an unexpected error (exit code 70), a traceback, a hang.
"""

import argparse
import contextlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save

from fedseal.cli import main
from fedseal.config.load import list_presets, load_config
from fedseal.system.checksums import verify_checksum
from fedseal.system.environment import set_up_process
from fedseal.system.logs import remove_logs, set_up_logs
from fedseal.system.machine import cores, versions
from fedseal.training.train import train

SECONDS = 120  # for a command; more is a hang, also on a busy machine
SUBPROCESSES = 5  # of each kind
GOOD = {0: "success", 2: "refused"}
SMALL = {
    "rounds": 1,
    "data.size": 12,
    "data.channels": 1,
    "method": "fedseal",
    "evaluate": "model",
    "bootstrap.epochs": 0,
    "fedseal.bootstrap_epochs": 0,
    "server.epochs": 1,
    "client.epochs": 1,
    "engine.workers": 1,
}

# ------------------------------------------------------------------ a command, and how it ends


class HangError(BaseException):
    """A command has taken too long."""


@dataclass
class Count:
    """How many inputs ended how, and the bad ones."""

    ends: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)

    def add(self, words: list[str], end: str, output: str) -> None:
        self.ends[end] += 1
        if end not in GOOD.values():
            self.bad.append(ascii(f"{end}: {words} {output[-1500:]}"))


def run_here(words: list[str]) -> tuple[str, str]:
    """How a command ends, and what it prints."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise HangError

    output = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace")
    former = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            set_up_logs()
            code = main.run_safely(lambda: main.app(words, prog_name="fedseal"))
            end = GOOD.get(code, f"exit code {code}")
    except HangError:
        end = "hang"
    except Exception as error:
        end = f"traceback of {type(error).__name__}"
    finally:
        remove_logs()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)
    output.seek(0)
    return _judge(end, output.read())


def run_process(words: list[str]) -> tuple[str, str]:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "fedseal", *words]
    try:
        done = subprocess.run(command, capture_output=True, timeout=2 * SECONDS)
    except subprocess.TimeoutExpired:
        return "hang", ""
    text = (done.stdout + done.stderr).decode("utf-8", "backslashreplace")
    return _judge(GOOD.get(done.returncode, f"exit code {done.returncode}"), text)


def _judge(end: str, text: str) -> tuple[str, str]:
    return ("traceback" if "Traceback (most recent" in text and end in GOOD.values() else end), text


# ------------------------------------------------------------------ what the inputs are made of

NUMBERS = st.one_of(
    st.integers(-3, 40),
    st.sampled_from([10**9, 2**31, 2**63, 10**20, -(10**20), 10**400]),
    st.floats(width=32),
    st.sampled_from([float("nan"), float("inf"), 1e300, 5e-324, -0.0]),
)
TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["", ".", "..", "/", "/dev/null", "/dev/full", "~nobody/x", "a\0b", "\udcff", "x" * 300]),
    st.sampled_from(
        ["none", "[bold]", "%s", "{}", "-1", "nan", "1e999", "0x10", "true", "*", "a:b", "--help"]
    ),
)
VALUES = st.recursive(
    st.one_of(NUMBERS, TEXTS, st.booleans(), st.none()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)


def _keys() -> list[str]:
    raw = load_config("fmnist-lenet").to_dict() | load_config("demo").to_dict()
    below = [f"{name}.{key}" for name, part in raw.items() if isinstance(part, dict) for key in part]
    return [*raw, *below]


KEYS = st.sampled_from(_keys()) | TEXTS
SOURCES = st.sampled_from([*list_presets(), "base-svhn"]) | TEXTS


@st.composite
def mutated(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes of which some are changed, removed, repeated or added."""
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        stop = min(len(data), start + draw(st.sampled_from([0, 1, 1, 4, 1000])))
        new = draw(st.sampled_from([b"", b"\0", b"\xff" * 8, data[start:stop] * 2]) | st.binary(max_size=8))
        data = data[:start] + new + data[stop:]
    return data


# ------------------------------------------------------------------ the kinds of input


@dataclass
class Inputs:
    """Writes inputs to a folder, and returns the words of commands that read them."""

    root: Path
    number: int = 0

    def prepare(self) -> None:
        """A tiny data set and a run on it, which most inputs are made from."""
        os.environ["FEDSEAL_DATA"] = str(self.root / "cache")
        rng = np.random.default_rng(0)
        for place in ("server/round", "server/square", "clients/north", "clients/south", "test/round"):
            for i in range(4):
                path = self.root / "images" / place / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(rng.integers(0, 256, (14, 14, 3), np.uint8)).save(path)
        keys = SMALL | {"data.path": str(self.root / "images")}
        train("folders", out=self.root / "run", options=keys)
        run_here(["keys", "init", str(self.root / "keys"), "--client", "north"])

    def new(self) -> Path:
        """An unused path; inputs before the last hundred are removed."""
        self.number += 1
        shutil.rmtree(self.root / f"input-{self.number - 100}", ignore_errors=True)
        place = self.root / f"input-{self.number}"
        place.mkdir()
        os.chdir(place)  # where commands write by default
        return place

    def configurations(self) -> st.SearchStrategy[list[str]]:
        """TOML files: changed bytes of a preset, and known keys with any values."""
        whole = load_config("demo").to_toml().encode()
        nested = st.sampled_from(
            ["x = " + "[" * 5000, "rounds = " + "9" * 5000, "", "#", "\ufeff", "a" * 10**5]
        )

        @st.composite
        def values(draw: st.DrawFn) -> str:
            lines = [f"{draw(KEYS)} = {_toml(draw(VALUES))}" for _ in range(draw(st.integers(1, 4)))]
            return "\n".join(lines)

        def write(content: str | bytes) -> list[str]:
            path = self.new() / "config.toml"
            path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "replace"))
            return ["show", str(path)]

        return st.one_of(mutated(whole), values(), nested, st.binary(max_size=60)).map(write)

    def assignments(self) -> st.SearchStrategy[list[str]]:
        """`--set KEY=VALUE`."""
        one = st.builds(lambda key, value: f"--set={key}={_toml(value)}".replace("\0", ""), KEYS, VALUES)
        return st.builds(
            lambda source, many: ["show", source, *many], SOURCES, st.lists(one, min_size=1, max_size=3)
        )

    def command_lines(self) -> st.SearchStrategy[list[str]]:
        """Any words after commands that do not train, in a folder with a run and images."""
        run, images = "run", "images"
        things = [run, images, "run/model.safetensors", "images/server/round/0.png", "/dev/null", "/dev/full"]
        names = (
            "out test csv adapt set picture wait key images name insecure host client from seeds only help"
        )
        words = st.one_of(
            st.sampled_from([*things, *(f"--{name}" for name in names.split())]),
            TEXTS.map(lambda text: text.replace("\0", "").replace("/", "_")),  # writes into this folder only
            NUMBERS.map(str),
        )
        commands = (
            "show|predict|predict run|report|report run|evaluate|evaluate run|presets|data show|data get"
        )
        commands += "|keys init|keys add-client|keys renew|keys revoke|reproduce --no-run|x|"
        commands += "|join|join localhost:9 --wait 0|export run --format safetensors --out x"
        starts = st.sampled_from([command.split() for command in commands.split("|")])

        def write(start: list[str], more: list[str]) -> list[str]:
            place = self.new()
            for name in (run, images):
                shutil.copytree(self.root / name, place / name)
            return [*start, *more]

        return st.builds(write, starts, st.lists(words, max_size=5))

    def run_folders(self) -> st.SearchStrategy[list[str]]:
        """A finished run of which one file is damaged, has wrong values, or is no file."""
        source = self.root / "run"
        names = ["config.toml", "events.jsonl", "summary.json", "model.safetensors"]
        names += ["checkpoint/state.safetensors", "checkpoint/memories.sqlite", "checkpoint/lock"]

        @st.composite
        def write(draw: st.DrawFn) -> list[str]:
            run = self.new() / "run"
            shutil.copytree(source, run, ignore=shutil.ignore_patterns("tensorboard"))
            path = run / draw(st.sampled_from(names))
            kind = draw(st.sampled_from(["mutated", "values", "values", "special"]))
            if kind == "mutated":
                path.write_bytes(draw(mutated(path.read_bytes())))
            elif kind == "special":
                _make_special(path, draw(st.sampled_from(["none", "fifo", "folder", "loop", "socket"])))
            else:
                _change_values(path, draw)
            commands = [["report", str(run)], ["report", str(run), str(source)], ["evaluate", str(run)]]
            commands += [["predict", str(run), str(self.root / "images" / "test")]]
            resume = ["train", str(run / "config.toml"), "--out", str(run), "--resume", "-q"]
            resume += ["--workers", "1", "--set", "rounds=2"]
            return draw(st.sampled_from([*commands, resume]))

        return write()

    def images(self) -> st.SearchStrategy[list[str]]:
        """Images of all formats and modes, changed bytes of them, and what is no file."""
        made = {}
        for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I", "F", "I;16"):
            pixels = Image.fromarray(np.arange(144, dtype=np.uint8).reshape(12, 12)).convert(mode)
            for name in ("png", "jpeg", "webp", "bmp", "gif", "tiff", "ppm"):
                with contextlib.suppress(OSError, ValueError, KeyError):  # not every format has every mode
                    file = io.BytesIO()
                    pixels.save(file, name)
                    made[f"{mode}.{name}"] = file.getvalue()

        @st.composite
        def write(draw: st.DrawFn) -> list[str]:
            folder = self.new() / "folder"
            shutil.copytree(self.root / "images", folder)
            names = ["0.png", "Thumbs.db", ".DS_Store", "é\n.png", "\udcff.png"]
            places = [
                "server/round",
                "server",
                "clients/north",
                "clients",
                "test/round",
                "server/__MACOSX",
                "server/\udcff",
            ]
            path = folder / draw(st.sampled_from(places)) / draw(st.sampled_from(names))
            path.parent.mkdir(exist_ok=True)
            kind = draw(st.sampled_from(["whole", "mutated", "mutated", "binary", "special"]))
            content = made[draw(st.sampled_from(sorted(made)))]
            if kind == "special":
                _make_special(
                    path, draw(st.sampled_from(["none", "fifo", "folder", "loop", "circle", "socket"]))
                )
            else:
                changed = {
                    "whole": st.just(content),
                    "mutated": mutated(content),
                    "binary": st.binary(max_size=99),
                }
                path.write_bytes(draw(changed[kind]))
            run = str(self.root / "run")
            commands = [["predict", run, str(path)], ["predict", run, str(folder)]]
            commands += [["data", "show", "folders", "--set", f"data.path={folder}", "--set", "data.size=12"]]
            commands += [["evaluate", run, "--test", str(folder / "test")]]
            return draw(st.sampled_from(commands))

        return write()

    def keys(self) -> st.SearchStrategy[list[str]]:
        """Keys of a deployment of which one file is damaged, or is no file."""
        names = ["ca.crt", "ca.key", "server.crt", "server.key", "clients/north.key", "clients/north.pub"]

        @st.composite
        def write(draw: st.DrawFn) -> list[str]:
            folder = self.new() / "keys"
            shutil.copytree(self.root / "keys", folder)
            path = folder / draw(st.sampled_from(names))
            if draw(st.booleans()):
                path.write_bytes(draw(mutated(path.read_bytes()) | st.binary(max_size=99)))
            else:
                _make_special(path, draw(st.sampled_from(["none", "fifo", "folder", "loop", "socket"])))
            images, key = (
                str(self.root / "images" / "clients" / "north"),
                str(folder / "clients" / "north.key"),
            )
            commands = [["keys", "add-client", str(folder), draw(TEXTS).replace("\0", "")]]
            commands += [["keys", "init", str(folder), "--client", "south"]]
            renewals: list[list[str]] = [[], ["--ca"], ["--client", "north"]]
            commands += [["keys", "renew", str(folder), *more] for more in renewals]
            commands += [["keys", "revoke", str(folder), "north"], ["doctor", "--keys", str(folder)]]
            commands += [["join", "localhost:9", "--images", images, "--key", key, "--wait", "0"]]
            serve = ["serve", "demo", "--labels", images, "--keys", str(folder), "--clients", "1"]
            return draw(st.sampled_from([*commands, serve]))

        return write()


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(k))} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float):
        return str(value)
    return json.dumps(value)


def _make_special(path: Path, kind: str) -> None:
    """Puts something else in the place of a file."""
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "circle":
        path.symlink_to(path.parent)
    elif kind == "socket":
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX) as server,
        ):  # if the path is not too long
            server.bind(str(path))


def _change_values(path: Path, draw: st.DrawFn) -> None:
    """Gives one key of a JSON object, or of a model's header, another value."""
    if path.name == "model.safetensors":
        about = json.loads(verify_checksum(path.read_bytes())["fedseal"])
        _change(about, draw)
        path.write_bytes(save(load_file(path), {"fedseal": json.dumps(about)}))
    elif path.name == "summary.json":
        about = json.loads(path.read_text())
        _change(about, draw)
        path.write_text(json.dumps(about))
    elif path.name == "events.jsonl":
        events = [json.loads(line) for line in path.read_text().splitlines()]
        for event in events:
            event.pop("checksum", None)
        _change(events[0], draw)
        path.write_text("".join(json.dumps(event) + "\n" for event in events))
    else:
        path.write_bytes(b"")


def _change(about: dict[str, Any], draw: st.DrawFn) -> None:
    key = draw(st.sampled_from(sorted(about)))
    if isinstance(about[key], dict) and about[key] and draw(st.booleans()):
        _change(about[key], draw)
    elif draw(st.integers(0, 4)) == 0:
        del about[key]
    else:
        about[key] = draw(VALUES)


# ------------------------------------------------------------------ all of it


KINDS = ("configurations", "assignments", "command_lines", "run_folders", "images", "keys")
SHARES = (3, 3, 4, 4, 4, 2)


def fuzz(root: Path, total: int, *, processes: bool = True) -> Iterator[tuple[str, Count]]:
    """Runs all kinds of input, and yields how they ended."""
    inputs = Inputs(root)
    inputs.prepare()
    for kind, share in zip(KINDS, SHARES, strict=True):
        strategy, number = getattr(inputs, kind)(), -(-total * share // sum(SHARES))
        yield kind, _run_all(strategy, number, run_here)
        if processes:
            yield f"{kind}, new process", _run_all(strategy, SUBPROCESSES, run_process)


def _run_all(
    strategy: st.SearchStrategy[list[str]], number: int, run: Callable[[list[str]], tuple[str, str]]
) -> Count:
    count = Count()

    @settings(
        max_examples=number,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def one(words: list[str]) -> None:
        count.add(words, *run(words))

    one()
    return count


def write_counts(path: Path, counts: dict[str, Any]) -> None:
    """Writes what was counted, and on which machine."""
    about = {"date": str(date.today()), "versions": versions(), "cores": cores()}
    path.write_text(json.dumps(about | counts, indent=1) + "\n")


def report() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    out = options.out.absolute() if options.out else None
    set_up_process("portable")
    table, bad = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for kind, count in fuzz(Path(folder), options.inputs):
            table[kind] = dict(sorted(count.ends.items()))
            bad += count.bad
            print(f"{kind}: {table[kind]}", flush=True)
            for one in count.bad:
                print(f"  {one}", flush=True)
        os.chdir("/")
    total = sum(sum(ends.values()) for ends in table.values())
    hangs = sum(ends.get("hang", 0) for ends in table.values())
    print(f"{total:,} inputs: {len(bad) - hangs} errors without a clear sentence, {hangs} hangs")
    if out:
        about = {"inputs": total, "errors": len(bad) - hangs, "hangs": hangs, "ends": table}
        write_counts(out, about)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(report())
