"""What fault tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from elaunch.rendezvous.embedded import EmbeddedEtcd


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EmbeddedEtcd]:
    server = EmbeddedEtcd(str(tmp_path / "etcd"))
    server.start()
    try:
        server.wait_ready(20)
        yield server
    finally:
        server.stop()
