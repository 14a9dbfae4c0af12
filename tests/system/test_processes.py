"""Deferred interrupts."""

import os
import signal

import pytest

from fedseal.system.processes import defer_interrupts


def test_ctrl_c_is_deferred_while_files_are_written() -> None:
    before, done = signal.signal(signal.SIGINT, signal.default_int_handler), []  # background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt), defer_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("written")
        assert done == ["written"]
        with pytest.raises(KeyboardInterrupt):  # no longer deferred
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
