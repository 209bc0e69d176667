"""The process groups that a function makes of torch.distributed: found as they are made, freed, forgotten.

Whoever makes one says to which store it comes, and there all its members meet first: so nobody waits in a backend for
one that is gone. From then on it can be freed by any thread.

Gloo tells nobody of a message that it could not send or was in the middle of sending when it found the end of the
connection: whoever waits for that waits for ever. So nobody's connections end under a message. Each worker ends what it
reads itself, when what it sends has left; and it keeps its ends of the connections open, and drops what still comes,
until all members have left their functions.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from elaunch import threads
from elaunch.errors import UsageError
from elaunch.workers.comm.native import ended, sockets
from elaunch.workers.comm.native.bulk import end_kept, keep, keep_until_over
from elaunch.workers.comm.native.groups import meet
from elaunch.workers.comm.native.hangups import Hangups, await_failure, communicator_of
from elaunch.workers.comm.native.held_calls import before_grouped
from elaunch.workers.comm.native.nccl import SETTINGS, error_of
from elaunch.workers.reentry.gloo_waits import GlooWaits

# The package's attribute of this name is a function.
rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")

OPEN_S = 30.0
"""For a backend to connect members who are all there."""

MEET_S = 1800.0
"""For all members of a group to come to its making, as torch has it."""


STORE_S = 0.05
"""Between two attempts to reach the job's store."""

END_S = 10.0
"""For groups to end before this process does: an interpreter that ends under a backend's thread aborts the process."""

SENT_S = 0.3
"""For what Gloo is sending to leave; the machine of a peer may be gone."""

LOOK_S = 0.0005

DRAIN_S = 0.005
"""Between two looks for what has come."""

CONNECTING_STEPS = 3
"""Steps of an entry until all members that have something for each other are connected."""

WITHOUT_MEMBERS = ("mpi", "fake")
"""Backends whose members do not meet in a store."""


