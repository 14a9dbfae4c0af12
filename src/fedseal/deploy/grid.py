"""A Flower Grid that a single client can neither block nor break.

Flower's own Grid fetches replies one after another, waits for a reply that is still being sent, and fails if
a reply cannot be read. This one fetches each reply in a thread, limits its size, and turns whatever is wrong
with it into an error message of its sender.
"""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any, cast

import httpx
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
    ObjectPushError,
    inflate_object_from_contents,
    pull_objects,
)
from flwr.superlink.grid import HttpGrid

from fedseal.deploy.inflation import inflated_size
from fedseal.engines.flower.engine import size_limit

THREADS = 64
MAX_FETCHES = 2  # of replies of one client at the same time
PULL_SECONDS = 0.1  # that `pull_messages` waits for replies that are being fetched
# Seconds between two attempts to fetch a part that has not arrived yet, doubled after each.
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.05, 2.0


class TooLargeError(Exception):
    """A reply is larger than its limit."""


class SafeGrid(HttpGrid):
    """`HttpGrid` with a `pull_messages` that fetches replies in parallel."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._limits: dict[str, int] = {}  # largest reply, by message without a reply so far
        self._fetched: dict[str, Future[Message]] = {}  # replies, by the message that they answer
        self._senders: dict[str, int] = {}  # of these replies
        self._unwanted: set[str] = set()  # messages whose replies are removed when they arrive
        self._abandoned: set[str] = set()  # messages whose replies are being fetched in vain
        self._threads, self._closed = ThreadPoolExecutor(THREADS, "reply"), False

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """The names of the messages. It is empty for one that was not accepted."""
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        try:
            name = next(iter(super().push_messages([message])), "")
        except ObjectPushError:  # its receiver confirmed it before it was complete
            return ""
        if name:
            self._limits[name] = size_limit(arrays_size(message))
        return name

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies to these messages that have arrived. A reply to one that was never sent is dropped."""
        messages = set(message_ids)
        expected = messages & self._limits.keys()
        asked = expected | self._unwanted
        answer = self._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=asked))
        for reply, tree in zip(answer.messages_list, answer.message_object_trees, strict=True):
            name = reply.metadata.reply_to_message_id
            if name in expected:
                expected.remove(name)  # the first of two replies counts
                self._make_room(reply.metadata.src_node_id)
                self._senders[name] = reply.metadata.src_node_id
                self._fetched[name] = self._threads.submit(self._fetch, reply, tree, self._limits.pop(name))
            elif name in self._unwanted:
                self._unwanted.remove(name)
                self._threads.submit(self._forget, reply)
        done, _ = wait(self._fetched.values(), PULL_SECONDS)
        names = [name for name, future in self._fetched.items() if future in done and name in messages]
        replies = [self._fetched.pop(name).result() for name in names]
        self._senders = {name: self._senders[name] for name in self._fetched}
        return replies

    def _make_room(self, sender: int) -> None:
        """Gives up incomplete replies of a client that sends another one, because each occupies a thread."""
        unfinished = [name for name, future in self._fetched.items() if not future.done()]
        own = [name for name in unfinished if self._senders[name] == sender]
        self.abandon(own[: max(0, len(own) + 1 - MAX_FETCHES)])

    def abandon(self, message_ids: Iterable[str]) -> None:
        """Gives up the replies to these messages, so that they occupy no thread and no memory."""
        for name in message_ids:
            fetching = self._fetched.pop(name, None)
            if fetching and not fetching.done():
                self._abandoned.add(name)
            if self._limits.pop(name, None) is not None:
                self._unwanted.add(name)

    def close(self) -> None:
        self._closed = True  # ends the threads, which would keep this process alive
        self._threads.shutdown(wait=False, cancel_futures=True)
        super().close()

    def _fetch(self, reply: MessageProto, tree: ObjectTree, limit: int) -> Message:
        """A reply, or an error message in its place. The SuperLink says which message it answers.

        Raises if the SuperLink cannot be reached.
        """
        try:
            parts = self._pull_parts(reply.metadata.reply_to_message_id, tree, limit)
            if inflated_size(parts) > limit:
                raise TooLargeError
            message = cast(Message, inflate_object_from_contents(reply.metadata.message_id, parts))
            message.metadata.__dict__["_reply_to_message_id"] = reply.metadata.reply_to_message_id
            return message
        except TooLargeError:
            error = Error(ErrorCode.UNKNOWN, f"its reply is too large: more than {limit / 1e6:.1f} MB")
        except ObjectPullError:  # the client disconnected while it was sending
            error = Error(ErrorCode.MESSAGE_UNAVAILABLE, "its reply is incomplete")
        except (httpx.NetworkError, httpx.RemoteProtocolError):  # the SuperLink is gone, not the client
            raise
        except Exception as exception:
            error = Error(ErrorCode.UNKNOWN, f"its reply cannot be read ({type(exception).__name__})")
        finally:
            self._abandoned.discard(reply.metadata.reply_to_message_id)
            self._forget(reply)
        metadata = Metadata(
            run_id=self.run.run_id,
            message_id="",
            src_node_id=self.node.node_id,
            dst_node_id=self.node.node_id,
            message_type=SYSTEM_MESSAGE_TYPE,
            reply_to_message_id=reply.metadata.reply_to_message_id,
            group_id="",
            created_at=0.0,
            ttl=0.0,
        )
        return make_message(metadata=metadata, error=error)

    def _forget(self, reply: MessageProto) -> None:
        """Removes a reply from the SuperLink's memory, also one that was refused."""
        if self._closed:  # the SuperLink is about to end
            return
        confirmation = ConfirmMessageReceivedRequest(
            node=self.node, run_id=self.run.run_id, message_object_id=reply.metadata.message_id
        )
        with suppress(httpx.HTTPError):
            self._runtime_client.ConfirmMessageReceived(confirmation)

    def _pull_parts(self, request: str, tree: ObjectTree, limit: int) -> dict[str, bytes]:
        """The content of all objects of the reply to a request, up to `limit` bytes together."""
        pull = make_pull_object_fn_protobuf(self._runtime_client.PullObject, self.node, self.run.run_id)
        left = limit

        def pull_within_limit(name: str) -> bytes:
            nonlocal left
            if self._closed or request in self._abandoned:
                raise InterruptedError
            content = pull(name)
            left -= len(content)
            if left < 0:
                raise TooLargeError
            return content

        names = [part.object_id for part in iterate_object_tree(tree)]
        return pull_objects(
            names,
            pull_within_limit,
            initial_backoff=MIN_RETRY_SECONDS,
            backoff_cap=MAX_RETRY_SECONDS,
        )


def arrays_size(message: Message) -> int:
    """The size of a message's arrays in bytes."""
    records = message.content.array_records.values() if message.has_content() else ()
    return sum(len(array.data) for record in records for array in record.values())
