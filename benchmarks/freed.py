"""How soon workers that wait in a native collective are free when one of them dies or stops there.

    python benchmarks/freed.py                    # about five minutes; --quick: less than one
    python benchmarks/freed.py --kind silent --json freed.json

Four workers over Gloo meet the faults of `tests/jobs/collectives.py`, one after the other: each rank in each
collective, in a forward, in a backward and at the commit barrier. One is killed, so that the kernel closes its
connections; or, *silent*, they stay open, as when its machine is lost: then the news of the next generation is all that
the others get; or it stops, and is killed for that after a second. The event log has how long the last of the others
waited after the news.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.jobs import ELAUNCH, HERE, Job, JobFailed, TimeLimit, Training, limit_time
from benchmarks.report import Report, add_arguments, spread
from tests.jobs.collectives import KINDS, NAMES

WORKERS = 4
LIMIT_S = 600.0
FREED_MS = 50.0


class FaultyJob(Job):
    """The job on one node, over Gloo, which meets faults of one kind and ends.

    Args:
        kind: of the faults.
        blocks: how often each collective has one.
        folder: for the log.
    """

    def __init__(self, kind: str, blocks: int, folder: Path) -> None:
        super().__init__(kind, Training(WORKERS, 0.0), folder)
        self._arguments = [kind, f"--blocks={blocks}", f"--crew={WORKERS}"]

    def begin(self) -> None:
        flags = ["--standalone", f"--nproc-per-node={WORKERS}", "--max-restarts=1000000", "--collectives=native"]
        script = HERE.parent / "tests" / "jobs" / "collectives.py"
        self._agent = self.processes.start([*ELAUNCH, *flags, "--events", self.log, script, *self._arguments])

    def launcher(self) -> subprocess.Popen[bytes]:
        return self._agent


@dataclass(frozen=True)
class Freed:
    """How long the last of the others waited in a collective, from the kernel's report of the death and the news."""

    collective: str
    after_death_ms: float
    after_news_ms: float


def freed(lines: Sequence[Mapping[str, Any]]) -> list[Freed]:
    """Returns what an event log has of its faults: the change that each has made."""
    transitions = [line for line in lines if line["kind"] == "transition"]
    found = []
    for fault in (line for line in lines if line["kind"] == "fault"):
        change = next((line for line in transitions if line["generation"] > fault["generation"]), None)
        if change is not None and "freed_s" in change:
            news_s, death_s = change["freed_s"], change["phases"]["detect_s"] + change["freed_s"]
            found.append(Freed(fault["collective"], 1e3 * death_s, 1e3 * news_s))
    return found


def add_row(report: Report, kind: str, collective: str, found: Iterable[Freed]) -> None:
    """Adds the figures of some faults."""
    each = list(found)
    death, news = spread(one.after_death_ms for one in each), spread(one.after_news_ms for one in each)
    report.row(
        kind=kind,
        collective=collective,
        faults=news.count,
        after_death_median_ms=round(death.median, 1),
        after_death_worst_ms=round(death.worst, 1),
        after_news_median_ms=round(news.median, 1),
        after_news_worst_ms=round(news.worst, 1),
        below_50_ms=f"{sum(one.after_news_ms < FREED_MS for one in each)} of {news.count}",
    )


def measure(report: Report, kind: str, blocks: int, folder: Path) -> None:
    """Has workers meet faults of one kind; adds its rows and its target, also of what there is when time is up."""
    with FaultyJob(kind, blocks, folder) as job:
        try:
            job.wait(job.finished, "end", LIMIT_S)
        finally:
            job.read()
            found = freed(job.lines)
            for name in NAMES:
                add_row(report, kind, name, (one for one in found if one.collective == name))
            add_row(report, kind, "all", found)
            worst_ms = spread(one.after_news_ms for one in found).worst
            name = f"{kind}: news -> all survivors free, worst of {len(found)}"
            report.target(name, worst_ms, "ms", below=FREED_MS)
    if job.launcher().returncode:
        raise JobFailed(f"{kind}: the job has failed:\n{job.processes.tail()}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, action="append", help="one alone")
    parser.add_argument("--blocks", type=int, help="faults of each kind in each collective (12; --quick: 1)")
    parser.add_argument("--limit-s", type=int, default=600)
    add_arguments(parser)
    args = parser.parse_args()
    report = Report(
        "Freed from a native group",
        notes=[
            "for each fault, the last of three survivors; 0 after the news: their connections had told all of them",
            "messages: the others receive from who dies; coalesced: three sums at once",
        ],
    )
    limit_time(args.limit_s)
    code = 0
    try:
        for kind in args.kind or KINDS:
            with tempfile.TemporaryDirectory() as folder:
                measure(report, kind, args.blocks or (1 if args.quick else 12), Path(folder))
    except (JobFailed, TimeLimit) as error:
        print(error, file=sys.stderr)
        code = 1
    report.print()
    report.write(args.json)
    return code


if __name__ == "__main__":
    sys.exit(main())
