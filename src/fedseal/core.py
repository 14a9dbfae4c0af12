"""The vocabulary: packets, participants, methods, engines."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from fedseal.aggregate import Aggregation
from fedseal.config.sections import BootstrapSettings, Settings, TrainingSettings
from fedseal.models import Network
from fedseal.weights import Tensors

Scalar = bool | int | float | str
Metrics = Mapping[str, int | float | list[float]]  # a list has one value per class


@dataclass(frozen=True)
class Packet:
    """Named groups of tensors, and scalars: the only thing that travels between server and client.

    It is also the form of a server's state and of a client's memory. In a request, the scalar "t" is the
    round and "train" says whether the client trains or only updates its memory. In a reply, integer scalars
    other than "t" are counts of images; the server adds them up over the clients. A client that keeps its
    counts to itself sends `counts = false` instead.
    """

    tensors: Mapping[str, Tensors] = field(default_factory=dict)
    scalars: Mapping[str, Scalar] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in self.scalars.items():
            if not isinstance(value, Scalar):
                kind = type(value).__name__
                raise TypeError(f"the scalar '{name}' of a packet is a {kind}, not a bool, int, float or str")

    def to_bytes(self) -> bytes:
        """Safetensors, with the scalars in its header."""
        flat: Tensors = {}
        seen: set[int] = set()
        for group, values in self.tensors.items():
            for name, value in values.items():
                storage = value.untyped_storage().data_ptr()  # safetensors refuses shared memory
                flat[f"{group}/{name}"] = value.clone() if storage in seen else value.contiguous()
                seen.add(storage)
        header = json.dumps({"groups": list(self.tensors), "scalars": dict(self.scalars)})
        # A single metadata key: safetensors does not keep the order of several.
        return bytes(save_safetensors(flat, {"packet": header}))

    @staticmethod
    def from_bytes(data: bytes) -> "Packet":
        """The inverse of `to_bytes`, bit for bit."""
        outer = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        header = json.loads(outer["__metadata__"]["packet"])
        tensors: dict[str, Tensors] = {group: {} for group in header["groups"]}
        for name, value in sorted(load_safetensors(data).items()):  # safetensors has no order
            group, key = name.split("/", 1)
            tensors[group][key] = value
        return Packet(tensors, header["scalars"])

    @property
    def trains(self) -> bool:
        """Of a request: whether the client is to train."""
        return bool(self.scalars.get("train", True))

    @property
    def counts(self) -> dict[str, int]:
        """Of a reply: the client's counts, such as |D⁺| and |D⁻| in FedSEAL."""
        whole = {k: v for k, v in self.scalars.items() if isinstance(v, int) and not isinstance(v, bool)}
        return {name: value for name, value in whole.items() if name != "t"}

    def without_counts(self, nonzero: Collection[str] = ()) -> "Packet":
        """Of a reply: the same without the client's counts. Of some it still says whether they are 0."""
        counts = self.counts
        if not counts:
            return self
        kept = {name: value for name, value in self.scalars.items() if name not in counts}
        known = {name: value > 0 for name, value in counts.items() if name in nonzero}
        return Packet(self.tensors, {**kept, **known, "counts": False})


@dataclass(frozen=True)
class Round:
    """One round: its number (from 1, as in the paper), the sampled clients, and all clients."""

    t: int
    cohort: tuple[int, ...]
    everyone: Sequence[int]


@dataclass(frozen=True)
class Images:
    """Images [n, C, H, W] as uint8, or with `model.freeze` their features [n, views, F]."""

    pixels: Tensor

    def __len__(self) -> int:
        return len(self.pixels)


@dataclass(frozen=True)
class LabelledImages(Images):
    """Images with their labels [n]."""

    labels: Tensor


class RecordLabels(Protocol):
    """Called with the labels that a method gives to some rows of a client's images.

    A complementary label says which class an image is *not*.
    """

    def __call__(self, name: str, rows: Tensor, labels: Tensor, *, complementary: bool = False) -> None: ...


def ignore_labels(name: str, rows: Tensor, labels: Tensor, *, complementary: bool = False) -> None:
    """Outside a simulation nobody knows the true labels."""


class Augment(Protocol):
    """Weak and strong augmentation of a batch: of images, or of features with `model.freeze`."""

    def weak(self, images: Tensor, generator: torch.Generator) -> Tensor: ...

    def strong(self, images: Tensor, generator: torch.Generator) -> Tensor: ...


