"""State of a device on its way through host memory: while one message travels, the next one is copied.

    staging = Staging(copies_of(device), hold)
    for buffer in staging.leaving(messages):    # here is one message; the next one is on its way to host memory
        send(buffer.bytes)

    for views in messages:
        with staging.coming(views) as buffer:   # after it, the message is on its way to the device
            receive(buffer.bytes)
    staging.end()

A copy engine begins copies between a device and pinned host memory, on a stream of its own, and says later when they
are done. Nothing is copied ahead where the tensors are in host memory: there copying takes the same cores as sending.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from elaunch.workers.comm.group import memory

ALIGN = 16

Done = Callable[[], None]
"""Returns when some copies are done."""


class CopyEngine(Protocol):
    """Copies between tensors and host memory.

    Attributes:
        ahead: how many messages are copied before their turn comes.
    """

    ahead: int

    def new(self, n_bytes: int) -> Tensor:
        """Returns host memory that it copies from and to."""

    def copy(self, to: Tensor, from_: Tensor) -> None:
        """Begins a copy, after whatever was begun before."""

    def mark(self) -> Done:
        """Returns what waits for all copies that were begun until now."""


class CopiesOnHost:
    """Copies within host memory, done when they have been begun."""

    ahead = 0

    def new(self, n_bytes: int) -> Tensor:
        """Returns memory."""
        return torch.empty(n_bytes, dtype=torch.uint8)

    def copy(self, to: Tensor, from_: Tensor) -> None:
        """Copies."""
        to.copy_(from_)

    def mark(self) -> Done:
        """Returns what waits for nothing."""
        return _nothing


class DeviceCopies:
    """Copies between a device and pinned host memory, on a stream beside the one that computes.

    Args:
        device: an accelerator.
        ahead: how many messages are copied before their turn comes; each takes a buffer.
    """

    def __init__(self, device: torch.device, ahead: int = 1) -> None:
        self.ahead = ahead
        self._device = device
        self._stream = torch.Stream(device)
        # What the tensors hold, or held until now, belongs to the stream that computes.
        self._stream.wait_stream(torch.accelerator.current_stream(device))

    def new(self, n_bytes: int) -> Tensor:
        """Returns pinned memory."""
        return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, to: Tensor, from_: Tensor) -> None:
        """Begins a copy."""
        with self._stream:
            to.copy_(from_, non_blocking=True)

    def mark(self) -> Done:
        """Returns what waits until the device has done the copies."""
        event = torch.Event(self._device)
        event.record(self._stream)
        return event.synchronize


def copies_of(device: torch.device, bounded: bool = False) -> CopyEngine:
    """Returns the copy engine for tensors on a device; `bounded`: memory is short, and nothing is copied ahead."""
    return DeviceCopies(device, 0 if bounded else 1) if device.type not in ("cpu", "meta") else CopiesOnHost()


class Scratch:
    """Memory in which one message after the other is packed: fresh memory for each costs more than the packing."""

    def __init__(self, copies: CopyEngine | None = None) -> None:
        self._copies = copies or CopiesOnHost()
        self._flat = torch.empty(0, dtype=torch.uint8)

    @property
    def n_bytes(self) -> int:
        """Returns how much it takes."""
        return self._flat.nbytes

    def take(self, n_bytes: int) -> Tensor:
        """Returns so many bytes of it; what it held is lost."""
        if n_bytes > self._flat.nbytes:
            self._flat = torch.empty(0, dtype=torch.uint8)
            self._flat = self._copies.new(n_bytes)
        return self._flat[:n_bytes]


class Buffer:
    """The memory of one message: the tensor itself where it is one run of host memory, else a buffer to pack.

    Args:
        views: what the message consists of.
        scratch: where it is packed; None: in memory of its own.

    Attributes:
        bytes: what travels.
    """

    def __init__(self, views: Sequence[Tensor], scratch: Scratch | None = None) -> None:
        self._packed: list[Tensor] = []
        if len(views) == 1 and views[0].device.type == "cpu" and views[0].is_contiguous():
            self.bytes = memory(views[0])
            return
        starts, end = [], 0
        for view in views:
            starts.append(aligned(end))
            end = starts[-1] + view.nbytes
        flat = (scratch or Scratch()).take(end)
        for start, view in zip(starts, views, strict=True):
            self._packed.append(flat[start : start + view.nbytes].view(view.dtype).view(view.shape))
        self.bytes = memory(flat)

    def pack(self, views: Sequence[Tensor], copies: CopyEngine | None = None) -> None:
        """Takes in what is to be sent."""
        copies = copies or CopiesOnHost()
        for place, view in zip(self._packed, views):
            copies.copy(place, view)

    def unpack(self, views: Sequence[Tensor], copies: CopyEngine | None = None) -> None:
        """Puts what has come where it belongs."""
        copies = copies or CopiesOnHost()
        for view, place in zip(views, self._packed):
            copies.copy(view, place)


class Staging:
    """The buffers of one direction of a link, which its messages take in turn.

    Args:
        copies: the copy engine.
        hold: is told of bytes that are allocated; negative: that are let go.
    """

    def __init__(self, copies: CopyEngine, hold: Callable[[int], None]) -> None:
        self._copies, self._hold = copies, hold
        # Whether what was copied from the buffer that comes next, for a message before, is done.
        self._turns: deque[tuple[Scratch, Done]] = deque((Scratch(copies), _nothing) for _ in range(1 + copies.ahead))

    def leaving(self, messages: Iterable[Sequence[Tensor]]) -> Iterator[Buffer]:
        """Returns the messages as they are to be sent. Who asks for the next one has sent the one before."""
        begun: deque[tuple[Buffer, Done]] = deque()
        for views in messages:
            buffer = self._next(views)
            buffer.pack(views, self._copies)
            begun.append((buffer, self._copies.mark()))
            if len(begun) > self._copies.ahead:
                yield _done(*begun.popleft())
        while begun:
            yield _done(*begun.popleft())

    @contextmanager
    def coming(self, views: Sequence[Tensor]) -> Iterator[Buffer]:
        """Gives a message a place to come to; after that it is on its way to where it belongs."""
        buffer = self._next(views)
        yield buffer
        buffer.unpack(views, self._copies)
        self._turns[-1] = self._turns[-1][0], self._copies.mark()

    def end(self) -> None:
        """Returns when all that has come is where it belongs."""
        for _, done in self._turns:
            done()

    def close(self) -> None:
        """Lets the buffers go; nothing is copied from or to them any more."""
        self.end()
        self._hold(-sum(scratch.n_bytes for scratch, _ in self._turns))

    def _next(self, views: Sequence[Tensor]) -> Buffer:
        scratch, done = self._turns.popleft()
        done()
        had_bytes = scratch.n_bytes
        buffer = Buffer(views, scratch)
        self._turns.append((scratch, _nothing))
        self._hold(scratch.n_bytes - had_bytes)
        return buffer


def to_host(tensors: Sequence[Tensor], copies: CopyEngine | None = None) -> Iterator[Tensor]:
    """Returns tensors in host memory, in their order, each as soon as it is there; what is there is not copied.

    Args:
        tensors: contiguous ones, on one device.
        copies: the copy engine, through which all go then; None: that of their device.
    """
    for coming in [begun_to_host(tensor, copies) for tensor in tensors]:
        yield coming()


def begun_to_host(tensor: Tensor, copies: CopyEngine | None = None) -> Callable[[], Tensor]:
    """Begins to copy a tensor to host memory beside what its device computes; what is there is not copied.

    Args:
        tensor: a contiguous one.
        copies: the copy engine; None: that of its device, for what its present stream has computed until now.

    Returns:
        What waits for the copy and returns it.
    """
    if copies is None:
        if tensor.device.type == "cpu":
            return lambda: tensor
        copies = copies_of(tensor.device)
    host = copies.new(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
    copies.copy(host, tensor)
    done = copies.mark()

    def coming() -> Tensor:
        done()
        _ = tensor  # its memory is not given to another one before
        return host

    return coming


def aligned(n_bytes: int) -> int:
    """Returns the least multiple of 16 that is not below."""
    return -(-n_bytes // ALIGN) * ALIGN


def _done(buffer: Buffer, done: Done) -> Buffer:
    done()
    return buffer


def _nothing() -> None:
    pass
