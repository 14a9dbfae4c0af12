"""Flower's programs as child processes, for the server and for clients."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.protobuf.client import ProtobufClientInterceptor

from fedseal.deploy.guard import GUARD_FILE
from fedseal.errors import UserError
from fedseal.system.processes import PARENT

NO_BYPASS = {  # these variables of Flower and uvicorn would open ways around the guard
    "FORWARDED_ALLOW_IPS": "",
    "FLWR_INTERNAL_GRPC_CONTROL_API": "0",
    "FLWR_INTERNAL_GRPC_FLEET_API": "0",
}

Notify = Callable[[str], None]  # called with messages for the user


class Program:
    """One of Flower's programs in a child process, which ends with this process."""

    def __init__(self, name: str, options: Sequence[str], home: Path, log: Path) -> None:
        self.name, self.log = name, log
        variables = {
            PARENT: str(os.getpid()),
            "FLWR_HOME": str(home),
            GUARD_FILE: str(guard_file(home)),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "fedseal.deploy.flower_program", name, *options],
                env={**os.environ, **variables, **NO_BYPASS},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,  # Ctrl-C reaches only this process, which then stops the program
            )

    def ended(self) -> bool:
        return self.process.poll() is not None

    def check(self) -> None:
        """Raises if the program has ended by itself."""
        if self.ended():
            raise UserError(f"Flower's {self.name} has ended: see the end of {self.log}.")

    def stop(self) -> None:
        for number, seconds in ((signal.SIGTERM, 10), (signal.SIGKILL, 5)):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


@contextmanager
def flower_home(secret: bytes) -> Iterator[Path]:
    """A private folder for a program's files, with the secret that authorises this process to take tasks."""
    with tempfile.TemporaryDirectory(prefix="fedseal-", ignore_cleanup_errors=True) as folder:
        secret_file(Path(folder)).write_bytes(secret)
        yield Path(folder)


def secret_file(home: Path) -> Path:
    return home / "secret"


def guard_file(home: Path) -> Path:
    return home / "guard.json"


def version_interceptor(component: str) -> RuntimeVersionHttpInterceptor:
    """Adds the version of Flower to each request, which Flower's programs require."""
    return RuntimeVersionHttpInterceptor(component_name=component)


def task_interceptors(secret: bytes) -> list[ProtobufClientInterceptor]:
    """Authorises requests for tasks at one of Flower's programs."""
    method = "/flwr.proto.Runtime/AcquireTask"
    task = SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=[method])
    return [version_interceptor("SuperExec"), task]