class FunctionGroups:
    """The process groups of one worker's function, from one entry to the next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._older: frozenset[int] = frozenset()
        self._connections: list[sockets.Socket] = []
        self._left: list[sockets.Socket] = []  # of the entry before
        self._device_groups: list[Any] = []
        self._communicators: list[int] = []  # of NCCL's groups among them
        self._hangups: Hangups | None = None
        self._steps = 0  # of this entry
        self._waits = GlooWaits(self._over, lambda: not self._device_groups)
        self._ending: list[threading.Thread] = []
        self._helper: Callable[..., Any] = distributed_c10d._new_process_group_helper
        self._connect: Callable[..., Any] = rendezvous._create_c10d_store
        _ALIVE.add(self)
        atexit.register(self.close)

    @contextlib.contextmanager
    def watching(self, entry: str) -> Iterator[None]:
        """Returns a context in which the groups that are made are known, and at whose end they are freed and forgotten.

        Args:
            entry: a name for it that all members have and no other entry; it comes before all keys in the job's store.

        Raises:
            UsageError: a default group is there already.
        """
        if dist.is_initialized():
            raise UsageError(
                "torch.distributed is initialized before the elastic function is entered, and its groups cannot "
                "change with the members: call init_process_group in the function"
            )
        self.let_go()
        with self._lock:
            self._over.clear()
            self._older = sockets.inodes()
        self._steps = 0
        distributed_c10d._new_process_group_helper = self._make  # type: ignore[assignment]
        rendezvous._create_c10d_store = lambda *args, **more: dist.PrefixStore(entry, self._store(*args, **more))
        shutdown: Callable[[Any], None] = dist.ProcessGroup.shutdown
        dist.ProcessGroup.shutdown = lambda group: self._shut_down(group, shutdown)  # type: ignore[assignment]
        grouped = before_grouped(self._hold) if dist.is_nccl_available() else contextlib.nullcontext()
        try:
            with self._waits.in_spells(), grouped:
                yield
        finally:
            distributed_c10d._new_process_group_helper = self._helper
            rendezvous._create_c10d_store = self._connect
            dist.ProcessGroup.shutdown = shutdown  # type: ignore[assignment]
            self.free()
            self._forget()

    def free(self) -> None:
        """Ends all groups: who waits here in one, or for one, gets an error within milliseconds. From any thread."""
        with self._lock:
            if self._over.is_set():
                return
            self._over.set()
            connections, groups = list(self._connections), list(self._device_groups)
        self._abort(groups)  # first: what torch gives to one that has lost a peer meanwhile may end the process
        _end_store_clients(self._older)
        self._end(connections)

    @property
    def on_device(self) -> bool:
        """Whether there is a group whose collectives a device does, behind the back of the training thread."""
        return bool(self._device_groups)

    def errored(self) -> str | None:
        """Returns what has gone wrong in the groups of devices; what a device has done by then may be garbage.

        From any thread. A group that has an error holds its device up until it is freed.
        """
        if self._over.is_set():
            return "its process groups were freed"
        with self._lock:
            groups = list(self._device_groups)
        errors = (error_of(one) for one in groups if hasattr(one, "get_error"))
        return next((f"a process group has {name}" for name in errors if name), None)

    def stepped(self) -> None:
        """Looks after a step for the connections that torch has made in it, when members first needed them."""
        self._steps += 1
        if self._steps <= CONNECTING_STEPS:
            self._watch_connections()

    def _watch_connections(self) -> None:
        """Has whoever works in groups of NCCL freed as soon as a peer of them is lost; by the training thread."""
        found = [one for one in map(communicator_of, list(self._device_groups)) if one]
        if found:
            with self._lock:
                self._communicators = found
            self._hangups = self._hangups or Hangups(self._after_hangup)
            self._hangups.watch(self._older)

    def _hold(self) -> None:
        if self._hangups is not None:
            self._hangups.hold(self._over)

    def _after_hangup(self) -> None:
        if await_failure(self._living_communicators, self._over):
            self.free()

    def _living_communicators(self) -> list[int]:
        with self._lock:
            return [] if self._over.is_set() else list(self._communicators)

    def _shut_down(self, group: Any, own: Callable[[Any], None]) -> None:
        """Takes the place of torch's way to end a group, for the function: what a device has is freed with the entry.

        What torch has destroyed an abort would free once more; and torch waits for members that may be gone.
        """
        with self._lock:
            ours = {id(one) for one in self._device_groups}
        if not any(id(group._get_backend(device)) in ours for device in group._device_types):
            own(group)

    def await_device(self, device: torch.device) -> str | None:
        """Returns when a device has done what it was given, and then what has gone wrong in its groups."""
        ended.reach(device, ended.here(device), self.errored, failed=self.free)
        return self.errored()

    def let_go(self) -> None:
        """Ends the connections of the entry before, for the peers as well. From any thread."""
        with self._lock:
            left, self._left = self._left, []
        for one in left:
            one.shut_down()
            one.silence()  # Gloo may keep it, in a group that threads of its own do not come out of
            one.close()

    def close(self) -> None:
        """Returns when all groups that were freed have ended, or `END_S` later."""
        end_s = time.monotonic() + END_S
        for thread in self._ending:
            thread.join(max(0.0, end_s - time.monotonic()))

    def _store(self, host: str, port: int, rank: int, size: int, timeout: timedelta, *args: Any, **more: Any) -> Any:
        """Connects to the job's store as torch does, but only once it can be reached: torch's own attempts end late.

        Raises:
            RuntimeError: the members have changed before.
        """
        serves_it = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        end_s = time.monotonic() + timeout.total_seconds()
        while not (serves_it or _listens(host, port)) and time.monotonic() < end_s:
            if self._over.wait(STORE_S):
                raise RuntimeError(f"the members have changed before the store of process groups at {host}:{port} came")
        return self._connect(host, port, rank, size, timeout, *args, **more)

    def _make(
        self, group_size: int, group_rank: int, ranks: Any, backend: Any, store: Any, *args: Any, **more: Any
    ) -> Any:
        """Makes a group as torch does, after all its members have come; torch calls it in place of its own."""
        if dist.is_nccl_available():
            os.environ.update(SETTINGS)  # here, as torchtitan sets some of them itself before it makes a group
        timeout: timedelta | None = more.get("timeout")
        own_rank = dist.get_rank() if dist.is_initialized() else group_rank
        name = str(args[0] if args else more.get("group_name", ""))
        if str(backend).lower() not in WITHOUT_MEMBERS and (own_rank in ranks or not ranks):
            prefix = dist.PrefixStore(f"elaunch/{name}", store)
            meet(prefix, len(ranks) or group_size, self._over, timeout.total_seconds() if timeout else MEET_S)
            older = sockets.inodes()
            made = self._helper(
                group_size, group_rank, ranks, backend, store, *args, **{**more, "timeout": _shorter(timeout)}
            )
            self._take(made[0], prefix, older, timeout)
            if not ranks:
                self._connect_devices()
            self._watch_connections()
            return made
        return self._helper(group_size, group_rank, ranks, backend, store, *args, **more)

    def _take(self, group: Any, store: dist.Store, older: frozenset[int], timeout: timedelta | None) -> None:
        backends = {id(one): one for device in group._device_types if (one := group._get_backend(device)) is not None}
        devices = [one for one in backends.values() if not isinstance(one, dist.ProcessGroupGloo)]
        found: list[sockets.Socket] = []
        if len(devices) < len(backends):
            own = [port for inode, port in sockets.listening() if inode not in older]
            sockets.tell(store, group.rank(), own)
            found = sockets.of_group(store, group.rank(), group.size(), own, older)
        for one in backends.values():
            if timeout is not None:
                one._set_default_timeout(timeout)
        with self._lock:
            self._connections += found
            self._device_groups += devices
            over = self._over.is_set()
        if over:
            self._abort(devices)
            self._end(found)
            raise RuntimeError("the members have changed while a process group was made")

    def _connect_devices(self) -> None:
        """Has the members of the default group connect their devices now, in a thread of its own.

        No abort frees who waits for that. Torch leaves it to the first collective of the training thread, which may
        come when a member has died. Of other groups it is left to that: they may be for messages alone.

        Raises:
            RuntimeError: the members have changed meanwhile, or they cannot connect.
        """
        groups = [one for one in self._device_groups if needs_connection(one)]
        if not groups:
            return
        index = torch.accelerator.current_device_index()  # of this thread
        failures = list[BaseException]()

        def connect() -> None:
            try:
                for one in groups:
                    sum_once(one, index)
            except RuntimeError as error:
                failures.append(error)

        thread = threads.start("elaunch-groups-connect", connect, failures.append)
        while thread.is_alive():
            if self._over.wait(LOOK_S):
                raise RuntimeError("the members have changed while a process group connected their devices")
        if failures:
            raise failures[0]

    def _forget(self) -> None:
        """Takes all groups out of torch's tables, as destroying them does, but waits for none of them."""
        world = distributed_c10d._world
        groups = list(world.pg_map)
        distributed_c10d._update_default_pg(None)
        tables: tuple[Any, ...] = (
            world.pg_map,
            world.pg_names,
            world.pg_group_ranks,
            world.pg_backend_config,
            world.pg_to_tag,
            world.tags_to_pg,
            world.pg_coalesce_state,
        )
        for table in tables:
            table.clear()
        distributed_c10d._unregister_all_process_groups()
        world.group_count = 0
        _forget_meshes()
        with self._lock:
            self._left += self._connections
            self._connections = []
            devices, self._device_groups, self._communicators = self._device_groups, [], []
        threads.start("elaunch-groups-drain", self._drain, lambda _: None)
        self._begin_end("elaunch-groups-close", end_kept)
        keep(devices)  # their destructors block for long
        if self._waits.left:
            keep_until_over(groups, self._waits.left)  # their ends would wait for threads that Gloo has lost
        else:
            # Gloo's ends its threads, which takes some milliseconds.
            self._begin_end("elaunch-groups-close", groups.clear)

    def _abort(self, groups: Sequence[Any]) -> None:
        """Frees whoever waits in groups of devices."""
        for group in groups:
            self._begin_end("elaunch-group-abort", group.abort)

    def _end(self, connections: Sequence[sockets.Socket]) -> None:
        """Frees whoever waits in some connections of Gloo's."""
        end_s = time.monotonic() + SENT_S
        sending = list(connections)
        while sending:
            is_late = time.monotonic() >= end_s
            for one in [one for one in sending if is_late or not one.count_unsent()]:
                one.end_reading()
                sending.remove(one)
            if sending:
                time.sleep(LOOK_S)

    def _drain(self) -> None:
        """Takes what peers send to the entry before, until its connections are let go."""
        while True:
            with self._lock:
                if not self._left:
                    return
                for one in self._left:
                    one.drain()
            time.sleep(DRAIN_S)

    def _begin_end(self, name: str, end: Callable[[], object]) -> None:
        with self._lock:  # the training thread forgets groups while the client's frees them
            self._ending = [thread for thread in self._ending if thread.is_alive()]
            self._ending.append(threads.start(name, end, lambda _: None))

    def _close_in_child(self) -> None:
        for one in [*self._connections, *self._left]:
            one.close_in_child()


