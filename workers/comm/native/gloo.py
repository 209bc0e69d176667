"""A native group over Gloo, for tensors in host memory."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elaunch.workers.comm.native import sockets
from elaunch.workers.comm.native.bulk import end_kept, keep_until_over
from elaunch.workers.comm.native.gloo_work import CLOSED_S, LOOK_S, Collective, GlooWork, GroupEnd, Messages

OPEN_TIMEOUT = timedelta(seconds=30)
THREADS = 2  # as many all-reduces run at a time
MESSAGE, EXCHANGE = 0, 1
"""Tags; what has the same is matched in order."""

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.0005, 0.05

ENDING_S = 0.1
"""For threads to come out of Gloo when the connections of a group have been closed."""

READ_S = 0.02
"""For Gloo to read what has come over connections that have been shut down, which takes it a millisecond."""

LONGEST = timedelta(hours=2)
"""For a collective: Gloo's thread in one whose message was lost on the way comes out of it then, and no sooner."""

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
        self._place: dist.Store | None = None  # Gloo does not keep what Python adds to it
        self._connections: list[sockets.Socket] = []
        self._lock = threading.Lock()
        self._shut_down_s = math.inf
        self._end = GroupEnd(self._is_closed, self._is_broken)
        self._begun: deque[Collective] = deque()
        _ALIVE.add(self)

    def open(self, store: dist.Store, rank: int, size: int, messages: bool = False) -> None:
        """Connects to all other members."""
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        with _MAKING:  # so that the new listening socket is this group's
            older = sockets.inodes()
            options._devices = [_device(self._host)]
            own = [port for inode, port in sockets.listening() if inode not in older]
        options._timeout, options._threads = OPEN_TIMEOUT, THREADS
        place = self._place = _Place(store, lambda: self._end.has_come)
        sockets.tell(place, rank, own)
        group = dist.ProcessGroupGloo(dist.PrefixStore("gloo", place), rank, size, options)
        group._set_default_timeout(LONGEST)
        found = sockets.of_group(place, rank, size, own, older)
        with self._lock:
            self._connections = found
            if not self._end.has_come and len(found) >= size - 1:
                self._group = group
                return
        self._end_connections()
        if not self._end.has_come:
            raise RuntimeError(f"{len(found)} of its {size - 1} connections were found")
        raise RuntimeError("the members have changed while it was opened")

    def all_reduce(self, tensor: torch.Tensor) -> dist.Work:
        """Begins to sum a tensor over the members, in place."""
        return self.wrap(self.backend_group().allreduce([tensor], _sum()), is_message=False)

    def backend_group(self) -> Any:
        """Returns Gloo's group."""
        group = self._group
        if group is None or self._end.has_come:
            raise RuntimeError("the group is closed")
        return group

    def wrap(self, work: dist.Work, is_message: bool) -> GlooWork:
        """Returns the work of an operation that was begun in Gloo's group: its waits end with the group."""
        if is_message:
            return Messages([work], self._end)
        found = Collective(work, self._end)
        with self._lock:
            while self._begun and self._begun[0].is_completed():
                self._begun.popleft()
            self._begun.append(found)
        return found

    def start_batch(self) -> bool:
        """Returns False: Gloo's operations run side by side."""
        return False

    def end_batch(self) -> None:
        """Does nothing: none is started."""

    def send(self, tensor: torch.Tensor, to: int) -> dist.Work:
        """Begins to send a tensor to a member."""
        return self.wrap(self.backend_group().send([tensor], to, MESSAGE), is_message=True)

    def receive(self, tensor: torch.Tensor, from_: int) -> dist.Work:
        """Begins to fill a tensor with what a member sends."""
        return self.wrap(self.backend_group().recv([tensor], from_, MESSAGE), is_message=True)

    def exchange(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> Sequence[dist.Work]:
        """Begins to send each member a flat tensor and to receive one from each."""
        group = self.backend_group()
        works = [group.recv([one], rank, EXCHANGE) for rank, one in enumerate(incoming) if one.numel()]
        works += [group.send([one], rank, EXCHANGE) for rank, one in enumerate(outgoing) if one.numel()]
        return [Messages(works, self._end)] if works else []

    def poison(self) -> None:
        """Shuts the connections down."""
        self._end.come()
        self._end_connections()

    def leave(self) -> None:
        """Does nothing: its work ends with `poison`, whether that has raised or not."""

    def errored(self) -> str | None:
        """Returns None: its work has raised what went wrong."""
        return None

    def close(self) -> None:
        """Ends Gloo's threads. A group in which one of them waits for a message whose end was lost is kept until then.

        Such a group has four descriptors and a thread.
        """
        end_kept()
        self._end.pass_by(lambda: not self._end.is_awaited, CLOSED_S)
        end_s = time.monotonic() + ENDING_S
        while (self._end.is_awaited or self._is_stuck()) and time.monotonic() < end_s:
            time.sleep(LOOK_S)
        with self._lock:
            if self._group is not None and self._is_stuck():
                keep_until_over((self._group, self._place), tuple(self._begun))
                for one in self._connections:
                    one.silence()
            self._group = self._place = None
            self._begun.clear()
            connections, self._connections = self._connections, []
        for one in connections:
            one.close()

    def _is_stuck(self) -> bool:
        return not all(work.is_completed() for work in self._begun)

    def _is_closed(self) -> bool:
        with self._lock:
            if time.monotonic() < self._shut_down_s + READ_S:
                return all(one.is_closed() for one in self._connections)
            return all(one.is_used_up() for one in self._connections)

    def _is_broken(self) -> bool:
        with self._lock:
            return any(one.is_closed() for one in self._connections)

    def _end_connections(self) -> None:
        with self._lock:
            self._shut_down_s = min(self._shut_down_s, time.monotonic())
            for one in self._connections:
                one.shut_down()

    def _close_in_child(self) -> None:
        for one in self._connections:
            one.close_in_child()


class _Place(dist.Store):
    """A store in which whoever waits for a member that died on the way is freed when the generation ends.

    Args:
        store: in which the members meet.
        is_over: returns whether the generation has ended.
    """

    def __init__(self, store: dist.Store, is_over: Callable[[], bool]) -> None:
        super().__init__()
        self._store, self._is_over = store, is_over

    def set(self, key: str, value: str) -> None:
        """Sets a value."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Returns a value once it is there."""
        self.wait([key], OPEN_TIMEOUT)
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: timedelta = OPEN_TIMEOUT) -> None:
        """Returns when all keys are there.

        Raises:
            RuntimeError: the generation has ended, or they did not come in time.
        """
        end_s, pause_s = time.monotonic() + timeout.total_seconds(), SHORTEST_PAUSE_S
        while not self._store.check(keys):
            if self._is_over():
                raise RuntimeError("the members have changed while it was opened")
            if time.monotonic() >= end_s:
                raise RuntimeError(f"not all members have come to its opening within {timeout.total_seconds():.0f} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


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
