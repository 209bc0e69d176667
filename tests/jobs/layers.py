"""A small model in layers under elaunch.hybrid(); a layer of it can raise, or wait for its test, in a step.

It trains on its GPU if it has one, else on the CPU.

`--die`, as in `tests/jobs/train.py`, knows these moments: `compute`, `ship` (before the last gradients for the copies
go out), `enter`, `half` and `passed` of one step, and, in that step or a later one,

    tp         in a layer, before a sum of its tensor-parallel group in which the others wait, over native groups
    share      before it tells the others the new values of its parameters, after the commit of the step before
    vote       as it is about to agree with the others on the step in flight
    held_state before it says what it has of the state
    connect    before it makes links
    moving     when it has sent a message of the state
    receive    when it has received one
    native-…   moving and receive, in a step in whose background the state moves over a native group
    turn-…     compute, enter, half, passed and share of a step in which the plan changes
    resume     when the state has moved, before it goes on
    outcome    before it tells the others whether a checkpoint is whole
    outcomes   when it has heard it from them
    barrier    before the barrier that ends a job

and, with a number of steps as STEP, while the checkpoint after so many is written,

    written    with its part on the disk, before it says so
    complete   as the first member, when all parts are there

`--full SLOT:STEP` lets no file of the checkpoint after so many steps become larger than some bytes, as a quota would.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import elaunch
from elaunch.plan import Plan, symmetric
from elaunch.rendezvous.membership import slot_of
from elaunch.workers.checkpoints import Checkpoints
from elaunch.workers.clocks import SimulatedClocks
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.transport import Transport
from elaunch.workers.hooks import Verdict
from elaunch.workers.layers.carry.native import NativeCarrier
from elaunch.workers.layers.engine import Engine
from elaunch.workers.layers.job import HybridJob
from elaunch.workers.layers.model import Layer as EngineLayer
from elaunch.workers.layers.snapshots import Snapshots
from elaunch.workers.layers.tensor_parallel import current
from elaunch.workers.layers.zero import ZeroOptimizer
from elaunch.workers.state import checkpoint
from elaunch.workers.state.background import BackgroundMove
from elaunch.workers.state.paths import in_step
from tests.jobs import come_late, say, share_device
from tests.jobs.eager import compile_nothing
from tests.jobs.hangs import Hangs
from tests.jobs.train import Faults, Pace, Samples, await_native, die, wait_for_save

WIDTH = 12


class LayerFaults(Faults):
    """Ends this process at the requested moments of a hybrid job."""

    OF_ONE_STEP: tuple[str, ...] = ("compute", "ship", "enter", "half", "passed")
    turned = False

    def __init__(self, job: HybridJob, requests: list[str]) -> None:
        super().__init__(job, requests)
        if self.steps:
            self._die_around(Snapshots, "ship", before="ship")
            self._die_around(NativeCarrier, "all_reduce", before="tp")
            self._die_around(ZeroOptimizer, "share", before="share")
            self._die_around(HybridJob, "vote", before="vote")
            self._die_around(Engine, "held_state", before="held_state")
            self._die_around(Transport, "connect", before="connect")
            self._die_around(HybridJob, "resume", before="resume")
            self._die_around(Checkpoints, "_outcomes", before="outcome", after="outcomes")
            self._wrap(BackgroundMove, "_leaving", self._leave_in_part)
            self._die_around(BackgroundMove, "wait", before="", after="receive")
            self._die_around(in_step._PathInStep, "_begin", before="", after="native-moving")
            self._die_around(in_step._PathInStep, "_end_first", before="", after="native-receive")
            self._wrap(Engine, "apply", self._apply)
            original, phases = checkpoint._write, {"part": "written", "elaunch": "complete"}

            def write(path: Path, fields: Any) -> None:
                # The folder has the number of steps in its name.
                step = self.steps.get(phases[path.stem.partition("-")[0]], -1)
                if path.parent.name.startswith(f"step-{step:09d}."):
                    die()
                original(path, fields)

            checkpoint._write = write

    def due(self, phase: str) -> bool:
        engine = getattr(self.job, "_engine", None)
        turning = engine is not None and (engine._migration is not None or (phase == "share" and self.turned))
        return super().due(phase) or (turning and super().due(f"turn-{phase}"))

    def _apply(self, original: Callable[..., Any], engine: Engine, *args: Any) -> None:
        self.turned = engine._migration is not None
        original(engine, *args)

    def _leave_in_part(self, original: Callable[..., Any], *args: Any) -> Iterator[tuple[int, memoryview]]:
        for message in original(*args):
            yield message
            if self.due("moving"):
                die()


class Layer(nn.Module):
    """One of several alike."""

    placements: ClassVar = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}

    row_s: ClassVar[Callable[[], float]] = lambda: 0.0

    def __init__(self, number: int, raise_at: tuple[int, int] | None, frozen: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        if frozen:
            self.up.requires_grad_(False)
            self.shift = nn.Buffer(torch.zeros(WIDTH), persistent=False)
        self.raise_at = raise_at
        self.number, self.step = number, 0
        self.before: Callable[[], object] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta:
            time.sleep(len(x) * type(self).row_s() / current().size)
        if self.raise_at == (self.number, self.step) and not x.is_meta:
            raise RuntimeError("the layer that breaks the script")
        self.before()
        if hasattr(self, "shift"):
            x = x + self.shift
        return x + torch.dropout(self.down(torch.tanh(self.up(x))), 0.1, True)


def load(engine: Engine) -> None:
    """Puts values that no seed gives into all layers, as a script does that has pretrained ones."""
    for (number, _), layer in engine.layers.items():
        values = {}
        for name, value in layer.module.named_parameters():
            drawn = torch.sin(torch.arange(value.numel(), dtype=value.dtype) * (number + 0.7))
            values[name] = 0.3 * drawn.view(value.shape)
        layer.module.load_state_dict(values)
        layer.module.get_buffer("shift").data.fill_(0.1 * (number + 1))


def hold_changes(step: int, gate: Path) -> None:
    """From a step on, when state is about to move, say so and wait for the test."""
    original = HybridJob.transfer

    def transfer(self: HybridJob, group: Group, verdict: Verdict) -> int:
        if verdict.step >= step and not gate.exists():
            say("a change is held")
            while not gate.exists():
                time.sleep(0.005)
        return original(self, group, verdict)

    HybridJob.transfer = transfer  # type: ignore[method-assign]


def loss_fn(y: Tensor, target: Tensor) -> Tensor:
    return (y.mean(1, keepdim=True) - target).square().mean()


def replan(job: HybridJob, engine: Engine, given: Plan, degrees: str, weights_only: bool) -> None:
    """Asks for a plan, and says which one holds and what is here then."""
    dp, pp, tp = map(int, degrees.split("x"))
    names = [f"any{number}" for number in range(dp * pp * tp)]
    sizes = given.n_layers, given.global_batch_size, given.micro_batch_size
    holds = job.replan(symmetric(names, *sizes, dp=dp, pp=pp, tp=tp), weights_only)
    here = sorted(number for number, _ in engine.layers)
    busy = len(holds.workers) - len(holds.idle)
    say(f"replanned {engine.step} {degrees} {len(holds.tiles)} tiles {busy} busy layers {here}")
    if weights_only:
        for (number, _), layer in engine.layers.items():
            layer.module.eval()
            say(f"lent {engine.step} {number} {layer.tp_rank.rank}/{layer.tp_rank.size} {digest(layer)}")


def digest(layer: EngineLayer) -> str:
    """Returns a digest of a layer's values."""
    values = [value.detach().cpu().contiguous().view(torch.uint8) for value in layer.tensors().values()]
    return f"{zlib.crc32(b''.join(value.numpy().tobytes() for value in values)):08x}"


