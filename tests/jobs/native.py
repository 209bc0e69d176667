"""A training script whose gradients go over native groups, and which hurts itself while they do.

It trains on its GPU if it has one, else on the CPU.

`--fault SLOT:STEP:MOMENT:KIND` ends (KIND kill) or stops (stop) the first worker of a slot by a signal, in the first
step from STEP on in which the whole crew is there and sums natively, at

    forward   while the others wait in a collective of the script
    issue     before its gradients go into the native sums that the others wait for
    sum       when its native sums have begun, or, where these have a fixed order, its summands have left
    enter     before it speaks at the commit barrier
    half      when it has spoken to one of the others there

or when those before it have been replaced, if that is later, which all wait for then. Or, when one of the crew is
missing,

    open      as it begins to open the native group of the others, in which they wait for it

`--device` gives groups of Gloo the manners of a device's: whoever waits goes on at once, a sum that was cut off leaves
garbage in the tensor, and only the group itself tells of that.

`--awaits` has workers tell each other that steps over links are slow and openings quick, so that all wait for their
group before the first step of a generation; `--dies-opening SLOT:STEP` ends the first worker of a slot meanwhile.

`--break-at SLOT:STEP` breaks the connections of a worker's native group, in the first step from STEP on in which the
whole crew is there and sums natively.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import nn

import elaunch
from elaunch.policy.collectives import in_order
from elaunch.workers import runtime
from elaunch.workers.comm.native.bulk import Bulk
from elaunch.workers.comm.native.gloo import GlooBulk
from elaunch.workers.comm.native.groups import NativeGroups
from elaunch.workers.comm.native.nccl import NcclBulk
from elaunch.workers.job import BaseJob
from elaunch.workers.member.swap_choice import StepTimes
from tests.jobs import come_late, say, share_device, train
from tests.jobs.eager import compile_nothing

GARBAGE = 1e3

SLOW_S = {"cpu": 0.05, "cuda": 0.2}
"""What a micro-batch takes while the crew is not whole, by type of the device: replacements come later to a GPU."""


class NativeFaults(train.Faults):
    """Hurts this worker once, when the whole crew sums natively, and those that are to be hurt before it have been."""

    def __init__(self, job: elaunch.Job, faults: list[str], crew: int) -> None:
        self.crew = crew
        asked = dict(fault.rsplit(":", 1) for fault in faults)
        parts = [fault.split(":") for fault in asked]
        self._order = [(slot, int(step)) for slot, step, moment in parts if moment != "open"]
        super().__init__(job, list(asked))
        slot = os.environ.get("LOCAL_RANK", "0")
        (kind,) = {kind for fault, kind in asked.items() if fault.startswith(f"{slot}:")} or {"kill"}
        train.die = hurt if kind == "kill" else halt
        native: type[NcclBulk | GlooBulk] = NcclBulk if job.device.type == "cuda" else GlooBulk
        begins = "exchange" if in_order(os.environ) else "all_reduce"
        self._die_around(native, begins, before="issue", after="sum")
        self._wrap(native, "open", self._open)

    def due(self, phase: str) -> bool:
        step = self.steps.get(phase)
        if step is None or self.job.step < step or not is_whole(self.job, self.crew):
            return False
        return self._next() == (os.environ.get("LOCAL_RANK", "0"), step)

    def await_crew(self) -> None:
        """Waits, once a fault is due, for who is missing and for the group of all."""
        fault = self._next()
        if fault is None or self.job.step < fault[1]:
            return
        if self.job.size < self.crew:
            train.await_missing(self.job, self.job.step)
        elif self.job._member.native.current is None:
            train.await_native(self.job)

    def _next(self) -> tuple[str, int] | None:
        members = self.job._member.group.members
        left = (fault for fault in self._order if any(member.endswith(f"/{fault[0]}#0") for member in members))
        return next(left, None)

    def _open(self, original: Callable[..., Any], bulk: Bulk, store: Any, rank: int, size: int, **more: Any) -> None:
        step = self.steps.get("open")
        if step is not None and self.job.step >= step and size == self.crew - 1:
            train.die()
        original(bulk, store, rank, size, **more)


def is_whole(job: BaseJob, crew: int) -> bool:
    """Whether all are there and sum natively."""
    return job.size >= crew and job._member.native.current is not None


def hurt() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def halt() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


class CutOff:
    """A sum as a stream sees it: it always ends, and what is in the tensor then is another matter."""

    def __init__(self, bulk: DeviceLike, work: Any, tensor: torch.Tensor) -> None:
        self._bulk, self._work, self._tensor = bulk, work, tensor

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._bulk.cut_off = str(error)
            self._tensor.fill_(GARBAGE)
        return True

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


class DeviceLike(GlooBulk):
    """A group of Gloo with the manners of a device's.

    Attributes:
        cut_off: what has gone wrong in it; empty: nothing.
    """

    backend = "device-like"
    cut_off = ""

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        try:
            return CutOff(self, super().all_reduce(tensor), tensor)
        except RuntimeError as error:
            self.cut_off = str(error)
            return CutOff(self, _Raises(error), tensor)

    def errored(self) -> str | None:
        return self.cut_off or None


class _Raises:
    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self) -> None:
        raise self._error

    def is_completed(self) -> bool:
        return True


def break_connections(job: elaunch.Job) -> None:
    """The connections of this worker's native group break; all processes and links live."""
    bulk = job._member.native.current
    assert bulk is not None
    if isinstance(bulk, GlooBulk):
        bulk._end_connections()
    else:
        bulk.poison()


