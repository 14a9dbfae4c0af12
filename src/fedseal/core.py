"""The vocabulary: what travels, where learning happens, what a method is, what an engine does."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

import torch
from pydantic import Field
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from fedseal.data import augment
from fedseal.models import Network
from fedseal.settings import Settings
from fedseal.weights import Tensors

Scalar = bool | int | float | str


class Learning(Settings):
    """How a side trains: the `[server]` and `[client]` sections."""

    lr: float = Field(0.001, gt=0, description="learning rate of round 1")
    decay: float = Field(0.995, gt=0, le=1, description="factor on the learning rate, each round")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of SGD, fresh each round")
    weight_decay: float = Field(0.0, ge=0, description="weight decay of SGD")
    epochs: int = Field(5, ge=0, description="passes over the data in a round")
    batch: int = Field(32, ge=1, description="images in a mini-batch")
    threads: int = Field(
        1, ge=1, description="threads that it computes with; sums depend on them in the last bit"
    )


class ServerLearning(Learning):
    """How the server trains."""

    threads: int = Field(
        0, ge=0, description="threads that it computes with; 0: one per core, and that number in config.toml"
    )

    augment: Literal["none", "weak", "strong"] = Field(
        "weak", description="augmentation of the labelled images"
    )


class Augmentation(Settings):
    """The `[augment]` section: what weak and strong augmentation are."""

    flip: bool | None = Field(None, description="mirror images; left out: as fits the data set (not digits)")
    shift: int = Field(4, ge=0, description="weak: crop or shift by up to so many pixels each way")
    weak_first: bool = Field(True, description="strong: the weak augmentation comes before RandAugment")
    n: int = Field(2, ge=0, description="strong: operations of RandAugment on an image")
    m: int = Field(10, ge=0, le=30, description="strong: magnitude of RandAugment, 0 to 30")

    def weak(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """a(x) of Eq. 3."""
        return augment.weak(images, generator, flip=bool(self.flip), shift=self.shift)

    def strong(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """A(x) of Eq. 14: RandAugment, by default of the weakly augmented image."""
        if self.weak_first:
            images = self.weak(images, generator)
        return augment.rand_augment(images, generator, n=self.n, m=self.m)


@dataclass(frozen=True)
class Packet:
    """All that ever travels between server and client; also a server's state and a client's memory."""

    tensors: Mapping[str, Tensors] = field(default_factory=dict)
    scalars: Mapping[str, Scalar] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Safetensors, with the scalars in its header."""
        flat: Tensors = {}
        seen: set[int] = set()
        for group, values in self.tensors.items():
            for name, value in values.items():
                storage = value.untyped_storage().data_ptr()  # safetensors refuses what shares memory
                flat[f"{group}/{name}"] = value.clone() if storage in seen else value.contiguous()
                seen.add(storage)
        header = json.dumps({"groups": list(self.tensors), "scalars": dict(self.scalars)})
        return bytes(save_safetensors(flat, {"packet": header}))  # one key: several come in any order

    @staticmethod
    def from_bytes(data: bytes) -> "Packet":
        """The inverse of `to_bytes`, to the bit."""
        outer = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        header = json.loads(outer["__metadata__"]["packet"])
        tensors: dict[str, Tensors] = {group: {} for group in header["groups"]}
        for name, value in load_safetensors(data).items():
            group, key = name.split("/", 1)
            tensors[group][key] = value
        return Packet(tensors, header["scalars"])


@dataclass(frozen=True)
class Round:
    """One round: its number from 1 as in the paper, who trains, and who there is."""

    t: int
    cohort: tuple[int, ...]
    everyone: Sequence[int]


@dataclass(frozen=True)
class Images:
    """Images [n, C, H, W] in uint8, and their labels where the holder may know them."""

    pixels: Tensor
    labels: Tensor | None = None

    def __len__(self) -> int:
        return len(self.pixels)


Diagnose = Callable[[str, Tensor, Tensor], None]


def no_diagnosis(name: str, rows: Tensor, labels: Tensor) -> None:
    """Where nobody knows the truth."""


@dataclass(frozen=True)
class Site:
    """Where learning happens: the server, or one client."""

    name: str
    model: Network  # scratch space: methods load weights into it
    data: Images
    learning: Learning
    augment: Augmentation
    seed: int
    device: torch.device
    classes: int
    validation: Images | None = None
    # Called with the labels that a method gave to some of the site's own images. A simulation that knows
    # the truth counts how many are right; nothing of it reaches the method or travels.
    diagnose: Diagnose = no_diagnosis

    def rng(self, t: int, purpose: str = "") -> torch.Generator:
        """Randomness that depends on the seed, the site, the round and the purpose alone."""
        return torch.Generator().manual_seed(derive_seed(self.seed, self.name, t, purpose))


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from anything that has a stable text."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@dataclass(frozen=True)
class Prepared:
    """A step of what comes before round 1: so many of all have been done, and the state after it."""

    what: str
    done: int
    total: int
    state: Packet


class Method(Settings, ABC):
    """What server and client do in a round. The fields are its hyper-parameters.

    The state's group "model" is the global model w^t, and "average", if there is one, the clients'
    average w̄. A client's memory belongs to the client and never travels.
    """

    needs_client_labels: ClassVar[bool] = False  # only FedAvg-SL, the upper bound
    uploads: ClassVar[str] = "model"  # the group that a client trains: in its reply as in its request
    asks_clients: ClassVar[bool] = True  # if not, their settings do not matter
    strong_views: ClassVar[bool] = True  # whether clients augment strongly; if not, how does not matter

    def check(self, server: Site) -> None:
        """Raises a UserError if this method cannot work so; called before anything is written."""

    @abstractmethod
    def start(self, server: Site) -> Packet:
        """The state that all begins with."""

    def prepare(self, state: Packet, server: Site) -> Iterator[Prepared]:
        """What takes long before round 1, step by step, from the state of `start` or of any step."""
        return iter(())

    @abstractmethod
    def server_round(self, round: Round, state: Packet, server: Site) -> tuple[Packet, dict[int, Packet]]:
        """Step 1: trains at the server; gives the new state and what each client is sent."""

    @abstractmethod
    def client_round(self, request: Packet, memory: Packet, client: Site) -> tuple[Packet, Packet]:
        """Step 3: trains at a client; gives the reply and the client's new memory."""

    @abstractmethod
    def collect(self, round: Round, state: Packet, replies: Mapping[int, Packet], server: Site) -> Packet:
        """Step 4, at the server: takes the replies into the state."""


@dataclass(frozen=True)
class Reply:
    """What an engine brings back from a client."""

    client: int
    packet: Packet
    down: int = 0  # bytes
    up: int = 0
    diagnosis: Mapping[str, int] = field(default_factory=dict)  # counts, in a simulation
    problem: str = ""  # why there is no usable packet


class Engine(Protocol):
    """Carries packets: steps 2 and 4."""

    @property
    def clients(self) -> Sequence[int]:
        """The numbers of all clients there are."""

    def exchange(self, requests: Mapping[int, Packet]) -> Iterator[Reply]:
        """Sends every request and yields the replies as they come."""

    def memories(self) -> dict[str, bytes]:
        """The clients' memories, where they are kept on this side."""

    def close(self) -> None:
        """Ends whatever the engine started."""
