"""All-reduces that run while backward goes on, in the order in which they are launched.

Over links one thread runs them, as it does in host memory where sums have a fixed order. A native group of the members
runs the others itself, once there is one.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist

from elaunch import threads
from elaunch.errors import CollectiveFailed, StepInterrupted
from elaunch.workers import heartbeat
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.native import ended
from elaunch.workers.comm.native.bulk import Bulk
from elaunch.workers.data_parallel.ordered import OrderedSums


class Reducer:
    """Runs a step's all-reduces in the background.

    The first error of a step is kept, and what is launched after it is ignored: a script's backward never fails because
    a peer did. Whoever waits helps, so that the last all-reduce of a step needs no change of threads.

    Args:
        failed: called with the generation when a native group failed.
        in_order: whether native groups add in the order of links.
    """

    def __init__(self, failed: Callable[[int], None] = lambda generation: None, in_order: bool = False) -> None:
        self._waiting: deque[torch.Tensor] = deque()
        self._arrived = threading.Condition()
        self._running = threading.Lock()
        self._group: Group | None = None
        self._native: NativeSums | None = None
        self._ordered = OrderedSums() if in_order else None
        self._scale = 1.0
        self._closed = False
        self._thread: threading.Thread | None = None
        self._failed = failed
        self.error: StepInterrupted | None = None
        self._failure: BaseException | None = None

    def begin(self, group: Group, scale: float, bulk: Bulk | None = None) -> None:
        """Starts a step: sums of this group, each multiplied by `scale`; by its native group, if that is given."""
        assert not self._waiting, "a step begins while all-reduces of another are under way"
        self._group, self._scale, self.error = group, scale, None
        self._native = None
        if bulk is not None and self._ordered is not None:
            self._native = NativeSumsInOrder(bulk, self._ordered, group.rank, group.size)
        elif bulk is not None:
            self._native = NativeSums(bulk)

    def launch(self, flat: torch.Tensor) -> None:
        """Reduce a 1-D tensor in place. It is complete when `wait` has returned and `error` is None."""
        group = self._group
        if group is None or self.error is not None:
            return
        if group.size == 1:
            flat.mul_(self._scale)
            return
        if self._native is not None:
            try:
                if self._native.add(flat, self._scale):
                    return
            except RuntimeError as error:
                self._native_failed(group, error)
                return
        if self._thread is None:
            self._thread = threads.start("elaunch-reducer", self._run, self._died)
        with self._arrived:
            self._waiting.append(flat)
            self._arrived.notify()

    def join(self) -> None:
        """Returns when whatever this thread does next with the sums, on a device its stream, comes after them."""
        group = self._group
        if self._native is None or self._ordered is not None:
            # Links name those for whom they wait by themselves.
            named = () if self._native is None or group is None else (group.others, group.generation)
            with heartbeat.waiting(*named):
                while self._run_next():
                    pass
        if self._native is not None and group is not None:
            self._in_native(group, self._native.join)

    def wait(self) -> None:
        """Returns when nothing is under way any more."""
        self.join()
        group = self._group
        if self._native is not None and group is not None:
            self._in_native(group, self._native.finish)

    def raise_error(self) -> None:
        """Raises what went wrong in this step.

        Raises:
            StepInterrupted: a link broke, a native group failed, or the generation changed.
        """
        if self._failure is not None:
            raise self._failure
        if self.error is not None:
            raise self.error

    def interrupt(self, error: StepInterrupted) -> None:
        """The step was interrupted elsewhere: what is launched from now on is ignored."""
        if self.error is None:
            self.error = error

    def cancel(self) -> None:
        """Forget the step. The group's operations have been interrupted before, so this does not wait for peers."""
        with self._arrived:
            self._waiting.clear()
            self._group = None
        with self._running:
            if self._native is not None:
                self._native.drop()
                self._native = None
            self.error = None

    def close(self) -> None:
        """Ends the thread."""
        with self._arrived:
            self._closed = True
            self._arrived.notify_all()

    def _in_native(self, group: Group, wait: Callable[[Callable[[], None]], None]) -> None:
        if self.error is not None:
            return
        others = group.others
        with heartbeat.waiting(others, group.generation):
            try:
                wait(lambda: group.transport.check(others))
            except StepInterrupted as error:
                self.interrupt(error)
            except RuntimeError as error:
                self._native_failed(group, error)

    def _native_failed(self, group: Group, error: RuntimeError) -> None:
        if self.error is None:
            self.error = CollectiveFailed(group.generation, str(error))
            self._failed(group.generation)

    def _died(self, error: BaseException) -> None:
        # Whoever waits runs what is left, so nobody hangs; and the script hears of it.
        if self._failure is None:
            self._failure = error

    def _run(self) -> None:
        heartbeat.in_background()
        while True:
            with self._arrived:
                self._arrived.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
            self._run_next()

    def _run_next(self) -> bool:
        """Runs the next all-reduce after those under way; tells whether there was one."""
        with self._running:
            try:
                flat, group = self._waiting.popleft(), self._group
            except IndexError:
                return False
            if group is not None and self.error is None and self._failure is None:
                try:
                    self._sum(group, flat)
                except StepInterrupted as error:
                    self.error = error
                except BaseException as failure:  # raised where the script can see it
                    self._failure = failure
            return True

    def _sum(self, group: Group, flat: torch.Tensor) -> None:
        native = self._native
        if not isinstance(native, NativeSumsInOrder):
            group.all_reduce(flat, scale=self._scale)
            return
        try:
            native.sum_here(flat, self._scale, lambda: group.transport.check(group.others))
        except StepInterrupted:
            raise
        except RuntimeError as error:
            self._native_failed(group, error)


