"""A client's connection to Flower's SuperLink, in the client's own process.

It does the work of Flower's SuperNode: it registers the client as connected, sends heartbeats, fetches
requests and delivers replies. It opens no port and starts no process.
"""

import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Self

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Error, Message
from flwr.app.message import remove_content_from_message
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
    UnregisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ObjectTree,
    PullObjectRequest,
    PushObjectRequest,
)
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedseal.deploy.bounded_answers import bound_answer
from fedseal.deploy.guard import VERSION_HEADER
from fedseal.deploy.inflation import inflated_size
from fedseal.deploy.keys import ClientKey
from fedseal.deploy.obstacles import Obstacle, explain
from fedseal.deploy.programs import Notify
from fedseal.engines.flower.client_app import DEFAULT_CONSENT
from fedseal.engines.flower.consent import Consent
from fedseal.errors import UserError
from fedseal.system.version import fedseal_version

# Seconds between two checks for a request: a tenth of the time since the last request, within these limits.
# This delays a request by little compared to the wait for it, and spares a server with many idle clients.
MIN_POLL, MAX_POLL = 0.1, 2.0
PART_POLL = 0.05  # seconds between two attempts to fetch a part that the server is still sending
RETRY_SECONDS = 1.0  # between two attempts to reach a server that does not answer
HEARTBEAT_SECONDS = 7.5  # between two heartbeats
HEARTBEAT_INTERVAL = 15.0  # Flower regards a client as disconnected after twice this time without a heartbeat
LEAVE_SECONDS = 5.0  # for the server to confirm that this client leaves
KEEP_ALIVE_SECONDS = 3.0  # more than MAX_POLL; the server closes idle connections after 5 seconds
TIMEOUT = httpx.Timeout(20.0, connect=5.0)  # with HEARTBEAT_SECONDS, a lost server is noticed within 30 s
ANY_SESSION = ""  # in which the server waits for a part
UNAVAILABLE = (502, 503, 504)  # HTTP statuses of a server that is starting or ending


def trust(key: ClientKey) -> ssl.SSLContext:
    """Accepts only servers with a certificate of the deployment's CA that was not revoked."""
    context = ssl.create_default_context(cadata=key.ca_certificate.decode())
    if key.crl is not None:
        context.load_verify_locations(key.crl)
        context.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF
    return context


class RequestRefusedError(Exception):
    """Why a client does not fetch a request. The server is told the text."""


