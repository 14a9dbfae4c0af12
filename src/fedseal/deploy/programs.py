"""Flower's SuperLink as a child process of the server."""

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO, Self

from fedseal.deploy.guard import GUARD_FILE, refused_file
from fedseal.errors import SuperLinkLostError
from fedseal.system.processes import PARENT
from fedseal.system.version import fedseal_version, needed_version

log = logging.getLogger("fedseal")

NO_BYPASS = {  # these variables of Flower and uvicorn would open ways around the guard
    "FORWARDED_ALLOW_IPS": "",
    "FLWR_INTERNAL_GRPC_CONTROL_API": "0",
    "FLWR_INTERNAL_GRPC_FLEET_API": "0",
}

SECRET_FILE = "/dev/stdin"  # where the SuperLink reads its secret, which is in no file
LOG_BYTES = 5_000_000  # of the SuperLink's log; the previous file of this size stays as well

Notify = Callable[[str], None]  # called with messages for the user


class SuperLink:
    """Flower's SuperLink in a child process, which ends with this process.

    The secret authorises this process to take the SuperLink's tasks.
    """

    def __init__(self, options: Sequence[str], secret: bytes, home: Path, log_file: Path) -> None:
        self.log, self.refused = log_file, refused_file(guard_file(home))
        self.warned = 0  # clients with an unsuitable version that the user was told about
        variables = {
            PARENT: str(os.getpid()),
            "FLWR_HOME": str(home),
            GUARD_FILE: str(guard_file(home)),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }
        log_file.parent.mkdir(parents=True, exist_ok=True)
        log_handler = RotatingFileHandler(log_file, maxBytes=LOG_BYTES, backupCount=1, encoding="utf-8")
        options = [*options, "--superexec-auth-secret-file", SECRET_FILE]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fedseal.deploy.flower_program", *options],
            env={**os.environ, **variables, **NO_BYPASS},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches only this process, which then stops the SuperLink
        )
        assert self.process.stdin and self.process.stdout
        arguments = (self.process.stdout, log_handler)
        self.writer = threading.Thread(target=write_log, args=arguments, name="flower.log", daemon=True)
        self.writer.start()
        with suppress(OSError), self.process.stdin as stdin:  # it may have ended already
            stdin.write(secret)

    def check(self) -> None:
        """Raises if the SuperLink has ended by itself; names clients that it refused."""
        if self.process.poll() is not None:
            raise SuperLinkLostError(
                f"Flower's SuperLink has ended: see the end of {self.log}, and continue with --resume."
            )
        lines = self.refused.read_text("utf-8").splitlines() if self.refused.exists() else []
        for line in lines[self.warned :]:
            mine = fedseal_version()
            log.warning(
                "refused a client: %s, this server %s; install fedseal %s there",
                *(line, mine, needed_version(mine)),
            )
        self.warned = len(lines)

    def stop(self) -> None:
        for number, seconds in ((signal.SIGTERM, 10), (signal.SIGKILL, 5)):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
                self.writer.join(seconds)
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


def write_log(output: IO[bytes], handler: RotatingFileHandler) -> None:
    """Writes what the SuperLink prints to its log. Its size is limited: strangers can make it print a lot."""
    handler.handleError = lambda record: None  # type: ignore[method-assign]  # a full disk ends nothing
    with output:
        for line in iter(lambda: output.readline(10_000), b""):
            handler.handle(logging.makeLogRecord({"msg": line.decode("utf-8", "replace").rstrip("\n")}))
    handler.close()


@contextmanager
def flower_home() -> Iterator[Path]:
    """A private folder for the SuperLink, which removes it if this process is killed."""
    with tempfile.TemporaryDirectory(prefix="fedseal-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def guard_file(home: Path) -> Path:
    return home / "guard.json"
