"""Deferred interrupts."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedseal.system.processes import SIGNALS, defer_interrupts


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


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_during_an_import_waits_for_its_end(number: signal.Signals, tmp_path: Path) -> None:
    """As PyTorch does, the importing code swallows exceptions."""
    (tmp_path / "slow.py").write_text(f"import os; os.kill(os.getpid(), {number}); complete = True")
    (tmp_path / "main.py").write_text(
        "import time\n"
        "from fedseal.system.processes import Stopped, stop_on_signals\n"
        "stop_on_signals()\n"
        "try:\n    import slow\nexcept BaseException:\n    print('swallowed')\n"
        "try:\n    time.sleep(100)\nexcept Stopped as stop:\n    print(slow.complete, stop.exit_code)\n"
    )
    done = subprocess.run(
        [sys.executable, "main.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=90,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs ignore it
    )
    assert (done.stdout, done.stderr) == (f"True {128 + number}\n", "")
