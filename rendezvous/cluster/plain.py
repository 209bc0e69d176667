"""Whether the servers at an endpoint speak TLS. Commands ask that: they do not know who has started the etcd there."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from contextlib import suppress

from elaunch.rendezvous.membership import split_address

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # and a frame SETTINGS without any
_HEADER_BYTES = 9
_SETTINGS = 4


def speaks_tls(addresses: Sequence[str], timeout_s: float) -> bool:
    """Returns whether one of some servers speaks TLS; not where nobody answers.

    A server without TLS answers the first words of HTTP/2 (RFC 9113, 3.4) with its settings. One with TLS hangs up.

    Args:
        addresses: of the servers, `host:port`.
        timeout_s: for all of them.
    """
    end_s = time.monotonic() + timeout_s
    for address in addresses:
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            break
        with suppress(OSError, ValueError), socket.create_connection(split_address(address), left_s) as connection:
            return not _has_settings(connection, end_s)
    return False


def _has_settings(connection: socket.socket, end_s: float) -> bool:
    answer = b""
    try:
        connection.sendall(_PREFACE)
        while len(answer) < _HEADER_BYTES and (left_s := end_s - time.monotonic()) > 0:
            connection.settimeout(left_s)
            part = connection.recv(_HEADER_BYTES - len(answer))
            if not part:
                break
            answer += part
    except TimeoutError:
        return True  # it waits: a client without TLS tells more of it
    except ConnectionError:
        return False
    return len(answer) == _HEADER_BYTES and answer[3] == _SETTINGS
