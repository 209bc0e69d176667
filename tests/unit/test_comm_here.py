"""Links within a machine: Unix sockets, to be had only from workers of the same user there."""

from __future__ import annotations

import os
import socket

import pytest

from elaunch.workers.comm import here
from elaunch.workers.comm.connection import HERE_LATENCY_S, MEASURED_BYTES
from elaunch.workers.comm.transport import Transport
from tests.unit.comm_crew import crew, together


def families(transport: Transport) -> set[int]:
    return {link.socket.family for link in transport._links.values()}


def exchange(a: Transport, b: Transport, n_bytes: int) -> None:
    body, got = os.urandom(n_bytes), bytearray(n_bytes)
    together(
        [
            lambda: a.exchange(1, 1, sends=[(b.worker, 0, memoryview(body))]),
            lambda: b.exchange(1, 1, receives=[(a.worker, 0, memoryview(got))]),
        ]
    )
    assert got == body


def test_workers_of_one_machine_have_unix_sockets() -> None:
    with crew(3) as transports:
        assert [families(transport) for transport in transports] == [{socket.AF_UNIX}] * 3


def test_they_have_tcp_where_the_user_wants_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(here.LINKS, "tcp")
    with crew(2) as (a, b):
        assert families(a) == families(b) == {socket.AF_INET}


def test_the_name_of_another_user_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sits at the name of a worker would be told the token."""
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with crew(2) as (a, b):
        assert families(a) == families(b) == {socket.AF_INET}


def test_a_name_that_is_taken_leaves_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX) as squatter:
        squatter.bind("\0elaunch/test-taken")
        monkeypatch.setattr(here, "_name", lambda address: "\0elaunch/test-taken")
        with crew(2) as (a, b):
            assert families(a) == families(b) == {socket.AF_INET}


def test_a_worker_that_has_gone_leaves_no_name() -> None:
    with crew(1) as (a,):
        address = a.address
        found = here.connect_here(address)
        assert found is not None
        found.close()
    assert here.connect_here(address) is None


@pytest.mark.parametrize("links", ["", "tcp"])
def test_how_fast_a_link_is_shows_once_it_has_carried_enough(links: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(here.LINKS, links)
    with crew(2) as (a, b):
        exchange(a, b, 1000)
        assert a.rates() == {}
        exchange(a, b, 2 * MEASURED_BYTES)
        rate, latency_s = a.rates()["a/1"]
        assert 1e7 < rate < 1e12
        assert latency_s == HERE_LATENCY_S if not links else 0 < latency_s < 1
