"""The work that an operation of `torch.distributed` returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from math import inf
from typing import Any

import torch
import torch.distributed as dist

from elaunch.errors import StepInterrupted
from elaunch.workers import heartbeat
from elaunch.workers.comm.c10d.mail import Letter
from elaunch.workers.comm.native import ended
from elaunch.workers.comm.native.gloo_work import Freed

Interrupted = Callable[[StepInterrupted], None]
"""Takes an interruption in the place of whoever waits, who then goes on with unspecified contents."""


class FinishedWork(dist.Work):
    """The result of an operation that is over when it returns."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: Any = None) -> bool:
        """Returns at once."""
        return True

    def is_completed(self) -> bool:
        """Returns True."""
        return True

    def is_success(self) -> bool:
        """Returns True: an operation that fails raises and returns no work."""
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Returns a finished future of the tensors."""
        return self._future


class SeveralWorks(dist.Work):
    """Several operations that were begun together.

    Args:
        works: of them.
        result: the tensors.
    """

    def __init__(self, works: Sequence[dist.Work], result: Any) -> None:
        super().__init__()
        self._works, self._result = works, result

    def wait(self, timeout: Any = None) -> bool:
        """Returns when all are done."""
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        """Returns whether all are done."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Returns whether all have gone well."""
        return all(work.is_success() for work in self._works)

    def get_future(self) -> torch.futures.Future[Any]:
        """Returns a future of the tensors."""
        result = self._result
        futures = [work.get_future() for work in self._works]
        return torch.futures.collect_all(futures).then(lambda all_of_them: result)


class MessageWork(dist.Work):
    """A message that goes its own way.

    Args:
        letter: the message.
        arrives: puts what has come into the tensor.
        interrupted: takes an interruption; None: whoever waits does.
        tensors: the tensors.
        source: rank of the sender.
    """

    def __init__(
        self,
        letter: Letter,
        arrives: Callable[[], None],
        interrupted: Interrupted | None,
        tensors: Sequence[torch.Tensor],
        source: int,
    ) -> None:
        super().__init__()
        self._letter, self._arrives, self._interrupted = letter, arrives, interrupted
        self._tensors, self._source = list(tensors), source

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns when the message has left, or is there.

        Raises:
            StepInterrupted: the generation is over, or a connection broke.
            TimeoutError: the time has passed.
            ValueError: the tensors at both ends differ in size.
        """
        try:
            if not self._letter.wait(timeout.total_seconds() if timeout else inf):
                raise TimeoutError(f"no message between this worker and {self._letter.peer} within {timeout}")
        except StepInterrupted as error:
            if self._interrupted is None:
                raise
            self._interrupted(error)
            return True
        arrives, self._arrives = self._arrives, lambda: None
        arrives()
        return True

    def synchronize(self) -> None:
        """Does as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Returns whether it is over."""
        return self._letter.is_over

    def is_success(self) -> bool:
        """Returns whether it has gone well."""
        return self._letter.is_over and self._letter.error is None

    def _source_rank(self) -> int:
        return self._source

    def get_future(self) -> torch.futures.Future[Any]:
        """Returns a future of the tensors."""
        future: torch.futures.Future[Any] = torch.futures.Future()

        def ends() -> None:
            try:
                self.wait()
                future.set_result(self._tensors)
            except Exception as error:
                future.set_exception(error)

        self._letter.then(ends)
        return future


class NativeWork(dist.Work):
    """An operation in the native group.

    Args:
        work: the backend's.
        peers: the other members that take part, and `generation` is theirs.
        look: called now and then while somebody waits in host memory; it raises what is wrong with the links to them.
        failed: takes that, or what the backend has raised: raises `StepInterrupted`, or has it handled elsewhere.
        done: called once when the work has been waited for.
        result: what its future has if it was handled elsewhere.
        device: of the tensors; what writes into host memory is over once it has been waited for.
    """

    def __init__(
        self,
        work: dist.Work,
        peers: Sequence[str],
        generation: int,
        look: Callable[[], None],
        failed: Callable[[StepInterrupted | RuntimeError], None],
        done: Callable[[NativeWork], None],
        result: Any,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._work, self._peers, self._generation = work, peers, generation
        self._look, self._failed, self._done = look, failed, done
        self._result, self._device, self._is_on_host = result, device, device.type == "cpu"
        self._waited = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns when the tensors are there; for those on a device, when its stream has been told to wait.

        Raises:
            StepInterrupted: the group has failed.
            RuntimeError: the time has passed.
        """
        if self._waited or self._is_there():
            return True
        with heartbeat.waiting(self._peers, self._generation):
            try:
                self._await(timeout)
            except (StepInterrupted, Freed) as error:  # what it writes to is left to `drop`
                self._failed(error)
                return True
            except RuntimeError as error:
                if timeout and not self._work.is_completed():
                    raise
                self._ends()
                self._failed(error)
                return True
        self._ends()
        return True

    def drop(self) -> None:
        """Returns when it is over, however it ends; the group has been poisoned before."""
        if not self._waited:
            ended.drop([self._work], self._is_on_host)
            self._ends()

    def _is_there(self) -> bool:
        """Returns whether it is over and nobody has to wait, as before a commit for most of a step's operations."""
        if not (self._is_on_host and self._work.is_completed() and self._work.is_success()):
            return False
        self._ends()
        return True

    def _await(self, timeout: timedelta | None) -> None:
        if timeout:
            self._work.wait(timeout)
            return
        if self._is_on_host:
            ended.wait(self._work, self._look)
        else:
            with ended.shown(self._device):
                self._work.wait()

    def _ends(self) -> None:
        self._waited = True
        self._done(self)

    def synchronize(self) -> None:
        """Does as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Returns whether it is over."""
        return (self._waited and self._is_on_host) or self._work.is_completed()

    def is_success(self) -> bool:
        """Returns whether it has gone well."""
        return bool(self._work.is_success())

    def result(self) -> Any:
        """Returns the tensors."""
        return self._work.result()

    def get_future(self) -> torch.futures.Future[Any]:
        """Returns a future of the tensors; it raises a `RuntimeError` that names the interruption."""
        future: torch.futures.Future[Any] = self._work.get_future()
        return future.then(self._outcome) if self._is_on_host else future

    def _outcome(self, future: torch.futures.Future[Any]) -> Any:
        try:
            return future.value()
        except RuntimeError as error:
            self._failed(error)
            return self._result


class BatchedWork(dist.Work):
    """An operation of a batch in the native group. While others are being put into the batch no wait for it is one.

    Args:
        tensors: of it.

    Attributes:
        batch: the work of the whole batch, once it has begun.
    """

    def __init__(self, tensors: Any) -> None:
        super().__init__()
        self.tensors = tensors
        self.batch: NativeWork | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Does as that of the batch."""
        return self.batch is None or self.batch.wait(timeout)

    def synchronize(self) -> None:
        """Does as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Returns whether the batch is over."""
        return self.batch is not None and self.batch.is_completed()

    def is_success(self) -> bool:
        """Returns whether the batch has gone well."""
        return self.batch is not None and self.batch.is_success()

    def get_future(self) -> torch.futures.Future[Any]:
        """Returns a future of the tensors."""
        if self.batch is None:
            return FinishedWork(self.tensors).get_future()

        def of_this(whole: torch.futures.Future[Any]) -> Any:
            whole.value()  # raises what has gone wrong
            return self.tensors

        return self.batch.get_future().then(of_this)
