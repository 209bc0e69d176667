"""The encrypted end of a connection: takes and gives bytes as a socket of the kernel's does, without blocking."""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

RECORD_BYTES = 1 << 14
"""So much at most is encrypted as one; each costs some 22 bytes more, and a call of the kernel."""

CHUNK_BYTES = 4 * RECORD_BYTES
"""So much is handed over at a time, and copied where the kernel does not take all of it."""


class SecureSocket(ssl.SSLSocket):
    """A socket of a context whose `sslsocket_class` this is. Like links, it is used by one thread at a time.

    Only `shutdown` may come from any thread: it ends the connection, and never what keeps it secret.
    """

    _rest = b""
    """What was taken and has not left: OpenSSL wants the same bytes again to go on with them."""

    def getpeername(self) -> Any:
        """Returns the address of the other end. Of an end that is over when it is wrapped, nothing stays open."""
        try:
            return super().getpeername()
        except OSError as error:
            if "_connected" in self.__dict__:
                raise
            # The library asks once it has taken the socket over, and would leave it to the collector.
            self.close()
            raise ConnectionResetError("the connection closed before the handshake") from error

    def send(self, data: ReadableBuffer, flags: int = 0) -> int:
        """Sends bytes as other sockets do; an end that the peer has made is told as they tell it."""
        try:
            return super().send(data, flags)
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
            raise ConnectionResetError("closed by the peer") from error

    def do_handshake(self, block: bool = False) -> None:
        """Agrees on the encryption; an end that the peer has made is told as other sockets tell it."""
        try:
            super().do_handshake(block)
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
            raise ConnectionResetError("the connection closed in the handshake") from error

    def take(self, buffers: Sequence[bytes | memoryview]) -> int:
        """Takes the bytes of these buffers, one after the other; returns how many. They may be changed at once.

        Some of them may wait here until `flush` has sent them.

        Raises:
            OSError: the connection is over.
        """
        taken = 0
        if not self.flush():
            return taken
        for chunk in _chunks(buffers):
            taken += len(chunk)
            if not self._begin(chunk):
                break
        return taken

    def flush(self) -> bool:
        """Sends what waits here, as far as the kernel takes it; returns whether nothing waits any more.

        Raises:
            OSError: the connection is over.
        """
        return not self._rest or self._begin(self._rest)

    @property
    def has_unsent(self) -> bool:
        """Whether something waits here that was taken."""
        return bool(self._rest)

    def fill(self, target: memoryview) -> int:
        """Fills the beginning of `target` with what has come; returns how many bytes that was, 0 at the end.

        Raises:
            BlockingIOError: nothing has come.
            OSError: the connection is over, or what came was not sent by the other end.
        """
        got, size = 0, len(target)
        try:
            while got < size:
                n_bytes: Any = self.read(size - got, target[got:])  # a number, where a buffer is given
                if not n_bytes:
                    break
                got += n_bytes
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            if not got:
                raise BlockingIOError from None
        return got

    def line(self, most: int) -> bytes:
        """Returns what has come of a line, its newline included, and no byte of what follows; empty at the end.

        Raises:
            BlockingIOError: nothing has come.
            OSError: the connection is over.
        """
        line = bytearray()
        try:
            while len(line) < most and not line.endswith(b"\n"):
                byte = self.read(1)
                if not byte:
                    break
                line += byte
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            if not line:
                raise BlockingIOError from None
        return bytes(line)

    def await_input(self) -> None:
        """Returns when something may have come, or the connection is over."""
        if not self.pending():
            poll = select.poll()
            poll.register(self, select.POLLIN)
            poll.poll()

    def shutdown(self, how: int) -> None:
        """Ends one or both directions. The library's own would read and write plain text from then on."""
        socket.socket.shutdown(self, how)

    def _begin(self, chunk: bytes | memoryview) -> bool:
        """Sends a chunk, or keeps what is left of it; returns whether all of it has left."""
        try:
            while chunk:
                chunk = chunk[self.send(chunk) :]
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            self._rest = bytes(chunk)
            return False
        self._rest = b""
        return True


def _chunks(buffers: Sequence[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Cuts bytes into chunks; small buffers, as headers are, go with what follows them."""
    small = b""
    for buffer in buffers:
        if len(small) + len(buffer) <= RECORD_BYTES:
            small += bytes(buffer)
            continue
        begin = 0
        if small:
            begin = CHUNK_BYTES - len(small)
            yield small + bytes(buffer[:begin])
            small = b""
        for lo in range(begin, len(buffer), CHUNK_BYTES):
            yield buffer[lo : lo + CHUNK_BYTES]
    if small:
        yield small
