"""Tells at once when a peer closes a connection that this process has, by a thread that sleeps until then.

NCCL knows of a lost peer as soon as the kernel has closed its end, which may be a tenth of a second before anybody
hears of its death, since a process with a device takes that long to be torn down. What torch gives to a communicator
meanwhile fails twice within one call where it is grouped, as functional collectives and messages are, and that ends the
process. So it is aborted first, and who is about to call such an operation looks for the end of connections before.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import select
import threading
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

from elaunch import threads
from elaunch.workers.comm.native import sockets

ERROR_S = 1.0
"""For NCCL to take note of a connection that has ended; others may have ended it."""

LOOK_S = 0.0005

HOLD_S = 0.1
"""The most that an operation waits for what the end of a connection means; NCCL takes note within a millisecond."""

SUCCESS, IN_PROGRESS = 0, 7  # of ncclResult_t


class Hangups:
    """Watches connections.

    Args:
        ended: called when a peer has closed one of them, by a thread of this object.
    """

    def __init__(self, ended: Callable[[], object]) -> None:
        self._ended = ended
        self._poll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll.register(self._wake, select.EPOLLIN)
        self._seen: set[int] = set()
        self._closed = threading.Event()
        self._since_s: float | None = None  # when the end was noticed whose meaning is being found out
        threads.start("elaunch-hangups", self._run, lambda _: None)

    def watch(self, older: Collection[int]) -> None:
        """Watches the connections over TCP that this process has now, from then on.

        Args:
            older: inodes of sockets that do not count.
        """
        for fd, inode in sockets.numbers():
            if inode in self._seen or inode in older or self._closed.is_set():
                continue
            with contextlib.suppress(OSError), sockets.view(fd) as sock:
                if not sockets.is_tcp(sock) or not sock.getpeername():
                    continue
                # The number itself: with a duplicate, the peer would not see the connection end when NCCL closes it.
                self._poll.register(fd, select.EPOLLRDHUP | select.EPOLLONESHOT)
                self._seen.add(inode)

    def hold(self, over: threading.Event) -> None:
        """Returns at once, or, where a peer has just closed a connection, when it is known whether that ends a group.

        Args:
            over: set if so.

        Raises:
            RuntimeError: it does.
        """
        if self._closed.is_set():
            return
        since_s = self._since_s
        if since_s is None and not self._is_noticed():
            return
        left_s = HOLD_S if since_s is None else since_s + HOLD_S - time.monotonic()
        if over.wait(max(0.0, left_s)):
            raise RuntimeError("a peer of a process group is lost, and the group is freed")

    def close(self) -> None:
        """Watches no more. From any thread."""
        self._closed.set()
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def _is_noticed(self, timeout_ms: int | None = 0) -> bool:
        """Returns whether a connection has ended that `_run` has not taken note of."""
        asked = select.poll()
        asked.register(self._poll.fileno(), select.POLLIN)
        return bool(asked.poll(timeout_ms))

    def _run(self) -> None:
        while not self._closed.is_set():
            self._is_noticed(None)
            self._since_s = time.monotonic()  # before the notice is taken: an operation must see one or the other
            self._poll.poll(0)
            if not self._closed.is_set():
                self._ended()
            self._since_s = None
        self._poll.close()
        os.close(self._wake)


def await_failure(
    communicators: Callable[[], Iterable[int]],
    over: threading.Event,
    error: Callable[[int], int] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Returns whether one of NCCL's communicators has failed, as soon as it has, or False after `ERROR_S`.

    Args:
        communicators: returns their addresses; they are valid until `over`.
        over: set before they are freed.
        error: returns what has gone wrong in one; by default, NCCL does.
        clock: returns the time, in seconds.
    """
    error = error or async_error
    end_s = clock() + ERROR_S
    while clock() < end_s and not over.is_set():
        if any(error(one) not in (SUCCESS, IN_PROGRESS) for one in communicators()):
            return True
        over.wait(LOOK_S)
    return False


def communicator_of(group: Any) -> int:
    """Returns the address of the communicator of a group of NCCL on the current device; 0: there is none."""
    with contextlib.suppress(RuntimeError, AttributeError):
        return int(group._comm_ptr())
    return 0


def async_error(communicator: int) -> int:
    """Returns NCCL's number for what has gone wrong in a communicator outside of any call; for any thread."""
    library = _nccl()
    if library is None:
        return SUCCESS
    result = ctypes.c_int(SUCCESS)
    library.ncclCommGetAsyncError(ctypes.c_void_p(communicator), ctypes.byref(result))
    return result.value


@functools.cache
def _nccl() -> ctypes.PyDLL | None:
    try:
        # The one that torch has loaded. Its answer comes at once: no other thread is let in between two of them.
        return ctypes.PyDLL("libnccl.so.2")
    except OSError:
        return None  # torch has it within itself
