"""What `state.commit()` of an elastic function costs one worker, in processor time, without the others.

    python benchmarks/commit_cost.py
    python benchmarks/commit_cost.py --kind fsdp --json cost.json

The GPT of `frameworks.py` in one process, the only member of its groups: with DistributedDataParallel, and with
FSDP2. Processor time counts, so other programs disturb it little. After each step the state is described and its copy
begun, as a commit does; the copy's thread works while the next step computes. `walked` is what it takes to describe the
state as if anew (`describe_shards`), which is what the first commits do.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from benchmarks.gpt_frames import build, data, loss_of
from benchmarks.report import Report, add_arguments
from elaunch.workers.random.rng import read_generators
from elaunch.workers.reentry.copies import Copies
from elaunch.workers.reentry.encoding import describe_shards

WARM_UP = 5


def cpu_ms(run: Callable[[], Any]) -> float:
    """Returns the processor time of this thread."""
    begin_ns = time.thread_time_ns()
    run()
    return (time.thread_time_ns() - begin_ns) / 1e6


def measure(report: Report, kind: str, steps: int) -> None:
    args: Any = argparse.Namespace(kind=kind, device=torch.device("cpu"), dtype="float32", batch_size=16)
    args.layers, args.width, args.heads, args.context = 4, 128, 4, 64
    model: Any = build(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, targets = torch.utils.data.default_collate([data(args)[place] for place in range(args.batch_size)])
    objects = {"model": model, "optimizer": optimizer}
    copies = Copies()
    copies.gate(objects)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, inputs, targets).backward()
        optimizer.step()

    found: dict[str, list[float]] = {name: [] for name in ("step", "walked", "describe", "begin", "copy", "random")}
    for number in range(WARM_UP + steps):
        begin_ns = time.process_time_ns(), time.thread_time_ns()
        step_ms = cpu_ms(step)
        copies.finish()
        beside_ns = time.process_time_ns() - begin_ns[0] - (time.thread_time_ns() - begin_ns[1])
        walked_ms = cpu_ms(lambda: describe_shards(objects))
        random_ms = cpu_ms(read_generators)
        description: Any = None

        def describe() -> None:
            nonlocal description
            description = copies.describe(objects)

        describe_ms = cpu_ms(describe)
        begin_ms = cpu_ms(lambda: copies.begin(number, objects, {}, described=description))  # noqa: B023
        if number >= WARM_UP:
            for name, value in zip(found, (step_ms, walked_ms, describe_ms, begin_ms, beside_ns / 1e6, random_ms)):
                found[name].append(value)
    copies.finish()
    medians = {name: statistics.median(values) for name, values in found.items()}
    spent_ms = sum(medians[name] for name in ("describe", "begin", "copy", "random"))
    report.row(
        {
            "kind": kind,
            "tensors": len(description.tensors),
            "copied_mb": sum(one.nbytes for one in description.tensors) / 1e6,
            **{f"{name}_ms": value for name, value in medians.items()},
            "of a step, %": 100 * spent_ms / medians["step"],
        }
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--kind", choices=("ddp", "fsdp"), help="instead of both")
    parser.add_argument("--steps", type=int, help="that count (default 60, quick 10)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    report = Report(
        "what a commit costs one worker: processor time of a GPT of 0.8 M parameters in one process",
        notes=["medians; copy: of all threads beside the training thread, while the next step computes"],
    )
    for kind in ("ddp", "fsdp") if given.kind is None else (given.kind,):
        measure(report, kind, given.steps or (10 if given.quick else 60))
    report.print()
    report.write(given.json)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
