"""A stand-in for torch_npu: NPUs that a test makes up, one for each worker, and HCCL between them.

It does what torch_npu does where a member dies (npu/_recovery.py, csrc/npu/Module.cpp, ProcessGroupHCCL.cpp in
csrc/distributed): operations hang without an error, `stop_device` ends what is under way and has everything after it
raise "FORCE STOP" until `restart_device`, and a watchdog that sees a stopped operation has the next one raise it, too.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

RUN, STOP = 1, 2
GARBAGE = -1.0


def force_stop() -> RuntimeError:
    return RuntimeError("FORCE STOP.")


class Operation:
    """A collective: done once all members have begun it."""

    def __init__(self, size: int) -> None:
        self.size, self.done, self.fails = size, False, False
        self.tensors: list[torch.Tensor] = []

    def begin(self, tensor: torch.Tensor) -> None:
        self.tensors.append(tensor)
        if len(self.tensors) == self.size:
            self.end(sum(one.clone() for one in self.tensors))

    def end(self, total: Any) -> None:
        for one in self.tensors:
            one.copy_(total)
        self.done = True

    def fail(self) -> None:
        """It ends with garbage, and its communicator tells so."""
        self.fails = True
        self.end(torch.tensor(GARBAGE))


class Fabric:
    """What connects the NPUs of a test."""

    def __init__(self, size: int) -> None:
        self.lock = threading.RLock()
        self.operations: dict[tuple[str, int], Operation] = {}
        self.names = map(str, itertools.count())
        self.npus = [StubNpu(self, index) for index in range(size)]

    def begin(self, key: tuple[str, int], size: int, tensor: torch.Tensor) -> Operation:
        with self.lock:
            operation = self.operations.setdefault(key, Operation(size))
            operation.begin(tensor)
            return operation


class StubNpu:
    """One NPU, with the stream of its worker's script.

    Attributes:
        stops: how often it was stopped, and `restarts` restarted.
        stopped_by: the thread that did so last.
        stops_well: what the driver answers.
    """

    def __init__(self, fabric: Fabric, index: int) -> None:
        self.fabric, self.device = fabric, torch.device("meta", index)
        self.is_stopped = self.raises_next = False
        self.stops = self.restarts = 0
        self.stopped_by: threading.Thread | None = None
        self.stops_well = True
        self.stream: deque[Callable[[], bool]] = deque()
        self.groups: list[StubGroup] = []
        stub = self

        class ProcessGroupHCCL(StubGroup):
            npu = stub

        self.torch_npu = SimpleNamespace(
            npu=SimpleNamespace(
                set_device=lambda device: None,
                Stream=lambda device: None,
                stream=stream,
                stop_device=self.stop_device,
                restart_device=self.restart_device,
            ),
            _C=SimpleNamespace(_distributed_c10d=SimpleNamespace(ProcessGroupHCCL=ProcessGroupHCCL)),
        )

    def run(self, work: Callable[[], object], looks: int = 0) -> None:
        """The script gives the device work, which takes so many looks at the device."""
        if self.is_stopped:
            raise force_stop()
        left = itertools.count(looks, -1)

        def advance() -> bool:
            if next(left) > 0:
                return False
            work()
            return True

        self.stream.append(advance)

    def mark(self) -> Any:
        """A place in the work of the stream."""
        if self.is_stopped:
            raise force_stop()
        reached: list[bool] = []
        self.run(lambda: reached.append(True))

        def query() -> bool:
            self.advance()
            return bool(reached)

        return SimpleNamespace(query=query)

    def advance(self) -> None:
        if self.is_stopped:
            raise force_stop()
        while self.stream and self.stream[0]():
            self.stream.popleft()

    def stop_device(self, index: int) -> int:
        assert index == self.device.index
        if not self.stops_well:
            return 1
        with self.fabric.lock:
            self.stops += 1
            self.stopped_by, self.is_stopped = threading.current_thread(), True
            self.stream.clear()
            for group in self.groups:
                for work in group.works:
                    work.is_stopped = work.is_stopped or not work.operation.done
                group.look()
        return 0

    def restart_device(self, index: int) -> None:
        assert index == self.device.index
        assert threading.current_thread() is self.stopped_by
        self.restarts += 1
        self.is_stopped = False


@contextmanager
def stream(stream: object) -> Iterator[None]:
    yield


class StubWork:
    """A collective, as the NPU of one member has it."""

    def __init__(self, npu: StubNpu, operation: Operation) -> None:
        self.npu, self.operation, self.is_stopped = npu, operation, False

    def is_completed(self) -> bool:
        if self.is_stopped:
            self.npu.raises_next = self.npu.raises_next or self.npu.is_stopped
            return False
        return self.operation.done

    def is_success(self) -> bool:
        return not self.operation.fails and self.is_completed()

    def wait(self) -> bool:
        """Whatever the script gives its stream from now on waits for the others."""
        self.npu.stream.append(self.is_completed)
        return True


class StubGroup:
    """`ProcessGroupHCCL`.

    Attributes:
        works: whose ends its watchdog waits for.
        is_aborted: its communicator is given back.
        torn: it was while something was under way.
    """

    npu: StubNpu
    Options = SimpleNamespace

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
        assert options.global_ranks_in_group == list(range(size))
        assert options.group_id
        self._store, self._rank, self._size = store, rank, size
        self._name, self._begun = "", 0
        self._status = RUN
        self.works: list[StubWork] = []
        self.is_aborted = self.torn = False
        self.npu.groups.append(self)

    def _set_default_timeout(self, timeout: object) -> None:
        pass

    def allreduce(self, tensors: list[torch.Tensor]) -> StubWork:
        if self.npu.is_stopped:
            raise force_stop()
        if self.npu.raises_next:
            self.npu.raises_next = False
            raise force_stop()
        if not self._name:
            self._connect()
        self._begun += 1
        work = StubWork(self.npu, self.npu.fabric.begin((self._name, self._begun), self._size, tensors[0]))
        self.works.append(work)
        return work

    def _connect(self) -> None:
        if self._rank == 0:
            self._store.set("name", next(self.npu.fabric.names))
        self._name = self._store.get("name").decode()
        self._store.add("come", 1)
        while self._store.add("come", 0) < self._size:
            time.sleep(0.001)

    def look(self) -> None:
        """Its watchdog looks at its operations."""
        if self._status == RUN:
            for work in self.works:
                work.is_completed()

    def set_watchdog_status(self, status: int) -> None:
        with self.npu.fabric.lock:
            self._status = status
            if status == RUN:
                self.npu.raises_next = any(work.is_stopped for work in self.works)

    def clear_workmeta_list(self) -> None:
        self.works.clear()

    def abort_hccl_comm(self, reason: str) -> None:
        self.torn = any(not work.operation.done for work in self.works)
        self.is_aborted = True
