"""Delayed interrupts."""

import os
import signal

import pytest

from fedseal.system.processes import defer_interrupts


def test_ctrl_c_waits_while_files_are_written() -> None:
    before, done = (
        signal.signal(signal.SIGINT, signal.default_int_handler),
        [],
    )  # a shell's "&" has it ignored
    try:
        with pytest.raises(KeyboardInterrupt), defer_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("written")
        assert done == ["written"]
        with pytest.raises(KeyboardInterrupt):  # and then it is as before
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
