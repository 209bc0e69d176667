"""What it costs to measure a job while it trains, and how long the figures take to go round.

    python benchmarks/profiling.py
    python benchmarks/profiling.py --quick --json profiling.json

The GPT of `examples/train_gpt_hybrid.py`, real compute, one worker. Steps come in pairs, one measured
(`elaunch.workers.layers.timing`, and what `Recorder` makes of it) and one not, in random order; each pair gives a
difference. A job measures one step in four once it runs, so the cost is a quarter of that, and what everybody does with
what is told: the *share* is the time of `Measured.take` and `Measured.look` in a job of 64 workers, of which as many
tell something new as this one did in its steps. In the first steps all do; that is given beside it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.report import Report, add_arguments, median_interval, spread
from elaunch.plan import symmetric
from elaunch.policy.cadence import EVERY
from elaunch.policy.measure import RECENT, Measured, Recorder
from elaunch.policy.sample import Sample
from elaunch.workers.layers.engine import Engine
from elaunch.workers.layers.settings import EngineSettings
from elaunch.workers.layers.timing import Stopwatch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import train_gpt_hybrid as example

BATCH, MICRO_BATCH = 32, 4
WORKERS = 64


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    given = parser.parse_args()
    pairs = 10 if given.quick else 40
    torch.set_num_threads(1)
    report = Report(
        "measuring while training: a GPT, one worker, real compute on one core",
        notes=[
            f"medians of {pairs} pairs of steps, in random order within a pair; interval of the median at 95 %",
            f"one step in {EVERY} is measured in a running job",
        ],
    )
    for blocks, width in ((4, 64), (6, 128)):
        cost = _measure(report, blocks, width, pairs)
        report.target(f"cost of measuring, {blocks} blocks of width {width}", cost, "% of a step", at_most=0.5)
    report.print()
    report.write(given.json)
    return 0


def gpt_engine(blocks: int, width: int, batch: int, micro_batch: int) -> Engine:
    """The engine of one worker that trains the example's GPT."""
    args = example.parse([f"--layers={blocks}", f"--width={width}"])
    layers = example.gpt(args)
    return Engine(
        layers,
        example.loss_fn,
        partial(example.adamw, lr=1e-3),
        symmetric(["w0"], len(layers), batch, micro_batch),
        EngineSettings(dataset=example.Sources(200_000, args.context)),
    )


def _measure(report: Report, blocks: int, width: int, pairs: int) -> float:
    engine = gpt_engine(blocks, width, BATCH, MICRO_BATCH)
    cpu = torch.device("cpu")
    for _ in range(3):
        engine.train_step()
    plain_s, differences = [], []
    recorder, told = Recorder(), []
    for _ in range(pairs):
        seconds = {}
        for watched in random.sample([False, True], 2):
            watch = Stopwatch(cpu) if watched else None
            begin_s = time.perf_counter()
            engine.train_step(watch=watch)
            if watch is not None:
                recorder.add(watch.turns(), {}, engine.update.host_s, engine.n_owned, None, watch.overheads())
                told.append(recorder.news(dict))
                recorder.pace()
            seconds[watched] = time.perf_counter() - begin_s
        plain_s.append(seconds[False])
        differences.append((seconds[True] - seconds[False]) / seconds[False])
    engine.close()
    samples = [sample for sample in told if sample is not None]
    said = samples[-1].to_json()
    # As in a job that runs: not in the first steps.
    later = told[RECENT:]
    part = sum(sample is not None for sample in later) / len(later)
    usual_s, most_s = (_share_s(engine, said, n) for n in (round(part * WORKERS), WORKERS))
    low, high = median_interval(differences)
    step_s = statistics.median(plain_s)
    measured = statistics.median(differences)
    cost, at_first = (100 * (measured + share_s / step_s) / EVERY for share_s in (usual_s, most_s))
    report.row(
        {
            "blocks": blocks,
            "width": width,
            "step_ms": 1e3 * step_s,
            "step, p90": 1e3 * spread(plain_s).p90,
            "a measured step, %": 100 * measured,
            "from, %": 100 * low,
            "to, %": 100 * high,
            "tell something new, %": 100 * part,
            f"share of {WORKERS} workers, ms": 1e3 * usual_s,
            "if all tell, ms": 1e3 * most_s,
            "of all steps, %": cost,
            "if all tell, %": at_first,
        }
    )
    return cost


def _share_s(engine: Engine, said: dict[str, object], telling: int) -> float:
    """Taking in what so many workers have told anew, and judging all workers of a job."""
    known = Measured("benchmark", *engine.builder.described())
    slots = [f"n{number // 8}/{number % 8}" for number in range(WORKERS)]
    known.keep([f"{slot}#0" for slot in slots])
    for slot in slots:
        known.take(slot, Sample.from_json(said))
    found = []
    for step in range(20):
        begin_s = time.perf_counter()
        for slot in slots[:telling]:
            known.take(slot, Sample.from_json(said))
        known.look(step, float(step), dict.fromkeys(slots, 1.0), {})
        found.append(time.perf_counter() - begin_s)
    return statistics.median(found)


if __name__ == "__main__":
    raise SystemExit(main())
