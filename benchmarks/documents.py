"""What the documents of a job cost by their size: bytes, and processor time to write, read and decide by them.

    python benchmarks/documents.py

One worker on each node. A change: one worker of n has died. Processor time of one thread, the least of 20 turns.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.report import Report, add_arguments
from elaunch.rendezvous.codec import from_json, to_json
from elaunch.rendezvous.decide import decide
from elaunch.rendezvous.intake import read_generation, read_node
from elaunch.rendezvous.membership import (
    Generation,
    GenerationStage,
    NodeDoc,
    NodeProgress,
    NodeWorker,
    Worker,
    WorkerState,
    WorkerSummary,
)
from elaunch.rendezvous.rules.edit import GenerationEdit, edit_between, follow
from elaunch.rendezvous.view import MembershipSettings, View

SIZES, TURNS = (50, 100, 200, 500, 1000, 10_000), 20


def least_us(act: Callable[[], object]) -> float:
    """Returns microseconds of processor time."""
    found = []
    for _ in range(TURNS):
        begin_s = time.thread_time()
        act()
        found.append(time.thread_time() - begin_s)
    return round(1e6 * min(found), 1)


def edit_anew(before: Generation, after: Generation) -> GenerationEdit:
    """Makes an edit of generations that nothing was asked of yet."""
    return edit_between(replace(before), replace(after))


def follow_anew(before: Generation, edit: bytes) -> Generation | None:
    """Reads an edit and follows it from a generation that nothing was asked of yet."""
    return follow(replace(before), from_json(GenerationEdit, edit))


def report_of(number: int) -> NodeDoc:
    name = f"node{number:04d}"
    worker = NodeWorker(f"{name}/0#0", 0, WorkerState.MEMBER, f"10.0.{number // 256}.{number % 256}:41234")
    summary, progress = WorkerSummary(elastic=True, took_part=True), NodeProgress(generation=7)
    return NodeDoc(name, "10.0.0.1", 1, (worker,), summary=summary, progress=progress, order=number)


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    args = parser.parse_args()
    report = Report("Documents of a job")
    edits: list[int] = []
    for n in SIZES[:3] if args.quick else SIZES:
        docs = tuple(report_of(number) for number in range(n))
        workers = tuple(Worker(one.workers[0].id, one.node, 0, one.workers[0].address) for one in docs)
        before = Generation(7, GenerationStage.TRAIN, workers, cause="start", aborts_step_before=7)
        cause = "worker node0001/0#0 was killed by SIGKILL"
        after = replace(before, number=8, workers=workers[:1] + workers[2:], cause=cause, aborts_step_before=8)
        whole, edit, own = to_json(after), to_json(edit_between(before, after)), to_json(docs[0])
        settings = MembershipSettings(min_nodes=n // 2, max_nodes=n)
        edits.append(len(edit))
        view = View(docs[:1] + docs[2:], before, begun=True, pending_s=0.0)
        report.row(
            workers=n,
            generation_bytes=len(whole),
            edit_bytes=len(edit),
            report_bytes=len(own),
            write_whole_us=least_us(partial(to_json, after)),
            read_whole_us=least_us(partial(read_generation, whole)),
            make_edit_us=least_us(partial(edit_anew, before, after)),
            follow_edit_us=least_us(partial(follow_anew, before, edit)),
            read_report_us=least_us(partial(read_node, "node0000", own, 1)),
            decide_us=least_us(partial(decide, view, 100.0, settings)),
        )
    report.target(
        f"an edit's bytes, the most over those with {SIZES[0]} workers", max(edits) / edits[0], "x", at_most=1.0
    )
    report.print()
    report.write(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