def hold_back(job: elaunch.Job, steps: list[int]) -> None:
    """Has this worker say that its n-th group is open from the n-th of these steps on."""
    ready, seen = NativeGroups.ready, list[int]()

    def ready_late(self: NativeGroups) -> int:
        found = ready(self)
        if found and found not in seen:
            seen.append(found)
        if found and seen.index(found) < len(steps) and job.step + 1 < steps[seen.index(found)]:
            return 0
        return found

    NativeGroups.ready = ready_late  # type: ignore[method-assign]


def measure(awaits: bool) -> None:
    """Has this worker measure what makes the members wait for their groups, or nothing.

    Steps of this script take as long as it sleeps in them.
    """
    StepTimes.figures = lambda self: (120.0, 0.1) if awaits else None  # type: ignore[method-assign]
    if awaits:
        NativeGroups.openings = ((99, 30.0),)  # type: ignore[assignment]


def die_opening(job: elaunch.Job, fault: str) -> None:
    """Has this worker die in the first opening from a step on, where the others have come to it."""
    slot, step = map(int, fault.split(":"))
    opens = GlooBulk.open

    def open_or_die(self: GlooBulk, *arguments: Any, **more: Any) -> None:
        if job.worker.endswith(f"/{slot}#0") and job.step >= step:
            hurt()
        opens(self, *arguments, **more)

    GlooBulk.open = open_or_die  # type: ignore[method-assign]


def main() -> None:
    come_late()
    share_device()
    compile_nothing()
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--crew", type=int, default=1)
    parser.add_argument("--ends-whole", action="store_true", help="the last steps wait for all of the crew")
    parser.add_argument("--fault", action="append", default=[], help="SLOT:STEP:MOMENT:KIND")
    parser.add_argument("--device", action="store_true")
    parser.add_argument("--break-at", default="", help="SLOT:STEP, see above")
    parser.add_argument("--refuse", default="", help="SLOT whose groups cannot be opened")
    parser.add_argument("--native-from", type=int, action="append", default=[], help="step from which a group is used")
    parser.add_argument("--relink-at", type=int, default=-1, help="step at which a link breaks")
    parser.add_argument("--awaits", action="store_true", help="first steps wait for the group of their generation")
    parser.add_argument("--dies-opening", default="", help="SLOT:STEP from which it dies when a group opens")
    args = parser.parse_args()
    slot = os.environ.get("LOCAL_RANK", "0")

    def refuse(*args: Any, **more: Any) -> None:
        raise RuntimeError("no route to host")

    if args.device:
        runtime.maker = lambda host, device: lambda: DeviceLike(host)  # type: ignore[attr-defined]
    if args.refuse == slot:
        GlooBulk.open = refuse  # type: ignore[method-assign]
    measure(args.awaits)
    job = elaunch.init()
    if args.dies_opening:
        die_opening(job, args.dies_opening)
    faults = NativeFaults(job, args.fault, args.crew)
    if args.native_from:
        hold_back(job, args.native_from)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(12, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 1)).double()
    net.to(job.device)
    model = job.wrap(net, first_bucket_bytes=1, bucket_bytes=1)  # a sum for each parameter
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    job.register(model=model, optimizer=optimizer)
    break_slot, _, break_step = args.break_at.partition(":")
    broken = relinked = False
    steps = job.steps(train.Samples(torch.float64), global_batch_size=16, micro_batch_size=2, seed=7, steps=args.steps)
    for step in steps:
        for inputs, targets in step:
            faults.await_crew()
            if not is_whole(job, args.crew) and args.crew > 1:
                time.sleep(SLOW_S[job.device.type])
            if args.ends_whole and job.size < args.crew:
                train.await_missing(job, args.steps)
            if faults.due("forward") and job.last_micro_batch:
                train.die()
            if job.last_micro_batch and args.crew > 1:
                torch.distributed.all_reduce(torch.ones(3, device=job.device), group=job.process_group)
            breaks = slot == break_slot and job.step >= int(break_step) and is_whole(job, args.crew)
            if breaks and job.last_micro_batch and not broken:
                broken = True
                say(f"the connections break in step {job.step}")
                break_connections(job)
            if args.relink_at == job.step and job.rank == 0 and not relinked:
                relinked = True
                next(iter(job._member._transport._links.values())).fail("broken for the test")
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            job.report(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
    norm = float(sum(parameter.detach().square().sum().item() for parameter in net.parameters()))
    say(f"ended {job.worker} norm {norm.hex()} after {job.step} steps")
    opening = [thread for thread in threading.enumerate() if thread.name == "elaunch-native-open"]
    say(f"groups that still open: {len(opening)}")


if __name__ == "__main__":
    main()
