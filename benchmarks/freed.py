"""How soon workers that wait in a native group are free when one of them dies there.

    python benchmarks/freed.py                    # about two minutes; --quick: less than one
    python benchmarks/freed.py --kind silent --json freed.json

Four workers sum gradients over Gloo. One is killed before its part comes; its connections are closed by the kernel, or,
*silent*, stay open, as when its machine is lost: then the news of the next generation is all that the others get.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.jobs import ELAUNCH, HERE, Job, JobFailed, TimeLimit, Training, limit_time
from benchmarks.report import Report, add_arguments, spread

WORKERS = 4
KINDS = ("kill", "silent")
LIMIT_S = 30.0
FREED_MS = 50.0


class NativeJob(Job):
    """The job on one node, over Gloo."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name, Training(WORKERS, 0.0), folder)
        self.folder = folder

    def begin(self) -> None:
        flags = ["--standalone", f"--nproc-per-node={WORKERS}", "--max-restarts=1000000", "--collectives=native"]
        command = [*ELAUNCH, *flags, "--events", str(self.log), str(HERE / "freed_job.py"), str(self.folder)]
        self._agent = self.processes.start(command)

    def launcher(self) -> subprocess.Popen[bytes]:
        return self._agent

    def sums_natively(self, after: int) -> bool:
        """Returns whether all workers have committed two steps over a native group, in a generation above `after`."""
        commits = self.commits()
        found = [line for line in self.lines if line["kind"] == "collectives"]
        if not commits or not found:
            return False
        last, swap = commits[-1], found[-1]
        whole = (last.members, last.generation) == (WORKERS, swap["generation"]) and last.generation > after
        return whole and last.step > swap["step"]

    def freed(self) -> list[tuple[float, float]]:
        """Returns when news came and when the training thread was free, in Unix seconds, of all so far."""
        lines = [line for path in self.folder.glob("freed-*.jsonl") for line in path.read_text().splitlines()]
        return [(one["news_t"], one["freed_t"]) for one in map(json.loads, lines)]

    def died(self) -> list[float]:
        """Returns when the kernel reported deaths, in Unix seconds."""
        return [line["t"] for line in self.lines if line["kind"] == "worker_exited"]


def measure(report: Report, kind: str, faults: int, folder: Path, chance: random.Random) -> None:
    """Kills workers, one after the other; adds the row and the targets of this kind."""
    after_death, after_news = list[float](), list[float]()
    generation = 0
    with NativeJob(kind, folder) as job:
        for _ in range(faults):
            job.wait(lambda: job.sums_natively(generation), "steps over a native group", 2 * LIMIT_S)  # noqa: B023
            generation = job.commits()[-1].generation
            n_died, n_freed = len(job.died()), len(job.freed())
            (folder / f"die-{chance.randrange(WORKERS)}").write_text(kind)
            job.wait(lambda: len(job.died()) > n_died, "death", LIMIT_S)  # noqa: B023
            job.wait(lambda: len(job.freed()) >= n_freed + WORKERS - 1, "three that are free", LIMIT_S)  # noqa: B023
            (died_t,), found = job.died()[n_died:], sorted(job.freed(), key=lambda one: one[0])[-(WORKERS - 1) :]
            after_death.append(max(freed_t - died_t for _, freed_t in found))
            after_news.append(max(freed_t - news_t for news_t, freed_t in found))
    death, news = (spread(1e3 * seconds for seconds in each) for each in (after_death, after_news))
    report.row(
        kind=kind,
        deaths=faults,
        after_death_median_ms=round(death.median, 1),
        after_death_worst_ms=round(death.worst, 1),
        after_news_median_ms=round(news.median, 1),
        after_news_worst_ms=round(news.worst, 1),
    )
    report.target(f"{kind}: news -> all survivors free, worst of {faults}", news.worst, "ms", below=FREED_MS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, action="append", help="one alone")
    parser.add_argument("--faults", type=int, help="deaths of each kind (50; --quick: 8)")
    parser.add_argument("--limit-s", type=int, default=600)
    add_arguments(parser)
    args = parser.parse_args()
    report = Report(
        "Freed from a native group",
        notes=["for each death, the last of three survivors; times before the news are negative: the kernel freed it"],
    )
    limit_time(args.limit_s)
    code = 0
    try:
        for kind in args.kind or KINDS:
            with tempfile.TemporaryDirectory() as folder:
                measure(report, kind, args.faults or (8 if args.quick else 50), Path(folder), random.Random(1))
    except (JobFailed, TimeLimit) as error:
        print(error, file=sys.stderr)
        code = 1
    report.print()
    report.write(args.json)
    return code


if __name__ == "__main__":
    sys.exit(main())
