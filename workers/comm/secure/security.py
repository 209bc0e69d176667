"""Which links are encrypted, and what it means when that fails."""

from __future__ import annotations

import socket
import ssl
import time

from elaunch.errors import ProtocolError
from elaunch.rendezvous.security.contexts import Contexts, explain, secure
from elaunch.workers.comm.secure.sockets import SecureSocket

FIRST_BYTE = b"\x16"
"""With it begins whoever speaks TLS, and no line of ours."""


class LinkSecurity:
    """Encrypts connections with the certificates in a folder, which may be renewed there.

    Args:
        folder: from the agent.
        always: TCP within this machine, too.
    """

    def __init__(self, folder: str, always: bool = False) -> None:
        self._contexts, self._always = Contexts(folder), always

    def covers(self, sock: socket.socket) -> bool:
        """Returns whether a connection must be encrypted."""
        return sock.family != socket.AF_UNIX and (self._always or not _is_here(sock))

    def wrap(self, sock: socket.socket, is_server: bool) -> SecureSocket:
        """Takes over a connected socket; `SecureSocket.do_handshake` comes next.

        Raises:
            ProtocolError: a file of this side's is of no use.
            OSError: it is not connected any more.
        """
        try:
            context = self._contexts.get(is_server)
        except OSError as error:
            raise ProtocolError(f"this worker's certificate cannot be read: {error}") from error
        context.sslsocket_class = SecureSocket
        wrapped = secure(sock, context, is_server)
        assert isinstance(wrapped, SecureSocket)
        return wrapped


def secured_within(security: LinkSecurity | None, sock: socket.socket, deadline_s: float) -> socket.socket:
    """Returns a connection that was just dialled and blocks, encrypted if it must be.

    Raises:
        ProtocolError: the other end is not of this job.
        ConnectionError: it has hung up.
        OSError: it does not answer before `deadline_s`, by `time.monotonic`.
    """
    if security is None or not security.covers(sock):
        return sock
    secured = security.wrap(sock, is_server=False)
    try:
        secured.settimeout(max(1e-3, deadline_s - time.monotonic()))
        secured.do_handshake()
    except BaseException as error:
        secured.close()
        if isinstance(error, ssl.SSLError):
            raise ProtocolError(explain(error)) from error
        raise
    return secured


def security_of(folder: str, always: bool) -> LinkSecurity | None:
    """Returns what an agent's welcome says of it; None: links are not encrypted."""
    return LinkSecurity(folder, always) if folder else None


def _is_here(sock: socket.socket) -> bool:
    """Returns whether both ends are on this machine; the kernel takes none of its own addresses from a network."""
    here, there = sock.getsockname()[0], sock.getpeername()[0]
    return bool(here == there) or (there.startswith("127.") and here.startswith("127."))
