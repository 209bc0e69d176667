"""How connections are accepted where anybody may ask for one: without spinning when the system gives no more."""

from __future__ import annotations

import errno
import resource
import selectors
import socket
import time
from collections.abc import Callable

PAUSE_S = 0.2
"""For how long nobody is accepted when the system gives no more descriptors."""

MAX_STRANGERS = 256
"""So many accepted connections may be without a proof at a time; no more than an eighth of the descriptors."""

_EXHAUSTED = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_BROKEN = frozenset((errno.EBADF, errno.EINVAL, errno.ENOTSOCK))


def most_strangers(open_files: int) -> int:
    """Returns how many connections may be without a proof, where a process may have so many open files."""
    return MAX_STRANGERS if open_files == resource.RLIM_INFINITY else max(8, min(MAX_STRANGERS, open_files // 8))


class Accepting:
    """A listening socket in a selector. It pauses for a moment when the system gives no more descriptors.

    Args:
        selector: in which it is registered, to be read from.
        listening: the socket; closed with this.
        data: its data there.
        complain: told in a line of such a pause, the first time.
    """

    def __init__(
        self, selector: selectors.BaseSelector, listening: socket.socket, data: object, complain: Callable[[str], None]
    ) -> None:
        self._selector = selector
        self._socket = listening
        self._data = data
        self._complain = complain
        self._complained = False
        self._paused_until_s: float | None = None
        listening.setblocking(False)
        selector.register(listening, selectors.EVENT_READ, data)

    @property
    def due_s(self) -> float | None:
        """Returns when `on_time` has something to do, by `time.monotonic`; None: never."""
        return self._paused_until_s

    def accept(self) -> socket.socket | None:
        """Returns the next connection, if there is one and the system lets this process have it.

        Raises:
            OSError: the socket is broken, so no connection comes any more.
        """
        try:
            link, _ = self._socket.accept()
        except OSError as error:
            if error.errno in _BROKEN:
                raise
            if error.errno in _EXHAUSTED:
                self.pause(error)
            return None
        return link

    def pause(self, error: OSError) -> None:
        """Accepts nobody for PAUSE_S: what waits would make the selector return at once, again and again."""
        if not self._complained:
            self._complained = True
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            self._complain(
                f"new connections wait: {error.strerror}; this process may have {most} open files (`ulimit -n`)"
            )
        if self._paused_until_s is None:
            self._selector.unregister(self._socket)
        self._paused_until_s = time.monotonic() + PAUSE_S

    def on_time(self, now_s: float) -> None:
        """Accepts again, once the pause is over."""
        if self._paused_until_s is not None and now_s >= self._paused_until_s:
            self._paused_until_s = None
            self._selector.register(self._socket, selectors.EVENT_READ, self._data)

    def close(self) -> None:
        """Closes the socket."""
        if self._paused_until_s is None:
            self._selector.unregister(self._socket)
        self._paused_until_s = None
        self._socket.close()
