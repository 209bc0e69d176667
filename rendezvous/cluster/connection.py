"""The connection to one server of an etcd cluster. Only this package and `etcd` load grpc."""

from __future__ import annotations

from typing import Any

import grpc
from pyetcd import etcdrpc

from elaunch.errors import LaunchError
from elaunch.rendezvous.security.authority import STORE_NAME, Pem

Metadata = tuple[tuple[str, str], ...]

CHANNEL_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    # Despite its name: the least time that one attempt to connect, with its TLS handshake, is given.
    ("grpc.min_reconnect_backoff_ms", 2000),
    # Silence is noticed within 9 s; etcd by default ends connections that ping more often than every 5 s. grpc takes
    # the longer of the two time-outs (the second is 60 s by default) and would stop pinging after two without data.
    ("grpc.keepalive_time_ms", 6000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.http2.ping_timeout_ms", 3000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A proxy for the web does not lead to etcd.
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
]


class ServerConnection:
    """The stubs of one server, on a channel of its own.

    Args:
        address: `host:port`.
        credentials: for TLS; None: none is used.
        name: that its certificate is to have; empty: its host's.
    """

    def __init__(self, address: str, credentials: Any, name: str = "") -> None:
        self.address = address
        self.has_answered = False
        self.is_closed = False
        if credentials is None:
            self.channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            expected = [("grpc.ssl_target_name_override", name)] if name else []
            self.channel = grpc.secure_channel(address, credentials, options=CHANNEL_OPTIONS + expected)
        self.kv = etcdrpc.KVStub(self.channel)
        self.lease = etcdrpc.LeaseStub(self.channel)
        self.watch = etcdrpc.WatchStub(self.channel)
        self.auth = etcdrpc.AuthStub(self.channel)

    def renew(self, request: Any, timeout_s: float, metadata: Metadata) -> float:
        """Renews a lease on a stream of one request; returns the seconds that it has left, 0 where it is gone."""
        return sum(
            int(answer.TTL) for answer in self.lease.LeaseKeepAlive(iter((request,)), timeout_s, metadata=metadata)
        )

    def close(self) -> None:
        """Hangs up; what is under way fails."""
        self.is_closed = True
        self.channel.close()


def status_of(error: Any) -> tuple[str, str]:
    """Returns the name of the status and its text; not every `grpc.RpcError` has them."""
    code = error.code() if hasattr(error, "code") else None
    details = error.details() if hasattr(error, "details") else str(error)
    return getattr(code, "name", "UNKNOWN"), str(details or code)


def parse_addresses(endpoint: str) -> list[str]:
    """Returns the addresses of the servers that an endpoint names; raises `LaunchError` where one is none."""
    addresses = [part.strip() for part in endpoint.split(",")]
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or len(port) > 5 or "/" in host:
            raise LaunchError(f"etcd: {address!r} is not host:port (endpoint {endpoint!r})")
    return addresses


def tls_credentials(ca_cert: str | None, cert: str | None, key: str | None) -> Any:
    """Returns what TLS needs, from PEM files; raises `LaunchError` where one is missing or is none."""
    if (cert is None) != (key is None):
        raise LaunchError("etcd: a client certificate needs its key and a key its certificate; give both or neither")
    ca_pem, cert_pem, key_pem = (
        _pem("CA certificate", ca_cert),
        _pem("client certificate", cert),
        _pem("client key", key),
    )
    return grpc.ssl_channel_credentials(ca_pem, key_pem, cert_pem)


def own_credentials(pem: Pem) -> tuple[Any, str]:
    """Returns what TLS needs for the etcd of the job itself, and the name that its certificates are to have.

    Those of a user's own authority have the names of its hosts.
    """
    name = STORE_NAME if pem.is_of_job else ""
    return grpc.ssl_channel_credentials(pem.authority, pem.key, pem.certificate), name


def _pem(what: str, path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            text = file.read()
    except OSError as error:
        raise LaunchError(f"etcd: cannot read the {what} {path!r}: {error.strerror}") from error
    if b"-----BEGIN " not in text:
        raise LaunchError(f"etcd: the {what} {path!r} is not a PEM file")
    return text
