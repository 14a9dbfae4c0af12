"""A Flower Grid that no client can hold up or break.

Flower's own fetches replies one after another, waits for one that is still being sent, and fails if one
cannot be read. Here each reply is fetched in a thread of its own, at most as large as what it answers allows,
and what is wrong with it is its sender's error.
"""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, cast

from fedseal.engines.flower import largest  # silences Flower

# isort: split
from flwr.app import Message, Metadata
from flwr.app.error import Error
from flwr.app.message import make_message
from flwr.common.constant import ErrorCode
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.constant import SYSTEM_MESSAGE_TYPE
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    inflate_object_from_contents,
    pull_objects,
)
from flwr.superlink.grid import HttpGrid

THREADS = 64
PATIENCE = 0.1  # seconds to wait for what is being fetched
POLL = 2.0  # most seconds between looks for a part that has not come yet


class Mailbox(HttpGrid):
    """`HttpGrid` with a `pull_messages` of its own."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._limits: dict[str, int] = {}  # of the reply to each message that has none yet
        self._fetched: dict[str, Future[Message]] = {}  # replies by the message that they answer
        self._threads, self._closed = ThreadPoolExecutor(THREADS, "reply"), False

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        names = list(super().push_messages(messages))
        self._limits |= {name: largest(size(m)) for name, m in zip(names, messages, strict=True) if name}
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Replies that are here. What answers nothing that was asked, as a client may send it, is dropped."""
        asked = set(message_ids) & self._limits.keys()
        answer = self._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=asked))
        for reply, tree in zip(answer.messages_list, answer.message_object_trees, strict=True):
            name = reply.metadata.reply_to_message_id
            if name in asked:
                asked.remove(name)  # of two replies the first counts
                self._fetched[name] = self._threads.submit(self._fetch, reply, tree, self._limits.pop(name))
        done, _ = wait(self._fetched.values(), PATIENCE)
        names = [name for name, future in self._fetched.items() if future in done]
        return [self._fetched.pop(name).result() for name in names]

    def close(self) -> None:
        self._closed = True  # what is still being fetched would keep this process from ending
        self._threads.shutdown(wait=False, cancel_futures=True)
        super().close()

    def _fetch(self, reply: MessageProto, tree: ObjectTree, limit: int) -> Message:
        """A reply, or an error in its place; it answers what the SuperLink says it does."""
        about, run = reply.metadata, self.run.run_id
        pull = make_pull_object_fn_protobuf(self._runtime_client.PullObject, self.node, run)
        left = limit

        def pull_some(name: str) -> bytes:
            nonlocal left
            if self._closed:
                raise InterruptedError
            content = pull(name)
            left -= len(content)
            if left < 0:
                raise OverflowError
            return content

        try:
            names = [part.object_id for part in iterate_object_tree(tree)]
            parts = pull_objects(names, pull_some, backoff_cap=POLL)
            message = cast(Message, inflate_object_from_contents(about.message_id, parts))
            message.metadata.__dict__["_reply_to_message_id"] = about.reply_to_message_id
            confirmed = ConfirmMessageReceivedRequest(
                node=self.node, run_id=run, message_object_id=about.message_id
            )
            self._runtime_client.ConfirmMessageReceived(confirmed)
            return message
        except Exception as error:
            code, reason = ErrorCode.UNKNOWN, f"it sent a reply that cannot be read ({type(error).__name__})"
            if isinstance(error, OverflowError):
                reason = f"it sent a reply that is far too large: more than {limit / 1e6:.1f} MB"
            elif isinstance(error, ObjectPullError):  # it went away while it sent
                code = ErrorCode.MESSAGE_UNAVAILABLE
            metadata = Metadata(
                run_id=run,
                message_id="",
                src_node_id=self.node.node_id,
                dst_node_id=self.node.node_id,
                message_type=SYSTEM_MESSAGE_TYPE,
                reply_to_message_id=about.reply_to_message_id,
                group_id="",
                created_at=0.0,
                ttl=0.0,
            )
            return make_message(metadata=metadata, error=Error(code, reason))


def size(message: Message) -> int:
    """Bytes of its arrays."""
    records = message.content.array_records.values() if message.has_content() else ()
    return sum(len(array.data) for record in records for array in record.values())
