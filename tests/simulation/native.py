"""Native groups of simulated workers: the real `NativeGroups` and `Reducer`, over backends that take time and break.

A backend has one of two manners. As over Gloo, a sum that is cut off raises, and the end of a peer cuts it off. As on a
device, whoever waits goes on at once, and the device later; only an abort frees that one from a sum without an end, and
leaves garbage in the tensor. What has gone wrong `errored` tells, if anything does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from math import inf
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch
from weakref import WeakKeyDictionary

import greenlet
import torch

from elaunch.rendezvous.membership import Generation, node_of
from elaunch.workers import runtime
from elaunch.workers.comm.native import ended, groups
from elaunch.workers.comm.native.bulk import Bulk
from elaunch.workers.comm.native.groups import NativeGroups
from elaunch.workers.data_parallel.reducer import NativeSums
from elaunch.workers.member import runtime_hooks, swaps
from elaunch.workers.member.swap_choice import MARGIN, SwapChoice
from tests.simulation.processes import Process

if TYPE_CHECKING:
    from tests.simulation.worker import Worker
    from tests.simulation.world import JobWorld

GARBAGE = 123_456.0
OPEN_S = 30.0
ABORT_S = (0.01, 0.08, 0.08, 1.0)
"""What a backend writes after its end it writes within so many seconds."""

LOOK_S = 0.2


class Thread(Process):
    """A thread of a process beside its training thread: it ends, and stops, with the process.

    Args:
        owner: the process.
        name: of its worker.
        run: what it does.
    """

    def __init__(self, owner: Process, name: str, run: Callable[[], None]) -> None:
        self._owner, self.name = owner, name
        super().__init__(owner._clock, run, self._over)
        self._thread.parent = owner._thread.parent
        owner.threads.append(self)
        _THREADS[self._thread] = self

    @classmethod
    def current(cls) -> Thread:
        return _THREADS[greenlet.getcurrent()]

    @property
    def stopped_until_s(self) -> float:
        return self._owner.stopped_until_s

    @stopped_until_s.setter
    def stopped_until_s(self, value: float) -> None:
        pass

    def is_alive(self) -> bool:
        return self.alive

    def join(self, timeout_s: float | None = None) -> None:
        if self.alive:
            self._owner.wait(self, timeout_s)

    def _over(self, code: int) -> None:
        self.alive = False
        self._owner.threads.remove(self)
        self._owner.wake(self)


_THREADS: WeakKeyDictionary[greenlet.greenlet, Thread] = WeakKeyDictionary()


class Event:
    """Stands in for `threading.Event`, for one thread that waits."""

    def __init__(self, thread: Thread) -> None:
        self._thread, self._is_set = thread, False

    def set(self) -> None:
        self._is_set = True
        self._thread.wake(self)

    def wait(self, timeout_s: float) -> bool:
        return self._is_set or self._thread.wait(self, timeout_s)


class Store:
    """The store of an attempt, which the agent of a generation's first node serves; each call takes time."""

    def __init__(self, world: JobWorld, host: str, prefix: str) -> None:
        self._world, self._host, self.prefix = world, host, prefix
        self._values = world.native_values

    def under(self, prefix: str) -> Store:
        return Store(self._world, self._host, f"{self.prefix}/{prefix}")

    def add(self, key: str, number: int) -> int:
        self._pass()
        found: int = self._values.get(f"{self.prefix}/{key}", 0) + number
        self._values[f"{self.prefix}/{key}"] = found
        return found

    def set(self, key: str, value: str) -> None:
        self._pass()
        self._values[f"{self.prefix}/{key}"] = value

    def check(self, keys: list[str]) -> bool:
        self._pass()
        return all(f"{self.prefix}/{key}" in self._values for key in keys)

    def _pass(self) -> None:
        thread, world = Thread.current(), self._world
        thread.sleep(world.delay_s("store"))
        node = world.nodes.get(self._host)
        if node is None or node.ended:
            raise RuntimeError(f"the store of {self._host} has hung up")
        if world.apart(f"{self._host}/0#0", thread.name):
            thread.sleep(OPEN_S)
            raise RuntimeError(f"the store of {self._host} does not answer")


