"""Unexpected errors: one sentence, exit code 70, and the traceback in a file."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedseal.cli import main
from fedseal.errors import UserError
from fedseal.system import crash, logs


@pytest.fixture(autouse=True)
def messages() -> Iterator[None]:
    logs.set_up_logs()
    yield
    logs.remove_logs()


def fail(error: BaseException) -> None:
    raise error


def test_an_unexpected_error_is_one_sentence_and_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run_safely(lambda: fail(KeyError("secret"))) == crash.EXIT_CODE == 70
    text = capsys.readouterr().err
    found = re.fullmatch(
        r"error: An unexpected error ended .* \(KeyError\)\. Please report .* in (.+)\.\n", text
    )
    assert found, text
    details = Path(found[1]).read_text()
    Path(found[1]).unlink()
    assert "KeyError: 'secret'" in details and "in fail" in details and "fedseal " in details


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_too_little_memory_is_not_a_bug(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run_safely(lambda: fail(error)) == 2
    assert capsys.readouterr().err.startswith("error: There is not enough memory: lower data.size")


def test_names_in_errors_are_shown_on_every_terminal() -> None:
    assert str(UserError("caf\udce9\n\x1b[31m é")) == "caf\\udce9\\n\\x1b[31m é"
