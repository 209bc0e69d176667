"""Waits for Gloo's collectives that end with an entry of the function, whatever Gloo tells of.

Of a message that a connection was in the middle of when it ended, Gloo tells nobody. Python waits for a collective in
short spells here, which have no effect on it, and looks in between. Not for messages: a time-out of one closes the
connections of its group. Nor is it of use to waits inside torch, such as those of DistributedDataParallel.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from elaunch.workers.comm.native.gloo_work import NO_TIMEOUT, SPELL_S, wait_in_spells

LOST_S = 1.0
"""For Gloo to tell of the end of its connections by itself."""

NO_LIMIT = timedelta()

COLLECTIVES = frozenset({*range(12), 15})
"""Numbers of torch's kinds of operations: no messages, and nothing whose waits do not heed a time-out."""


class GlooWaits:
    """The waits of one entry.

    Args:
        over: is set when its groups have been freed.
        applies: returns whether all groups are Gloo's.

    Attributes:
        left: what has been waited for and is not over: Gloo's threads come out of it after its time-out, and no sooner.
    """

    def __init__(self, over: threading.Event, applies: Callable[[], bool]) -> None:
        self._over, self._applies = over, applies
        self.left: list[dist.Work] = []

    @contextlib.contextmanager
    def in_spells(self) -> Iterator[None]:
        """Returns a context in which whoever waits for a collective from Python waits so."""
        own: Any = dist.Work.wait
        self.left = []

        def wait(work: Any, timeout: timedelta = NO_LIMIT) -> Any:
            if work._get_op_type() not in COLLECTIVES or not self._applies():
                return own(work, timeout)
            freed_s = 0.0

            def look() -> None:
                nonlocal freed_s
                if self._over.is_set():
                    now_s = time.monotonic()
                    freed_s = freed_s or now_s
                    if now_s - freed_s > LOST_S:
                        self.left.append(work)
                        raise RuntimeError("Gloo lost a message when the members changed") from None

            return wait_in_spells(partial(own, work), work.is_completed, look, SPELL_S, timeout or NO_TIMEOUT)

        dist.Work.wait = wait  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            dist.Work.wait = own  # type: ignore[method-assign]
