"""Contexts of TLS in which both sides show a certificate, from the files of a node."""

from __future__ import annotations

import os
import socket
import ssl

from elaunch.rendezvous.membership import split_address
from elaunch.rendezvous.security.identity import AUTHORITY, NODE, NodeIdentity, is_loopback


def make_context(authority: str, node: str, is_server: bool) -> ssl.SSLContext:
    """Returns the context of one side.

    Who is at the other end is decided by the authority alone: workers are reached at addresses, and know each other by
    their names.

    Args:
        authority: the file of the authority that the other side must be of.
        node: the file of this side's certificate and key.
        is_server: whether this side was dialled.

    Raises:
        OSError: a file cannot be read, or is of no use.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if is_server:
        context.num_tickets = 0  # nobody comes back with one, and the first bytes on a link are then this side's own
    context.load_verify_locations(authority)
    context.load_cert_chain(node)
    return context


def client_of_store(authority: str, node: str) -> ssl.SSLContext:
    """Returns the context of a client of the job's etcd; one before 3.5.8 has no TLS 1.3."""
    context = make_context(authority, node, is_server=False)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


class Contexts:
    """The contexts of both sides, made anew when the files in a folder have changed.

    Args:
        folder: of a `NodeIdentity`.
    """

    def __init__(self, folder: str) -> None:
        self._authority, self._node = os.path.join(folder, AUTHORITY), os.path.join(folder, NODE)
        self._made: dict[bool, tuple[tuple[int, int], ssl.SSLContext]] = {}

    def get(self, is_server: bool) -> ssl.SSLContext:
        """Returns the context of one side; raises `OSError` where a file cannot be read, or is of no use."""
        found = os.stat(self._node)
        stamp = found.st_mtime_ns, found.st_ino
        made = self._made.get(is_server)
        if made is None or made[0] != stamp:
            made = self._made[is_server] = stamp, make_context(self._authority, self._node, is_server)
        return made[1]


class AgentContexts:
    """The contexts in which agents ask each other: encrypted where links between the same machines are.

    Both sides decide by the address that is asked.

    Args:
        identity: of this node.
    """

    def __init__(self, identity: NodeIdentity) -> None:
        self._identity, self._contexts = identity, Contexts(identity.folder)

    def get(self, address: str, is_server: bool) -> ssl.SSLContext | None:
        """Returns the context of one side of a connection to the agent at an address; None: it is plain.

        Raises:
            OSError: this node has no certificate, or none yet.
        """
        links = self._identity.settings.links
        if links == "off" or (links == "auto" and is_loopback(split_address(address)[0])):
            return None
        if self._identity.pem is None:
            raise OSError("this node has no certificate")
        return self._contexts.get(is_server)


def secure(sock: socket.socket, context: ssl.SSLContext, is_server: bool) -> ssl.SSLSocket:
    """Takes over a connected socket; `do_handshake` comes next. Raises `OSError` where it is not connected any more."""
    # What is said first follows the last message of the handshake: else it would wait for a delayed acknowledgement.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return context.wrap_socket(sock, is_server, do_handshake_on_connect=False)


def explain(error: ssl.SSLError) -> str:
    """Returns what a handshake's failure means to people."""
    text = str(getattr(error, "verify_message", "") or error.reason or error)
    if "not yet valid" in text or "expired" in text.lower():
        return f"its certificate is refused ({text}): compare the clocks of both machines"
    if isinstance(error, ssl.SSLCertVerificationError) or "CERTIFICATE" in text or "UNKNOWN_CA" in text:
        return f"its certificate is not of this job ({text}): do all nodes have the same secret?"
    if "WRONG_VERSION_NUMBER" in text or "HTTP_REQUEST" in text:
        return "it does not encrypt: --link-encryption must be the same on all nodes"
    return f"TLS failed: {text}"
