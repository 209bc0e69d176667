"""A native group over Gloo, for tensors in host memory."""

from __future__ import annotations

import os
import threading
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elaunch.workers.comm.native import sockets

OPEN_TIMEOUT = timedelta(seconds=30)
THREADS = 2  # as many all-reduces run at a time
NO_TIMEOUT = timedelta(days=7)
"""Who is dead the membership finds out, and frees whoever waits."""

INTERFACE = "GLOO_SOCKET_IFNAME"


class GlooBulk:
    """A group of `ProcessGroupGloo`. `abort` of Gloo's wakes nobody, so its sockets are shut down instead.

    Args:
        host: address of this worker that the others can reach, unless `GLOO_SOCKET_IFNAME` names an interface.
    """

    backend = "gloo"

    def __init__(self, host: str) -> None:
        self._host = host
        self._group: Any = None  # what torch declares of its groups lacks their collectives
        self._connections: list[sockets.Socket] = []
        self._lock = threading.Lock()
        self._poisoned = False
        _ALIVE.add(self)

    def open(self, store: dist.Store, rank: int, size: int) -> None:
        """Connects to all other members."""
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        with _MAKING:  # so that the new listening socket is this group's
            older = sockets.inodes()
            options._devices = [_device(self._host)]
            own = [port for inode, port in sockets.listening() if inode not in older]
        options._timeout, options._threads = OPEN_TIMEOUT, THREADS
        store.set(f"ports/{rank}", ",".join(map(str, own)))
        group = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, options)
        group._set_default_timeout(NO_TIMEOUT)
        told = [store.get(f"ports/{peer}").decode() for peer in range(size) if peer != rank]
        others = [int(port) for ports in told for port in ports.split(",") if port]
        found = sockets.connected(own, others, older)
        with self._lock:
            self._connections = found
            if not self._poisoned:
                self._group = group
                return
        self._end_connections()
        raise RuntimeError("the members have changed while it was opened")

    def all_reduce(self, tensor: torch.Tensor) -> dist.Work:
        """Begins to sum a tensor over the members, in place."""
        group = self._group
        if group is None or self._poisoned:
            raise RuntimeError("the group is closed")
        work: dist.Work = group.allreduce([tensor], _sum())
        return work

    def poison(self) -> None:
        """Shuts the connections down."""
        with self._lock:
            self._poisoned = True
        self._end_connections()

    def leave(self) -> None:
        """Does nothing: its work ends with `poison`, whether that has raised or not."""

    def errored(self) -> str | None:
        """Returns None: its work has raised what went wrong."""
        return None

    def close(self) -> None:
        """Ends Gloo's threads."""
        with self._lock:
            self._group = None
            connections, self._connections = self._connections, []
        for one in connections:
            one.close()

    def _end_connections(self) -> None:
        with self._lock:
            for one in self._connections:
                one.shut_down()

    def _close_in_child(self) -> None:
        for one in self._connections:
            one.close_in_child()


def _device(host: str) -> dist.ProcessGroupGloo.Device:
    names = os.environ.get(INTERFACE, "").split(",")
    if names[0]:
        return dist.ProcessGroupGloo.create_device(interface=names[0])
    return dist.ProcessGroupGloo.create_device(hostname=host)


def _sum() -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.SUM  # type: ignore[assignment]
    return options


_MAKING = threading.Lock()
_ALIVE: weakref.WeakSet[GlooBulk] = weakref.WeakSet()


def _close_all_in_child() -> None:
    for bulk in list(_ALIVE):
        bulk._close_in_child()


# As for links: a forked child would keep the connections open after its parent was killed.
os.register_at_fork(after_in_child=_close_all_in_child)
