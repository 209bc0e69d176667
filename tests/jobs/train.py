"""A small training script as users write it, with dropout, AdamW and a schedule; it can hurt itself on request.

It trains on its GPU if it has one, else on the CPU.

`--die SLOT:STEP:PHASE` ends the first worker of a slot (SLOT#N: its N-th replacement) by SIGKILL in that step, at

    compute   in the forward pass of its first micro-batch
    reduce    after it has sent its part of the gradients, before it has the sum
    enter     with complete gradients, before it speaks at the commit barrier
    half      at the commit barrier, after it has spoken to the last of the others and to nobody else: that one passes
    passed    right after it has passed the barrier, before its optimizer acts

or, when that step or a later one is in flight, at

    vote      as it is about to agree with the others on the step in flight
    moving    when it has sent a message of the state
    receive   when it has received one
    barrier   before the barrier that ends a transition, or the job

So that no test races the end of its job, `--crew` and `--gather` slow the steps while workers are missing, and `--hold`
stops at a step until the test has done what it came for.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

import elaunch
from elaunch.workers.comm import group as group_module
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.stream import Messages
from elaunch.workers.layers.job import HybridJob
from tests.jobs import come_late, say, share_device
from tests.jobs.eager import compile_nothing
from tests.jobs.hangs import Hangs
from tests.jobs.links import Links, throttle


class Samples(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points of a smooth function, by index; each takes `load_s` to load."""

    def __init__(self, dtype: torch.dtype, load_s: float = 0.0) -> None:
        self.dtype, self.load_s = dtype, load_s

    def __len__(self) -> int:
        return 500

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.load_s:
            time.sleep(self.load_s)
        point = torch.linspace(-1, 1, 12, dtype=self.dtype) * (1 + index / 500)
        return point, point.sin().sum().reshape(1)


def wait_for_save(job: elaunch.Job | HybridJob) -> None:
    """Until the checkpoint that was begun is complete, or has failed: the next one never finds it unfinished."""
    attempt = job._member.checkpoints._attempt
    if attempt is not None:
        attempt.over.wait(10.0)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


LAST_STEPS = 5
PATIENCE_S = 30.0


def await_missing(job: elaunch.Job | HybridJob, steps: int) -> None:
    """Waits in the last steps for who is missing, however long it takes to come on a busy machine."""
    end_s = time.monotonic() + PATIENCE_S
    while steps - job.step <= LAST_STEPS and time.monotonic() < end_s:
        if job._member._recovery.newest_generation() > job.generation:
            break  # they come; or there is another change to go through first
        time.sleep(0.005)


def await_native(job: elaunch.Job | HybridJob) -> None:
    """Waits until the native groups of this generation are open, however long that takes on a busy machine."""
    native, end_s = job._member.native, time.monotonic() + PATIENCE_S
    while native.current is None and not native.ready() and time.monotonic() < end_s:
        if job._member._recovery.newest_generation() > job.generation:
            break
        time.sleep(0.005)


class Pace:
    """Keeps the job from running away from its test: see `--crew`, `--gather` and `--hold`."""

    SLOW_S = 0.1

    def __init__(
        self, job: elaunch.Job | HybridJob, steps: int, sleep_s: float, crew: int, gather: int, hold: str
    ) -> None:
        self.job, self.steps, self.sleep_s, self.crew, self.gather = job, steps, sleep_s, crew, gather
        step, _, gate = hold.partition(":")
        self.hold_step = int(step or 0)
        self.gate = Path(gate) if gate else None
        self.gathered_step: int | None = None

    def before(self) -> None:
        """Called before each micro-batch."""
        if self.gathered_step is None and self.job.size >= self.gather:
            self.gathered_step = self.job.step
        # One step commits in the full membership before the hold: tests wait to see it.
        if self.gathered_step is not None and self.job.step > max(self.gathered_step, self.hold_step - 1):
            while self.gate is not None and not self.gate.exists():
                time.sleep(0.005)

    def after(self) -> None:
        """Called after each micro-batch."""
        if self.gathered_step is not None and self.job.size >= self.crew:
            time.sleep(self.sleep_s)
            return
        time.sleep(self.SLOW_S)
        await_missing(self.job, self.steps)


