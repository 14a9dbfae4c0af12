"""Worker processes are forked from a process with PyTorch and without threads."""

import os
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import pytest

from fedseal.system.workers import prepare_workers, start_worker

linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")


def describe(pipe: Connection) -> None:
    """Sends what a worker sees."""
    threads = len(list(Path(f"/proc/{os.getppid()}/task").iterdir()))
    blocked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    pipe.send((os.getppid(), "torch" in sys.modules, threads, blocked, dict(os.environ), str(Path.cwd())))


def ask() -> tuple[int, bool, int, bool, dict[str, str], str]:
    prepare_workers("fedseal.engines.local")
    here, there = Pipe()
    process = start_worker(describe, there)
    answer: tuple[int, bool, int, bool, dict[str, str], str] = here.recv()
    process.join()
    assert process.exitcode == 0
    return answer


@linux
def test_a_temporary_folder_with_a_long_path_is_named(tmp_path: Path) -> None:
    folder = tmp_path / (80 * "x")
    folder.mkdir()
    command = "from fedseal.system.workers import prepare_workers; prepare_workers('json')"
    environment = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", command], env=environment, capture_output=True, text=True)
    assert f"{folder} is too long for worker processes: set TMPDIR" in done.stderr


@linux
def test_workers_are_forked_from_one_process_without_threads() -> None:
    first, torch_is_there, threads, blocked, *_ = ask()
    assert first != os.getpid()
    assert torch_is_there
    assert threads == 1
    assert blocked, "Ctrl-C is meant for the run"
    assert ask()[0] == first


@linux
def test_a_worker_has_the_environment_and_the_folder_of_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ask()
    monkeypatch.setenv("FEDSEAL_TEST", "now")
    monkeypatch.chdir(tmp_path)
    *_, environment, folder = ask()
    assert environment == dict(os.environ)
    assert folder == str(tmp_path)


@linux
def test_workers_start_again_after_their_origin_has_died() -> None:
    origin = ask()[0]
    os.kill(origin, signal.SIGKILL)
    os.waitid(os.P_PID, origin, os.WEXITED | os.WNOWAIT)
    assert ask()[0] != origin


@linux
def test_workers_start_although_their_origin_is_killed_while_it_forks() -> None:
    origin = ask()[0]
    os.kill(origin, signal.SIGSTOP)  # it has got the request for a worker, and does nothing
    timer = threading.Timer(0.5, os.kill, (origin, signal.SIGKILL))
    timer.start()
    assert ask()[0] != origin
    timer.join()
