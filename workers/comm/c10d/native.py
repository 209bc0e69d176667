"""The operations of a member in its native group."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from elaunch.errors import CollectiveFailed, StepInterrupted
from elaunch.workers.comm.c10d.works import Interrupted, NativeWork
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.native import ended
from elaunch.workers.comm.native.bulk import Bulk

MESSAGES = ("send", "recv")

GLOO_TYPES = frozenset(
    (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
        *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
    )
)
"""Of others it finds out in the middle of the operation; other backends refuse them at the call."""


class NativeWorks:
    """What a member has under way in its native group, from one commit barrier to the next.

    Args:
        current: returns the native group that all members use at present; None: there is none, and links serve.
        device_type: of the tensors that it takes.
        failed: called with the generation when an operation has failed, once for each.
    """

    def __init__(
        self, current: Callable[[], Bulk | None], device_type: str, failed: Callable[[int], None] = lambda number: None
    ) -> None:
        self._current, self._device_type, self._failed = current, device_type, failed
        self._begun: dict[NativeWork, None] = {}
        self._on_device: tuple[Bulk, torch.device] | None = None
        self._group: Group | None = None
        self.error: StepInterrupted | None = None

    def issue(
        self, group: Group, names: Sequence[str], args: Sequence[Any], interrupted: Interrupted | None
    ) -> NativeWork | None:
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
        bulk = self._current()
        tensor = _first_tensor(args)
        if bulk is None or tensor is None or tensor.device.type != self._device_type or group.size == 1:
            return None
        if tensor.layout is not torch.strided:
            return None  # refused there, with the cure
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
            work = method(*given)
        except (RuntimeError, ValueError):
            with contextlib.suppress(RuntimeError):
                bulk.backend_group()
                return None  # a type or an option that the backend does not know
            raise self.failure(RuntimeError("the group is closed")) from None

        def fails(error: StepInterrupted | RuntimeError) -> None:
            failure = self._lost(error) if isinstance(error, StepInterrupted) else self.failure(error)
            if interrupted is None:
                raise failure from None
            interrupted(failure)

        others = [member for member in group.members if member != group.transport.worker]
        is_on_host = tensor.device.type == "cpu"
        is_message = names[0] in MESSAGES
        look = None if is_message else lambda: group.transport.check(others)
        found = NativeWork(work, others, group.generation, look, fails, self._ended, args[0], is_on_host)
        if not is_message:  # what one member sends, another may receive in the next step
            self._begun[found] = None
        if not is_on_host:
            self._on_device = bulk, tensor.device
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
        if self._on_device is not None:
            bulk, device = self._on_device
            ended.reach(device, ended.here(device), bulk.errored, failed=bulk.poison)
            if wrong := bulk.errored():
                raise self.failure(RuntimeError(wrong))
        self._on_device = None

    def drop(self) -> None:
        """Forgets the step; the group has been poisoned before. Then nothing writes into the tensors any more."""
        begun, self._begun, self._on_device = list(self._begun), {}, None
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


def _first_tensor(args: Any) -> torch.Tensor | None:
    """The first tensor in nested lists."""
    if isinstance(args, torch.Tensor):
        return args
    if isinstance(args, (list, tuple)):
        return next((found for one in args if (found := _first_tensor(one)) is not None), None)
    return None
