"""HTTP connections that nobody can use up: idle ones are closed, and an address has a limit."""

import asyncio
from collections import Counter

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

IDLE_SECONDS = 30.0  # for the headers of a request, between two parts of its body, and for reading the answer
MAX_CONNECTIONS = 200  # of one address, behind which there may be many clients
LOCAL = ("127.0.0.1", "::1")  # the server itself has no limit

connections: Counter[str] = Counter()  # by address


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol with these limits. It looks at each connection every `IDLE_SECONDS`."""

    _address, _received, _request, _unread = "", False, None, 0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        connections[self._address] += 1
        if connections[self._address] > MAX_CONNECTIONS and self._address not in LOCAL:
            transport.abort()
        self._timer = self.loop.call_later(IDLE_SECONDS, self._close_if_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        connections[self._address] -= 1
        if not connections[self._address]:
            del connections[self._address]
        if self._timer:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received = True
        super().data_received(data)

    def _close_if_idle(self) -> None:
        """Closes a connection on which no request began, or nothing was received or read."""
        state, request = self.conn.their_state, self.cycle
        no_headers = state is h11.IDLE and request is self._request
        unread = self.transport.get_write_buffer_size()
        stuck = self._unread and unread >= self._unread
        if no_headers or stuck or (state is h11.SEND_BODY and not self._received):
            self.transport.abort()
            return
        self._received, self._request, self._unread = False, request, unread
        self._timer = self.loop.call_later(IDLE_SECONDS, self._close_if_idle)
