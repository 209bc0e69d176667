"""Stores of every kind for the contract suites, and an etcd for those that need a real one."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaunch.rendezvous.embedded import EmbeddedEtcd
from elaunch.rendezvous.etcd import EtcdStore
from elaunch.rendezvous.memory import MemoryStore
from elaunch.rendezvous.store import Store

READY_S = 20.0


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedEtcd]:
    """One etcd for all tests of a module; a test that hurts it uses `own_etcd`."""
    server = EmbeddedEtcd(str(tmp_path_factory.mktemp("etcd")))
    server.start()
    try:
        server.wait_ready(READY_S)
        yield server
    finally:
        server.stop()


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[EmbeddedEtcd]:
    """An etcd of the test's own."""
    server = EmbeddedEtcd(str(tmp_path / "etcd"))
    server.start()
    try:
        server.wait_ready(READY_S)
        yield server
    finally:
        server.stop()


@pytest.fixture(params=["memory", "etcd"])
def store(request: pytest.FixtureRequest, etcd: EmbeddedEtcd) -> Iterator[Store]:
    """A store of each kind. Keys of other tests may be in it: use `prefix`."""
    made: Store = MemoryStore() if request.param == "memory" else EtcdStore(etcd.endpoint, timeout_s=20.0)
    yield made
    made.close()


@pytest.fixture
def prefix() -> str:
    """A prefix that no other test uses."""
    return f"/test/{uuid.uuid4().hex}/"
