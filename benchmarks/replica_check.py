"""What comparing replicas costs (`--check-replicas`), beside the steps between two comparisons.

    python benchmarks/replica_check.py
    python benchmarks/replica_check.py --quick --json replica_check.json

A stack of GELU layers in float32 under AdamW, on one thread. Timed alternately: a step (forward and backward of 8 rows
per parameter matrix, and the optimizer, which is the least that a step does), and the digest of all that the workers
compare: parameters and both moments. The comparison itself is one reduction of 16 bytes over the members. The share is
that of one digest in the steps of the default.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn

from benchmarks.report import Report, add_arguments, spread
from elaunch.replica_check import DEFAULT_EVERY
from elaunch.workers.replicas import digests_of_objects, whole

TARGET = 0.001
ROWS = 8


def measure(width: int, depth: int, rounds: int) -> tuple[int, list[float], list[float]]:
    """Returns the parameters of a model, and the seconds of its steps and of its digests."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU())))
    optimizer = torch.optim.AdamW(model.parameters())
    objects = {"model": model, "optimizer": optimizer}
    rows = torch.randn(ROWS, width)
    steps_s, digests_s = [], []
    for number in range(rounds + 1):
        t0 = time.perf_counter()
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        t1 = time.perf_counter()
        whole(digests_of_objects(objects))
        t2 = time.perf_counter()
        if number:
            steps_s.append(t1 - t0)
            digests_s.append(t2 - t1)
    return sum(one.numel() for one in model.parameters()), steps_s, digests_s


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rounds = 5 if args.quick else 30
    report = Report(
        "replica check", notes=[f"a comparison every {DEFAULT_EVERY} steps; a step is the shortest that there is"]
    )
    for width, depth in ((256, 4), (1024, 8), (2048, 6), (2048, 24)):
        if args.quick and width * width * depth > 30e6:
            continue
        count, steps_s, digests_s = measure(width, depth, rounds)
        step, digest = spread(steps_s), spread(digests_s)
        share = digest.median / (DEFAULT_EVERY * step.median)
        size = f"{count / 1e6:.1f} M"
        report.row(
            parameters=size,
            step_ms=1e3 * step.median,
            step_p90_ms=1e3 * step.p90,
            digest_ms=1e3 * digest.median,
            digest_p90_ms=1e3 * digest.p90,
            share_percent=100 * share,
        )
        report.target(f"share of the steps, {size}", 100 * share, "%", at_most=100 * TARGET)
    report.print()
    report.write(args.json)


if __name__ == "__main__":
    main()
