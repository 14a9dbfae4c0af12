"""The Flower engine: carries packets over a Flower Grid, to simulated clients or to other machines."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import httpx
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

from fedseal.core import Packet, Problem, Reply
from fedseal.engines.flower.task import LABEL_COUNTS, ClientTask, pack, unpack
from fedseal.errors import SuperLinkLostError, UserError

log = logging.getLogger("fedseal")

REPLY_POLL = 0.1  # seconds between two checks for replies
NODE_POLL = 2.0  # seconds between two checks for clients that reconnected
RETURN_SECONDS = 10.0  # at the start of a round, for a client whose connection has just broken
MAX_SENDS = 10  # of a request to one client; a reply that never becomes complete occupies a thread
MORE_HEADER = 20_000  # bytes by which a reply's header may exceed that of its request
# A client that disconnected may come back before the deadline, so these errors are not its answer.
GONE = (ErrorCode.NODE_UNAVAILABLE, ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)


class ClientRegistry:
    """Knows which Flower node is which client: by its public key, or by its answer if nodes have no keys."""

    def __init__(self, grid: Grid, clients: Collection[str], keys: Mapping[bytes, str] | None = None) -> None:
        self.grid, self.clients, self.keys = grid, set(clients), keys
        self.seen: set[str] = set()  # clients that have ever been connected
        self.revoked: set[str] = set()  # clients whose keys were revoked while the run went on
        self.present: set[str] = set()  # clients that have been connected since a round began
        self._names: dict[int, str] = {}  # by node
        self._queries: dict[str, int] = {}  # nodes that were asked for their name, by message
        self._asked: dict[int, str] = {}  # when a node connected that was asked for its name

    def connected(self) -> dict[str, NodeInfo]:
        """The clients that are connected now. If two have the same name, the later one counts."""
        nodes = sorted(self.grid.get_nodes(), key=lambda node: node.last_activated_at)
        keys = self.keys  # another thread may replace them
        if keys is not None:
            named = {keys[node.public_key]: node for node in nodes if node.public_key in keys}
        else:
            self._ask_for_names(nodes)
            named = {self._names[node.node_id]: node for node in nodes if node.node_id in self._names}
        found = {name: node for name, node in named.items() if name in self.clients}
        self.seen |= found.keys()
        self.present |= found.keys()
        return found

    def replace_keys(self, keys: Mapping[bytes, str]) -> None:
        """Recognises clients by these keys from now on. Those that have none are revoked."""
        self.revoked |= set((self.keys or {}).values()) - set(keys.values())
        self.keys = keys

    def _ask_for_names(self, nodes: Collection[NodeInfo]) -> None:
        """Asks once per connection: if a connection broke, the question or its answer may be lost."""
        for node in nodes:
            if node.node_id not in self._names and self._asked.get(node.node_id) != node.last_activated_at:
                query = Message(RecordDict(), node.node_id, MessageType.QUERY)
                for name in filter(None, self.grid.push_messages([query])):
                    self._queries[name], self._asked[node.node_id] = node.node_id, node.last_activated_at
        for answer in self.grid.pull_messages(list(self._queries)) if self._queries else ():
            node_id = self._queries.pop(answer.metadata.reply_to_message_id, 0)
            if not answer.has_content() or "client" not in answer.content.config_records:
                self._asked.pop(node_id, None)
            elif node_id and node_id not in self._names:
                name = one_line(str(answer.content.config_records["client"].get("name", "")))
                self._names[node_id] = name
                abandon(
                    self.grid, self._queries, [q for q, asked in self._queries.items() if asked == node_id]
                )
                if name not in self.clients:
                    log.warning("ignored a client named '%s', which is not in the list of clients", name)

    def wait_for_clients(
        self,
        number: int,
        seconds: float,
        notify: Callable[[int], None] = lambda connected: None,
        check: Callable[[], None] = lambda: None,
    ) -> set[str]:
        """Waits until this number of clients is connected, and returns their names.

        If keys were revoked and fewer clients are left, it waits for these. `notify` is called with the
        number of connected clients whenever it changes, `check` all the time.
        """
        end, before = time.monotonic() + seconds, -1
        while True:
            check()
            with flower_errors():
                names = set(self.connected())
            if len(names) != before:
                before = len(names)
                notify(before)
            left = len(self.clients - self.revoked)
            if not left:
                raise UserError("The keys of all clients were revoked: no client is left.")
            if before >= min(number, left):
                return names
            if time.monotonic() > end:
                listed = f" ({', '.join(sorted(names))})" if names else ""
                raise UserError(
                    f"Only {before} of {number} clients connected within {seconds:g} seconds{listed}: start"
                    " the others with 'fedseal join', or raise --wait."
                )
            time.sleep(REPLY_POLL)


class FlowerEngine:
    """An engine over a Flower Grid. Client k is `names[k]`, and those in `expelled` are never asked.

    `check` raises if Flower has ended.
    """

    def __init__(
        self,
        grid: Grid,
        registry: ClientRegistry,
        names: Sequence[str],
        task: ClientTask,
        *,
        deadline: float | None,
        expelled: Collection[str] = (),
        check: Callable[[], None] = lambda: None,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.clients = [k for k, name in enumerate(names) if name not in expelled]
        self.grid, self.registry, self.names, self.task = grid, registry, names, task
        self.deadline, self.check, self.close = deadline, check, close

    def exchange(self, requests: Mapping[int, Packet]) -> Iterator[Reply]:
        """Yields replies as they arrive, and a problem for every client without one at the deadline.

        A client that reconnects before the deadline gets its request again.
        """
        wires: dict[int, bytes] = {}  # most clients get the same packet: it is serialised once
        for packet in requests.values():
            if id(packet) not in wires:
                wires[id(packet)] = packet.to_bytes()
        sizes = {k: len(wires[id(packet)]) for k, packet in requests.items()}
        start, before, self.registry.present = time.monotonic(), self.registry.present, set()
        end = start + self.deadline if self.deadline else float("inf")
        waiting = set(requests)
        sent = dict[str, int]()  # clients by message
        activations = dict[int, str]()  # when a client connected that has its request
        sends = Counter[int]()
        checked = float("-inf")
        while waiting:
            self.check()
            for k in sorted(k for k in waiting if self.names[k] in self.registry.revoked):
                waiting.remove(k)
                yield Reply(k, Packet(), problem=Problem("its key was revoked"))
            with flower_errors():
                if time.monotonic() > checked + NODE_POLL:
                    connected, checked = self.registry.connected(), time.monotonic()
                    for k in sorted(waiting):
                        node = connected.get(self.names[k])
                        if node is not None and activations.get(k) != node.last_activated_at:
                            name = self._send(node, k, wires[id(requests[k])])
                            # A request that was not accepted is sent again.
                            activations[k], sends[k] = node.last_activated_at if name else "", sends[k] + 1
                            sent |= {name: k} if name else {}
                messages = list(self.grid.pull_messages(list(sent))) if sent else []
            for k in sorted(waiting - activations.keys()):
                if self.names[k] not in before or time.monotonic() > start + RETURN_SECONDS:
                    waiting.remove(k)
                    yield Reply(k, Packet(), problem=Problem("it is not connected"))
            for k in sorted(k for k in waiting if sends[k] > MAX_SENDS):
                waiting.remove(k)
                problem = Problem(f"its connection broke more than {MAX_SENDS} times")
                yield Reply(k, Packet(), sizes[k], problem=problem)
            for message in messages:
                k = sent.pop(message.metadata.reply_to_message_id, -1)
                if message.has_error() and message.error.code in GONE:
                    activations[k] = ""  # the request is lost: it is sent again while the client is connected
                elif k in waiting:
                    waiting.remove(k)
                    wire = wires[id(requests[k])]
                    yield read_reply(message, k, wire, simulated=bool(self.task.memory_folder))
            abandon(self.grid, sent, [name for name in sent if sent[name] not in waiting])
            if time.monotonic() > end:
                break
            time.sleep(REPLY_POLL if waiting else 0)
        abandon(self.grid, sent, list(sent))
        for k in sorted(waiting):
            yield Reply(k, Packet(), sizes[k], problem=Problem(f"no reply within {self.deadline:g} seconds"))
        self.clients = [k for k in self.clients if self.names[k] not in self.registry.revoked]
        if not self.clients:
            raise UserError("The keys of all clients were revoked: no client is left.")

    def _send(self, node: NodeInfo, k: int, wire: bytes) -> str:
        """The name of the message to a client, which is empty if it was not accepted."""
        task = self.task.model_copy(update={"client": self.names[k]})
        message = Message(pack(wire, task), node.node_id, MessageType.TRAIN, ttl=self.deadline)
        return next(iter(self.grid.push_messages([message])), "")


def abandon(grid: Grid, sent: dict[str, int], messages: Collection[str]) -> None:
    """Expects no reply to these messages any more. Flower's own Grids need not be told."""
    if messages:
        getattr(grid, "abandon", lambda messages: None)(messages)
    for name in messages:
        del sent[name]


