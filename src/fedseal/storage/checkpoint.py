"""Checkpoints: everything that is needed to continue a run."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from fedseal.core import Packet
from fedseal.errors import UserError
from fedseal.rounds import Progress
from fedseal.system.files import write_atomic


@dataclass(frozen=True)
class Checkpoint:
    """A run's progress, the clients' memories, and the seconds that it has taken."""

    progress: Progress
    memories: Mapping[str, bytes]
    seconds: float = 0.0

    def save(self, path: Path, fingerprint: str) -> None:
        """Writes one file, atomically; `fingerprint` identifies the run."""
        state = self.progress.state
        tensors = {f"state.{name}": group for name, group in state.tensors.items()}
        joined = bytearray().join(self.memories.values())  # one tensor: thousands of small ones are slow
        sizes = [len(memory) for memory in self.memories.values()]
        tensors["memories"] = {
            "bytes": torch.frombuffer(joined, dtype=torch.uint8)
            if joined
            else torch.zeros(0, dtype=torch.uint8),
            "sizes": torch.tensor(sizes, dtype=torch.int64),
        }
        scalars = {f"state.{name}": value for name, value in state.scalars.items()}
        scalars |= {"t": self.progress.t, "seconds": self.seconds, "fingerprint": fingerprint}
        scalars["clients"] = json.dumps(list(self.memories))
        write_atomic(path, Packet(tensors, scalars).to_bytes())

    @staticmethod
    def load(path: Path, fingerprint: str) -> "Checkpoint":
        """Reads a checkpoint; refuses a damaged one and one of another run."""
        try:
            packet = Packet.from_bytes(path.read_bytes())
            scalars, memories = packet.scalars, packet.tensors["memories"]
            parts = memories["bytes"].split(memories["sizes"].tolist())
            kept = {
                k: m.numpy().tobytes()
                for k, m in zip(json.loads(str(scalars["clients"])), parts, strict=True)
            }
            t, seconds, found = int(scalars["t"]), float(scalars["seconds"]), scalars["fingerprint"]
        except OSError as error:
            raise UserError(
                f"Cannot read {path} ({error.strerror}): check the file, then try again."
            ) from error
        except Exception as error:
            raise UserError(
                f"{path} is damaged ({type(error).__name__}): delete it to start again."
            ) from error
        if found != fingerprint:
            raise UserError(
                f"{path} belongs to another configuration, other data or other clients: resume with the"
                " config.toml beside it and the same clients, or choose another --out."
            )
        state = Packet(
            {k.removeprefix("state."): v for k, v in packet.tensors.items() if k.startswith("state.")},
            {k.removeprefix("state."): v for k, v in scalars.items() if k.startswith("state.")},
        )
        return Checkpoint(Progress(t, state), kept, seconds)
