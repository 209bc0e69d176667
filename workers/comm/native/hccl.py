"""A native group over HCCL, of Ascend NPUs.

Written against the source of torch_npu for torch 2.13 to 2.15, and not tried on a device. HCCL has no abort that frees
a stream. What does is `torch_npu.npu.stop_device`: it ends whatever the device has under way, and all that is asked of
the device from then on raises "FORCE STOP", until `restart_device`. Memory stays, and so does the membership of the
groups; a new object has the next one.

    poison (any thread)      whoever waits for a sum is freed: it waits on the host, and looks
    leave (training thread)  its stream comes to its end, as the update of the last step may be under way; if an
                             operation of a poisoned group still is, the device is stopped and restarted
    close                    the communicator is given back

So no operation of the script ever raises, and no stream of the script waits for a member that may be dead.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elaunch import threads
from elaunch.workers.comm.native import ended
from elaunch.workers.fatal import end_process

NO_TIMEOUT = timedelta(days=7)
NO_MESSAGES = "it sums gradients only: what models in layers exchange goes over links"
FIRST_SUM_S = 120.0

SETTINGS = {
    "TORCH_HCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_HCCL_BLOCKING_WAIT": "0",
    "TORCH_HCCL_ENABLE_MONITORING": "0",
    "TORCH_HCCL_DUMP_ON_TIMEOUT": "0",
}
"""With others torch_npu ends the process when a peer dies."""

_RUN, _STOP = 1, 2  # of a group's watchdog (torch_npu/npu/_recovery.py)


class Npu:
    """The device of this worker, which stops as a whole, whichever of its groups has something under way.

    Args:
        device: by its index.
        torch_npu: the module.
    """

    def __init__(self, device: torch.device, torch_npu: Any) -> None:
        self.device, self.torch_npu = device, torch_npu
        self.lock = threading.RLock()
        """Nobody looks at an operation while the device is stopped."""
        self._groups: set[HcclBulk] = set()

    @classmethod
    def find(cls, device: torch.device) -> Npu | None:
        """Returns the device; None: torch_npu is not there, or too old to stop it."""
        try:
            torch_npu = importlib.import_module("torch_npu")
        except ImportError:
            return None
        fit = all(hasattr(torch_npu.npu, name) for name in ("stop_device", "restart_device"))
        return cls(device, torch_npu) if fit else None

    def add(self, group: HcclBulk) -> None:
        """Takes note of a group that may have something under way from now on."""
        with self.lock:
            self._groups.add(group)

    def remove(self, group: HcclBulk) -> None:
        """Takes note that a group has nothing under way any more."""
        with self.lock:
            self._groups.discard(group)

    def free(self) -> None:
        """Ends what poisoned groups have under way; ends this process if that cannot be done. By the training thread.

        Nothing else may be under way but what belongs to a step that is dropped: the caller's stream is waited for.
        """
        with self.lock:
            stuck = [group for group in self._groups if group.is_poisoned and group.is_busy()]
        if not stuck:
            return
        ended.reach(self.device, ended.here(self.device), lambda: "the members have changed")
        with self.lock:
            # A watchdog that sees an operation stopped has the next operation of any group of the process raise.
            # torch_npu tells only those of groups that torch.distributed knows.
            for group in self._groups:
                group.watch(_STOP)
            if self.torch_npu.npu.stop_device(self.device.index):
                end_process("native group", RuntimeError(f"{self.device} could not be stopped"))
            self.torch_npu.npu.restart_device(self.device.index)
            for group in list(self._groups):
                group.forget()
                group.watch(_RUN)


class HcclBulk:
    """A group of `ProcessGroupHCCL` with one communicator.

    Args:
        npu: the device of this member.
    """

    backend = "hccl"

    def __init__(self, npu: Npu) -> None:
        self._npu = npu
        self._group: Any = None
        self._newest: dist.Work | None = None  # its operations run one after the other
        self._closes = False
        self.is_poisoned = False

    def open(self, store: dist.Store, rank: int, size: int, messages: bool = False) -> None:
        """Makes the communicator by a first sum."""
        if messages:
            raise RuntimeError(NO_MESSAGES)
        os.environ.update(SETTINGS)
        npu, hccl = self._npu.torch_npu.npu, self._npu.torch_npu._C._distributed_c10d.ProcessGroupHCCL
        npu.set_device(self._npu.device)
        options = hccl.Options()
        # As a part of a larger group: else a table of ranks (RANK_TABLE_FILE) would say who its members are.
        options.global_ranks_in_group, options.group_id = list(range(size)), "elaunch"
        group = hccl(dist.PrefixStore("hccl", store), rank, size, options)
        group._set_default_timeout(NO_TIMEOUT)
        with self._npu.lock:
            if self.is_poisoned:
                raise RuntimeError("the members have changed while it was opened")
            self._group = group
            self._npu.add(self)
        with npu.stream(npu.Stream(self._npu.device)):
            # Until all have come this waits on the host, for as long as HCCL_CONNECT_TIMEOUT says.
            first = group.allreduce([torch.zeros(1, device=self._npu.device)])
            with self._npu.lock:
                self._newest = first
            deadline_s = time.monotonic() + FIRST_SUM_S
            while self._under_way(first):
                if time.monotonic() >= deadline_s:
                    raise RuntimeError("its first sum did not end")
                time.sleep(ended.POLL_S)

    def all_reduce(self, tensor: torch.Tensor) -> dist.Work:
        """Begins to sum a tensor over the members, in place, after what its stream has to do."""
        if self._group is None or self.is_poisoned:
            raise RuntimeError("the group is closed")
        work: dist.Work = self._group.allreduce([tensor])
        self._newest = work
        return LookedAt(self, work)

    def backend_group(self) -> None:
        """Returns None: `leave` knows of the operations that are begun here alone."""

    def wrap(self, work: dist.Work, is_message: bool) -> dist.Work:
        """Returns the work; there is none, as `backend_group` gives no group."""
        return work

    def start_batch(self) -> bool:
        """Returns False: it has no messages."""
        return False

    def end_batch(self) -> None:
        """Does nothing: none is started."""

    def send(self, tensor: torch.Tensor, to: int) -> dist.Work:
        """Refuses."""
        raise RuntimeError(NO_MESSAGES)

    def receive(self, tensor: torch.Tensor, from_: int) -> dist.Work:
        """Refuses."""
        raise RuntimeError(NO_MESSAGES)

    def exchange(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> Sequence[dist.Work]:
        """Refuses."""
        raise RuntimeError(NO_MESSAGES)

    def wait(self, work: dist.Work) -> None:
        """Returns when an operation is over, and the caller's stream comes after it.

        Raises:
            RuntimeError: the group is poisoned, or the operation has failed.
        """
        while self._under_way(work):
            time.sleep(ended.POLL_S)
        work.wait()

    def poison(self) -> None:
        """Frees who waits; the device is stopped in `leave`, as the script may be using it."""
        with self._npu.lock:
            self.is_poisoned = True

    def leave(self) -> None:
        """Stops the device and restarts it if something is under way there for a group that is over."""
        self._npu.free()

    def errored(self) -> str | None:
        """Returns the error of the communicator, or that the group is poisoned."""
        if self.is_poisoned:
            return "the members have changed"
        with self._npu.lock:
            work = self._newest
            return "an operation has failed" if work and work.is_completed() and not work.is_success() else None

    def close(self) -> None:
        """Gives the communicator back, or leaves that to `leave` while an operation is under way."""
        with self._npu.lock:
            self._closes = self.is_busy()
            if self._closes:
                return
            group, self._group, self._newest = self._group, None, None
            self._npu.remove(self)
        if group is not None:
            group.abort_hccl_comm("the members have changed")

    def is_busy(self) -> bool:
        """Returns whether the device may not have come to the end of what was issued here.

        An operation that has failed says that it is over, and may hang on.
        """
        return self._newest is not None and not (self._newest.is_completed() and self._newest.is_success())

    def watch(self, status: int) -> None:
        """Has torch_npu's watchdog look at the operations of the group, or not."""
        if status == _RUN:
            self._group.clear_workmeta_list()
        self._group.set_watchdog_status(status)

    def forget(self) -> None:
        """Takes note that the device was stopped; gives the communicator back if that was put off."""
        self._newest = None
        if self._closes:
            threads.start("elaunch-native-close", self.close, lambda _: None)

    def _under_way(self, work: dist.Work) -> bool:
        """Returns whether the device has not come to the end of an operation.

        Raises:
            RuntimeError: the group is poisoned, or the operation has failed.
        """
        with self._npu.lock:
            if self.is_poisoned:
                raise RuntimeError("the members have changed")
            if not work.is_completed():
                return True
            if not work.is_success():
                raise RuntimeError("an operation has failed")
            return False


class LookedAt(dist.Work):
    """An operation for which the host waits, so that no stream of the script waits for a member that may be dead.

    Args:
        bulk: the group.
        work: the operation.
    """

    def __init__(self, bulk: HcclBulk, work: dist.Work) -> None:
        super().__init__()
        self._bulk, self._work = bulk, work

    def is_completed(self) -> bool:
        """Returns whether a wait for it returns, or raises, at once."""
        return self._bulk.is_poisoned or self._work.is_completed()

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Returns when the operation is over.

        Raises:
            RuntimeError: the group is poisoned, or the operation has failed.
        """
        self._bulk.wait(self._work)
        return True
