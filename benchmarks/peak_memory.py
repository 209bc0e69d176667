"""The estimator's peak of memory beside what torch's allocator counts: each worker a process of its own.

    python benchmarks/peak_memory.py
    python benchmarks/peak_memory.py --device gpu     # the workers share one device; a larger model

The GPT of `examples/train_gpt_hybrid.py`, float32, AdamW. What is counted on CPUs are the bytes that malloc has given
out, by which torch allocates there, at their greatest after any operation of the steps after the first; on a GPU it is
`torch.cuda.max_memory_allocated` of these steps. Of what was there between two steps, parameters, masters and optimizer
states count. The estimate is that of `elaunch.policy.estimate`
with the profile that a job would measure: sizes of parameters as they are known without running, kept bytes of each
layer as metered in the first step. Nothing is timed.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import math
import multiprocessing
import multiprocessing.connection
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import torch
import train_gpt_hybrid as example
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.report import Report, add_arguments
from elaunch.plan import Pipeline, Plan, pipelines, symmetric
from elaunch.policy.estimate import estimate_step
from elaunch.policy.profile import LayerProfile, Profile
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.transport import Transport
from elaunch.workers.layers.engine import Engine
from elaunch.workers.layers.settings import EngineSettings
from elaunch.workers.layers.timing import Stopwatch

STEPS = 3
LIMIT_S = 240


@dataclasses.dataclass(frozen=True)
class Case:
    """A plan, and how it is trained."""

    name: str
    plan: Plan
    width: int
    blocks: int
    context: int = 64
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


MALLINFO_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _Malloc(ctypes.Structure):
    _fields_: ClassVar = [(name, ctypes.c_size_t) for name in MALLINFO_FIELDS.split()]


def allocated_bytes() -> int:
    """The bytes that malloc, by which torch allocates on CPUs, has given out in all threads of this process."""
    now = MALLINFO()
    return int(now.uordblks + now.hblkhd)


MALLINFO = ctypes.CDLL(None).mallinfo2
MALLINFO.restype = _Malloc


class PeakMeter(TorchDispatchMode):
    """Looks after each operation of this thread at how much is allocated."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.peak_bytes = max(self.peak_bytes, allocated_bytes())
        return found


def _peak_on_cpu(engine: Engine) -> int:
    """Trains, and returns how much more than before was allocated at the worst moment."""
    before = allocated_bytes()
    with PeakMeter() as meter:
        for _ in range(STEPS - 1):
            engine.train_step()
    peak: int = meter.peak_bytes - before
    return peak


