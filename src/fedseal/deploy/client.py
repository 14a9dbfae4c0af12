"""`fedseal join`: a client on its own machine.

It answers the server's requests with the installed fedseal, in one process. So it never runs code that comes
over the network, and nothing has to be restarted between rounds.
"""

import json
import os
import re
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import torch
from flwr.app import Context, Error, Message, MessageType, RecordDict
from flwr.app.user_config import UserConfig
from flwr.common.constant import ErrorCode

from fedseal.config.sections import ModelSettings
from fedseal.core import Packet
from fedseal.data.folder_cache import NoImageError
from fedseal.data.folders import require_image
from fedseal.deploy.connection import Connection
from fedseal.deploy.keys import ClientKey
from fedseal.deploy.programs import Notify
from fedseal.engines.flower import client_app
from fedseal.engines.flower.consent import Consent
from fedseal.engines.flower.engine import one_line
from fedseal.engines.flower.task import END_OF_RUN, unpack, unpack_task
from fedseal.engines.secure_client import KEYS, PHASE, SHARES, UNMASK
from fedseal.errors import UserError
from fedseal.storage.model_file import load
from fedseal.storage.model_header import read_header
from fedseal.system.checksums import verify_checksum
from fedseal.system.files import cannot_write, make_private, write_atomic
from fedseal.system.logs import log
from fedseal.system.machine import find_device

PHASES = {KEYS: "made keys", SHARES: "made shares of its secrets", UNMASK: "opened others' shares"}


@dataclass(frozen=True)
class Client:
    """A client on this machine: its images, its memory, its key, and the server's address."""

    server: str
    images: Path
    memory: Path
    name: str
    key: ClientKey | None  # None: no TLS and no authentication
    files: client_app.OwnFiles = client_app.NO_FILES  # copies of the server's own files
    device: str = "auto"
    threads: int = 0  # 0: as many as the server says
    consent: Consent = client_app.DEFAULT_CONSENT

    def join(self, wait: float, notify: Notify) -> None:
        """Takes part until the run ends. While the server is away, waits for it up to `wait` seconds."""
        require_image(self.images)
        find_device(self.device, "--device")
        self._check_memory()
        run = ""
        with Connection(self.server, self.key, wait, notify, self.consent) as connection:
            connection.connect()
            while True:
                request = connection.receive()
                before, run = run, find_run(request) or run
                if before not in ("", run):
                    notify("the server has started another run: the former one has ended or was given up")
                reply = self._reply(request, notify)
                if END_OF_RUN in request.content.config_records:
                    connection.ended = True
                    with suppress(httpx.HTTPError, ValueError):  # the server may end first
                        connection.push(reply)
                    self._keep_model(request, notify)
                    notify("the run has ended")
                    return
                connection.send(reply)

    def _check_memory(self) -> None:
        """Raises before the first round if the memory cannot be written."""
        try:
            self.memory.mkdir(0o700, parents=True, exist_ok=True)
            for pattern in ("*.safetensors", "class-mix-*.json"):
                for file in self.memory.glob(pattern):  # of an older version
                    make_private(file)
            tempfile.TemporaryFile(dir=self.memory).close()
        except OSError as error:
            raise cannot_write(self.memory, error) from error

    def _keep_model(self, message: Message, notify: Notify) -> None:
        """Writes the final model and this client's class mix beside the memory. The mix stays here."""
        if "packet" not in message.content.array_records:
            return
        name = str(message.content.config_records[END_OF_RUN].get("client", ""))
        safe_name = re.sub(r"[^\w-]", "_", name)[:100]
        model, mix = self.memory / "model.safetensors", self.memory / f"class-mix-{safe_name}.json"
        data = unpack(message.content)
        write_atomic(model, data, private=True)
        try:
            self._check_model(data)
            classifier = load(model, self.files.network or None)
            found = classifier.predict([self.images], adapt=True)
            shares = {
                name: round(share, 4) for name, share in zip(classifier.classes, found.mix, strict=True)
            }
            write_atomic(mix, json.dumps(shares, indent=1, ensure_ascii=False) + "\n", private=True)
        except Exception as error:  # a server can send anything; the run has ended all the same
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            notify(f"the class mix was not estimated: {kind}{one_line(str(error))}")
            return
        notify(f"the model is in {model}, the class mix of this client's images in {mix}")

    def _check_model(self, data: bytes) -> None:
        """Raises if the final model would enlarge images, or has more classes, than this client accepts."""
        about = read_header(verify_checksum(data))
        settings = ModelSettings.model_validate(about["model"])
        size = max(about["size"], settings.resize)
        for name, value in (("size", size), ("classes", len(about["classes"])), ("views", settings.views)):
            if refusal := self.consent.compare(name, value):
                raise UserError(refusal)

    def _reply(self, message: Message, notify: Notify) -> Message:
        """The reply to a request. If it fails, the user sees the error, and the server gets a safe reason."""
        settings: UserConfig = {
            "client": self.name,
            "images": str(self.images.resolve()),
            "memory": str(self.memory.resolve()),
            **asdict(self.files),
            "device": self.device,
            "threads": self.threads,
            "consent": self.consent.model_dump_json(),
        }
        context = Context(message.metadata.run_id, message.metadata.dst_node_id, settings, RecordDict(), {})
        start = time.monotonic()
        try:
            reply = client_app.app(message, context)
        except Exception as error:
            log.warning("failed: %s", one_line(str(error)))
            failure = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, public_reason(error))
            return Message(failure, reply_to=message)
        if message.metadata.message_type == MessageType.TRAIN:
            seconds = time.monotonic() - start
            notify(describe_round(unpack(message.content), unpack(reply.content), seconds))
        return reply


def find_run(request: Message) -> str:
    """The run that a request belongs to; empty if it does not say so, or cannot be read."""
    with suppress(Exception):
        return unpack_task(request.content).run
    return ""


def public_reason(error: Exception) -> str:
    """Why a client failed, for the server's log: without file names and other private text."""
    if isinstance(error, client_app.TaskRefusedError):
        return str(error)
    if isinstance(error, NoImageError):
        return "it has no readable image"
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return "it is out of memory"
    cause = error if isinstance(error, OSError) else error.__cause__
    if isinstance(cause, OSError) and cause.errno is not None:
        return f"it cannot read or write a file ({os.strerror(cause.errno)})"
    return f"{type(error).__name__}, see the client's own output"


def describe_round(request: bytes, reply: bytes, seconds: float) -> str:
    """One line about a round: what was received, what was done, what is sent."""
    received, sent = Packet.from_bytes(request), Packet.from_bytes(reply)
    action = PHASES.get(
        str(received.scalars.get(PHASE)), "trained" if received.trains else "updated its memory"
    )
    t = received.scalars.get("t", received.scalars.get("round", "?"))
    tensors = [f"{name} ({len(group)} tensors)" for name, group in sent.tensors.items()]
    scalars = [f"{name} = {value}" for name, value in sent.scalars.items()]
    return (
        f"round {t}: received {_format_size(len(request))}, {action} in"
        f" {seconds:.1f} s, sends {_format_size(len(reply))}: {', '.join(tensors + scalars)}"
    )


def _format_size(size: int) -> str:
    return f"{size / 1e6:.2f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
