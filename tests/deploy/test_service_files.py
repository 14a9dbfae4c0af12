"""The files in deploy/: the container image, the composition of containers, and the systemd services."""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from configparser import ConfigParser
from pathlib import Path

import click
import pytest
import typer
import yaml
from packaging.requirements import Requirement

from fedseal.cli.main import app
from fedseal.errors import SuperLinkLostError
from fedseal.system.version import fedseal_version

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SERVICES = ("fedseal-server.service", "fedseal-client@.service")
INSTALLED = "/opt/fedseal/bin/fedseal"


def parse_command(words: list[str]) -> dict[str, object]:
    """Parses a command line of fedseal without running it, and returns the values of its options."""
    command: click.Command = typer.main.get_command(app)
    context = click.Context(command, info_name="fedseal")
    while isinstance(command, click.Group):
        name, found, words = command.resolve_command(context, words)
        assert found is not None
        command = found
        if isinstance(command, click.Group):
            context = click.Context(command, parent=context, info_name=name)
    with command.make_context(name, words, parent=context) as parsed:
        return dict(parsed.params)


def test_the_parser_of_these_tests_refuses_mistakes() -> None:
    assert parse_command(["keys", "init", "x", "--host", "h"])["host"] == ("h",)
    for words in (["jion"], ["join", "s:1", "--images", "x", "--wiat", "1"], ["join", "s:1"]):
        with pytest.raises(click.UsageError):
            parse_command(words)


# ---- the image -----------------------------------------------------------------------------------------


def instructions(name: str) -> list[str]:
    """The arguments of all instructions of this name in the Dockerfile."""
    text = (DEPLOY / "Dockerfile").read_text("utf-8").replace("\\\n", " ")
    return [line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith(f"{name} ")]


def copied() -> list[Path]:
    return [Path(word) for line in instructions("COPY") for word in line.split()[:-1]]


def locked() -> dict[str, str]:
    lines = re.findall(r"^(\S+)==(\S+)", (ROOT / "requirements.lock").read_text("utf-8"), re.MULTILINE)
    return {normal(name): version for name, version in lines}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_image_copies_tracked_files_only() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text("utf-8").split("\n")
    assert "*" in ignored  # so that neither keys nor images get into the image
    assert {line[1:] for line in ignored if line.startswith("!")} == {str(path) for path in copied()}
    assert all((ROOT / path).exists() for path in copied())
    if (ROOT / ".git").exists():
        tracked = subprocess.run(
            ["git", "ls-files", "--error-unmatch", *map(str, copied())],
            **{"cwd": ROOT, "capture_output": True, "text": True, "check": False},
        )
        assert tracked.returncode == 0, tracked.stderr


def test_the_image_has_pinned_versions_and_no_root_user() -> None:
    [base], [user] = instructions("FROM"), instructions("USER")
    assert re.fullmatch(r"python:3\.\d+-slim", base) and user != "root"
    assert "://" not in (DEPLOY / "Dockerfile").read_text("utf-8")
    locked_packages, package, _ = instructions("RUN")
    assert locked_packages == "sh install.sh pip" and "--no-deps --no-build-isolation" in package

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    python = base.removeprefix("python:").removesuffix("-slim")
    assert python in Requirement(f"python{project['project']['requires-python']}").specifier
    needed = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    for text in needed + project["project"]["optional-dependencies"]["flower"]:
        requirement = Requirement(text)
        assert locked()[normal(requirement.name)] in requirement.specifier, text


def test_every_locked_package_has_hashes() -> None:
    """pip then refuses any other file, and needs no package that is not listed."""
    text = (ROOT / "requirements.lock").read_text("utf-8")
    assert "://" not in text
    blocks = re.findall(r"^(\S+)==\S+((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", text, re.MULTILINE)
    assert [normal(name) for name, _ in blocks] == list(locked())
    assert "--require-hashes --no-deps --only-binary" in (DEPLOY / "install.sh").read_text("utf-8")


