"""Hosts made of network namespaces, on one bridge: links between them are cut as in a data centre. Needs root."""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import subprocess
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

import pytest

LIMIT_S = 20.0


def ip(*words: str) -> None:
    """Run the `ip` program; fails the test with what it says."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


class Network:
    """Namespaces whose hosts reach each other, and this one, over a bridge; each has one address."""

    def __init__(self, tag: str, subnet: str) -> None:
        self._tag, self._subnet = tag, subnet
        self._numbers = itertools.count(2)
        self._hosts: dict[str, int] = {}
        self.gateway = f"{subnet}.1"
        # With an address of its own. Otherwise a bridge takes the lowest one of its ports: when a host with a lower one
        # is added, what the others send to the gateway is lost until their neighbour tables know of it, for seconds.
        ip("link", "add", tag, "address", "02:00:00:00:00:01", "type", "bridge")
        ip("addr", "add", f"{self.gateway}/24", "dev", tag)
        ip("link", "set", tag, "up")

    def add(self, name: str) -> str:
        """Make a host; returns the name of its namespace."""
        number = next(self._numbers)
        space, outside = f"{self._tag}-{name}", f"{self._tag}{number}"
        ip("netns", "add", space)
        self._hosts[name] = number
        ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", space)
        ip("link", "set", outside, "master", self._tag, "up")
        ip("-n", space, "link", "set", "lo", "up")
        ip("-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
        ip("-n", space, "link", "set", "eth0", "up")
        return space

    def cut(self, one: str, other: str, both_ways: bool = True) -> None:
        """Nothing of `one` reaches `other` any more, nor the other way round."""
        ip("-n", f"{self._tag}-{one}", "route", "add", "blackhole", f"{self.address(other)}/32")
        if both_ways:
            self.cut(other, one, both_ways=False)

    def mend(self, one: str, other: str, both_ways: bool = True) -> None:
        """Undo `cut`."""
        ip("-n", f"{self._tag}-{one}", "route", "del", "blackhole", f"{self.address(other)}/32")
        if both_ways:
            self.mend(other, one, both_ways=False)

    def part(self, some: Collection[str], others: Collection[str], cut: bool = True) -> None:
        """Cut, or mend, all that leads from some hosts to others; this one still reaches all of them."""
        for one, other in itertools.product(some, others):
            (self.cut if cut else self.mend)(one, other)

    def plug(self, name: str, into: bool) -> None:
        """Pull the cable of a host, or put it back."""
        ip("link", "set", f"{self._tag}{self._hosts[name]}", "up" if into else "down")

    def cable(self, name: str) -> str:
        """Return the interface here at which the cable of a host ends."""
        return f"{self._tag}{self._hosts[name]}"

    def address(self, name: str) -> str:
        """Return the address of a host."""
        return f"{self._subnet}.{self._hosts[name]}"

    def close(self) -> None:
        for name in self._hosts:
            with suppress(AssertionError):
                ip("netns", "del", f"{self._tag}-{name}")
        ip("link", "del", self._tag)


@contextmanager
def network() -> Iterator[Network]:
    """A network of this test's own."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces can only be made by root")
    if shutil.which("ip") is None:
        pytest.fail("this test makes network namespaces and needs the program `ip`: apt-get install iproute2")
    tag = f"el{secrets.token_hex(3)}"
    made = Network(tag, f"10.{secrets.randbelow(100) + 100}.{secrets.randbelow(256)}")
    try:
        yield made
    finally:
        made.close()