class SimulatedGroups(NativeGroups):
    """The native groups of a simulated worker: the real ones but for threads."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(lambda: cast(Bulk, SimulatedBulk(worker)))
        self._worker = worker
        self.leaves = False

    @property
    def offered(self) -> str:
        return ""  # nothing moves: the state of a simulated job is a number

    def close(self) -> None:
        self.leaves = True
        super().close()

    def start(self, name: str, run: Callable[[], object]) -> threading.Thread:
        process = self._worker.process
        thread = Thread(process, self._worker.id, run)  # type: ignore[arg-type]
        if name == "elaunch-native-open":
            assert self._newest is not None
            self._newest.over = Event(thread)  # type: ignore[assignment]
        else:
            run.__self__.retired = True  # type: ignore[attr-defined]
        self._threads = [one for one in self._threads if one.is_alive()] + [thread]  # type: ignore[list-item]
        self._worker.world.at(0.0, partial(process.when_running, thread.start))
        return thread  # type: ignore[return-value]


class Sum:
    """An all-reduce of a native group on one member; what it does to the tensor it does without a thread's help."""

    def __init__(self, bulk: SimulatedBulk, number: int, tensor: torch.Tensor) -> None:
        self.bulk, self.number, self._tensor = bulk, number, tensor
        self.own = float(tensor)
        self._ended = False
        self._failed = ""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """With a time-out, as while a step goes on: a device's stream goes on by itself."""
        process = self.bulk.worker.process
        end_s = inf if timeout is None else self.bulk.world.now_s + timeout.total_seconds()
        while not self._ended and not (timeout is not None and self.bulk.is_device):
            left_s = end_s - self.bulk.world.now_s
            if left_s <= 1e-9:
                raise RuntimeError("Operation timed out!")
            process.wait(self, None if left_s == inf else left_s)
        if self._failed:
            raise RuntimeError(self._failed)
        return True

    def is_completed(self) -> bool:
        return self._ended

    def succeed(self, total: float) -> None:
        if not self._ended:
            self._tensor.fill_(total)
            self._end()

    def break_off(self, why: str) -> None:
        if not self._ended:
            self._tensor.fill_(GARBAGE)
            self._failed = "" if self.bulk.is_device else why
            self._end()

    def _end(self) -> None:
        self._ended = True
        self.bulk.running.pop(self.number, None)
        self.bulk.worker.process.wake(self)


class Mark:
    """A place in the work of a device: behind all sums until now. Each look at it takes time while some go on."""

    def __init__(self, sums: NativeSums) -> None:
        self._works: list[Any] = list(sums._works)

    def query(self) -> bool:
        going = [work for work in self._works if not work.is_completed()]
        return not going or (going[-1].bulk.worker.process.wait(going[-1], LOOK_S) and self.query())


class SimulatedBulk:
    """A native group of one worker.

    Attributes:
        running: its sums that have not ended, by number.
        retired: it had been open, and is closed after the votes.
    """

    backend = "simulated"

    def __init__(self, worker: Worker) -> None:
        self.worker, self.world = worker, worker.world
        self.is_device = self.world.native_on_device
        self.room: Room | None = None
        self.rank = -1
        self.opened = self.poisoned = self.retired = self.closed = False
        self._broken = ""
        self._issued = 0
        self.running: dict[int, Sum] = {}
        worker.bulks.append(self)

    def open(self, store: Any, rank: int, size: int, messages: bool = False) -> None:
        thread, world = Thread.current(), self.world
        self.rank = rank
        thread.sleep(world.delay_s(self.worker.id))
        if world.rng.random() < world.refusals:
            raise RuntimeError("no route to host")
        self.room = room = world.native_rooms.setdefault(store.prefix, Room(world, size))
        room.bulks[rank] = self
        end_s = world.now_s + OPEN_S
        for bulk in room.bulks.values():
            bulk.worker.wake_threads(room)
        while len(room.bulks) < size or any(room.silent(self, bulk) for bulk in room.bulks.values()):
            if world.now_s >= end_s or (self.poisoned and self.is_device):
                raise RuntimeError("it was not opened")
            thread.wait(room, 0.5)
        thread.sleep(world.delay_s(self.worker.id) * world.rng.choice([1, 1, 1, 10]))
        if self.poisoned:
            raise RuntimeError("the members have changed while it was opened")
        self.opened = True

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        assert self.opened, f"{self.worker.id} uses a group that is not open"
        assert not self.closed, f"{self.worker.id} uses a group that is closed"
        if self.poisoned or (self._broken and not self.is_device):
            raise RuntimeError(self._broken or "the group is closed")
        assert self.room is not None
        work = Sum(self, self._issued, tensor)
        self._issued += 1
        self.running[work.number] = work
        self.room.contribute(self, work)
        return work

    def poison(self) -> None:
        if self.poisoned:
            return
        self.poisoned = True
        self.worker.wake_threads(self.room)
        late_s = self.world.rng.random() * self.world.rng.choice(ABORT_S)
        self.world.at(late_s, partial(self.worker.process.when_running, partial(self.end_sums, "aborted")))
        if self.room is not None:
            self.room.left_by(self)

    def leave(self) -> None:
        pass

    def end_sums(self, why: str) -> None:
        for work in list(self.running.values()):
            work.break_off(why)

    def peer_left(self) -> None:
        """A peer has ended, or has left the group: its connections are closed."""
        if not self.is_device or self.world.rng.random() < 0.5:  # a device may not be told
            self.break_down("connection closed by peer")

    def break_down(self, why: str) -> None:
        """Its connections break."""
        if self.opened and not self.poisoned and not self.closed:
            self._broken = why
            if not self.is_device:
                self.end_sums(why)

    @property
    def is_broken(self) -> bool:
        return bool(self._broken)

    def errored(self) -> str | None:
        return "aborted" if self.poisoned else self._broken if self.is_device and self._broken else None

    def close(self) -> None:
        assert not self.closed, f"{self.worker.id} closes a group twice"
        self.closed = True
        native = self.worker.member.native if self.worker.member is not None else None
        assert isinstance(native, SimulatedGroups)
        if native.leaves or not self.retired or self.worker.active is None:
            return
        assert self.room is not None
        for other in self.room.bulks.values():
            survives = other.worker.alive and other.worker.id in self.worker.active.ids
            assert other.poisoned or not survives, (
                f"{self.worker.id} closes a group that {other.worker.id} has not left"
            )


