"""What it costs to move 1, 2 or 4 layers to the next stage of a pipeline, and to let a replica of each stage join:
pausing, or during the next step.

    python benchmarks/migration.py
    python benchmarks/migration.py --quick --json migration.json
    python benchmarks/migration.py --slow-links     # more state, and links as slow as a network's

After ElasWave's figure 13. Two stages of two replicas each, four processes on this machine with links over loopback;
the engines, their steps, messages and state are real, compute is emulated (`benchmarks/emulation.py`): a layer sleeps.
Moved are the parameters of the layers (float32) and what AdamW keeps of them. Side by side, in turn, for

- *pausing*: everything waits until the state is where it belongs,
- *in a step*: the state moves in the background of the next step, whose first half is done under the old plan,

and for the two layouts of the optimizer's state over the replicas of a stage, *contiguous* and *interleaved*.

With `--slow-links` there are eight layers of 13 M parameters, and links are TCP connections that the kernel paces to
1 GB/s each in each direction (emulated: no network is there). It takes about 6 GB of memory.

The stall is the time from the end of the step before the change to the end of the step after it, less what a step of
the old plan takes. Where layers move, the larger stage has as many before as after, so that both plans take the same.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.crew import Rank, crew
from benchmarks.emulation import Words, emulated_layers, loss_fn
from benchmarks.jobs import limit_time
from benchmarks.report import Report, add_arguments, spread
from elaunch.plan import OptimizerLayout, Plan, Stage, stages, symmetric
from elaunch.policy.profile import LayerProfile, Profile
from elaunch.workers.comm.here import LINKS
from elaunch.workers.device import keep_freed_memory
from elaunch.workers.layers.engine import Engine
from elaunch.workers.layers.settings import EngineSettings

WORKERS = [f"n{number // 2}/{number % 2}#0" for number in range(4)]
MOVED = (1, 2, 4)
SO_MAX_PACING_RATE = 47  # asm-generic/socket.h
LAYOUTS: tuple[OptimizerLayout, ...] = ("contiguous", "interleaved")
LEAST_SAVED = 0.51

Way = tuple[bool, OptimizerLayout]
"""Whether it pauses, and the layout."""


def plan_of(first: int, layers: int, units: int, zero: OptimizerLayout) -> Plan:
    """Two stages, the first of `first` layers."""
    names = [(worker,) for worker in WORKERS]
    cut = [Stage(range(first), tuple(names[:2])), Stage(range(first, layers), tuple(names[2:]))]
    return stages(layers, units, 1, cut, zero=zero)


@dataclass(frozen=True)
class Size:
    """Of the job.

    Attributes:
        layers, units: of the model, and samples of a step.
        width: features; a layer has their square of parameters.
        layer_s: what forward of a sample takes in a layer, emulated.
        link_bytes_s: what a link carries in a direction; None: as much as memory is copied.
    """

    layers: int
    units: int
    width: int
    layer_s: float
    link_bytes_s: float | None


def both(size: Size, moved: int, zero: OptimizerLayout) -> tuple[Plan, Plan]:
    """Before and after `moved` layers go from the first stage to the second; none: before and after replicas join."""
    if not moved:
        alone = symmetric(WORKERS[::2], size.layers, size.units, 1, pp=2, zero=zero)
        joined = plan_of(size.layers // 2, size.layers, size.units, zero)
        return replace(alone, idle=tuple(WORKERS[1::2])), joined
    layers = size.layers - moved % 2
    first = (layers + moved) // 2
    return plan_of(first, layers, size.units, zero), plan_of(first - moved, layers, size.units, zero)


class MigrationRank(Rank):
    """One worker."""

    engine: Engine | None = None

    def begin(self, pausing: bool, zero: OptimizerLayout, moved: int, size: Size) -> None:
        """Make an engine, and do its first steps, which warm up."""
        keep_freed_memory(os.environ)  # as jobs do
        torch.manual_seed(0)
        if size.link_bytes_s is not None:
            for link in self.transport._links.values():
                link.socket.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, int(size.link_bytes_s))
        self.plans = both(size, moved, zero)
        # The rest of a profile is nothing to emulated layers.
        layer = LayerProfile(size.layer_s, 2 * size.layer_s, 0, 0, 0, 0)
        width = size.width
        profile = Profile("even", (layer,) * self.plans[0].n_layers, 1, 1e9, 0.0)
        self.engine = Engine(
            emulated_layers(profile, width=width),
            loss_fn,
            torch.optim.AdamW,
            self.plans[0],
            EngineSettings(dataset=Words(4 * width, width), snapshots=0, blocking=pausing),
            group=self.group,
        )
        self.steps(2)

    def steps(self, count: int) -> list[float]:
        """Seconds of each."""
        assert self.engine is not None
        found = []
        for _ in range(count):
            start_s = time.perf_counter()
            self.engine.train_step()
            found.append(time.perf_counter() - start_s)
        return found

    def turn(self) -> tuple[float, int]:
        """Go over to the other plan; seconds until the end of the next step, and bytes that came here."""
        assert self.engine is not None
        start_s = time.perf_counter()
        self.plans = self.plans[::-1]
        received_bytes = self.engine.change(self.group, self.plans[0], self.engine.step)
        self.engine.install()
        self.engine.train_step()
        return time.perf_counter() - start_s, received_bytes

    def end(self) -> None:
        """Let go of the engine."""
        assert self.engine is not None
        self.engine.close()
        self.engine = None


def name_of(way: Way) -> str:
    return f"{'pausing' if way[0] else 'in a step'}, {way[1]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--rounds", type=int, help="in each, every way makes an engine anew (default 2, quick 1)")
    parser.add_argument("--turns", type=int, help="changes of plan by each of them (default 4, quick 2)")
    parser.add_argument("--slow-links", action="store_true", help="with 1 to 2 GB of state, over links of 1 GB/s")
    parser.add_argument("--width", type=int, help="features; a layer has their square of parameters (default 768)")
    parser.add_argument("--layer-s", type=float, help="forward of a sample in a layer (default 0.002)")
    args = parser.parse_args()
    rounds, turns = args.rounds or (1 if args.quick else 2), args.turns or (2 if args.quick else 4)
    size = Size(8, 8, 3584, 0.04, 1e9) if args.slow_links else Size(16, 16, 768, 0.002, None)
    size = replace(size, width=args.width or size.width, layer_s=args.layer_s or size.layer_s)
    if size.link_bytes_s is not None:
        os.environ[LINKS] = "tcp"  # the kernel paces no other sockets
    torch.set_num_threads(1)
    ways: list[Way] = [(pausing, zero) for pausing in (True, False) for zero in LAYOUTS]
    if args.slow_links:
        ways = [ways[0], ways[-1]]  # those that are compared
    report = Report(
        "migration: layers go to the next stage",
        notes=[
            f"two stages of two replicas, {size.layers} layers of {size.width**2 / 1e6:.1f} M parameters, {size.units} "
            f"samples a step; emulated compute, {1e3 * size.layer_s:g} ms forward and twice that backward for a layer "
            "and sample",
            "stall: until the end of the step after the change, less a step; moved: by all workers together",
            "no network: the cores that run the workers also copy and move the bytes"
            + (f"; links emulated at {size.link_bytes_s / 1e9:g} GB/s each way" if size.link_bytes_s else ""),
        ],
    )
    limit_time(1500)
    with crew(WORKERS, MigrationRank) as all_of:
        for moved in (4,) if args.slow_links else (4, 0) if args.quick else (*MOVED, 0):
            what = f"{moved} layer{'s' if moved > 1 else ''}" if moved else "join"
            stalls: dict[Way, list[float]] = {way: [] for way in ways}
            steps: dict[Way, list[float]] = {way: [] for way in ways}
            bytes_: dict[Way, int] = {}
            for number in range(rounds):
                for way in ways if number % 2 == 0 else ways[::-1]:
                    all_of("begin", *way, moved, size)
                    for turn in range(turns if moved else 2 * turns):
                        ordinary = all_of("steps", 3)[0]
                        ended: list[tuple[float, int]] = all_of("turn")
                        if moved or turn % 2 == 0:
                            steps[way] += ordinary
                            stalls[way].append(ended[0][0] - statistics.median(ordinary))
                            bytes_[way] = sum(received for _, received in ended)
                    all_of("end")
            for way in ways:
                found = spread(stalls[way])
                report.row(
                    {
                        "change": what,
                        "way": name_of(way),
                        "moved_mb": bytes_[way] / 1e6,
                        "changes": found.count,
                        "step_ms": 1e3 * spread(steps[way]).median,
                        "stall_ms": 1e3 * found.median,
                        "least_ms": 1e3 * found.least,
                        "worst_ms": 1e3 * found.worst,
                    }
                )
            if not moved:
                way = (False, "interleaved")
                stall_s, step_s = spread(stalls[way]).median, spread(steps[way]).median
                report.target("stall of a join in a step", stall_s / step_s, "steps", below=1)
                continue
            worse, better = (spread(stalls[way]).median for way in ((True, "contiguous"), (False, "interleaved")))
            report.target(f"stall saved, {what}", 100 * (1 - better / worse), "%", at_least=100 * LEAST_SAVED)
    report.print()
    report.write(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
