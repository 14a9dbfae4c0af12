"""`fedseal doctor` on this machine, with real keys and ports."""

import socket
import sys
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path

import pytest

from conftest import Command
from fedseal.cli import doctor
from fedseal.deploy import certificates, keys
from fedseal.errors import UserError
from fedseal.system.machine import cores
from fedseal.system.ports import check_port


def lines(out: str) -> dict[str, tuple[str, str]]:
    """Verdict and text by name."""
    return {line[6:24].strip(): (line[:4].strip(), line[25:]) for line in out.splitlines()}


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_machine_that_can_train(fedseal: Command, port: int, tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    keys.create_keys(folder, ["server.example"], ["south", "north"])
    answer = fedseal("doctor", "--port", port, "--keys", folder)
    found = lines(answer.out)
    assert answer.code == 0 and "fail" not in {verdict for verdict, _ in found.values()}, answer.out
    assert found["python"] == ("ok", sys.version.split()[0])
    assert found["torch"] == ("ok", version("torch")) and found["flower"] == ("ok", version("flwr"))
    assert found["cores"] == ("ok", str(cores())) and found["port"] == ("ok", f"{port} is free")
    assert (
        found["memory"][1].endswith(" GB free") and f"GB free ({Path.cwd()})" in found["disk, this folder"][1]
    )
    assert found["data"][0] == "ok" and "fashion-mnist (55 MB)" in found["data"][1]
    year = (datetime.now(UTC) + timedelta(days=keys.DAYS)).year
    assert found["certificates"][0] == "ok" and f"valid until {year}-" in found["certificates"][1]
    assert "server.example" in found["certificates"][1]
    assert found["client keys"] == ("ok", "north, south")


def test_a_busy_port(fedseal: Command) -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        number = other.getsockname()[1]
        answer = fedseal("doctor", "--port", number)
    assert answer.code == 2
    text = f"Cannot listen on 0.0.0.0:{number} (Address already in use): choose another --port."
    assert lines(answer.out)["port"] == ("fail", text)


def test_a_host_that_is_not_this_machine() -> None:
    with pytest.raises(UserError, match=r"Cannot listen on 203\.0\.113\.1:8000 .*: check the host\."):
        check_port("203.0.113.1", 8000)


@pytest.mark.parametrize(("days", "verdict", "code"), [(-1, "fail", 2), (10, "note", 0)])
def test_certificates_that_expire(
    days: int, verdict: str, code: int, fedseal: Command, port: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Real certificates, made with another validity."""
    end = datetime.now(UTC) + timedelta(days=days, hours=1 if days > 0 else 23)
    monkeypatch.setattr(certificates, "_end", lambda days: end)
    keys.create_keys(tmp_path / "keys", [], ["north"])
    answer = fedseal("doctor", "--port", port, "--keys", tmp_path / "keys")
    found = lines(answer.out)
    name = "keys" if verdict == "fail" else "certificates"
    assert (found[name][0], answer.code) == (verdict, code)
    assert ("expired on " if days < 0 else "keys renew") in found[name][1]


def test_keys_that_are_missing(fedseal: Command, port: int, tmp_path: Path) -> None:
    answer = fedseal("doctor", "--port", port, "--keys", tmp_path)
    assert answer.code == 2
    verdict, text = lines(answer.out)["keys"]
    assert verdict == "fail" and text.startswith(f"Cannot read {tmp_path}/") and "keys init" in text


def test_no_data_and_a_cache_that_cannot_be_written(
    fedseal: Command, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSEAL_DATA", str(tmp_path / "not-yet" / "here"))
    found = lines(fedseal("doctor", "--port", port).out)
    assert found["data"] == ("note", "no data set is here yet: get one with 'fedseal data get fashion-mnist'")
    assert found["disk, data cache"][0] in ("ok", "note")
    monkeypatch.setenv("FEDSEAL_DATA", "/proc/nowhere")
    answer = fedseal("doctor", "--port", port)
    verdict, text = lines(answer.out)["disk, data cache"]
    assert (verdict, answer.code) == ("fail", 2) and "cannot write to /proc (" in text
    assert text.endswith("set FEDSEAL_DATA to another folder")


def test_too_little_memory_or_disk() -> None:
    assert doctor.judge_size("memory", 3e9, 1e9, 2e9, "x") == ("ok", "memory", "3.0 GB free")
    assert doctor.judge_size("memory", 1.5e9, 1e9, 2e9, "end other programs")[::2] == (
        "note", "1.5 GB free: may be too little; end other programs",
    )  # fmt: skip
    assert doctor.judge_size("memory", 0.2e9, 1e9, 2e9, "end other programs")[::2] == (
        "fail", "0.2 GB free, but training needs 1.0 GB: end other programs",
    )  # fmt: skip
    assert 0 < doctor.available_memory() < 1e15