class Room:
    """What a native group is between its members.

    Attributes:
        bulks: of the members that have come to its opening, by rank.
    """

    def __init__(self, world: JobWorld, size: int) -> None:
        self.world, self.size = world, size
        self.bulks: dict[int, SimulatedBulk] = {}
        self._sums: dict[int, dict[int, Sum]] = {}
        self._lost: set[tuple[int, int]] = set()

    def contribute(self, bulk: SimulatedBulk, work: Sum) -> None:
        parts = self._sums.setdefault(work.number, {})
        parts[bulk.rank] = work
        if len(parts) == self.size:
            for one in parts.values():
                self.world.at(self.world.delay_s(one.bulk.worker.id), partial(self._deliver, one))

    def silent(self, one: SimulatedBulk, other: SimulatedBulk) -> bool:
        return self.world.silent_since_s(one.worker.id, other.worker.id) < inf

    def look(self) -> None:
        """Delivers what a silence has held up."""
        for parts in self._sums.values():
            if len(parts) == self.size:
                for one in parts.values():
                    self._deliver(one)

    def left_by(self, bulk: SimulatedBulk) -> None:
        """A member has poisoned its group, or has ended: what it has sent last may be lost."""
        for other in self.bulks.values():
            if other is not bulk and other.worker.alive:
                for work in other.running.values():
                    if self.world.rng.random() < 0.5:
                        self._lost.add((other.rank, work.number))
                if not self.silent(bulk, other):
                    self.world.at(self.world.notice_s(), partial(other.worker.process.when_running, other.peer_left))

    def _deliver(self, work: Sum) -> None:
        bulk, parts = work.bulk, self._sums[work.number]
        lost = (bulk.rank, work.number) in self._lost or bulk.is_broken
        if lost or any(self.silent(bulk, part.bulk) for part in parts.values()):
            return
        if bulk.worker.alive and work.number in bulk.running:
            work.succeed(sum(part.own for part in parts.values()))


def store_of(world: JobWorld, generation: Generation) -> Store:
    """Returns the store in which the members of a generation meet."""
    return Store(world, node_of(generation.ids[0]), str(generation.attempt))


@contextmanager
def backends_of(world: JobWorld) -> Iterator[None]:
    """Has native groups of this world opened in its stores, by its time."""
    with ExitStack() as patches:
        time = world.clock.monotonic
        patches.enter_context(patch.object(groups, "time", world.clock))
        stores = SimpleNamespace(PrefixStore=lambda prefix, store: store.under(prefix))
        patches.enter_context(patch.object(groups, "dist", stores))
        patches.enter_context(patch.object(groups, "_say", lambda line: None))
        patches.enter_context(patch.object(ended, "time", SimpleNamespace(monotonic=time, sleep=lambda seconds: None)))
        patches.enter_context(
            patch.object(NativeSums, "_mark", lambda sums: Mark(sums) if world.native_on_device else None)
        )
        patches.enter_context(patch.object(runtime, "within", lambda *limit: nullcontext()))  # by a real clock
        patches.enter_context(patch.object(runtime_hooks, "store_of", partial(store_of, world)))
        patches.enter_context(patch.object(swaps, "time", world.clock))
        choice = SwapChoice(True, world.awaited_s / MARGIN, 9.0, 0.0) if world.awaited_s else None
        patches.enter_context(patch.object(swaps, "choose", lambda reports, size: choice if size > 1 else None))
        yield


@contextmanager
def groups_of(worker: Worker) -> Iterator[None]:
    """Has the runtime that is made meanwhile have the native groups of a simulated worker."""
    made: Callable[..., NativeGroups] = lambda make, messages: SimulatedGroups(worker)  # noqa: E731
    with patch.object(runtime, "NativeGroups", made):
        yield
