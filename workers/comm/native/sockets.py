"""Which sockets of this process belong to a Gloo group.

Gloo has no call that frees a thread which waits for a silent peer; the shutdown of the sockets does. They are known by
their ports: each group has a listening socket of its own, and a connection has that of this member at one end, or that
of another member at the other.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import os
import platform
import re
import select
import socket
import sys
import termios
import threading
from collections.abc import Collection, Iterator

import torch.distributed as dist

DRAINED_BYTES = 1 << 20


def listening() -> frozenset[tuple[int, int]]:
    """Returns (inode, port) of each TCP socket of this process that accepts connections."""
    found = []
    for fd, inode in numbers():
        with contextlib.suppress(OSError), view(fd) as sock:
            if is_tcp(sock) and _accepts(sock):
                found.append((inode, sock.getsockname()[1]))
    return frozenset(found)


def tell(store: dist.Store, rank: int, own: Collection[int]) -> None:
    """Tells the other members of a group at which ports this one accepts."""
    store.set(f"ports/{rank}", ",".join(map(str, own)))


def of_group(store: dist.Store, rank: int, size: int, own: Collection[int], older: Collection[int]) -> list[Socket]:
    """Returns the connections of a group, all of whose members `tell` at which ports they accept.

    Args:
        store: of this group alone.
        rank, size: of this member, and how many there are.
        own: the ports of this member.
        older: inodes of sockets that are older than the group.
    """
    told = [store.get(f"ports/{peer}").decode() for peer in range(size) if peer != rank]
    return connected(own, [int(port) for ports in told for port in ports.split(",") if port], older)


def connected(own: Collection[int], others: Collection[int], born_before: Collection[int]) -> list[Socket]:
    """Returns the connections of a group, for as long as they are kept: each is a duplicate of Gloo's own.

    Args:
        own: ports at which this member accepts.
        others: ports at which the other members accept.
        born_before: inodes of sockets that are older than the group.
    """
    found = []
    for fd, inode in numbers():
        if inode in born_before:
            continue
        with contextlib.suppress(OSError), view(fd) as sock:
            if not is_tcp(sock) or _accepts(sock):  # without the latter Gloo ends the process
                continue
            if sock.getsockname()[1] in own or sock.getpeername()[1] in others:
                # Not sock.dup(), which makes it a blocking one, for Gloo as well.
                found.append(Socket(fd, inode, socket.socket(fileno=os.dup(fd))))
    return found


def inodes() -> frozenset[int]:
    """Returns the inodes of all sockets of this process."""
    return frozenset(inode for _, inode in numbers())


class Socket:
    """A connection of Gloo's, and a duplicate of it that cannot become another one.

    Args:
        fd: Gloo's own number.
        inode: of the socket.
        duplicate: belongs to this object.
    """

    def __init__(self, fd: int, inode: int, duplicate: socket.socket) -> None:
        self._fd, self._inode, self._duplicate = fd, inode, duplicate
        # One thread frees who waits here while another gives the duplicate back: its number may be another file's then.
        self._lock = threading.Lock()
        self._is_shut_down = False

    def shut_down(self) -> None:
        """Ends the connection, in both directions: who waits at either end gets an error."""
        with self._lock, contextlib.suppress(OSError):
            self._is_shut_down = True
            self._duplicate.shutdown(socket.SHUT_RDWR)

    def end_reading(self) -> None:
        """Has Gloo find the end of the connection once it has read what has come. The peer finds none."""
        with self._lock, contextlib.suppress(OSError):
            self._duplicate.shutdown(socket.SHUT_RD)

    def count_unsent(self) -> int:
        """Returns how many bytes the peer's kernel has not taken yet."""
        with self._lock:
            if self._duplicate.fileno() < 0:
                return 0
            try:
                return int.from_bytes(fcntl.ioctl(self._duplicate, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
            except OSError:
                return 0

    def drain(self) -> None:
        """Drops what the peer sends to a connection that Gloo has closed here, so that the peer can go on sending."""
        if self.is_closed():
            with self._lock, contextlib.suppress(OSError):
                while self._duplicate.recv(DRAINED_BYTES, socket.MSG_DONTWAIT | socket.MSG_TRUNC):
                    pass

    def is_closed(self) -> bool:
        """Returns whether Gloo has closed it; it does so when it finds it shut down."""
        try:
            return os.fstat(self._fd).st_ino != self._inode
        except OSError:
            return True

    def is_used_up(self) -> bool:
        """Returns whether nothing more can come from it, also where Gloo keeps it; drops what has come, once shut down.

        Gloo reads no further, and does not close it, where what it was reading into is gone. When the kernel finds
        nothing left to read, no earlier read of Gloo's still writes: both hold the socket's lock.
        """
        with self._lock:
            if self.is_closed():
                return True
            if not self._is_shut_down:
                return False
            try:
                while self._duplicate.recv(DRAINED_BYTES, socket.MSG_DONTWAIT | socket.MSG_TRUNC):
                    pass
            except BlockingIOError:
                return False
            except OSError:  # it was reset: that comes after all that there was to read
                pass
            return True

    def silence(self) -> None:
        """Has Gloo's thread not wake for it again: of one that it keeps though it has ended, it would hear for ever."""
        if self.is_closed():
            return
        for poll, data in _polls(self._fd, self._inode):
            event = _Event(select.EPOLLONESHOT, data)
            _libc().epoll_ctl(poll, EPOLL_CTL_MOD, self._fd, ctypes.byref(event))

    def close(self) -> None:
        """Gives the duplicate back; of no effect for who still uses it."""
        with self._lock:
            self._duplicate.close()

    def close_in_child(self) -> None:
        """In a forked child: closes both, so that peers see the end of its parent."""
        self._duplicate.close()  # without the lock, which a thread of the parent may have held
        if not self.is_closed():
            os.close(self._fd)


def numbers() -> Iterator[tuple[int, int]]:
    """Yields (descriptor, inode) of the sockets of this process."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            kind, _, inode = os.readlink(f"/proc/self/fd/{name}").partition(":")
            if kind == "socket":
                yield int(name), int(inode[1:-1])


@contextlib.contextmanager
def view(fd: int) -> Iterator[socket.socket]:
    """Returns a context with a socket object for a descriptor; at its end the descriptor stays open."""
    sock = socket.socket(fileno=os.dup(fd))
    try:
        yield sock
    finally:
        sock.close()


EPOLL_CTL_MOD = 3  # sys/epoll.h
_POLLED = re.compile(r"tfd:\s*(\d+)\s+events:\s*[0-9a-f]+\s+data:\s*([0-9a-f]+)\s+pos:\S+\s+ino:([0-9a-f]+)")


class _Event(ctypes.Structure):
    """`struct epoll_event`."""

    if platform.machine() == "x86_64":
        _pack_ = 1
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


def _polls(fd: int, inode: int) -> Iterator[tuple[int, int]]:
    """Yields each epoll of this process that a socket is registered in, and the data that stand there for it."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") != "anon_inode:[eventpoll]":
                continue
            with open(f"/proc/self/fdinfo/{name}") as file:
                for registered, data, its_inode in _POLLED.findall(file.read()):
                    if (int(registered), int(its_inode, 16)) == (fd, inode):
                        yield int(name), int(data, 16)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def is_tcp(sock: socket.socket) -> bool:
    """Returns whether it is a socket of TCP."""
    return sock.type == socket.SOCK_STREAM and sock.family in (socket.AF_INET, socket.AF_INET6)


def _accepts(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
