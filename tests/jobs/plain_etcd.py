"""A real etcd for tests of the launcher, and its administrator's tool; this process itself never talks to it."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from elaunch.rendezvous.embedded import EmbeddedEtcd, find_etcd

LIMIT_S = 20.0


@contextlib.contextmanager
def serving(folder: Path, host: str = "127.0.0.1") -> Iterator[EmbeddedEtcd]:
    """Serve until the end of the block."""
    server = EmbeddedEtcd(str(folder), host)
    try:
        server.start()
        server.wait_ready(LIMIT_S)
        yield server
    finally:
        server.stop()


def find_server(agent: int) -> int | None:
    """The process of the etcd that this agent has started, once it runs its program; None: it has none."""
    try:
        for child in psutil.Process(agent).children():
            with contextlib.suppress(psutil.NoSuchProcess, IndexError):
                if Path(child.cmdline()[0]).name == "etcd" and child.status() != psutil.STATUS_ZOMBIE:
                    return child.pid
    except psutil.NoSuchProcess:
        pass
    return None


def etcdctl(endpoint: str, *words: str) -> str:
    """Run the tool, which lies beside the server; what it prints."""
    program = Path(find_etcd()).with_name("etcdctl")
    if not program.exists():
        pytest.skip("needs the `etcdctl` program beside etcd")
    done = subprocess.run(
        [str(program), f"--endpoints={endpoint}", *words],
        env=os.environ | {"ETCDCTL_API": "3"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
