"""A native group over NCCL.

Written against torch 2.11 to 2.13; 2.15 has the same class still. An aborted communicator frees the streams of its
members, which then go on with garbage: so nothing counts before `errored` has been asked, after the stream is done.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from elaunch import threads
from elaunch.workers.comm.native import sockets
from elaunch.workers.comm.native.bulk import keep
from elaunch.workers.comm.native.hangups import Hangups, await_failure, communicator_of

NO_TIMEOUT = timedelta(days=7)
FIRST_SUM_S = 120.0
POLL_S = 0.0005
BATCH_S = 0.05
"""For a batch of operations to be given to NCCL before an abort frees the communicator; it takes microseconds."""

ABORTED_S = 10.0
"""For aborts to end before this process does; one takes half a second."""

CRASHES_IN_ABORT = ((2, 28, 3), (2, 28, 8))
"""The first and the last version of NCCL that may crash in an abort."""

SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # Torch's watchdog sleeps four times as long when a peer is lost, and holds a lock that the next operation needs.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "NCCL_NVLS_ENABLE": "0",
    # Else an algorithm's connections are made when it is first taken, and the host waits for all members there.
    "NCCL_RUNTIME_CONNECT": "0",
    # Messages of a group come in order by design.
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}
"""With others torch ends the process when a peer dies, or the abort waits for the dead."""

CALLS = ("_set_default_timeout", "abort", "allreduce", "eager_connect_single_device", "get_error")
"""What a torch's `ProcessGroupNCCL` must have."""

NONBLOCKING_TIMEOUT = "TORCH_NCCL_NONBLOCKING_TIMEOUT"


class NcclBulk:
    """A group of `ProcessGroupNCCL` with one communicator, which is made at once and does not block.

    Args:
        device: of this member.
    """

    backend = "nccl"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._group: Any = None
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._hangups: Hangups | None = None
        self._abort: threading.Thread | None = None
        self._batch: Any = None
        self._no_batch = threading.Event()
        self._no_batch.set()

    def open(self, store: dist.Store, rank: int, size: int, messages: bool = False) -> None:
        """Makes the communicator, sums once over it, and exchanges a number with each member if there are messages."""
        set_environment()
        torch.cuda.set_device(self._device)
        older = sockets.inodes()
        self._connect(store, rank, size)
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            self._group.allreduce([torch.zeros(1, device=self._device)]).wait()
            if messages:
                # NCCL connects the two ends of a message when it is first sent, and the host would wait for that.
                numbers = torch.zeros(2, size, 1, device=self._device)
                self._group.alltoall(list(numbers[0]), list(numbers[1])).wait()
            done = torch.cuda.Event()
            done.record()
            deadline_s = time.monotonic() + FIRST_SUM_S
            while not done.query() and not self._over.is_set() and time.monotonic() < deadline_s:
                time.sleep(POLL_S)
            if self._over.is_set() or not done.query() or (wrong := self.errored()):
                raise RuntimeError(wrong or "its first sum did not end")
        if communicator := communicator_of(self._group):
            hangups = Hangups(lambda: self._after_hangup(communicator))
            hangups.watch(older)
            with self._lock:
                self._hangups = hangups
            if self._over.is_set():
                hangups.close()

    def all_reduce(self, tensor: torch.Tensor) -> dist.Work:
        """Begins to sum a tensor over the members, in place, after what its stream has to do."""
        work: dist.Work = self.backend_group().allreduce([tensor])
        return work

    def send(self, tensor: torch.Tensor, to: int) -> dist.Work:
        """Begins to send a tensor to a member, after what its stream has to do."""
        work: dist.Work = self.backend_group().send([tensor], to, 0)
        return work

    def receive(self, tensor: torch.Tensor, from_: int) -> dist.Work:
        """Begins to fill a tensor with what a member sends, after what its stream has to do."""
        work: dist.Work = self.backend_group().recv([tensor], from_, 0)
        return work

    def exchange(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> Sequence[dist.Work]:
        """Begins to send each member a flat tensor and to receive one from each, in one grouped operation."""
        work: dist.Work = self.backend_group().alltoall(list(incoming), list(outgoing))
        return [work]

    def backend_group(self) -> Any:
        """Returns NCCL's group, for an operation that is called now.

        Raises:
            RuntimeError: it is closed, or a peer is lost.
        """
        if self._hangups is not None:
            self._hangups.hold(self._over)
        group = self._group
        if group is None or self._over.is_set():
            raise RuntimeError("the group is closed")
        return group

    def wrap(self, work: dist.Work, is_message: bool) -> dist.Work:
        """Returns the work: the host does not wait for it."""
        return work

    def start_batch(self) -> bool:
        """Opens a group of NCCL: alone, a message would keep those after it waiting until its peer comes to it."""
        group = self.backend_group()
        if not getattr(group, "supports_coalescing", False):
            return False
        with self._lock:
            if self._over.is_set():
                raise RuntimeError("the group is closed")
            self._batch = group
            self._no_batch.clear()
        group._start_coalescing()
        return True

    def end_batch(self) -> dist.Work | None:
        """Closes the group of NCCL, also once this one is poisoned: the thread could give it nothing else before."""
        group, self._batch = self._batch, None
        try:
            work: dist.Work | None = group._end_coalescing()
            return work
        finally:
            self._no_batch.set()

    def poison(self) -> None:
        """Aborts the communicator, in a thread of its own: the call returns half a second after its effect."""
        with self._lock:
            begins = not self._over.is_set() and self._group is not None
            self._over.set()
            if begins:
                free = partial(self._free, self._group)
                self._abort = threads.start("elaunch-nccl-abort", free, lambda _: None)
                _ABORTS.append(self._abort)
            hangups = self._hangups
        if hangups is not None:
            hangups.close()

    def _after_hangup(self, communicator: int) -> None:
        if await_failure(lambda: [communicator], self._over):
            self.poison()

    def _free(self, group: Any) -> None:
        """Aborts a group, not while a thread is putting operations together that name its communicator."""
        self._no_batch.wait(BATCH_S)
        group.abort()

    def leave(self) -> None:
        """Does nothing: the abort frees the stream, and what follows on it comes after."""

    def errored(self) -> str | None:
        """Returns the error of the communicator, or that it is aborted."""
        if self._over.is_set():
            return "aborted"
        return error_of(self._group)

    def close(self) -> None:
        """Keeps the object: the abort has freed what it held, and its destructor blocks for long."""
        if self._group is not None:
            keep(self._group)
            self._group = None

    def _connect(self, store: dist.Store, rank: int, size: int) -> None:
        refuse_torch(dist.ProcessGroupNCCL)
        options = dist.ProcessGroupNCCL.Options()
        options.config.blocking = 0
        group: Any = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)
        group._set_default_timeout(NO_TIMEOUT)
        self._hold(group)
        group.eager_connect_single_device(self._device)

    def _hold(self, group: Any) -> None:
        with self._lock:
            if self._over.is_set():
                raise RuntimeError("the members have changed while it was opened")
            self._group = group


