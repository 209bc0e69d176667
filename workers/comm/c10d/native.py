"""The operations of a member in its native groups."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from elaunch.errors import CollectiveFailed, StepInterrupted
from elaunch.workers.comm.c10d.works import BatchedWork, FinishedWork, Interrupted, NativeWork
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.native import ended
from elaunch.workers.comm.native.bulk import Bulk
from elaunch.workers.comm.native.groups import NativeGroups
from elaunch.workers.comm.native.opening import GroupKey

MESSAGES = ("send", "recv")

COMBINES = "reduce"
"""In the names of all operations that combine tensors of several members."""

GLOO_TYPES = frozenset(
    (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
        *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
    )
)
"""Of others it finds out in the middle of the operation; other backends refuse them at the call."""


SUBGROUP = "c10d"
"""The purpose of native groups of subgroups, followed by their number."""


class Issues(Protocol):
    """Where the operations of one process group begin."""

    def issue(
        self, group: Group, names: Sequence[str], args: Sequence[Any], interrupted: Interrupted | None
    ) -> NativeWork | BatchedWork | None:
        """Begins an operation natively, or returns None: it goes over links."""

    def of_subgroup(self, number: int) -> Issues | None:
        """Returns the same for a process group of some of the members; None: its operations go over links."""

    def start_batch(self, group: Group, device: torch.device) -> bool:
        """Has operations that this thread issues from now on begin together; returns False where each does by itself.

        Args:
            group: the members.
            device: of the tensors.
        """

    def end_batch(self, interrupted: Interrupted | None) -> NativeWork | None:
        """Begins a batch and returns its work, which is that of all its operations; None: there are none in it.

        Args:
            interrupted: as for `issue`.

        Raises:
            CollectiveFailed: the group has failed, or was left.
        """

    def give_up_batch(self) -> None:
        """Ends a batch, if there is one, whose operations will not all come: an error came between them."""


@dataclass(eq=False)
class _OpenBatch:
    """Operations that begin together.

    Attributes:
        bulk, group, device: where.
        works: of those that it has so far.
        has_sums: whether some of them are more than messages.
    """

    bulk: Bulk
    group: Group
    device: torch.device
    works: list[BatchedWork] = field(default_factory=list)
    has_sums: bool = False

    def add(self, tensors: Any, is_message: bool) -> BatchedWork:
        """Returns the work of one more operation."""
        self.works.append(BatchedWork(tensors))
        self.has_sums |= not is_message
        return self.works[-1]


class NativeWorks:
    """What a member has under way in its native groups, from one commit barrier to the next.

    Args:
        current: returns the native group that all members use at present; None: there is none, and links serve.
        device_type: of the tensors that it takes.
        failed: called with the generation when an operation has failed, once for each.
        natives: opens groups for subgroups; None: these go over links.
        sums: whether operations that combine tensors begin there too; else links do them, in a fixed order.
    """

    def __init__(
        self,
        current: Callable[[], Bulk | None],
        device_type: str,
        failed: Callable[[int], None] = lambda number: None,
        natives: NativeGroups | None = None,
        sums: bool = True,
    ) -> None:
        self._current, self._device_type, self._failed, self._natives = current, device_type, failed, natives
        self._sums = sums
        self._begun: dict[NativeWork, None] = {}
        self._on_device: dict[Bulk, torch.device] = {}
        self._group: Group | None = None
        self._batch: _OpenBatch | None = None
        self.error: StepInterrupted | None = None

    def issue(
        self, group: Group, names: Sequence[str], args: Sequence[Any], interrupted: Interrupted | None
    ) -> NativeWork | BatchedWork | None:
        """Begins an operation in the native group.

        Args:
            group: the members.
            names: of the operation, as versions of torch have it.
            args: of the backend's method of this name.
            interrupted: takes an interruption; None: whoever waits does.

        Returns:
            None where there is no native group, or it does not do this: all members find the same.

        Raises:
            CollectiveFailed: the group has failed, or was left.
        """
        return self.begin(self._current(), group, names, args, interrupted)

    def of_subgroup(self, number: int) -> SubgroupWorks | None:
        """Returns where operations of some of the members begin; None: they go over links."""
        return None if self._natives is None else SubgroupWorks(self, self._natives, number)

    def start_batch(self, group: Group, device: torch.device) -> bool:
        """Begins a batch where the members have a native group for tensors of this device, and it needs one."""
        self.give_up_batch()
        bulk = self._current()
        if bulk is None or device.type != self._device_type or group.size == 1:
            return False
        try:
            if not bulk.start_batch():
                return False
        except RuntimeError:
            return False  # the group has failed, as each operation will say
        self._batch = _OpenBatch(bulk, group, device)
        return True

    def end_batch(self, interrupted: Interrupted | None) -> NativeWork | None:
        """Begins a batch and returns its work."""
        batch, self._batch = self._batch, None
        if batch is None:
            return None
        self._group = batch.group
        try:
            work = batch.bulk.end_batch()
        except RuntimeError as error:
            raise self.failure(error) from None
        if not batch.works:
            return None
        tensors = [one.tensors for one in batch.works]
        found = self._of(batch.bulk, batch.group, work, batch.device, not batch.has_sums, interrupted, tensors)
        for one in batch.works:
            one.batch = found
        return found

    def give_up_batch(self) -> None:
        """Ends a batch: while it is open, this thread gives the backend nothing else."""
        batch, self._batch = self._batch, None
        if batch is not None:
            with contextlib.suppress(RuntimeError):
                batch.bulk.end_batch()

    def begin(
        self,
        bulk: Bulk | None,
        group: Group,
        names: Sequence[str],
        args: Sequence[Any],
        interrupted: Interrupted | None,
    ) -> NativeWork | BatchedWork | None:
        """Does as `issue`, in a native group of these members."""
        tensor = _first_tensor(args)
        if bulk is None or tensor is None or tensor.device.type != self._device_type or group.size == 1:
            return None
        if tensor.layout is not torch.strided:
            return None  # refused there, with the cure
        if not self._sums and COMBINES in names[0]:
            return None
        if bulk.backend == "gloo" and tensor.dtype not in GLOO_TYPES:
            return None
        self._group = group
        try:
            backend = bulk.backend_group()
        except RuntimeError as error:
            raise self.failure(error) from None
        if backend is None:
            return None
        method = next((getattr(backend, name) for name in names if hasattr(backend, name)), None)
        if method is None:
            return None
        given = args if args[-1] is not None else args[:-1]
        try:
            at_once = not getattr(given[-1], "asyncOp", True)  # then the stream waits as soon as it is called
            with ended.shown(tensor.device) if at_once else contextlib.nullcontext():
                work, is_message = method(*given), names[0] in MESSAGES
        except (RuntimeError, ValueError):
            with contextlib.suppress(RuntimeError):
                bulk.backend_group()
                return None  # a type or an option that the backend does not know
            raise self.failure(RuntimeError("the group is closed")) from None
        if self._batch is not None and self._batch.bulk is bulk:
            return self._batch.add(args[0], is_message)
        return self._of(bulk, group, work, tensor.device, is_message, interrupted, args[0])

    def _of(
        self,
        bulk: Bulk,
        group: Group,
        work: dist.Work | None,
        device: torch.device,
        is_message: bool,
        interrupted: Interrupted | None,
        tensors: Any,
    ) -> NativeWork:
        """The work of what has begun. Of what was asked to be over at once on the caller's stream NCCL returns none."""

        def fails(error: StepInterrupted | RuntimeError) -> None:
            failure = self._lost(error) if isinstance(error, StepInterrupted) else self.failure(error)
            if interrupted is None:
                raise failure from None
            interrupted(failure)

        others = group.others
        found = NativeWork(
            bulk.wrap(FinishedWork(tensors) if work is None else work, is_message),
            others,
            group.generation,
            lambda: group.transport.check(others),
            fails,
            self._ended,
            tensors,
            device,
        )
        if not is_message:  # what one member sends, another may receive in the next step
            self._begun[found] = None
        if device.type != "cpu":
            self._on_device[bulk] = device
        return found

    def finish(self) -> None:
        """Returns when all that was begun is done, and right; before the commit barrier.

        Raises:
            StepInterrupted: it is not.
        """
        if self.error is not None:
            raise self.error
        for work in list(self._begun):
            work.wait()
        if self.error is not None:  # handled elsewhere
            raise self.error
        for bulk, device in self._on_device.items():
            ended.reach(device, ended.here(device), bulk.errored, failed=bulk.poison)
            if wrong := bulk.errored():
                raise self.failure(RuntimeError(wrong))
        self._on_device = {}

    def drop(self) -> None:
        """Forgets the step; the group has been poisoned before. Then nothing writes into the tensors any more."""
        self.give_up_batch()
        begun, self._begun, self._on_device = list(self._begun), {}, {}
        for work in begun:
            work.drop()
        self._group, self.error = None, None

    def interruption(self, error: Exception) -> StepInterrupted:
        """Returns the interruption that an error in a step is, or follows from: torch's own code passes on a text only.

        Raises:
            RuntimeError: the error, which has nothing to do with the native group.
        """
        if isinstance(error, StepInterrupted):
            return error
        if self.error is None:
            raise error
        return self.error

    def _lost(self, error: StepInterrupted) -> StepInterrupted:
        if self.error is None:
            self.error = error
        return self.error

    def failure(self, error: RuntimeError) -> StepInterrupted:
        """Returns the interruption that follows from an error of the backend."""
        assert self._group is not None, "an operation fails that was not begun"
        if self.error is None:
            self.error = CollectiveFailed(self._group.generation, str(error))
            self._failed(self._group.generation)
        return self.error

    def _ended(self, work: NativeWork) -> None:
        self._begun.pop(work, None)


