"""The connection to one server of an etcd cluster."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import NamedTemporaryFile
from typing import Any

from elaunch.errors import LaunchError, ProtocolError
from elaunch.rendezvous.cluster import messages
from elaunch.rendezvous.cluster.calls import Call, Metadata, RpcError
from elaunch.rendezvous.cluster.channel import GrpcChannel
from elaunch.rendezvous.cluster.http2 import DIAL_S
from elaunch.rendezvous.security.authority import STORE_NAME, Pem


class ServerConnection:
    """One server, on a channel of its own.

    Args:
        address: `host:port`.
        context: of TLS; None: none is used.
        name: that its certificate is to have; empty: its host's.
        dial_s: how long one attempt to connect may take, in seconds.
    """

    def __init__(self, address: str, context: ssl.SSLContext | None, name: str = "", dial_s: float = DIAL_S) -> None:
        self.address = address
        self.has_answered = False
        self.channel = GrpcChannel(address, context, name, dial_s)

    def ask(self, method: str, request: Any, timeout_s: float, metadata: Metadata = ()) -> Any:
        """Sends a request, and returns the answer, which has the method's name (`messages.PATHS`).

        A lease is renewed so, too: on a stream of one request.

        Raises:
            RpcError: it failed.
            ChannelClosed: `close` was called.
        """
        path = messages.PATHS[method]
        return read(method, self.channel.ask(path, request.to_bytes(), timeout_s, metadata))

    def open(self, method: str, connect_s: float, metadata: Metadata = ()) -> Call:
        """Begins a call that is answered more than once; raises as `ask`."""
        return self.channel.open(messages.PATHS[method], connect_s, metadata)

    def close(self) -> None:
        """Hangs up; what is under way fails."""
        self.channel.close()


def read(method: str, answer: bytes) -> Any:
    """Reads an answer; raises `RpcError` where it is none of etcd's."""
    try:
        return messages.read(f"{method}Response", answer)
    except ProtocolError as error:
        raise RpcError("INTERNAL", f"its answer to {method} cannot be read: {error}") from error


def parse_addresses(endpoint: str) -> list[str]:
    """Returns the addresses of the servers that an endpoint names; raises `LaunchError` where one is none."""
    addresses = [part.strip() for part in endpoint.split(",")]
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or len(port) > 5 or "/" in host:
            raise LaunchError(f"etcd: {address!r} is not host:port (endpoint {endpoint!r})")
    return addresses


def tls_context(ca_cert: str | None, cert: str | None, key: str | None) -> ssl.SSLContext:
    """Returns what TLS needs, from PEM files; raises `LaunchError` where one is missing or is none."""
    if (cert is None) != (key is None):
        raise LaunchError("etcd: a client certificate needs its key and a key its certificate; give both or neither")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority = _pem("CA certificate", ca_cert)
    _pem("client certificate", cert)
    _pem("client key", key)
    try:
        if authority is None:
            context.load_default_certs()
        else:
            context.load_verify_locations(cadata=authority)
        if cert is not None:
            context.load_cert_chain(cert, key)
    except (OSError, ValueError) as error:
        raise LaunchError(f"etcd: the certificates {ca_cert!r}, {cert!r} and {key!r} are of no use: {error}") from error
    return _with_http2(context)


def own_context(pem: Pem) -> tuple[ssl.SSLContext, str]:
    """Returns what TLS needs for the etcd of the job itself, and the name that its certificates are to have.

    Those of a user's own authority have the names of its hosts.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # from 1.2 on: an etcd before 3.5.8 has no 1.3
    context.load_verify_locations(cadata=pem.authority.decode())
    with _file_of(pem.certificate + b"\n" + pem.key) as path:
        context.load_cert_chain(path)
    return _with_http2(context), STORE_NAME if pem.is_of_job else ""


def _with_http2(context: ssl.SSLContext) -> ssl.SSLContext:
    context.set_alpn_protocols(["h2"])
    return context


@contextmanager
def _file_of(secret: bytes) -> Iterator[str]:
    """Gives a secret a path, for a while, that nobody else can open; on Linux it is in memory alone."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("elaunch-key")
        try:
            with os.fdopen(fd, "wb", closefd=False) as file:
                file.write(secret)
            yield f"/proc/self/fd/{fd}"
        finally:
            os.close(fd)
        return
    with NamedTemporaryFile() as file:
        file.write(secret)
        file.flush()
        yield file.name


def _pem(what: str, path: str | None) -> str | None:
    if path is None:
        return None
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError as error:
        raise LaunchError(f"etcd: cannot read the {what} {path!r}: {error.strerror}") from error
    if "-----BEGIN " not in text:
        raise LaunchError(f"etcd: the {what} {path!r} is not a PEM file")
    return text