def error_of(group: Any) -> str | None:
    """Returns the name of what torch has found to be wrong in one of its groups; None: nothing."""
    name = str(group.get_error().name)
    return None if name == "SUCCESS" else name


@atexit.register  # after whatever was registered later, such as the end of a job
def await_aborts() -> None:
    """Returns when all aborts have ended; the end of the process under one of them would be an abort of the process."""
    end_s = time.monotonic() + ABORTED_S
    for thread in _ABORTS:
        thread.join(max(0.0, end_s - time.monotonic()))


_ABORTS: deque[threading.Thread] = deque(maxlen=64)
"""The last ones; of one that began long ago nothing is left."""


def set_environment() -> None:
    """Sets what torch and NCCL read when a communicator is made."""
    for name, value in SETTINGS.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    os.environ.setdefault(NONBLOCKING_TIMEOUT, str(int(FIRST_SUM_S)))


def load(device: torch.device) -> None:
    """Has this process load what its first group loads, NCCL's kernels among it: by a group of itself alone."""
    alone = NcclBulk(device)
    try:
        alone.open(dist.HashStore(), 0, 1)
    except RuntimeError:
        return  # the first group with others says why
    finally:
        alone.poison()
        alone.close()


def refuse_version(version: tuple[int, ...]) -> None:
    """Sees to it that the version of NCCL can abort.

    Raises:
        RuntimeError: it may crash in an abort.
    """
    first, last = CRASHES_IN_ABORT
    if first <= version[:3] <= last:
        name, least, most = (".".join(map(str, each)) for each in (version[:3], first, last))
        raise RuntimeError(
            f"NCCL {name} may crash when a member dies, as all of {least} to {most} do: install another version"
        )


def refuse_torch(kind: type) -> None:
    """Sees to it that torch's class has what is called here.

    Raises:
        RuntimeError: it lacks something.
    """
    if missing := [name for name in CALLS if not hasattr(kind, name)]:
        raise RuntimeError(
            f"{kind.__name__} of torch {torch.__version__} lacks {', '.join(missing)}: install torch 2.11 to "
            "2.15, or use --collectives=links"
        )
