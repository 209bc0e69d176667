"""When a device has come to the end of what it does in native groups."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elaunch.workers import heartbeat
from elaunch.workers.comm.native.gloo_work import GlooWork, wait_in_spells
from elaunch.workers.fatal import end_process
from elaunch.workers.heartbeat import Mark

POLL_S = 0.00005
LOOK_S = 0.1
LINKS_S = 1.0
"""How often whoever waits in a native group looks at its links: a backend may wait for ever for a peer that is gone."""

DROP_S = 2.0
"""For operations to end whose connections are closed; what a thread of Gloo's computes meanwhile takes milliseconds."""

FREED_S = 120.0
"""For a device to come to the end of its work once a native group has failed or was poisoned, which frees it."""


def here(device: torch.device) -> Mark:
    """Returns the place that the present stream of a device has come to with all that it was given until now."""
    mark = torch.Event(device)
    mark.record(torch.accelerator.current_stream(device))
    return mark


@contextlib.contextmanager
def shown(device: torch.device) -> Iterator[None]:
    """Returns a context in which a device is told to wait for members; the heartbeat shows that as long as it does.

    The marks are new ones: another thread looks at them.
    """
    if device.type == "cpu" or not heartbeat.is_shown():
        yield
        return
    of_cuda = device.type == "cuda"
    if of_cuda and (torch.cuda.is_current_stream_capturing() or _capture_mode_setter() is None):
        yield
        return
    before = here(device)
    yield
    after = here(device)
    heartbeat.on_device(*(_OtherThreadsMark(before), _OtherThreadsMark(after)) if of_cuda else (before, after))


_RELAXED = 2  # cudaStreamCaptureModeRelaxed, driver_types.h
_of_thread = threading.local()


@functools.cache
def _capture_mode_setter() -> Any:
    """CUDA's `cudaThreadExchangeStreamCaptureMode`; None: it cannot be found, or this torch is not one for CUDA."""
    major = (torch.version.cuda or "").partition(".")[0]
    try:
        return ctypes.CDLL(f"libcudart.so.{major}").cudaThreadExchangeStreamCaptureMode if major else None
    except (OSError, AttributeError):
        return None


class _OtherThreadsMark:
    """A mark at which threads look that do not train.

    While the training thread records a CUDA graph, another thread that asks for an event spoils the recording, unless
    that thread has said that it does not take part in any (CUDA's `cudaStreamCaptureModeRelaxed`).
    """

    def __init__(self, mark: Mark) -> None:
        self._mark = mark

    def query(self) -> bool:
        if not getattr(_of_thread, "is_relaxed", False):
            _of_thread.is_relaxed = True
            _capture_mode_setter()(ctypes.byref(ctypes.c_int(_RELAXED)))
        return self._mark.query()


def reach(
    device: torch.device,
    done: Mark,
    errored: Callable[[], str | None],
    clock: Callable[[], float] | None = None,
    look: Callable[[], object] = lambda: None,
    failed: Callable[[], object] = lambda: None,
    poll_s: float = POLL_S,
) -> None:
    """Returns when a device has come to a place in its work; ends this process if even an abort frees it not.

    It is polled, as a thread that waits in a device's driver could not be freed. A peer that hangs is for the hang
    detector, whose end poisons the groups. From then on, only this device is waited for. While it writes into the
    tensors the step cannot be done again here, and other members wait.

    Args:
        device: as messages name it.
        done: the place.
        errored: returns what has gone wrong in the groups, as `Bulk.errored` does.
        clock: returns the time, in seconds; by default, the monotonic one.
        look: called every `LINKS_S` while nothing has gone wrong; what it raises ends the wait.
        failed: called when something has: an error of a group does not free the device, but its poison does.
        poll_s: how often the device is asked; a thread beside the one that trains takes the interpreter from that.
    """
    clock = clock or time.monotonic
    look_s, links_s, end_s, wrong = clock() + LOOK_S, clock() + LINKS_S, math.inf, ""
    while not done.query():
        if (now_s := clock()) >= look_s:
            look_s = now_s + LOOK_S
            if not wrong and (wrong := errored() or ""):
                end_s = now_s + FREED_S
                failed()
            if not wrong and now_s >= links_s:
                links_s = now_s + LINKS_S
                look()
            if now_s >= end_s:
                why = f"{device} was not done with its sums {FREED_S:g} s after their end ({wrong})"
                end_process("native group", TimeoutError(why))
        time.sleep(poll_s)


def wait(work: dist.Work, look: Callable[[], object]) -> None:
    """Returns when an operation in host memory is over.

    Args:
        work: of it.
        look: called every `LINKS_S` meanwhile; what it raises ends the wait.

    Raises:
        RuntimeError: it has failed, or its group is poisoned.
    """
    wait_in_spells(work.wait, lambda: work.is_completed(), look, LINKS_S)


def drop(works: Iterable[dist.Work], on_host: bool) -> None:
    """Returns when nothing writes into the tensors of some operations any more; their group has been poisoned before.

    Args:
        works: of the operations.
        on_host: whether they are in host memory; else a device's stream comes after them.
    """
    end_s = time.monotonic() + DROP_S
    for work in works:
        left_s = max(1e-3, end_s - time.monotonic())
        with contextlib.suppress(RuntimeError):
            if isinstance(work, GlooWork):
                work.drained(left_s)
            elif on_host:
                work.wait(timedelta(seconds=left_s))
            else:
                work.wait()
