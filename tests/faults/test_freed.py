"""Members die and stop in every native collective; the log says how soon after the news the others were free of it."""

from __future__ import annotations

import dataclasses
import math
import re
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers import Spawner, soak
from tests.jobs.collectives import KINDS, MOMENTS, NAMES, CollectiveFault, fault_of
from tests.jobs.watch import Event, Node, elaunch

SCRIPT = Path(__file__).parents[1] / "jobs" / "collectives.py"
WORKERS = 4
LONGEST_S = 2.0
"""Far below what any wait of Gloo's, or of links, ends by itself; benchmarks/freed.py says how long it takes."""


def transition_after(fault: Event, transitions: list[Event]) -> Event:
    """Returns the change that a fault has made."""
    return next(event for event in transitions if event["generation"] > fault["generation"])


def faults_met(node: Node) -> list[CollectiveFault]:
    names = [field.name for field in dataclasses.fields(CollectiveFault)]
    return [CollectiveFault(**{name: event[name] for name in names}) for event in node.events("fault")]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kinds", "blocks"), [(KINDS, 1), *(soak((kind,), 12) for kind in KINDS)])
def test_whichever_collective_a_member_dies_or_stops_in_the_others_are_free_at_the_news(
    spawn: Spawner, tmp_path: Path, kinds: tuple[str, ...], blocks: int
) -> None:
    conf = "--rdzv-conf=stop_timeout=0.3"
    flags = ("--standalone", f"--nproc-per-node={WORKERS}", "--max-restarts=1000", "--collectives=native", conf)
    script: tuple[str | Path, ...] = (SCRIPT, *kinds, f"--blocks={blocks}", f"--crew={WORKERS}")
    node = elaunch(spawn, tmp_path, *flags, script=script)
    assert node.agent.wait(500) == 0, node.agent.tail()
    expected = [fault_of(number, kinds, blocks, WORKERS) for number in range(len(NAMES) * blocks * len(kinds))]
    assert faults_met(node) == expected
    ends = re.findall(r"ended \S+ after (\d+) faults", node.agent.text())
    assert ends == [str(len(expected))] * WORKERS
    ended = Counter(event.get("signal") for event in node.events("worker_exited"))
    assert ended[signal.SIGKILL] == len(expected), f"who stops is killed: {ended}"
    after = [transition_after(event, node.events("transition")) for event in node.events("fault")]
    assert len({event["generation"] for event in after}) == len(expected)
    assert all(event["interrupted"] for event in after)
    freed = [(fault, event.get("freed_s", math.inf)) for fault, event in zip(expected, after)]
    late = [(fault, seconds) for fault, seconds in freed if seconds > LONGEST_S]
    assert not late, f"waited for longer than {LONGEST_S} s after the news: {late}"
    if "silent" in kinds:
        assert any(seconds for fault, seconds in freed if fault.how == "silent"), (
            "no kernel has freed them before the news"
        )


def test_the_rotation_has_each_rank_in_each_collective_at_each_moment() -> None:
    found = [fault_of(number, KINDS, 12, WORKERS) for number in range(len(NAMES) * 12 * len(KINDS))]
    cases = {(one.how, one.rank, one.collective, one.moment) for one in found}
    assert len(cases) == len(found) == len(KINDS) * WORKERS * len(NAMES) * len(MOMENTS)
    begun = {(one.how, one.rank, one.collective, one.begun) for one in found}
    assert len(begun) == len(KINDS) * WORKERS * len(NAMES) * 2
    short = [fault_of(number, ("kill",), 4, WORKERS) for number in range(len(NAMES) * 4)]
    assert len({(one.rank, one.collective) for one in short}) == WORKERS * len(NAMES)
