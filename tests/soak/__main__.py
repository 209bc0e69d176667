"""Runs jobs that meet random faults, and prints what came of it.

python -m tests.soak                                 1,000 faults
python -m tests.soak --faults 50 --seed 3            others, fewer
python -m tests.soak --round 17 --seed 3             one job of these again
python -m tests.soak --kinds KILL,"node lost" --settings hybrid --stores "etcd; three nodes, secret"
python -m tests.soak --faults 100000 --minutes 60    as many as an hour has time for

Each job has three hosts, which are network namespaces, with two workers each; its store is an etcd apart, or one that
its nodes host. After each fault all must be there again, those that it did not hit in the processes that they had. At
the end each step must have been done once, with the samples and, to 1e-9, the losses of an undisturbed job, and have
one line in the logs (docs/failures.md has the exceptions); all agents must have ended well and left nothing behind.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.report import machine
from tests import forks
from tests.helpers import TEST_ID, end_processes_left
from tests.soak.means import missing
from tests.soak.report import Tried, summary
from tests.soak.run import Findings, run_round, undisturbed
from tests.soak.schedule import KINDS, SETTINGS, STORES, Round, make_round
from tests.soak.steps import Steps, Unmet

GRACE_S = 5.0


def listed(text: str, names: dict[str, object], what: str, between: str = ",") -> list[str]:
    """Returns the names in a text, with that between them.

    Raises:
        argparse.ArgumentTypeError: one is none of these.
    """
    found = [name.strip() for name in text.split(between)]
    for name in found:
        if name not in names:
            raise argparse.ArgumentTypeError(f"no {what} is called {name!r}; there are {', '.join(names)}")
    return found


def rounds(args: argparse.Namespace) -> Iterator[Round]:
    """The jobs, without an end; or the one that is asked for."""
    number = args.round if args.round is not None else 0
    kinds = [kind for kind in args.kinds if kind not in missing()]
    while True:
        yield make_round(args.seed, number, args.each, args.settings, kinds, args.stores)
        if args.round is not None:
            return
        number += 1


def main(argv: list[str] | None = None) -> int:
    """Returns 0 if all was as it must be, 1 otherwise."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=1000, help="how many (default 1000)")
    parser.add_argument("--each", type=int, default=12, help="how many one job meets (default 12)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--round", type=int, help="this job alone")
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no further job after so long")
    parser.add_argument("--kinds", type=lambda text: listed(text, dict(KINDS), "fault"), default=list(KINDS))
    parser.add_argument("--settings", type=lambda text: listed(text, dict(SETTINGS), "job"), default=list(SETTINGS))
    parser.add_argument("--stores", type=lambda text: listed(text, dict(STORES), "store", ";"), default=list(STORES))
    parser.add_argument("--folder", type=Path, help="for logs; kept. Else only those of jobs that fail are kept")
    parser.add_argument("--json", type=Path, metavar="PATH", help="where the table goes as JSON; else into the folder")
    args = parser.parse_args(argv)
    top = args.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    top.mkdir(exist_ok=True)
    token = uuid.uuid4().hex
    os.environ[TEST_ID] = f"{token}/0"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    jobs: list[Tried] = []
    expected: dict[str, Steps] = {}
    begin_s, before = time.monotonic(), machine()
    try:
        for round_ in rounds(args):
            if sum(len(job.findings.met) for job in jobs) >= args.faults:
                break
            if time.monotonic() > begin_s + 60 * args.minutes:
                break
            os.environ[TEST_ID] = f"{token}/{round_.number + 1}"
            job = one_job(top, round_, expected)
            if left := end_processes_left(f"{token}/{round_.number + 1}", frozenset(), GRACE_S):
                job = replace(job, failure=job.failure or "processes are left: " + "; ".join(left))
            jobs.append(job)
            tell(job, top)
            if not (job.failure or args.folder):
                shutil.rmtree(folder_of(top, round_))
    finally:  # where somebody ends it, too
        forks.close_all()
        left_out = [f"no {kind!r} here: {why}" for kind, why in missing().items() if kind in args.kinds]
        report = summary(jobs, args.seed, (time.monotonic() - begin_s) / 60, left_out, before)
        report.print()
        path = args.json or top / "soak.json"
        report.write(path)
        print(f"as JSON: {path}", flush=True)
    return 1 if any(job.failure for job in jobs) else 0


def folder_of(top: Path, round_: Round) -> Path:
    """Returns where a job has its logs."""
    return top / f"round-{round_.number}"


def one_job(top: Path, round_: Round, expected: dict[str, Steps]) -> Tried:
    """Runs a job; `expected` has the steps of undisturbed ones, and gets those that were not run yet."""
    findings = Findings()
    try:
        if round_.api not in expected:
            expected[round_.api] = undisturbed(top / f"undisturbed-{round_.api}", round_.api, round_.steps)
        run_round(folder_of(top, round_), round_, expected[round_.api], findings)
    except (Unmet, pytest.fail.Exception, AssertionError, OSError) as error:
        (top / f"round-{round_.number}.failed").write_text(str(error))
        after = ", ".join(one.fault.kind for one in findings.met) or "no fault"
        return Tried(round_, findings, f"after {after}: {str(error).partition(chr(10))[0]}")
    return Tried(round_, findings)


def tell(job: Tried, top: Path) -> None:
    """Prints how a job went."""
    went = f"FAILED, see {folder_of(top, job.round)}: {job.failure}" if job.failure else "passed"
    print(f"{job.name}: {len(job.findings.met)} faults met; {went}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
