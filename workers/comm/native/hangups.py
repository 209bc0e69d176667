"""Tells at once when a peer closes a connection that this process has, by a thread that sleeps until then.

NCCL knows of a lost peer as soon as the kernel has closed its end, which may be a tenth of a second before anybody
hears of its death, since a process with a device takes that long to be torn down. Whatever torch gives to a
communicator meanwhile fails twice within one call, and that ends the process: so it is aborted first.
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

    def close(self) -> None:
        """Watches no more. From any thread."""
        self._closed.set()
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        while not self._closed.is_set():
            self._poll.poll()
            if not self._closed.is_set():
                self._ended()
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
    while clock() < end_s and not over.wait(LOOK_S):
        if any(error(one) not in (SUCCESS, IN_PROGRESS) for one in communicators()):
            return True
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
def _nccl() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libnccl.so.2")  # the one that torch has loaded
    except OSError:
        return None  # torch has it within itself