def fill_disk(step: int) -> None:
    """While the checkpoint after so many steps is written, let files have few bytes."""
    original = checkpoint.write_shard

    def write(folder: Path, *args: Any) -> bool:
        if not folder.name.startswith(f"step-{step:09d}."):
            return original(folder, *args)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
        try:
            return original(folder, *args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    setattr(checkpoint, "write_shard", write)  # noqa: B010


def main() -> None:
    come_late()
    share_device()
    compile_nothing()
    parser = argparse.ArgumentParser()
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--idle", type=int, default=0, help="workers to which the plan gives nothing")
    parser.add_argument("--deferred", type=int, default=0, help="micro-batches whose weight gradients may wait")
    parser.add_argument("--units", type=int, default=8, help="micro-batches of a step")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--dtype", choices=("float64", "bfloat16"), default="float64")
    parser.add_argument("--await-native", action="store_true", help="no step before native groups are open")
    parser.add_argument("--snapshots", type=int, default=1)
    parser.add_argument("--max-extra-bytes", type=int)
    parser.add_argument("--crew", type=int, default=0, help="with fewer members, steps take 0.1 s more")
    parser.add_argument("--die", action="append", default=[])
    parser.add_argument("--raise-at", default="", help="LAYER:STEP")
    parser.add_argument("--wait-for-saves", action="store_true", help="go on when a checkpoint is complete")
    parser.add_argument("--full", default="", help="SLOT:STEP: its part of this checkpoint does not fit on the disk")
    parser.add_argument("--hold", default="", help="STEP:FILE: wait in this step for the file")
    parser.add_argument("--hold-change", default="", help="STEP:FILE: from this step on, wait for the file in a change")
    parser.add_argument("--row-seconds", type=float, default=0.0, help="that each layer takes for a row")
    parser.add_argument(
        "--slow",
        action="append",
        default=[],
        metavar="SLOT:STEP:FACTOR[:END]",
        help="from this step on, to another one, this local rank, or `node/local_rank`, takes so many times as long",
    )
    parser.add_argument("--slow-again", action="store_true", help="--slow is of the slot: replacements are slow too")
    parser.add_argument("--clocks", action="store_true", help="its device is simulated, and may be clocked")
    parser.add_argument("--hang-between", action="store_true", help="it does so before the step, not in a layer")
    parser.add_argument("--frozen", action="store_true", help="layers have frozen parameters; loads values into all")
    parser.add_argument("--loaders", type=int, default=0, help="processes that load samples")
    parser.add_argument("--spoil", default="", help="SLOT:STEP: before this step, it changes its layers' values")
    parser.add_argument(
        "--replan",
        action="append",
        default=[],
        metavar="STEP:DPxPPxTP[:weights]",
        help="before this step, go over to another plan, with the weights alone or with all; in this order",
    )
    parser.add_argument("--stop", type=int, help="end after so many steps, as if there were no more")
    for name in ("--hang", "--busy", "--pause"):
        parser.add_argument(name, action="append", default=[], help="SLOT:STEP:WHAT, see tests/jobs/hangs.py")
    args = parser.parse_args()
    layer, _, step = args.raise_at.partition(":")
    raise_at = (int(layer), int(step)) if args.raise_at else None
    hold, _, gate = args.hold.partition(":")
    if args.hold_change:
        step, _, file = args.hold_change.partition(":")
        hold_changes(int(step), Path(file))

    dtype = getattr(torch, args.dtype)
    job = elaunch.hybrid()
    clocks = SimulatedClocks((1000, 1200, 1400, 1600, 1800, 2000), 1000)
    if args.clocks:
        job.find_clocks = lambda: clocks
    slow = [one.split(":") for one in args.slow]
    here = os.environ.get("LOCAL_RANK"), slot_of(job.worker)
    slow = [one for one in slow if one[0] in here and (args.slow_again or job.worker.endswith("#0"))]

    def row_s() -> float:
        slowed = 1.0
        for _, begin, factor, *end in slow:
            if int(begin) <= job.step < (int(end[0]) if end else 1 << 60):
                slowed = float(factor)
        return float(args.row_seconds * slowed / clocks.speed)

    Layer.row_s = row_s
    if args.full.partition(":")[0] == os.environ.get("LOCAL_RANK", "0"):
        fill_disk(int(args.full.partition(":")[2]))
    faults = LayerFaults(job, args.die)
    hangs = Hangs(args.hang, args.busy, args.pause, job.worker)
    pace = Pace(job, args.steps, 0.0, args.crew, 0, "")
    busy = args.dp * args.pp * args.tp
    workers = [f"w{rank}" for rank in range(busy + args.idle)]
    plan = symmetric(workers[:busy], 4, 3 * args.units, 3, dp=args.dp, pp=args.pp, tp=args.tp)
    engine = job.engine(
        [partial(Layer, number, raise_at, args.frozen) for number in range(4)],
        loss_fn,
        partial(torch.optim.AdamW, lr=3e-3),
        replace(plan, idle=tuple(workers[busy:]), deferred=args.deferred),
        dataset=Samples(dtype),
        dtype=dtype,
        clip_norm=1.0,
        scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=args.steps),
        snapshots=args.snapshots,
        max_extra_bytes=args.max_extra_bytes,
        num_workers=args.loaders,
    )
    if args.frozen:
        load(engine)
    say(f"trains {job.worker} pid {os.getpid()} layers {sorted(number for number, _ in engine.layers)}")

    def before() -> None:
        if faults.due("compute"):
            die()
        if not args.hang_between:
            hangs.at(engine.step)

    asked = [one.split(":") for one in args.replan]
    while engine.step < min(args.steps, args.stop or args.steps):
        for _, degrees, *weights in [one for one in asked if int(one[0]) == engine.step]:
            replan(job, engine, plan, degrees, bool(weights))
        for layer_here in engine.layers.values():
            assert isinstance(layer_here.module, Layer)
            layer_here.module.step, layer_here.module.before = engine.step, before
        if args.wait_for_saves:
            wait_for_save(job)
        while gate and engine.step == int(hold) and not Path(gate).exists():
            time.sleep(0.005)
        pace.before()
        pace.after()
        if args.await_native:
            await_native(job)
        if args.hang_between:
            hangs.at(engine.step)
        if args.spoil == f"{os.environ.get('LOCAL_RANK', '0')}:{engine.step}":
            for layer_here in engine.layers.values():
                for value in layer_here.tensors().values():
                    value.add_(1)
        report = job.train_step()
        if job.rank == 0:
            say(f"step {report.step} loss {report.loss!r} norm {report.gradient_norm!r}")
    job.finish()
    for (number, _), layer_here in engine.layers.items():
        say(f"weights {number} {digest(layer_here)}")
    say(f"ended {job.worker} pid {os.getpid()}")


if __name__ == "__main__":
    main()