def test_a_package_with_another_hash_is_not_installed(tmp_path: Path) -> None:
    """deploy/install.sh with a real package in place of torch; nothing comes from the network."""
    wheel = tmp_path / "wheels" / "torch-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("torch-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
        file.writestr("torch-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        file.writestr("torch-1.0.dist-info/RECORD", "torch-1.0.dist-info/METADATA,,\n")
    pip = tmp_path / "pip"
    pip.write_text(f'#!/bin/sh\nexec {sys.executable} -m pip "$@"\n')
    pip.chmod(0o700)
    target, variables = tmp_path / "packages", {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    variables |= {"PIP_FIND_LINKS": str(wheel.parent), "PIP_TARGET": str(target)}

    def install(digest: str) -> "subprocess.CompletedProcess[str]":
        (tmp_path / "requirements.lock").write_text(f"torch==1.0 \\\n    --hash=sha256:{digest}\n")
        return subprocess.run(
            ["sh", DEPLOY / "install.sh", pip],
            **{"cwd": tmp_path, "env": os.environ | variables, "capture_output": True, "text": True},
        )

    refused = install("0" * 64)
    assert refused.returncode != 0 and "DO NOT MATCH THE HASHES" in refused.stderr
    assert not target.exists()
    accepted = install(hashlib.sha256(wheel.read_bytes()).hexdigest())
    assert accepted.returncode == 0, accepted.stderr
    assert (target / "torch-1.0.dist-info").is_dir()


def test_the_image_is_built_in_a_fresh_environment(tmp_path: Path) -> None:
    """The package's own build step, from the copied files alone. Other packages are those of this process."""
    source, fresh = tmp_path / "source", tmp_path / "fresh"
    for path in copied():
        copy = shutil.copytree if (ROOT / path).is_dir() else shutil.copy2
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / path, source / path)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", fresh], check=True)
    [packages] = fresh.glob("lib/*/site-packages")
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    variables["PATH"] = f"{fresh / 'bin'}{os.pathsep}{os.environ['PATH']}"

    def run(command: str, folder: Path = tmp_path) -> str:
        answer = subprocess.run(
            ["sh", "-c", command],
            **{"env": variables, "cwd": folder, "capture_output": True, "text": True, "check": False},
        )
        assert answer.returncode == 0, answer.stderr
        return answer.stdout

    run(f"python -m {instructions('RUN')[1]}", source)  # pip is one of the other packages
    [entry], [default] = instructions("ENTRYPOINT"), instructions("CMD")
    program, words = yaml.safe_load(entry), yaml.safe_load(default)
    assert shutil.which(program[0], path=variables["PATH"]) == str(fresh / "bin" / "fedseal")
    assert run(f"{shlex.join(program)} --version") == f"fedseal {fedseal_version()}\n"
    assert "Semi-supervised federated learning" in run(shlex.join([*program, *words]))
    assert run("python -c 'import fedseal; print(fedseal.__file__)'").startswith(str(fresh))


# ---- the containers ------------------------------------------------------------------------------------


def test_the_containers_have_valid_commands_and_few_rights() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))["services"]
    commands = {name: parse_command(service["command"]) for name, service in services.items()}
    clients = set(services) - {"keys", "server"}
    assert len(clients) == 3 and set(commands["keys"]["client"]) == clients  # type: ignore[call-overload]
    for name, service in services.items():
        assert (ROOT / "deploy" / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service["security_opt"]
        mounted = [word.split(":")[1] for word in service["volumes"]]
        for value in commands[name].values():  # each path of a command is in a mounted folder
            if str(value).startswith("/"):
                assert any(Path(str(value)).is_relative_to(folder) for folder in mounted), (name, value)
    for name in clients | {"server"}:  # decoded images are on a disk, not in /tmp, and can be written
        writable = [word.split(":")[1] for word in services[name]["volumes"] if not word.endswith(":ro")]
        assert [str(Path(services[name]["environment"]["FEDSEAL_DATA"]).parent)] == writable
    for name in clients:
        assert commands[name]["server"] == "server:8000" and "server" in commands["keys"]["host"]  # type: ignore[operator]
        sources = [word.split(":")[0] for word in services[name]["volumes"]]
        assert sources == [f"./images/{name}", f"./keys/clients/{name}.key", f"./memory/{name}"]
        assert services[name]["volumes"][0].endswith(":ro") and services[name]["volumes"][1].endswith(":ro")
    assert commands["server"]["resume"] and services["server"]["ports"] == ["8000:8000"]


# ---- the services --------------------------------------------------------------------------------------


def read_unit(name: str) -> ConfigParser:
    unit = ConfigParser(interpolation=None, strict=True)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string((DEPLOY / name).read_text("utf-8"))
    return unit


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_a_valid_command_and_few_rights(name: str) -> None:
    unit, service = read_unit(name)["Unit"], read_unit(name)["Service"]
    assert "time-sync.target" in unit["Wants"] and "time-sync.target" in unit["After"]  # for certificates
    program, *words = shlex.split(service["ExecStart"])
    values = {"${FEDSEAL_SERVER}": "server:8000", "${FEDSEAL_IMAGES}": "/srv/photos"}
    parsed = parse_command([values.get(word, word).replace("%i", "north") for word in words])
    assert program == INSTALLED and parsed["wait"] == 86400
    written = parsed["out"] if "out" in parsed else parsed["memory"]
    state = Path("/var/lib") / service["StateDirectory"].replace("%i", "north")
    assert Path(str(written)).is_relative_to(state)
    assert service["User"] == "fedseal" and service["ProtectSystem"] == "strict"
    assert service["NoNewPrivileges"] == service["PrivateTmp"] == "yes"
    assert service["Restart"] == "on-failure" and "2" in service["RestartPreventExitStatus"].split()
    assert str(SuperLinkLostError.exit_code) not in service["RestartPreventExitStatus"].split()
    assert service["LogNamespace"] == "fedseal" and (DEPLOY / "journald@fedseal.conf").is_file()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is missing")
def test_systemd_accepts_the_services(tmp_path: Path) -> None:
    for name in SERVICES:  # the program must exist
        text = (DEPLOY / name).read_text("utf-8").replace(INSTALLED, sys.executable)
        (tmp_path / name).write_text(text, "utf-8")
    files = [tmp_path / name for name in SERVICES]
    answer = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *files], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0 and str(tmp_path) not in answer.stderr, answer.stderr