def _peak_on_gpu(engine: Engine) -> int:
    """Does the same on a GPU."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(STEPS - 1):
        engine.train_step()
    peak: int = torch.cuda.max_memory_allocated() - before
    return peak


def work(case: Case, place: int, on_gpu: bool, pipe: multiprocessing.connection.Connection) -> None:
    """A worker: tells its address, hears all, trains, tells its peak and what its layers keep."""
    torch.set_num_threads(1)
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    worker = case.plan.workers[place]
    transport = Transport(worker, "memory")
    pipe.send(transport.address)
    transport.connect(pipe.recv(), generation=1, timeout_s=60)
    args = example.parse([f"--layers={case.blocks}", f"--width={case.width}", f"--context={case.context}"])
    dataset = example.Sources(200_000, args.context)
    engine = Engine(
        example.gpt(args),
        example.loss_fn,
        partial(example.adamw, lr=1e-3),
        case.plan,
        EngineSettings(dataset=dataset, snapshots=0, device=device, **case.settings),
        group=Group(transport, 1, case.plan.workers),
    )
    watch = Stopwatch(device, meter=True)
    engine.train_step(watch=watch)
    gc.collect()
    # What the interpreter, torch, its libraries' workspaces and the links have allocated is no part of it.
    own_bytes = sum(engine.memory_bytes().values())
    peak = own_bytes + (_peak_on_gpu if on_gpu else _peak_on_cpu)(engine)
    layers, _ = engine.builder.described()
    pipe.send((peak, watch.kept_bytes, engine.memory_bytes(), layers))
    pipe.recv()
    transport.interrupt(1 << 60)
    transport.close()


def measure(case: Case, on_gpu: bool) -> tuple[dict[str, int], Profile]:
    """The peak of each worker, and the profile that the workers have measured."""
    context = multiprocessing.get_context("spawn")
    processes, pipes = [], []
    for place in range(len(case.plan.workers)):
        here, there = context.Pipe()
        processes.append(context.Process(target=work, args=(case, place, on_gpu, there), daemon=True))
        processes[-1].start()
        pipes.append(here)

    def heard(pipe: multiprocessing.connection.Connection) -> Any:
        if not pipe.poll(LIMIT_S):
            raise TimeoutError(f"{case.name}: a worker has said nothing for {LIMIT_S} s")
        return pipe.recv()

    try:
        addresses = dict(zip(case.plan.workers, map(heard, pipes), strict=True))
        for pipe in pipes:
            pipe.send(addresses)
        told = [heard(pipe) for pipe in pipes]
        for pipe in pipes:
            pipe.send("end")
        for process in processes:
            process.join(30)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
    kept: dict[int, float] = {}
    for _, of_layers, _, _ in told:
        for layer, n_bytes in of_layers.items():
            kept[layer] = max(n_bytes, kept.get(layer, 0.0))
    known: tuple[LayerProfile, ...] = told[0][3]
    layers = tuple(
        dataclasses.replace(
            one,
            forward_s_per_row=1.0,
            backward_s_per_row=2.0,
            activation_bytes_per_row=round(kept.get(index, one.activation_bytes_per_row)),
        )
        for index, one in enumerate(known)
    )
    widths = {len(tile.workers) for tile in case.plan.tiles}
    profiled = Profile(case.name, layers, max(widths), 1e9, 1e-4, width=max(widths))
    return dict(zip(case.plan.workers, (one[0] for one in told), strict=True)), profiled


def cases(quick: bool, on_gpu: bool) -> list[Case]:
    """What is run."""
    width, blocks, batch, micro = (64, 2, 16, 2) if quick else (768 if on_gpu else 256, 6, 32, 4)
    n_layers = blocks + 2

    def plan(**degrees: Any) -> Plan:
        workers = [f"a/{number}#0" for number in range(math.prod(degrees.values()))]
        return symmetric(workers, n_layers, batch, micro, **degrees)

    def case(name: str, which: Plan, **settings: Any) -> Case:
        return Case(name, which, width, blocks, settings=settings)

    units = batch // micro
    whole = range(n_layers)
    shares = pipelines(
        n_layers,
        batch,
        micro,
        [
            Pipeline(range(units // 4), ((whole, ("a/0#0",)),)),
            Pipeline(range(units // 4, units), ((whole, ("a/1#0",)),)),
        ],
    )
    return [
        case("one worker", plan()),
        case("one worker (fast)", plan(), consistency="fast"),
        case("PP 2", plan(pp=2)),
        case("PP 4", plan(pp=4)),
        case("DP 2", plan(dp=2)),
        case("DP 4", plan(dp=4)),
        case("DP 2 x PP 2", plan(dp=2, pp=2)),
        case("DP 2 (micro-batches 1 to 3)", shares),
        case("PP 2 (recomputed)", plan(pp=2), recompute=True),
        case("TP 2", plan(tp=2)),
        case("PP 2 (bfloat16)", plan(pp=2), dtype=torch.bfloat16),
        Case("PP 2 (long samples)", plan(pp=2), width, blocks, context=512),
        Case("DP 2 (long samples)", plan(dp=2), width, blocks, context=512),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--only", default="", metavar="CASE,…", help="names of cases (default: all)")
    args = parser.parse_args()
    report = Report(f"peak memory on {args.device}: estimated, and counted by the allocator")
    errors: list[tuple[float, str]] = []
    wanted = [name for name in args.only.split(",") if name]
    on_gpu = args.device == "gpu"
    for case in cases(args.quick, on_gpu):
        if wanted and case.name not in wanted:
            continue
        print(case.name, file=sys.stderr, flush=True)
        counted, profiled = measure(case, on_gpu)
        estimated = estimate_step(case.plan, profiled).peak_bytes
        for stage, worker in enumerate(case.plan.workers):
            error = estimated[worker] / counted[worker] - 1
            errors.append((error, f"{case.name}, worker {stage}"))
            print(
                f"  {stage}: counted {counted[worker]:,}, estimated {estimated[worker]:,}, {100 * error:+.1f} %",
                file=sys.stderr,
                flush=True,
            )
            report.row(
                {
                    "plan": case.name,
                    "worker": stage,
                    "counted_kb": counted[worker] / 1e3,
                    "estimated_kb": estimated[worker] / 1e3,
                    "error_pct": 100 * error,
                }
            )
    if errors:
        worst, where = max(errors, key=lambda one: abs(one[0]))
        mean = statistics.fmean(abs(error) for error, _ in errors)
        report.target(f"error of {len(errors)} peaks, mean", 100 * mean, "%", at_most=5)
        report.target("the same, worst", 100 * abs(worst), "%", at_most=5)
        report.notes.append(f"the worst, {100 * worst:+.1f} %, is {where}")
    report.print()
    report.write(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