@dataclass(frozen=True)
class Participant:
    """The server or one client: its images, its settings, and a network to work with."""

    name: str
    model: Network  # scratch space: methods load weights into it
    data: Images
    training: TrainingSettings
    augment: Augment
    seed: int
    device: torch.device
    classes: int
    aggregation: Aggregation = field(default_factory=Aggregation)
    # In a simulation that knows the true labels, this counts correct pseudo-labels. Nothing of it reaches
    # the method, and nothing travels.
    record_labels: RecordLabels = ignore_labels

    def rng(self, t: int, purpose: str = "") -> torch.Generator:
        """A generator that depends only on the seed, the participant, the round and the purpose."""
        return torch.Generator().manual_seed(derive_seed(self.seed, self.name, t, purpose))

    @contextmanager
    def seeded(self, t: int, purpose: str = "") -> Iterator[None]:
        """Dropout and the like draw from PyTorch's own generator. Here it depends on the same as `rng`."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(self.seed, self.name, t, purpose, "network"))
            yield


@dataclass(frozen=True)
class LabelledParticipant(Participant):
    """A participant whose images have labels: a client of FedAvg-SL."""

    data: LabelledImages


@dataclass(frozen=True, kw_only=True)
class Server(LabelledParticipant):
    """The server: labelled images to train on, and others for validation."""

    validation: LabelledImages
    new_network: Callable[[int], Network]  # by seed: another one like `model`, newly initialised
    bootstrap: BootstrapSettings = field(default_factory=BootstrapSettings)


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from anything that has a stable text."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@dataclass(frozen=True)
class PreparationStep:
    """A step of the work before round 1: how far it is, and the state after it."""

    what: str
    done: int
    total: int
    state: Packet


class Method(Settings, ABC):
    """What server and client do in a round. The fields are the method's hyper-parameters.

    In the state, the group "model" is the global model w^t, and "average", if present, the clients' average
    w̄. A client's memory belongs to the client and never travels.
    """

    needs_client_labels: ClassVar[bool] = False  # only FedAvg-SL, the upper bound
    uploads: ClassVar[str] = "model"  # the tensor group that a client trains and sends back
    # Further groups of a reply. Each has the names, shapes and types of the same group in the request.
    also_uploads: ClassVar[tuple[str, ...]] = ()
    # Counts of which the server must know whether they are 0, even if clients keep their counts private.
    nonzero_counts: ClassVar[tuple[str, ...]] = ()
    needs_single_replies: ClassVar[bool] = False  # if True, `collect` needs more than the sum of the replies
    uses_clients: ClassVar[bool] = True  # if False, the client settings do not affect the result
    strong_views: ClassVar[bool] = True  # if False, the strong augmentation does not affect the result
    titles: ClassVar[Mapping[str, str]] = {}  # how metrics are called in reports, e.g. {"positive": "D⁺"}
    explanations: ClassVar[Mapping[str, str]] = {}  # by metric, or "average" for w̄: a sentence for reports

    def check(self, server: Server) -> None:
        """Raises a UserError if the method cannot run like this; called before anything is written."""

    @abstractmethod
    def initial_state(self, server: Server) -> Packet:
        """The state before anything is trained."""

    def prepare(self, state: Packet, server: Server) -> Iterator[PreparationStep]:
        """Long work before round 1, step by step, starting from the state of any earlier step."""
        return iter(())

    @abstractmethod
    def server_round(self, current: Round, state: Packet, server: Server) -> tuple[Packet, dict[int, Packet]]:
        """Step 1, at the server: trains; returns the new state and the request to each client."""

    @abstractmethod
    def client_round(self, request: Packet, memory: Packet, client: Participant) -> tuple[Packet, Packet]:
        """Step 3, at a client: trains; returns the reply and the client's new memory."""

    def takes_part(self, reply: Packet) -> bool:
        """Whether a reply's model enters the average; its counts always do."""
        return True

    @abstractmethod
    def collect(self, current: Round, state: Packet, replies: Mapping[int, Packet], server: Server) -> Packet:
        """Step 4, at the server: combines the replies into the state."""

    # What the method tells about itself. All of it is optional.

    def metrics(self, state: Packet) -> Metrics:
        """Numbers of the round just finished, for events.jsonl, progress bar, TensorBoard and report."""
        return {}

    def preparation_epochs(self, bootstrap: BootstrapSettings) -> int:
        """Epochs over the labelled images that `prepare` takes."""
        return 0

    def predicts_everywhere(self) -> bool:
        """True if clients predict all of their images in every round, sampled or not."""
        return False

    def explain_labels(
        self, memory: Packet, metrics: Metrics, predict: Callable[[], Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """For the report: the confidences [n, M] by which a client labels its images, and masks [n] that say
        what the images are used for. `metrics` are those of the last round; `predict` applies the final
        model."""
        return predict(), {}


@dataclass(frozen=True)
class Reply:
    """What an engine returns for one client."""

    client: int
    packet: Packet
    down: int = 0  # bytes
    up: int = 0
    label_counts: Mapping[str, int] = field(default_factory=dict)  # correct labels, in a simulation
    problem: "Problem | None" = None  # why there is no usable packet


@dataclass(frozen=True)
class Problem:
    """Why a client is left out of a round."""

    reason: str
    worker_died: bool = False  # this machine's fault, not the client's


class Engine(Protocol):
    """Carries packets between server and clients: steps 2 and 4."""

    @property
    def clients(self) -> Sequence[int]:
        """The numbers of all clients that can be asked, in ascending order."""

    def exchange(self, requests: Mapping[int, Packet]) -> Iterator[Reply]:
        """Sends every request and yields the replies as they arrive."""

    def close(self) -> None:
        """Ends everything that the engine started."""