class NativeSums:
    """The sums of one step in a native group.

    Args:
        bulk: the group.
    """

    def __init__(self, bulk: Bulk) -> None:
        self._bulk = bulk
        self._works: list[dist.Work] = []
        self._joined = 0
        self._device = torch.device("cpu")

    def add(self, flat: torch.Tensor, scale: float = 1.0) -> bool:
        """Begins a sum, multiplied by `scale`; returns False where it is left to a thread that waits for it.

        Raises:
            RuntimeError: the group has failed, or is over.
        """
        self._device = flat.device
        self._works.append(self._bulk.all_reduce(flat.mul_(scale)))
        return True

    def join(self, look: Callable[[], None]) -> None:
        """Has what follows on this thread, on a device on its stream, come after all sums.

        Args:
            look: called now and then while this thread waits; what it raises ends the wait.

        Raises:
            RuntimeError: one has failed.
        """
        with ended.shown(self._device) if self._joined < len(self._works) else contextlib.nullcontext():
            while self._joined < len(self._works):
                work = self._works[self._joined]
                if self._device.type != "cpu":
                    work.wait()
                else:
                    ended.wait(work, look)
                self._joined += 1

    def finish(self, look: Callable[[], None]) -> None:
        """Returns when all sums are there, and right.

        A stream that is freed by an abort goes on with garbage: so it is done first, and the group asked then.

        Args:
            look: as for `join`.

        Raises:
            RuntimeError: they are not.
        """
        if (done := self._mark()) is not None:
            ended.reach(self._device, done, self._bulk.errored, look=look, failed=self._bulk.poison)
        if wrong := self._bulk.errored():
            raise RuntimeError(wrong)

    def _mark(self) -> heartbeat.Mark | None:
        """Returns the end of what the device has been told until now; None: its sums have ended already."""
        return None if self._device.type == "cpu" else ended.here(self._device)

    def drop(self) -> None:
        """Returns when nothing writes into the tensors any more. The group has been poisoned before."""
        ended.drop(self._works, on_host=self._mark() is None)


class NativeSumsInOrder(NativeSums):
    """The sums of one step in a native group, in the order in which links add.

    Args:
        bulk: the group.
        sums: what makes them, step after step.
        rank: of this member.
        size: number of members.
    """

    def __init__(self, bulk: Bulk, sums: OrderedSums, rank: int, size: int) -> None:
        super().__init__(bulk)
        self._sums, self._rank, self._size = sums, rank, size

    def add(self, flat: torch.Tensor, scale: float = 1.0) -> bool:
        """Begins a sum on a device; in host memory it is left to `sum_here`."""
        self._device = flat.device
        if flat.device.type == "cpu":
            return False
        self._sums.begin_on_device(self._bulk, self._rank, self._size, flat, scale)
        return True

    def sum_here(self, flat: torch.Tensor, scale: float, look: Callable[[], None]) -> None:
        """Returns when a tensor in host memory is summed; `look` as for `join`.

        Raises:
            RuntimeError: the group has failed, or is over.
        """
        self._sums.sum_on_host(self._bulk, self._rank, self._size, flat, scale, look)

    def join(self, look: Callable[[], None]) -> None:
        """Has what follows on a device's stream come after all sums; in host memory they are there."""
        if self._device.type != "cpu":
            self._sums.join(self._device)

    def drop(self) -> None:
        """Returns when nothing writes into the tensors any more. The group has been poisoned before."""
        self._sums.drop(self._device)
