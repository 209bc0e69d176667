"""`torch.distributed.all_reduce` on the CPU: over links, in the native group, and by plain Gloo, side by side in turn.

    python benchmarks/collectives.py            # a minute; --quick: ten seconds
    python benchmarks/collectives.py --json collectives.json

Four processes on one machine. *links* and *native* are the default group of a job before and after its native group
stands; *gloo* is what `init_process_group("gloo")` makes; *in order* sums natively as links do, for
`--consistency=bitwise`. *exchange* is `batch_isend_irecv` of a ring: each process
sends to the one after it and receives from the one before it. A call is timed from a barrier until it has returned on
the last process.

The second table is of what a member does before each commit once its sums in the native group are there: *look* asks
for their outcome and the group for errors, and *vote* is the commit barrier of all members, over links.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.crew import Crew, Rank, crew
from benchmarks.report import Report, add_arguments, spread
from elaunch.workers import barrier
from elaunch.workers.barrier import StepRecord
from elaunch.workers.comm.c10d.native import NativeWorks
from elaunch.workers.comm.native.gloo import GlooBulk
from elaunch.workers.comm.process_group import ElasticProcessGroup
from elaunch.workers.data_parallel.ordered import OrderedSums
from elaunch.workers.data_parallel.reducer import NativeSums

WORKERS = [f"n0/{number}#0" for number in range(4)]
WAYS = ("links", "native", "gloo")
IN_ORDER = "in order"
"""One more way to sum: natively, in the order of links."""

SIZES = {"4 KB": 4 << 10, "1 MB": 1 << 20, "25 MB": 25 << 20}
BUDGET_S = 3.0
"""For each size of a call and each way, about."""

SUMS = (1, 8, 32)
"""Buckets of gradients in a step, and as many sums of the script's own."""

LOOK_MS = 0.3


class CollectiveRank(Rank):
    """One process, with a group of each kind."""

    def __init__(self, workers: Sequence[str], place: int, store: dist.Store) -> None:
        super().__init__(workers, place, store)
        dist.init_process_group("gloo", store=dist.PrefixStore("plain", store), rank=place, world_size=len(workers))
        bulk = self._bulk = GlooBulk("127.0.0.1")
        self._sums = OrderedSums()
        self._works = NativeWorks(lambda: bulk, "cpu")
        bulk.open(dist.PrefixStore("native", store), place, len(workers))
        plain = dist.group.WORLD
        assert plain is not None
        self._groups: dict[str, dist.ProcessGroup] = {
            "links": ElasticProcessGroup(lambda: self.group),
            "native": ElasticProcessGroup(lambda: self.group, None, self._works),
            "gloo": plain,
        }

    def run(self, call: str, way: str, n_bytes: int, times: int) -> list[float]:
        """Makes a call so many times; returns the seconds of each."""
        group = self._groups.get(way)
        tensor, other = torch.ones(n_bytes // 4), torch.empty(n_bytes // 4)
        found = []
        for _ in range(times):
            self.group.barrier()
            begin_s = time.perf_counter()
            if way == IN_ORDER:
                self._sums.sum_on_host(self._bulk, self.place, len(WORKERS), tensor, 1.0, lambda: None)
            elif call == "all_reduce":
                dist.all_reduce(tensor, group=group)
            else:
                self._exchange(group, tensor, other)
            self.group.barrier()
            found.append(time.perf_counter() - begin_s)
            tensor.fill_(1.0)
        return found

    def before_commit(self, n_sums: int, times: int) -> list[tuple[float, float]]:
        """Ends so many steps; returns the seconds of the look and of the vote, of each."""
        found = []
        for step in range(times):
            sums, tensors = NativeSums(self._bulk), [torch.ones(256) for _ in range(2 * n_sums)]
            for gradients, own in zip(tensors[::2], tensors[1::2]):
                sums.add(gradients)
                dist.all_reduce(own, group=self._groups["native"], async_op=True)
            sums.join(lambda: None)
            while not all(work.is_completed() for work in self._works._begun):
                time.sleep(0.0005)
            self.group.barrier()
            begin_s = time.perf_counter()
            sums.finish(lambda: None)
            self._works.finish()
            looked_s = time.perf_counter()
            barrier.reduce(self.group, StepRecord.at(step, native=(1, 1)))
            found.append((looked_s - begin_s, time.perf_counter() - looked_s))
        return found

    def _exchange(self, group: dist.ProcessGroup | None, sent: Tensor, got: Tensor) -> None:
        assert group is not None, "who sums in order sends nothing else"
        size = len(WORKERS)
        works = [group.send([sent], (self.place + 1) % size, 0), group.recv([got], (self.place - 1) % size, 0)]
        for work in works:
            work.wait()


def compare_calls(report: Report, all_of: Crew, quick: bool) -> None:
    """Makes all calls by all ways, in turn."""
    for call in ("all_reduce", "exchange"):
        for size, n_bytes in SIZES.items():
            ways = (*WAYS, IN_ORDER) if call == "all_reduce" else WAYS
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            once_s = max(max(took) for took in all_of("run", call, "links", n_bytes, 2))
            rounds = 3 if quick else 8
            times = max(1, min(200, int((0.3 if quick else BUDGET_S) / rounds / once_s)))
            for _ in range(rounds):
                for way in ways:
                    took = all_of("run", call, way, n_bytes, times)
                    seconds[way] += [max(each) for each in zip(*took, strict=True)]
            medians = {way: spread(values).median for way, values in seconds.items()}
            report.row(
                {
                    "call": call,
                    "size": size,
                    "calls": len(seconds["links"]),
                    **{f"{way.replace(' ', '_')}_ms": 1e3 * median for way, median in medians.items()},
                    "links_to_gloo": medians["links"] / medians["gloo"],
                    "native_to_gloo": medians["native"] / medians["gloo"],
                }
            )


def add_last_look(report: Report, n_sums: int, found: Sequence[Sequence[tuple[float, float]]]) -> None:
    """Adds the figures of all processes."""
    look, vote = (spread(1e3 * seconds for seconds in each) for each in zip(*itertools.chain.from_iterable(found)))
    report.row(
        {
            "before a commit, sums": 2 * n_sums,
            "steps": len(found[0]),
            "look_ms": look.median,
            "p90_look_ms": look.p90,
            "vote_ms": vote.median,
            "p90_vote_ms": vote.p90,
        }
    )
    report.target(f"look before a commit, {2 * n_sums} sums", look.median, "ms", at_most=LOOK_MS)


def main() -> int:
    parser = argparse.ArgumentParser(description="Collectives of torch.distributed, side by side.")
    add_arguments(parser)
    parser.add_argument("--only", choices=("calls", "commit"), help="one table instead of both")
    args = parser.parse_args()
    report = Report(
        "Collectives of torch.distributed on the CPU", ["four processes on one machine", "times include a barrier"]
    )
    with crew(WORKERS, CollectiveRank) as all_of:
        if args.only != "commit":
            compare_calls(report, all_of, args.quick)
        for n_sums in SUMS if args.only != "calls" else ():
            add_last_look(report, n_sums, all_of("before_commit", n_sums, 10 if args.quick else 60))
    report.print()
    report.write(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