class SubgroupWorks:
    """Begins operations of a subgroup in a native group of its own, of each generation a new one.

    That is opened in the background from the first operation of a generation on. The subgroup's members tell each other
    over links, with their operation of number 1, 2, 4, 8 and so on, whether it is open; from the one on at which it is
    on all of them they use it. Messages stay with the links: one may be on its way while others agree.

    Args:
        works: of the member, which waits for all before a commit barrier.
        natives: opens the group.
        number: of the subgroup, the same on all its members.
    """

    def __init__(self, works: NativeWorks, natives: NativeGroups, number: int) -> None:
        self._works, self._natives, self._number = works, natives, number
        self._generation = self._operations = 0
        self._agreed = False

    def issue(
        self, group: Group, names: Sequence[str], args: Sequence[Any], interrupted: Interrupted | None
    ) -> NativeWork | BatchedWork | None:
        """Begins an operation, as `NativeWorks.issue` does; it may ask the other members whether they can."""
        if names[0] in MESSAGES or group.size == 1:
            return None
        key = GroupKey(f"{SUBGROUP}{self._number}", group.members)
        if group.generation != self._generation:
            self._generation, self._operations, self._agreed = group.generation, 0, False
        if not self._agreed:
            self._natives.ask_for(group.generation, key)
            self._operations += 1
            if self._operations & (self._operations - 1):
                return None
            is_open = self._natives.opened(group.generation, key) is not None
            self._agreed = all(one == b"1" for one in group.all_gather_bytes(b"1" if is_open else b"0"))
            if not self._agreed:
                return None
        # None: the generation is over, as the links will say.
        bulk = self._natives.opened(group.generation, key)
        return self._works.begin(bulk, group, names, args, interrupted)

    def of_subgroup(self, number: int) -> SubgroupWorks:
        """Returns where operations of some of its members begin."""
        return SubgroupWorks(self._works, self._natives, number)

    def start_batch(self, group: Group, device: torch.device) -> bool:
        """Returns False: its messages go over links."""
        return False

    def end_batch(self, interrupted: Interrupted | None) -> None:
        """Does nothing: none is started."""

    def give_up_batch(self) -> None:
        """Does nothing: none is started."""


def _first_tensor(args: Any) -> torch.Tensor | None:
    """The first tensor in nested lists."""
    if isinstance(args, torch.Tensor):
        return args
    if isinstance(args, (list, tuple)):
        return next((found for one in args if (found := _first_tensor(one)) is not None), None)
    return None
