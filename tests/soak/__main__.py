"""Runs jobs that meet random faults, and prints what came of it.

python -m tests.soak                                 1,000 faults
python -m tests.soak --faults 50 --seed 3            others, fewer
python -m tests.soak --round 17 --seed 3             one job of these again
python -m tests.soak --kinds KILL,"node lost" --settings hybrid

Each job has three hosts, which are network namespaces, with two workers each. After each fault all must be there
again, those that it did not hit in the processes that they had. At the end each step must have been done once, with
the samples and, to 1e-9, the losses of an undisturbed job; all agents must have ended well and left nothing behind.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from tests import forks
from tests.helpers import TEST_ID, end_processes_left
from tests.soak.means import missing
from tests.soak.rig import Unmet
from tests.soak.run import Met, Steps, run_round, undisturbed
from tests.soak.schedule import KINDS, SETTINGS, Round, make_round

GRACE_S = 5.0


def listed(text: str, names: dict[str, object], what: str) -> list[str]:
    """Returns the names in a text, between commas.

    Raises:
        argparse.ArgumentTypeError: one is none of these.
    """
    found = [name.strip() for name in text.split(",")]
    for name in found:
        if name not in names:
            raise argparse.ArgumentTypeError(f"no {what} is called {name!r}; there are {', '.join(names)}")
    return found


def rounds(args: argparse.Namespace) -> Iterator[Round]:
    """The jobs, without an end; or the one that is asked for."""
    number = args.round if args.round is not None else 0
    kinds = [kind for kind in args.kinds if kind not in missing()]
    while True:
        yield make_round(args.seed, number, args.each, args.settings, kinds)
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
    parser.add_argument("--folder", type=Path, help="for logs; kept. Else that of a job that fails is kept")
    args = parser.parse_args(argv)
    for kind, why in missing().items():
        if kind in args.kinds:
            print(f"no {kind!r} here: {why}", flush=True)
    top = args.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    top.mkdir(exist_ok=True)
    token = uuid.uuid4().hex
    os.environ[TEST_ID] = f"{token}/0"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    met: list[tuple[Round, Met]] = []
    failed: list[str] = []
    expected: dict[str, Steps] = {}
    end_s = time.monotonic() + 60 * args.minutes
    try:
        for round_ in rounds(args):
            if len(met) >= args.faults or time.monotonic() > end_s:
                break
            name = f"round {round_.number} ({round_.setting}{', clocks' if round_.has_clocks else ''})"
            folder = top / f"round-{round_.number}"
            found: list[Met] = []
            os.environ[TEST_ID] = f"{token}/{round_.number + 1}"
            try:
                if round_.api not in expected:
                    expected[round_.api] = undisturbed(top / f"undisturbed-{round_.api}", round_.api)
                run_round(folder, round_, expected[round_.api], found.append)
                if left := end_processes_left(f"{token}/{round_.number + 1}", frozenset(), GRACE_S):
                    raise Unmet("processes are left: " + "; ".join(left))
            except (Unmet, pytest.fail.Exception, AssertionError, OSError) as error:
                (top / f"round-{round_.number}.failed").write_text(str(error))
                failed.append(name)
                print(f"{name} FAILED after {[one.fault.kind for one in found]}, see {folder}: ", end="")
                print(str(error).partition("\n")[0], flush=True)
            met += [(round_, one) for one in found]
            print(f"{name}: {len(found)} faults met, {len(met)} in all, {len(failed)} jobs failed", flush=True)
    finally:
        forks.close_all()
    print()
    print(table(met))
    print(f"\n{len(met)} faults, {len({round_.number for round_, _ in met})} jobs, {len(failed)} of them failed")
    return 1 if failed else 0


def table(met: list[tuple[Round, Met]]) -> str:
    """How often each kind of fault was met, and how fast jobs went on."""
    of_kind: dict[str, list[Met]] = defaultdict(list)
    for _, one in met:
        of_kind[one.fault.kind].append(one)
    lines = [
        "| fault | times | until two more steps, median (worst), s | until all are there again, median (worst), s |",
        "|---|---|---|---|",
    ]
    for kind in KINDS:
        if several := of_kind.get(kind):
            on, whole = [one.on_s for one in several], [one.whole_s for one in several]
            cells = [f"{median(values):.2f} ({max(values):.2f})" for values in (on, whole)]
            lines.append(f"| {kind} | {len(several)} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
