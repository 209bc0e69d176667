"""Ways in which the links of a worker of a test job go wrong while its process lives.

`--link SLOT:STEP:KIND` happens to the first worker of that slot from this step on, `--quarrel SLOT:STEP:OTHER` to all
workers of that slot.

    deaf      nobody listens at its address any more, and the thread that makes its links has not noticed
    dead      the thread that makes its links meets an error that it does not expect
    OTHER     each operation with the worker of the slot OTHER breaks the link to it, however often it is made anew
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import elaunch
from elaunch.workers.comm import listener
from elaunch.workers.comm.link import Link
from elaunch.workers.layers.job import HybridJob

SO_MAX_PACING_RATE = 47  # of asm-generic/socket.h


def throttle(job: elaunch.Job | HybridJob, wanted: str) -> None:
    """As `--throttle SLOT:STEP:BYTES` wants it: the kernel lets so many bytes a second pass on each link of a slot."""
    slot, step, rate = wanted.split(":") if wanted else ("", 0, 0)
    if slot == os.environ.get("LOCAL_RANK") and job.step >= int(step):
        for link in job._member._transport._links.values():
            link.socket.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, int(rate))


class Links:
    """Does what `--link` and `--quarrel` ask for."""

    def __init__(self, job: elaunch.Job | HybridJob, faults: list[str], quarrels: list[str]) -> None:
        self.job = job
        slot = os.environ.get("LOCAL_RANK", "0")
        asked = [tuple(fault.split(":")) for fault in faults]
        self.faults = {int(step): kind for who, step, kind in asked if f"{who}#0" == job.worker.partition("/")[2]}
        for who, step, other in (quarrel.split(":") for quarrel in quarrels):
            if who == slot:
                self._quarrel(int(step), f"/{other}#")

    def at(self, step: int) -> None:
        """Called in each micro-batch."""
        kind = self.faults.pop(step, "")
        if kind == "deaf":
            own = self.job._member._transport._listener
            for server in own._accepting:
                own._selector.unregister(server)  # or what has its number next could not be registered
                server.close()
        elif kind == "dead":
            listener.Listener._wait_s = _fails  # type: ignore[assignment, method-assign]
            self.job._member._transport._listener.dial(self.job.worker, "", 1.0)

    def _quarrel(self, from_step: int, other: str) -> None:
        job = self.job

        def breaking(name: str) -> None:
            original: Callable[..., Any] = getattr(Link, name)

            def post(link: Link, *args: Any, **more: Any) -> Any:
                if other in link.peer and job.step >= from_step:
                    raise link.fail("the other slot's worker is not talked to")
                return original(link, *args, **more)

            setattr(Link, name, post)

        breaking("post_send")
        breaking("post_receive")


def _fails(_: object) -> None:
    raise RuntimeError("this thread dies")
