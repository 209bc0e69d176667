"""Connections between workers of one machine: Unix sockets, which carry bytes twice as fast as TCP on loopback.

A worker that listens at a TCP address listens at an abstract name made of it too. Abstract names belong to a network
namespace, so whoever finds the name is on the machine of the worker (in its container, where that has a network of its
own), and all others dial TCP.
"""

from __future__ import annotations

import os
import socket
import struct

LINKS = "ELAUNCH_LINKS"
"""The variable in which a user says "tcp" who wants that within a machine, too."""

SEND_BUFFER_BYTES = 1 << 20
"""Of each direction. The default, 208 KiB, makes both sides wait for each other more often than bytes are copied."""

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
        _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if user == os.geteuid():
            return sock
    except OSError:
        pass
    sock.close()
    return None


def _name(address: str) -> str:
    return f"\0elaunch/{address}"