def read_reply(message: Message, k: int, request: bytes, *, simulated: bool = False) -> Reply:
    """Client k's reply to a request, or a problem if it cannot be used.

    Nothing that a client sends raises an exception here. Label statistics are read only in a simulation.
    """
    down = len(request)
    if message.has_error():
        reason = message.error.reason or f"error {message.error.code}"
        return Reply(k, Packet(), down, problem=Problem(f"it failed: {one_line(reason)}"))
    try:
        wire = unpack(message.content)
        if len(wire) > size_limit(down):
            size = f"{len(wire) / 1e6:.1f} MB for a request of {down / 1e6:.1f} MB"
            return Reply(k, Packet(), down, len(wire), problem=Problem(f"its reply is too large: {size}"))
        if header_size(request) + MORE_HEADER < header_size(wire) <= len(wire):
            problem = Problem("its reply lists many more tensors or scalars than the request")
            return Reply(k, Packet(), down, len(wire), problem=problem)
        packet = Packet.from_bytes(wire)
        records = message.content.config_records if simulated else {}
        counts = {name: int(str(n)) for name, n in records.get(LABEL_COUNTS, ConfigRecord()).items()}
        return Reply(k, packet, down, len(wire), counts)
    except Exception as error:  # a client can send anything; the round continues without it
        problem = Problem(f"its reply cannot be read ({type(error).__name__})")
        return Reply(k, Packet(), down, problem=problem)


def header_size(wire: bytes) -> int:
    """The size of a packet's header in bytes: of the names of its tensors, and of its scalars."""
    return int.from_bytes(wire[:8], "little")


def size_limit(sent: int) -> int:
    """The largest reply, in bytes, to a request of this size."""
    return 4 * sent + 1_000_000


def one_line(text: str) -> str:
    """Text from another machine for a log: one short line without control characters."""
    words = "".join(c if c.isprintable() else " " for c in text).split()
    return " ".join(words)[:300]


@contextmanager
def flower_errors() -> Iterator[None]:
    """Turns an error of the connection to Flower's SuperLink into a SuperLinkLostError."""
    try:
        yield
    except httpx.HTTPError as error:
        raise SuperLinkLostError(
            f"The connection to Flower's SuperLink broke ({one_line(str(error))}): continue with --resume."
        ) from error
