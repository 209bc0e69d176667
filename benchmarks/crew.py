"""Processes that are the workers of a benchmark without a launcher: a call goes to all of them at once.

with crew(["a/0#0", "b/0#0"], MyRank) as all_of:
    seconds = all_of("method", argument)        # of each, in the order of the workers
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from elaunch.workers.comm.group import Group
from elaunch.workers.comm.secure.security import LinkSecurity
from elaunch.workers.comm.transport import Transport

PATIENCE_S = 120.0
FORK = multiprocessing.get_context("fork")


class Rank:
    """One of the processes; it has links to all others, and one thread to compute with.

    Args:
        workers: the names of all.
        place: its own among them.
        store: where they find each other.

    Attributes:
        security: which links are encrypted; None: none is.
    """

    security: LinkSecurity | None = None

    def __init__(self, workers: Sequence[str], place: int, store: dist.Store) -> None:
        torch.set_num_threads(1)
        self.worker, self.place = workers[place], place
        self.transport = Transport(self.worker, "", security=self.security)
        store.set(self.worker, self.transport.address)
        members = {worker: store.get(worker).decode() for worker in workers}
        self.transport.introduce(members)
        self.transport.connect(members, generation=1, timeout_s=PATIENCE_S)
        self.group = Group(self.transport, 1, workers)


class Crew:
    """The processes."""

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self._pipes = pipes

    def __call__(self, *call: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(call)
        return self.answers()

    def answers(self) -> list[Any]:
        said = [pipe.recv() for pipe in self._pipes]
        for one in said:
            if isinstance(one, RuntimeError):
                raise one
        return said


@contextlib.contextmanager
def crew(workers: Sequence[str], kind: type[Rank]) -> Iterator[Crew]:
    """Forked before there are threads, and killed at the end."""
    port = _free_port()
    ends = [FORK.Pipe() for _ in workers]
    processes = [
        FORK.Process(target=_serve, args=(kind, workers, place, port, theirs), daemon=True)
        for place, (_, theirs) in enumerate(ends)
    ]
    for process in processes:
        process.start()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    try:
        found = Crew([ours for ours, _ in ends])
        found.answers()
        yield found
    finally:
        for process in processes:
            process.kill()
            process.join()
        del store


def _serve(kind: type[Rank], workers: Sequence[str], place: int, port: int, pipe: Connection) -> None:
    """What a process does: the calls that come through its pipe."""
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=PATIENCE_S))
        rank = kind(workers, place, store)
        pipe.send(None)
        while (call := pipe.recv()) is not None:
            name, *arguments = call
            pipe.send(getattr(rank, name)(*arguments))
    except BaseException:
        pipe.send(RuntimeError(traceback.format_exc()))
    finally:
        os._exit(0)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
