"""Connections between workers of one machine: Unix sockets, which carry bytes twice as fast as TCP on loopback.

A worker that listens at a TCP address listens at an abstract name made of it too. Abstract names belong to a network
namespace, so whoever finds the name is on the machine of the worker (in its container, where that has a network of its
own), and all others dial TCP.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import socket
import struct
from typing import Literal

from elaunch.workers.comm.wire import Offer

LINKS = "ELAUNCH_LINKS"
"""The variable in which a user says "tcp" who wants that within a machine, too."""

SEND_BUFFER_BYTES = 1 << 20
"""Of each direction. The default, 208 KiB, makes both sides wait for each other more often than bytes are copied."""

OFFERED_BYTES = 128 << 10
"""A body of so much or more is offered: of a smaller one the two copies take less than asking and answering."""

_CREDENTIALS = struct.Struct("=iII")


def listen_here(address: str) -> socket.socket | None:
    """Returns a socket that workers of this machine connect to, for a worker with this TCP address.

    None where the system has no abstract names, or somebody else has taken this one, or the user wants TCP.
    """
    if os.environ.get(LINKS) == "tcp":
        return None
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(_name(address))
        sock.listen(1024)
    except OSError:
        sock.close()
        return None
    return sock


def connect_here(address: str) -> socket.socket | None:
    """Returns a connection, which does not block, to the worker with this TCP address; None: it is not to be had.

    It is not where the worker is on another machine, or has no place for one more at this moment, and not where the
    name belongs to another user, who would learn the job's token.
    """
    if os.environ.get(LINKS) == "tcp":
        return None
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    try:
        sock.connect(_name(address))
        if process_of(sock) is not None:
            return sock
    except OSError:
        pass
    sock.close()
    return None


def process_of(sock: socket.socket) -> int | None:
    """Returns the process at the other end of a Unix socket, as the kernel has it; None if it is another user's.

    0: a process that has no number here, as it is in another container.
    """
    process, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return process if user == os.geteuid() else None


class OfferMark:
    """By what those who read this process's memory see whether what they have read is what was offered.

    Two numbers: one that no other process has, and that of the first offer that still holds. Whoever has read looks at
    them afterwards. So an offer can be withdrawn at any moment, and a process that has got the number of a dead one is
    not taken for it.

    Attributes:
        address: where the numbers are.
        secret: the first one.
    """

    def __init__(self) -> None:
        self.secret = secrets.randbits(64)
        self._numbers = (ctypes.c_uint64 * 2)(self.secret, 0)
        self.address = ctypes.addressof(self._numbers)

    def withdraw(self, below: int) -> None:
        """Makes all offers whose number is below this one worthless."""
        self._numbers[1] = below


class _Range(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PTRACER = 0x59616D61  # linux/prctl.h


def fetch(process: int, offer: Offer, target: memoryview) -> Literal["fetched", "withdrawn", "refused", "gone"]:
    """Reads what a process offers from its memory, into `target`, of the same size. Other threads run meanwhile.

    Returns:
        "withdrawn": it holds no more, and what is in `target` is of no use. "refused": this process may not read it.
        "gone": the process is no more.
    """
    numbers = (ctypes.c_uint64 * 2)()
    failure = _read(process, offer.address, address_of(target), offer.nbytes)
    # After the bytes, never before: only so a number that still holds says something about them.
    unseen = _read(process, offer.mark_address, ctypes.addressof(numbers), ctypes.sizeof(numbers))
    if errno.ESRCH in (failure, unseen):
        return "gone"
    if unseen == 0 and numbers[0] != offer.secret:
        return "gone"
    if unseen == 0 and numbers[1] > offer.number:
        return "withdrawn"
    return "refused" if failure or unseen else "fetched"


def _read(process: int, address: int, into: int, n_bytes: int) -> int:
    """Returns 0 or the error's number."""
    read = getattr(_LIBC, "process_vm_readv", None)
    if read is None:
        return errno.ENOSYS
    to, from_ = _Range(into, n_bytes), _Range(address, n_bytes)
    got = read(process, ctypes.byref(to), ctypes.c_ulong(1), ctypes.byref(from_), ctypes.c_ulong(1), ctypes.c_ulong(0))
    return 0 if got == n_bytes else ctypes.get_errno() if got < 0 else errno.EFAULT


def address_of(view: memoryview) -> int:
    """Returns where the first byte of a writable view is."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def let_read(process: int | None) -> None:
    """Lets a process and its children read this one's memory, where Yama restricts that to parents.

    Args:
        process: the one that starts the workers of a job on this machine; None or 0: nobody is let.
    """
    if process:
        with contextlib.suppress(AttributeError):
            _LIBC.prctl(_PR_SET_PTRACER, ctypes.c_ulong(process), 0, 0, 0)


def _name(address: str) -> str:
    return f"\0elaunch/{address}"
