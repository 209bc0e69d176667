"""Several workers in one process: a transport each, driven by threads."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, cast

import pytest

from elaunch.rendezvous.security.identity import NodeIdentity
from elaunch.rendezvous.security.secret import SecuritySettings
from elaunch.workers.comm.here import LINKS
from elaunch.workers.comm.secure.security import LinkSecurity
from elaunch.workers.comm.transport import Transport
from tests.helpers import scaled

T = TypeVar("T")
PATIENCE_S = 60.0

made_securities: list[Callable[[], LinkSecurity | None]] = [lambda: None]
"""The first of them makes what a crew's links are encrypted by."""


def make_transport(worker: str, token: str = "secret") -> Transport:
    """Returns a transport as crews have them."""
    return Transport(worker, token, security=made_securities[0]())


@contextmanager
def encrypted(monkeypatch: pytest.MonkeyPatch, secret: bytes = b"a secret of some length") -> Iterator[NodeIdentity]:
    """Links of crews are TCP, and encrypted."""
    monkeypatch.setenv(LINKS, "tcp")
    node = NodeIdentity(SecuritySettings(secret), "job", "node", encrypts=True)
    node.make(time.time())
    made_securities.insert(0, lambda: LinkSecurity(node.folder, always=True))
    try:
        yield node
    finally:
        del made_securities[0]
        node.remove()


@contextmanager
def crew(size: int, connected: bool = True) -> Iterator[list[Transport]]:
    """`size` transports "a/0#0", "a/1#0", ..., linked in generation 1 if `connected`."""
    transports: list[Transport] = []
    try:
        for index in range(size):
            transports.append(make_transport(f"a/{index}#0"))
        if connected:
            connect_all(transports)
        yield transports
    finally:
        for transport in transports:
            transport.interrupt(1 << 60)
            transport.close()


def addresses(transports: Sequence[Transport]) -> dict[str, str]:
    return {transport.worker: transport.address for transport in transports}


def introduce_all(transports: Sequence[Transport]) -> None:
    for transport in transports:
        transport.introduce(addresses(transports))


def connect_all(transports: Sequence[Transport], generation: int = 1) -> None:
    members = addresses(transports)
    each(lambda f: f.connect(members, generation=generation, timeout_s=PATIENCE_S), transports)


@contextmanager
def switching_often() -> Iterator[None]:
    """Threads take turns ten times as often as by default: those of engines wait for each other all the time.

    They share one core, unless `make soak` has them run at the same time: handing the interpreter's lock from core to
    core takes as much again as what they compute.
    """
    interval_s, cores = sys.getswitchinterval(), sorted(os.sched_getaffinity(0))
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    sys.setswitchinterval(5e-4)
    os.sched_setaffinity(0, scaled([cores[process % len(cores)]], cores))
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        sys.setswitchinterval(interval_s)


class Task:
    """A call in a thread; `result` waits for it and raises what it raised."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._value: object = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], object]) -> None:
        try:
            self._value = call()
        except BaseException as error:
            self._error = error

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def result(self, patience_s: float = PATIENCE_S) -> object:
        self._thread.join(patience_s)
        assert not self._thread.is_alive(), "the call hangs"
        if self._error is not None:
            raise self._error
        return self._value


def together(calls: Sequence[Callable[[], T]], patience_s: float = PATIENCE_S) -> list[T]:
    """Runs the calls at the same time; returns their results, or raises the first error."""
    return [cast(T, task.result(patience_s)) for task in [Task(call) for call in calls]]


def outcomes(calls: Sequence[Callable[[], object]]) -> list[BaseException | object]:
    """Like `together`, with errors returned in the place of results."""
    collected: list[BaseException | object] = []
    for task in [Task(call) for call in calls]:
        try:
            collected.append(task.result())
        except Exception as error:
            collected.append(error)
    return collected


def each(call: Callable[..., T], *arguments: Sequence[Any]) -> list[T]:
    """Like `map`, with all calls at the same time."""
    return together([partial(call, *args) for args in zip(*arguments, strict=True)])
