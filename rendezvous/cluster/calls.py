"""A call of gRPC: its messages, how it ends, and what a failure means."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import Any, Protocol
from urllib.parse import unquote

Metadata = tuple[tuple[str, str], ...]

NO_ANSWER, HUNG_UP = "no answer came", "the server hung up"

MOST_BYTES = 2**28
"""Of an answer; etcd's largest are of all documents of a job."""

_FRAME = struct.Struct(">BI")  # of a message: whether it is compressed, and its length

_STATUS = (
    *("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS"),
    *("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED"),
    *("INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"),
)


class RpcError(Exception):
    """A call failed.

    Attributes:
        status: its name, as gRPC has it.
        text: what the server, or the network, says of it.
        is_sent: whether the server may have seen the request.
        is_tls: whether TLS could not be agreed on.
    """

    def __init__(self, status: str, text: str, is_sent: bool = True, is_tls: bool = False) -> None:
        super().__init__(f"{text} ({status})")
        self.status, self.text, self.is_sent, self.is_tls = status, text, is_sent, is_tls

    def unsent(self) -> RpcError:
        """Returns the same for a request that was not sent."""
        return RpcError(self.status, self.text, is_sent=False, is_tls=self.is_tls)


class ChannelClosed(Exception):
    """The channel was closed by this side."""


class CallPath(Protocol):
    """The connection over which a call goes."""

    def send(self, call: Call, data: bytes, is_last: bool) -> None:
        """Sends bytes of a call, as soon as the server takes them."""

    def cancel(self, call: Call) -> None:
        """Ends a call on this side."""


class Call:
    """One call: requests go to the server, answers are taken one by one.

    Attributes:
        stream: its number on the connection.
        is_over: whether it has ended.
        has_said_all: whether this side has sent its last request.
    """

    def __init__(self, connection: CallPath) -> None:
        self._connection = connection
        self._answers: SimpleQueue[bytes | RpcError | None] = SimpleQueue()
        self._buffer = bytearray()
        self._headers: dict[str, str] = {}
        self.stream = 0
        self.is_over = self.has_said_all = False

    def send(self, request: bytes, is_last: bool = False) -> None:
        """Sends a request, as soon as the server takes it."""
        self._connection.send(self, _FRAME.pack(0, len(request)) + request, is_last)

    def take(self, timeout_s: float | None = None) -> bytes | None:
        """Returns the next answer, or None at the end of them; raises `RpcError`."""
        try:
            answer = self._answers.get(timeout=timeout_s)
        except Empty:
            raise RpcError("DEADLINE_EXCEEDED", NO_ANSWER) from None
        if isinstance(answer, RpcError):
            raise answer
        return answer

    def __iter__(self) -> Iterator[bytes]:
        while (answer := self.take()) is not None:
            yield answer

    def cancel(self) -> None:
        """Ends the call; whoever waits for an answer gets an `RpcError`."""
        self._connection.cancel(self)

    # -- for the connection, which holds its lock ------------------------------------------------------------------

    def take_headers(self, headers: Any) -> None:
        """Takes what the server says before the answers, or after them."""
        self._headers.update((_text(name), _text(value)) for name, value in headers)

    def take_data(self, data: bytes) -> None:
        """Takes bytes of answers."""
        self._buffer += data
        while len(self._buffer) >= _FRAME.size:
            compressed, size = _FRAME.unpack_from(self._buffer)
            end = _FRAME.size + size
            if compressed or size > MOST_BYTES:
                what = "compressed, which was not asked for" if compressed else f"of {size} bytes"
                self.end(RpcError("INTERNAL", f"the answer is {what}"))
                return
            if len(self._buffer) < end:
                return
            self._answers.put(bytes(self._buffer[_FRAME.size : end]))
            del self._buffer[:end]

    def finish(self) -> None:
        """The server has ended the call."""
        code = self._headers.get("grpc-status", "")
        if code == "0":
            self.end(None)
            return
        status = _STATUS[int(code)] if code.isdecimal() and len(code) < 3 and int(code) < len(_STATUS) else "UNKNOWN"
        http = self._headers.get(":status", "")
        text = unquote(self._headers.get("grpc-message", "")) or f"it answers with HTTP status {http or 'none'}"
        self.end(RpcError(status, text))

    def end(self, how: RpcError | None) -> None:
        """Ends it, once: None: well."""
        if not self.is_over:
            self.is_over = True
            self._answers.put(how)


def _text(value: Any) -> str:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