def needs_connection(group: Any) -> bool:
    """Returns whether a group of devices connects its members with its first collective: NCCL's, of several."""
    return dist.is_nccl_available() and isinstance(group, dist.ProcessGroupNCCL) and group.size() > 1


def sum_once(group: Any, index: int) -> None:
    """Sums a number over a group of NCCL, beside all that the device does; for any thread.

    Torch's own call for this, `eager_connect_single_device`, has all messages go over the same communicator then.
    """
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        group.allreduce([torch.zeros(1, device=device)]).wait()


def _shorter(timeout: timedelta | None) -> timedelta:
    limit = timedelta(seconds=OPEN_S)
    return limit if timeout is None else min(timeout, limit)


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 5.0).close()
    except OSError:
        return False
    return True


def _end_store_clients(older: frozenset[int]) -> None:
    """Shuts down the connections to the store of the job that are younger than the entry."""
    port = int(os.environ.get("MASTER_PORT", "0"))
    for fd, inode in sockets.numbers():
        if inode in older:
            continue
        with contextlib.suppress(OSError), sockets.view(fd) as sock:
            if sockets.is_tcp(sock) and sock.getpeername()[1] == port:
                sock.shutdown(socket.SHUT_RDWR)


def _forget_meshes() -> None:
    """Empties the caches that take two meshes of the same shape for one."""
    if "torch.distributed.tensor" in sys.modules:
        from elaunch.workers.comm.mesh import forget_equal_meshes

        forget_equal_meshes()


def is_of_a_group(error: Exception) -> bool:
    """Returns whether an error comes from a process group or a store of torch."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in ("gloo", "nccl", "process group", "peer"))


_ALIVE: weakref.WeakSet[FunctionGroups] = weakref.WeakSet()


def _close_all_in_child() -> None:
    for one in list(_ALIVE):
        one._close_in_child()


# A forked child, such as a loader's, would keep the connections open after its parent was killed.
os.register_at_fork(after_in_child=_close_all_in_child)