class Connection:
    """The server's requests and this client's replies. While the server is away, waits up to `wait` seconds.

    Without a key, there is no TLS, and the client registers itself under a key that it has just generated.
    """

    def __init__(
        self,
        server: str,
        key: ClientKey | None,
        wait: float,
        notify: Notify,
        consent: Consent = DEFAULT_CONSENT,
    ) -> None:
        self.server, self.key, self.wait, self.notify, self.consent = server, key, wait, notify, consent
        self.ended = False  # the run
        verify = trust(key) if key else True
        private = key.private if key else ec.generate_private_key(ec.SECP384R1())
        self._public = public_key_to_bytes(private.public_key())
        self._fleet = FleetHttpClient(
            f"http{'s' if key else ''}://{server}",
            interceptors=[
                RuntimeVersionHttpInterceptor("SuperNode"),
                NodeAuthHttpInterceptor(private, private.public_key()),
            ],
            verify=verify,
        )
        self._http = httpx.Client(
            verify=verify,
            trust_env=False,  # no proxy
            timeout=TIMEOUT,
            headers={VERSION_HEADER: fedseal_version(), "accept-encoding": "identity"},
            event_hooks={"response": [bound_answer]},
            limits=httpx.Limits(keepalive_expiry=KEEP_ALIVE_SECONDS),
        )
        self._fleet._client = self._http
        self._node = Node()  # its number is 0 until the server has accepted this client
        self._alive = 0.0  # when the server last confirmed that this client is connected
        self._told = ""  # the obstacle that the user was told about last; empty if there is none
        self._lock = threading.Lock()  # a heartbeat in the middle of `_activate` would undo its first step
        self._closed = threading.Event()
        self._heartbeats = threading.Thread(target=self._send_heartbeats, name="heartbeats", daemon=True)

    def __enter__(self) -> Self:
        self._heartbeats.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Tells the server that this client leaves, but not at the end: its last reply would be dropped."""
        self._closed.set()
        self._http.timeout = LEAVE_SECONDS
        self._heartbeats.join(LEAVE_SECONDS)
        with suppress(httpx.HTTPError):
            if self._node.node_id and not self.ended:
                self._fleet.DeactivateNode(DeactivateNodeRequest(node_id=self._node.node_id))
                if self.key is None:
                    self._fleet.UnregisterNode(UnregisterNodeFleetRequest(node_id=self._node.node_id))
        self._http.close()

    def connect(self) -> None:
        """Returns when the server accepts this client; raises if it refuses, or does not answer in time."""

        def activate() -> None:
            with self._lock:
                self._activate()

        self._repeat_until_answered(activate)
        self.notify(f"joined {self.server}")

    def receive(self) -> Message:
        """Waits for the next request. If the connection breaks, connects again, and the server repeats it."""
        start = time.monotonic()
        while True:
            node = self._node
            try:
                answer = self._fleet.PullMessages(PullMessagesRequest(node=node))
                if answer.messages_list:
                    message, tree = answer.messages_list[0], answer.message_object_trees[0]
                    return self._fetch(node, message.metadata.run_id, tree)
            except RequestRefusedError as error:
                self.notify(f"refused a request: {error}")
                failure = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, str(error))
                self.send(Message(failure, reply_to=message_from_proto(message)))
            except httpx.HTTPError:
                if self._node is node:  # otherwise a heartbeat has connected again
                    self.notify("the connection is lost: trying again")
                    time.sleep(RETRY_SECONDS)
                    self.connect()
                    start = time.monotonic()
            except Exception as error:
                self.notify(f"a request was lost ({type(error).__name__})")
            time.sleep(min(MAX_POLL, max(MIN_POLL, (time.monotonic() - start) / 10)))

    def send(self, reply: Message) -> None:
        """Delivers a reply. If the connection breaks, delivers it when the server is back.

        If the server does not accept it then, the reply may be lost: connecting again makes the server
        repeat its request, if it still waits for the reply.
        """
        again = lost = False

        def push() -> None:
            nonlocal again, lost
            before, again = again, True
            try:
                accepted = self.push(reply, again=before)
            except httpx.HTTPStatusError as error:
                if error.response.status_code in UNAVAILABLE:
                    raise
                if error.response.status_code == 413:
                    self.notify("the server refuses this reply, because it is too large")
                    lost = before  # repeated attempts count as well
                    return
                accepted = False
            if not accepted:
                self.notify("the server no longer expects this reply")
                lost = before

        self._repeat_until_answered(push)
        if lost:
            self.connect()

    def push(self, reply: Message, *, again: bool = False) -> bool:
        """Delivers a reply in one attempt; False if the server does not accept any part of it.

        If the network delivers the announcement twice, the server waits for the parts in a second session,
        which the client does not know. So a part that the first one refuses is sent to any that waits for it.

        `again` says that an earlier attempt broke off. The server may then wait for parts without saying so,
        because it has taken the announcement of the reply. So all parts are sent, wanted or not.
        """
        with no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            tree = get_object_tree(reply)
            parts = {name: part.deflate() for name, part in get_all_nested_objects(reply).items()}
        proto = message_to_proto(remove_content_from_message(reply))
        request = PushMessagesRequest(node=self._node, messages_list=[proto], message_object_trees=[tree])
        answer = self._fleet.PushMessages(request)

        def push_part(name: str, session: str) -> bool:
            part = PushObjectRequest(
                node=request.node,
                run_id=reply.metadata.run_id,
                session_id=session,
                object_id=name,
                object_content=parts[name],
            )
            return self._fleet.PushObject(part).stored

        if again and not answer.objects_to_push:
            for name in parts:
                push_part(name, ANY_SESSION)
            return True
        wanted = list(answer.objects_to_push)
        stored = [push_part(name, answer.session_id) or push_part(name, ANY_SESSION) for name in wanted]
        return any(stored) or not wanted

    def _fetch(self, node: Node, run_id: int, tree: ObjectTree) -> Message:
        """The request whose parts are listed in a tree."""
        parts, size = {}, 0
        for part in iterate_object_tree(tree):
            request = PullObjectRequest(node=node, run_id=run_id, object_id=part.object_id)
            while not (answer := self._fleet.PullObject(request)).object_available:
                if not answer.object_found:
                    raise LookupError("the server has withdrawn the request")
                time.sleep(PART_POLL)
            parts[part.object_id] = answer.object_content
            size += len(answer.object_content)
            self._check_size(size)
        self._check_size(inflated_size(parts))
        message = inflate_object_from_contents(tree.object_id, parts)
        if not isinstance(message, Message) or not message.has_content():
            raise TypeError("not a request")
        message.metadata.__dict__["_message_id"] = tree.object_id  # a message does not contain its own name
        self._fleet.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(node=node, run_id=run_id, message_object_id=tree.object_id)
        )
        return message

    def _check_size(self, size: int) -> None:
        """Refuses a request of so many bytes if they are too many."""
        if size > 1_000_000 * (limit := self.consent.limits.request):
            raise RequestRefusedError(
                f"this client accepts requests of at most {limit} MB, but the server's is larger: join"
                " with --limit request=MB to accept it"
            )

    def _activate(self) -> None:
        """Registers this client as connected. A new connection makes the server repeat its request."""
        with suppress(httpx.HTTPStatusError):  # a server that was restarted does not know this client
            if self._node.node_id:
                self._fleet.DeactivateNode(DeactivateNodeRequest(node_id=self._node.node_id))
        with suppress(httpx.HTTPStatusError):  # it is registered already
            if self.key is None:
                self._fleet.RegisterNode(RegisterNodeFleetRequest(public_key=self._public))
        request = ActivateNodeRequest(public_key=self._public, heartbeat_interval=HEARTBEAT_INTERVAL)
        self._node = Node(node_id=self._fleet.ActivateNode(request).node_id)
        self._alive = time.monotonic()

    def _send_heartbeats(self) -> None:
        """Keeps this client connected while it trains, even if the server is restarted in the meantime."""
        while not self._closed.wait(HEARTBEAT_SECONDS):
            if not self._node.node_id:
                continue
            try:
                with self._lock:
                    if not self._is_known():
                        self._activate()
                self._told = ""
            except httpx.TransportError as error:
                with suppress(UserError):  # the main thread raises it when it needs the server
                    self._tell(explain(error, self.server, self.wait, self.key, joined=True))
            except Exception:
                continue  # the main thread reports it when it needs the server

    def _is_known(self) -> bool:
        """Sends a heartbeat; False if the server does not know this client, or may have given it up."""
        if time.monotonic() > self._alive + 2 * HEARTBEAT_INTERVAL:
            return False
        request = SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=HEARTBEAT_INTERVAL)
        try:
            known = self._fleet.SendNodeHeartbeat(request).success
        except httpx.HTTPStatusError as error:
            return error.response.status_code != 401
        self._alive = time.monotonic()
        return known

    def _repeat_until_answered(self, action: Callable[[], None]) -> None:
        """Repeats an action until the server answers. Raises if it refuses, or does not answer in time."""
        obstacle: Obstacle | None = None
        since = 0.0
        while True:
            try:
                action()
                self._told = ""
                return
            except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
                before, joined = obstacle, bool(self._node.node_id)
                obstacle = explain(error, self.server, self.wait, self.key, joined=joined)
            if obstacle != before:
                since = time.monotonic()
            if time.monotonic() >= since + obstacle.seconds:
                raise UserError(obstacle.failure)
            self._tell(obstacle)
            time.sleep(RETRY_SECONDS)

    def _tell(self, obstacle: Obstacle) -> None:
        """Tells the user once, whichever thread meets the obstacle first."""
        if self._told != obstacle.status:
            self._told = obstacle.status
            self.notify(obstacle.status)
