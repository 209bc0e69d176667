"""The store of a job under test: a server apart, or on one or three of its nodes, and where it is meanwhile."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from typing import Protocol

from elaunch.rendezvous.embedded import EmbeddedEtcd
from tests.jobs.plain_etcd import find_server

PORT = 29400
DIAL_S = 0.2
READY_S = 30.0

MOVES = re.compile(
    rb"this node (serves another one|serves the rendezvous store, too,|goes over to the rendezvous store) "
    rb"at ([\d.]+:\d+)"
)
"""What an agent says when it hosts the store, one that it has founded, or with others, and where it finds another."""


class StoreUnderTest(Protocol):
    """Where a job meets."""

    @property
    def flags(self) -> tuple[str, ...]:
        """Returns what an agent that is started now is told of it."""

    @property
    def endpoint(self) -> str:
        """Returns where it is, for `elaunch ctl`."""

    def server(self, agents: Mapping[str, int], host: str) -> tuple[str, int] | None:
        """Returns one of its servers: the host whose agent has it (empty: none has) and its process.

        Args:
            agents: processes of those that run, by host.
            host: whose server it is, if it has one.
        """

    def note(self, host: str, text: bytes) -> None:
        """Takes what the agent of a host has written."""

    def start_again(self) -> None:
        """Starts a server that was killed, unless its agent does."""


class StoreApart:
    """An etcd that is no node's."""

    def __init__(self, etcd: EmbeddedEtcd) -> None:
        self._etcd = etcd

    @property
    def flags(self) -> tuple[str, ...]:
        return (f"--rdzv-endpoint={self.endpoint}",)

    @property
    def endpoint(self) -> str:
        return self._etcd.endpoint

    def server(self, agents: Mapping[str, int], host: str) -> tuple[str, int] | None:
        pid = self._etcd.pid
        return None if pid is None else ("", pid)

    def note(self, host: str, text: bytes) -> None:
        pass

    def start_again(self) -> None:
        self._etcd.start_again()
        self._etcd.wait_ready(READY_S)


class StoreOnNodes:
    """An etcd that the first node hosts, or the first three.

    A node that comes later is told where the job is by then, as the agents' lines say it: with one server where that
    is, with three where each host has it.

    Args:
        addresses: of the hosts, by name, in the order in which they come.
        servers: how many nodes host it.
    """

    def __init__(self, addresses: Mapping[str, str], servers: int) -> None:
        self._servers = servers
        self._at = {host: f"{address}:{PORT}" for host, address in addresses.items()}
        self._newest = next(iter(self._at.values()))

    @property
    def flags(self) -> tuple[str, ...]:
        return ("--rdzv-backend=c10d", f"--rdzv-endpoint={self.endpoint}")

    @property
    def endpoint(self) -> str:
        return self._newest if self._servers == 1 else ",".join(list(self._at.values())[: self._servers])

    def server(self, agents: Mapping[str, int], host: str) -> tuple[str, int] | None:
        for name in sorted(agents, key=lambda name: name != host):
            if (pid := find_server(agents[name])) is not None:
                return name, pid
        return None

    def note(self, host: str, text: bytes) -> None:
        for how, address in MOVES.findall(text):
            if how.startswith(b"serves"):
                self._at[host] = address.decode()
            if not how.endswith(b"too,"):  # one that was founded, or, where others have not come there, the one before
                self._newest = address.decode()

    def start_again(self) -> None:
        pass


def answers(endpoint: str) -> bool:
    """Returns whether something listens at one of the addresses of an endpoint."""
    for address in endpoint.split(","):
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), DIAL_S).close()
        except OSError:
            continue
        return True
    return False
