"""What it costs to move 1, 2 or 4 layers to the next stage of a pipeline, and to let a replica of each stage join:
pausing, or during the next step.

    python benchmarks/migration.py
    python benchmarks/migration.py --quick --json migration.json

After ElasWave's figure 13. Two stages of two replicas each, four processes on this machine with links over loopback;
the engines, their steps, messages and state are real, compute is emulated (`benchmarks/emulation.py`): a layer sleeps.
Moved are the parameters of the layers (float32) and what AdamW keeps of them. Side by side, in turn, for

- *pausing*: everything waits until the state is where it belongs,
- *in a step*: the state moves in the background of the next step, whose first half is done under the old plan,

and for the two layouts of the optimizer's state over the replicas of a stage, *contiguous* and *interleaved*.

The stall is the time from the end of the step before the change to the end of the step after it, less what a step of
the old plan takes. Where layers move, the larger stage has as many before as after, so that both plans take the same.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.crew import Rank, crew
from benchmarks.emulation import Words, emulated_layers, loss_fn
from benchmarks.jobs import limit_time
from benchmarks.report import Report, add_arguments, spread
from elaunch.plan import OptimizerLayout, Plan, Stage, stages, symmetric
from elaunch.policy.profile import LayerProfile, Profile
from elaunch.workers.layers.engine import Engine
from elaunch.workers.layers.settings import EngineSettings

WORKERS = [f"n{number // 2}/{number % 2}#0" for number in range(4)]
LAYERS, REPLICAS, UNITS = 16, 2, 16
MOVED = (1, 2, 4)
LAYOUTS: tuple[OptimizerLayout, ...] = ("contiguous", "interleaved")
LEAST_SAVED = 0.51

Way = tuple[bool, OptimizerLayout]
"""Whether it pauses, and the layout."""


def plan_of(first: int, layers: int, zero: OptimizerLayout) -> Plan:
    """Two stages, the first of `first` layers."""
    names = [(worker,) for worker in WORKERS]
    cut = [Stage(range(first), tuple(names[:2])), Stage(range(first, layers), tuple(names[2:]))]
    return stages(layers, UNITS, 1, cut, zero=zero)


def both(moved: int, zero: OptimizerLayout) -> tuple[Plan, Plan]:
    """Before and after `moved` layers go from the first stage to the second; none: before and after replicas join."""
    if not moved:
        alone = symmetric(WORKERS[::2], LAYERS, UNITS, 1, pp=2, zero=zero)
        return replace(alone, idle=tuple(WORKERS[1::2])), plan_of(LAYERS // 2, LAYERS, zero)
    layers = LAYERS - moved % 2
    first = (layers + moved) // 2
    return plan_of(first, layers, zero), plan_of(first - moved, layers, zero)


class MigrationRank(Rank):
    """One worker."""

    engine: Engine | None = None

    def begin(self, pausing: bool, zero: OptimizerLayout, moved: int, width: int, layer_s: float) -> None:
        """Make an engine, and do its first steps, which warm up."""
        torch.manual_seed(0)
        self.plans = both(moved, zero)
        # The rest of a profile is nothing to emulated layers.
        layer = LayerProfile(layer_s, 2 * layer_s, 0, 0, 0, 0)
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
    parser.add_argument("--width", type=int, default=768, help="features; a layer has their square of parameters")
    parser.add_argument("--layer-s", type=float, default=0.002, help="forward of a sample in a layer")
    args = parser.parse_args()
    rounds, turns = args.rounds or (1 if args.quick else 2), args.turns or (2 if args.quick else 4)
    torch.set_num_threads(1)
    ways: list[Way] = [(pausing, zero) for pausing in (True, False) for zero in LAYOUTS]
    report = Report(
        "migration: layers go to the next stage",
        notes=[
            f"two stages of two replicas, {LAYERS} layers of {args.width**2 / 1e6:.1f} M parameters, {UNITS} samples a "
            f"step; emulated compute, {1e3 * args.layer_s:g} ms forward and twice that backward for a layer and sample",
            "stall: until the end of the step after the change, less a step; moved: by all workers together",
            "no network: the two cores that run the workers also copy and move the bytes",
        ],
    )
    limit_time(1500)
    with crew(WORKERS, MigrationRank) as all_of:
        for moved in (4, 0) if args.quick else (*MOVED, 0):
            what = f"{moved} layer{'s' if moved > 1 else ''}" if moved else "join"
            stalls: dict[Way, list[float]] = {way: [] for way in ways}
            steps: dict[Way, list[float]] = {way: [] for way in ways}
            bytes_: dict[Way, int] = {}
            for number in range(rounds):
                for way in ways if number % 2 == 0 else ways[::-1]:
                    all_of("begin", *way, moved, args.width, args.layer_s)
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
