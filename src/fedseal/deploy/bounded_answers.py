"""A server's answers, which cannot fill a client's memory."""

from collections.abc import Iterator

import httpx

MAX_ANSWER_BYTES = 8_000_000  # a request arrives in parts of at most 5 MiB


class BadAnswerError(ValueError):
    """An answer that no fedseal server sends."""


class BoundedAnswer(httpx.SyncByteStream):
    """The bytes of an answer. Raises while they arrive if there are too many."""

    def __init__(self, response: httpx.Response) -> None:
        assert isinstance(response.stream, httpx.SyncByteStream)
        self.stream = response.stream

    def __iter__(self) -> Iterator[bytes]:
        size = 0
        for data in self.stream:
            size += len(data)
            if size > MAX_ANSWER_BYTES:
                raise BadAnswerError("too large")
            yield data

    def close(self) -> None:
        self.stream.close()


def bound_answer(response: httpx.Response) -> None:
    """Limits an answer before it is read. A compressed one would need more memory than its size."""
    if response.headers.get("content-encoding", "identity") != "identity":
        raise BadAnswerError("compressed")
    response.stream = BoundedAnswer(response)