class Faults:
    """Ends this process at the requested moments; counts on what each phase calls."""

    OF_ONE_STEP: tuple[str, ...] = ("compute", "reduce", "enter", "half", "passed")

    def __init__(self, job: elaunch.Job | HybridJob, requests: list[str]) -> None:
        self.job = job
        slot, number = os.environ.get("LOCAL_RANK", "0"), job.worker.partition("#")[2]
        names = {f"{slot}#{number}", slot} if number == "0" else {f"{slot}#{number}"}
        asked = [request.split(":") for request in requests]
        self.steps = {phase: int(step) for who, step, phase in asked if who in names}
        if self.steps:
            self._die_around(Group, "all_gather_bytes", before="enter", after="passed")
            self._die_around(Group, "all_gather", before="reduce")
            self._die_around(Group, "barrier", before="barrier")
            self._die_around(elaunch.Job, "vote", before="vote")
            self._wrap(Group, "all_gather_bytes", self._speak_to_one)
            self._wrap(Group, "stream", self._stream_in_part)

    def due(self, phase: str) -> bool:
        step = self.steps.get(phase)
        return step is not None and (step == self.job.step or (step < self.job.step and phase not in self.OF_ONE_STEP))

    def _die_around(self, kind: type, name: str, before: str, after: str = "") -> None:
        def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self.due(before):
                die()
            result = original(*args, **kwargs)
            if self.due(after):
                die()
            return result

        self._wrap(kind, name, call)

    def _speak_to_one(self, original: Callable[..., Any], group: Group, payload: bytes) -> Any:
        if self.due("half"):
            listener = [member for member in group.members if member != self.job.worker][-1]
            group.transport.exchange(group.generation, group._next_op(), [(listener, 0, memoryview(payload))])
            die()
        return original(group, payload)

    def _stream_in_part(
        self,
        original: Callable[..., Any],
        group: Group,
        outgoing: Mapping[int, Messages],
        incoming: Mapping[int, Messages],
    ) -> None:
        original(
            group,
            {peer: self._dying(messages, "moving") for peer, messages in outgoing.items()},
            {peer: self._dying(messages, "receive") for peer, messages in incoming.items()},
        )

    def _dying(self, messages: Messages, phase: str) -> Iterator[memoryview]:
        for message in messages:
            yield message
            if self.due(phase):
                die()

    def _wrap(self, kind: type, name: str, call: Callable[..., Any]) -> None:
        original = getattr(kind, name)
        setattr(kind, name, lambda *args, **kwargs: call(original, *args, **kwargs))


def upload(asked: str, step: int) -> None:
    """Wait for the answer of a server that is slow, if this worker is to do so before this step."""
    slot, _, rest = asked.partition(":")
    every, _, seconds = rest.partition(":")
    if slot == os.environ.get("LOCAL_RANK") and step and step % int(every) == 0:
        ours, server = socket.socketpair()
        with ours, server, suppress(TimeoutError):
            ours.settimeout(float(seconds))
            ours.recv(1)


