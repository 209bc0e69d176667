"""The schedule as executed, in the trace of a real job whose worker is killed."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from elaunch.cli import run
from elaunch.plan.executed import ExecutedAction, ExecutedStep, digest_of_plan
from elaunch.plan.schedule import schedule
from elaunch.plan.tiling import Plan
from elaunch.plan.timeline import Action
from elaunch.plan.views import sources, takers
from tests.helpers import ROOT, Spawner
from tests.jobs.watch import Node, elaunch
from tests.unit.test_trace import check_format, named, spans

SCRIPT = ROOT / "tests" / "jobs" / "layers.py"
LIMIT_S = 150.0
CLOCK_S = 5e-3
"""Workers of one host have one clock, which each of them compares with that of its moments."""

pytestmark = pytest.mark.timeout(300)

Done = Mapping[str, Mapping[Action, ExecutedAction]]
"""By worker: its actions, with Unix times in seconds as moments."""


def executed(node: Node, decision: Mapping[str, Any]) -> Done:
    """What each worker has told of its first whole step under a plan."""
    key = decision["generation"], digest_of_plan(Plan.parse(decision["plan"]))
    events = [event for event in node.events("actions") if (event["generation"], event["plan"]) == key]
    told = [ExecutedStep.from_fields(event) for event in events]
    assert None not in told
    assert len({one.step for one in told if one is not None}) == 1
    assert len({one.worker for one in told if one is not None}) == len(told)
    return {
        one.worker: {
            done.action: ExecutedAction(done.action, *(one.begin_t + moment_s for moment_s in done[1:]))
            for done in one.actions
        }
        for one in told
        if one is not None
    }


def check_dependencies(plan: Plan, done: Done) -> None:
    """That no action began before those it needs had begun to send; what one worker has done is in its order."""
    orders = schedule(plan).by_worker
    assert done.keys() == set(plan.workers)
    for worker, actions in done.items():
        assert tuple(actions) == orders[worker]
        ends_t = 0.0
        for one in actions.values():
            assert list(one[1:]) == sorted(one[1:])
            assert ends_t <= one.awaits_s
            ends_t = one.ends_s
    passed = {
        (one.action.passes, worker, one.action.tile, one.action.micro_batch): one
        for worker, actions in done.items()
        for one in actions.values()
        if one.action.passes is not None
    }
    for (what, _, tile, micro_batch), later in passed.items():
        needs = sources(plan) if what == "activation" else takers(plan)
        for giver, number, _ in needs[tile][micro_batch]:
            for other in plan.tiles[giver].workers:
                first = passed[what, other, giver, number]
                assert first.sends_s < later.begins_s + CLOCK_S, (first, later)


def trace_of_log(node: Node, target: Path) -> dict[str, Any]:
    assert run.main(["trace", str(node.log), "-o", str(target)]) == 0
    found: dict[str, Any] = json.loads(target.read_text())
    return found


@pytest.mark.parametrize("deferred", [0, 1])
def test_the_trace_has_what_all_workers_did_under_the_plans_before_and_after_a_kill(
    spawn: Spawner, tmp_path: Path, deferred: int
) -> None:
    script = SCRIPT, "--dp=1", "--pp=3", "--steps=12", f"--deferred={deferred}", "--die=2:5:half"
    flags = "--standalone", "--nproc-per-node=3", "--max-restarts=0", "--policy=resize"
    node = elaunch(spawn, tmp_path, *flags, script=script)
    assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()
    (killed,) = [event for event in node.events("worker_exited") if event.get("signal") == signal.SIGKILL]
    assert killed["worker"] == "node0/2#0"
    told = [(event["generation"], event["worker"]) for event in node.events("actions")]
    assert sorted(told) == sorted({*told})

    trace = trace_of_log(node, tmp_path / "trace.json")
    check_format(trace)
    processes, decisions = named(trace, "process_name"), node.events("decision")
    generations = {name: pid for name, (pid, _) in processes.items() if name.startswith("executed schedule of ")}
    assert not [name for name in processes if name.startswith("planned schedule")]
    assert len(generations) == len(decisions) >= 2
    steps = []
    for decision, (name, pid) in zip(decisions, generations.items(), strict=True):
        plan, done = Plan.parse(decision["plan"]), executed(node, decision)
        assert len(plan.tiles) == len(plan.workers) > 1  # stages
        check_dependencies(plan, done)
        step = next(event["step"] for event in node.events("actions") if event["generation"] == decision["generation"])
        assert name == f"executed schedule of generation {decision['generation']}, step {step}"
        steps.append(step)
        for tid, worker in enumerate(plan.workers, start=1):
            order = [str(action) for action in schedule(plan).by_worker[worker]]
            drawn = [one["name"] for one in spans(trace, pid, tid)]
            assert [one for one in drawn if one in order] == order
            assert {"sums", "commit", "optimizer", "parameters"} <= set(drawn)
    assert steps[0] == 0
    assert steps[1] >= 5