def main() -> None:
    come_late()
    share_device()
    compile_nothing()
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--global-batch-size", type=int, default=24)
    parser.add_argument("--micro-batch-size", type=int, default=3, help="0: a worker does its share at once")
    parser.add_argument("--loaders", type=int, default=0, help="processes that load the samples of each worker")
    parser.add_argument("--load", type=float, default=0.0, help="seconds that it takes to load a sample")
    parser.add_argument("--start-method", help="how those processes are started")
    parser.add_argument("--data-loader", action="store_true", help="hand over a DataLoader instead of a data set")
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds that a micro-batch takes besides")
    parser.add_argument(
        "--slow", default="", help="SLOT:STEP:SECONDS that a micro-batch takes besides from this step on"
    )
    parser.add_argument("--crew", type=int, default=0, help="with fewer members, micro-batches take 0.1 s each")
    parser.add_argument("--gather", type=int, default=0, help="the same, until there were once so many members")
    parser.add_argument(
        "--hold", default="", help="STEP:FILE: once gathered, wait in this step or a later for the file"
    )
    parser.add_argument(
        "--extras", action="store_true", help="a layer with buffers, and collectives of the script's own"
    )
    parser.add_argument("--die", action="append", default=[])
    parser.add_argument("--wait-for-saves", action="store_true", help="go on when a checkpoint is complete")
    parser.add_argument("--direct", type=int, help="how many members may all have links to each other")
    parser.add_argument("--cross", type=int, help="a step in which all first workers wait for each other's messages")
    parser.add_argument("--skip", default="", help="SLOT:STEP in which a worker leaves out a collective of the script")
    parser.add_argument("--fail-at", default="", help="SLOT:STEP at which a worker raises")
    parser.add_argument("--throttle", default="", help="SLOT:STEP:BYTES: from then on its links carry so many a second")
    parser.add_argument("--break-at", default="", help="SLOT:STEP at which its backward raises, half of it reduced")
    parser.add_argument("--link", action="append", default=[], help="SLOT:STEP:KIND, see tests/jobs/links.py")
    parser.add_argument("--quarrel", action="append", default=[], help="SLOT:STEP:OTHER, see tests/jobs/links.py")
    for name in ("--hang", "--busy", "--pause"):
        parser.add_argument(name, action="append", default=[], help="SLOT:STEP:WHAT, see tests/jobs/hangs.py")
    parser.add_argument("--between", action="store_true", help="these come after the optimizer's step, not in forward")
    parser.add_argument("--upload", default="", help="SLOT:EVERY:SECONDS: every so many steps a worker sends something")
    parser.add_argument("--chat", default="", help="the same, between the first micro-batch of a step and the next")
    parser.add_argument("--begin-when", type=Path, help="wait for this file before elaunch.init()")
    args = parser.parse_args()

    while args.begin_when and not args.begin_when.exists():
        time.sleep(0.005)
    if args.direct:
        group_module.DIRECT_MEMBERS = args.direct
    if args.throttle:
        os.environ["ELAUNCH_LINKS"] = "tcp"  # the kernel throttles no others
    job = elaunch.init()
    faults = Faults(job, args.die)
    hangs = Hangs(args.hang, args.busy, args.pause, job.worker)
    links = Links(job, args.link, args.quarrel)
    pace = Pace(job, args.steps, args.sleep, args.crew, args.gather, args.hold)
    dtype = getattr(torch, args.dtype)
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Linear(12, args.width),
        nn.GELU(),
        nn.Dropout(args.dropout),
        nn.Linear(args.width, args.width),
        nn.GELU(),
        nn.Dropout(args.dropout),
    )
    small = {"first_bucket_bytes": 1, "bucket_bytes": 1} if args.break_at else {}
    norm_layer = nn.BatchNorm1d(args.width) if args.extras else nn.Identity()
    model = job.wrap(nn.Sequential(net, norm_layer, nn.Linear(args.width, 1)).to(job.device, dtype), **small)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    job.register(model=model, optimizer=optimizer, scheduler=scheduler)

    def may_break(gradient: torch.Tensor) -> None:
        if job.last_micro_batch and args.break_at == f"{os.environ.get('LOCAL_RANK', '0')}:{job.step}":
            raise RuntimeError("the backward that breaks the script")

    next(iter(model.parameters())).register_hook(may_break)
    if not args.between:
        net.register_forward_pre_hook(lambda *_: hangs.at(job.step))
    rows = set()
    counted, logged = 0.0, -1
    samples: Any = Samples(dtype, args.load)
    sizes = {"global_batch_size": args.global_batch_size, "micro_batch_size": args.micro_batch_size or None}
    loading: dict[str, Any] = {"num_workers": args.loaders, "multiprocessing_context": args.start_method}
    if args.data_loader:
        samples = torch.utils.data.DataLoader(samples, sizes.pop("micro_batch_size"), shuffle=True, **loading)
        loading = {}
    for points, values in job.batches(samples, seed=7, steps=args.steps, **sizes, **loading):
        if args.wait_for_saves:
            wait_for_save(job)
        pace.before()
        throttle(job, args.throttle)
        if faults.due("compute"):
            die()
        links.at(job.step)
        if args.fail_at == f"{os.environ.get('LOCAL_RANK', '0')}:{job.step}":
            raise RuntimeError("the sample that breaks the script")
        rows.add(len(points))
        loss = (model(points) - values).square().mean()
        loss.backward()
        job.report(loss=loss)
        pace.after()
        slot, _, slower = args.slow.partition(":")
        if slot == os.environ.get("LOCAL_RANK") and job.step >= int(slower.partition(":")[0]):
            time.sleep(float(slower.partition(":")[2]))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        if args.cross == job.step and job.last_micro_batch and job.worker.endswith("#0"):
            args.cross = None
            torch.distributed.recv(torch.ones(1, device=job.device), (job.rank + 1) % job.size, group=job.process_group)
        if args.skip.partition(":")[2] == str(job.step) and job.last_micro_batch:
            here = f"{slot}:{job.step}" if job.worker.endswith("#0") else ""
            if args.skip != here:
                torch.distributed.all_reduce(torch.ones(3000, device=job.device), group=job.process_group)
        if args.extras and job.last_micro_batch:
            ones = torch.ones(3000, device=job.device)
            torch.distributed.all_reduce(ones, group=job.process_group)
            counted = ones[0].item()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if job.last_micro_batch:
            upload(args.upload, job.step)
            if args.between:
                hangs.at(job.step)
        elif logged != job.step:
            logged = job.step
            upload(args.chat, job.step)
    norm = sum(parameter.detach().double().square().sum().item() for parameter in model.parameters())
    if args.extras:
        statistics = [round(buffer.double().sum().item(), 12) for buffer in model.buffers()]
        say(f"extras {statistics} members {counted:g} of {job.size}")
    rate = scheduler.get_last_lr()[0]
    say(f"ended {job.worker} pid {os.getpid()} norm {norm:.15e} rate {rate:.6e} rows {sorted(rows)}")


if __name__ == "__main__":
    main()
