"""A simulated job: in closed form without events, by hand in small cases, and beside a twin that goes in ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaunch.errors import UsageError
from elaunch.plan import Plan, holders, symmetric
from elaunch.policy.candidates.structure import NotPossible
from elaunch.policy.profile import LayerProfile, Profile
from elaunch.simulator.faults import exponential, present
from elaunch.simulator.job import is_lost, simulate_job
from elaunch.simulator.model import JobModel, JobRun, JobSituation, Timings, Way
from elaunch.simulator.strategies import STRATEGIES, make_strategy, plain_names
from elaunch.simulator.traces import NodeChange, merged
from tests.helpers import scaled

LAYER = LayerProfile(0.01, 0.02, 1000, 6000, 10, 10)
PROFILE = Profile("even", (LAYER,) * 4, 1, 1e9, 0.0, change_s=0.5)
JOB = JobModel(PROFILE, batch=24, micro_batch=1)
TIMINGS = Timings(detect_s=3.0, decide_s=0.25, join_s=10.0, restart_s=20.0, checkpoint_every_s=50.0)
NODES = [f"n{number}" for number in range(4)]


class Even:
    """Divides the samples evenly; every change stops the job for as long."""

    name = "even"
    sees_slow = has_copies = False

    def __init__(self, stall_s: float = 0.5) -> None:
        self.stall_s = stall_s

    def first(self, job: JobModel, members: Sequence[str]) -> Plan:
        if not members:
            raise NotPossible("nobody is there")
        return symmetric(members, len(job.profile.layers), job.batch, 1, dp=len(members))

    def next(self, here: JobSituation) -> Way:
        plan = self.first(here.job, here.members)
        return Way(plan, plan, self.name, self.stall_s, 0)


def step_s(members: int) -> float:
    """Of a step of `Even` under JOB; parameters are so small that reducing them takes about no time."""
    return math.ceil(JOB.batch / members) * 4 * 0.03


def check_books(run: JobRun) -> None:
    """Spans follow each other without gaps from 0 to the end, and all steps are in them."""
    ends = [0.0, *(span.end_s for span in run.spans)]
    assert [span.start_s for span in run.spans] == ends[:-1]
    assert ends[-1] == pytest.approx(run.until_s)
    assert all(span.length_s >= 0 and 0 <= span.busy <= span.members for span in run.spans)
    assert all(span.steps == 0 for span in run.spans if span.kind != "train")
    assert run.steps == sum(span.steps for span in run.spans) - run.undone
    assert run.steps >= 0
    assert run.undone == sum(change.undone for change in run.changes)


@pytest.mark.parametrize("name", STRATEGIES)
def test_without_events_a_job_does_as_many_steps_as_fit(name: str) -> None:
    run = simulate_job(JOB, make_strategy(name, TIMINGS), present(NODES), 1000.0, TIMINGS)
    (change,) = run.changes
    assert run.steps == math.floor(1000.0 / change.step_s)
    assert [(span.kind, span.length_s) for span in run.spans] == [("train", 1000.0)]
    assert run.device_s() == 4000.0
    assert run.trained == 1.0
    assert run.rate == run.steps * 24 / 1000.0


def test_a_loss_by_hand() -> None:
    """Steps of 0.72 s; the loss comes at 10 s, in step 13 (which began at 9.36 s)."""
    changes = [*present(NODES), NodeChange(10.0, left=("n3",))]
    run = simulate_job(JOB, Even(), changes, 20.0, TIMINGS)
    found = [(span.kind, round(span.start_s, 3), span.members, span.steps) for span in run.spans]
    assert found == [
        ("train", 0.0, 4, 13),
        ("redo", 9.36, 4, 0),
        ("detect", 10.0, 3, 0),
        ("decide", 13.0, 3, 0),
        ("change", 13.25, 3, 0),
        ("train", 13.75, 3, 6),
    ]
    assert run.steps == 13 + math.floor((20 - 13.75) / 0.96)
    assert run.changes[1].stopped_s == pytest.approx(3.75)
    assert (run.changes[1].lost, run.changes[1].joined, run.changes[1].members) == (1, 0, 3)


def test_a_node_that_joins_is_waited_for_by_nobody() -> None:
    changes = [*present(NODES[:3]), NodeChange(10.0, joined=("n3",))]
    run = simulate_job(JOB, Even(), changes, 40.0, TIMINGS)
    # It is ready at 20 s; the step of 0.96 s that is being done then ends at 20.16 s.
    assert [(span.kind, round(span.start_s, 2)) for span in run.spans] == [
        ("train", 0),
        ("change", 20.16),
        ("train", 20.66),
    ]
    assert run.spans[0].steps == 21


def test_a_loss_while_a_loss_is_dealt_with_begins_the_recovery_anew() -> None:
    changes = [*present(NODES), NodeChange(10.0, left=("n3",)), NodeChange(12.0, left=("n2",))]
    run = simulate_job(JOB, Even(), changes, 20.0, TIMINGS)
    kinds = [(span.kind, round(span.start_s, 2), span.members) for span in run.spans[2:]]
    assert kinds == [("detect", 10, 3), ("detect", 12, 2), ("decide", 15, 2), ("change", 15.25, 2), ("train", 15.75, 2)]
    assert run.changes[1].stopped_s == pytest.approx(5.75)
    assert run.changes[1].lost == 2


def test_a_node_that_says_so_before_leaves_without_a_step_done_again() -> None:
    changes = [*present(NODES), NodeChange(100.0, left=("n3",))]
    timings = replace(TIMINGS, notice_s=30.0)
    run = simulate_job(JOB, Even(), changes, 200.0, timings)
    assert run.seconds("redo") == run.seconds("detect") == 0.0
    assert [span.members for span in run.spans] == [4, 3, 3]
    assert run.spans[1].start_s == pytest.approx(98 * 0.72, abs=0.01)
    # A notice that is shorter than the step is of no use.
    late = simulate_job(JOB, Even(), changes, 200.0, replace(TIMINGS, notice_s=0.01))
    assert late.seconds("detect") == 3.0


def test_too_few_nodes_are_waited_for_with_the_state_in_memory() -> None:
    job = replace(JOB, min_nodes=3)
    changes = [*present(NODES[:3]), NodeChange(10.0, left=("n2",)), NodeChange(30.0, joined=("n4",))]
    run = simulate_job(job, Even(), changes, 60.0, TIMINGS)
    check_books(run)
    assert [span.kind for span in run.spans] == ["train", "redo", "detect", "decide", "wait", "change", "train"]
    assert run.undone == 0
    assert run.spans[4].end_s == pytest.approx(40.0)
    stuck = simulate_job(job, Even(), changes[:2], 60.0, TIMINGS)
    assert stuck.note == "2 of the 3 nodes that it needs are there"


def test_nodes_beyond_the_most_take_the_place_of_lost_ones() -> None:
    job = replace(JOB, max_nodes=3)
    changes = [*present(NODES), NodeChange(10.0, left=("n0",))]
    run = simulate_job(job, Even(), changes, 60.0, TIMINGS)
    assert {span.members for span in run.spans if span.kind == "train"} == {3}
    assert run.changes[1].joined == 1


def test_a_restart_loses_the_steps_since_the_last_checkpoint() -> None:
    changes = [*present(NODES), NodeChange(110.0, left=("n3",))]
    strategy = make_strategy("restart", TIMINGS)
    run = simulate_job(JOB, strategy, changes, 300.0, TIMINGS)
    check_books(run)
    step = run.changes[0].step_s
    assert run.undone == math.floor(110 / step) - math.floor(100 / step)
    assert run.seconds("restart") == pytest.approx(20 + JOB.state_bytes / TIMINGS.storage_bytes_per_s)


def test_the_last_holders_of_some_state_take_it_with_them() -> None:
    plan = symmetric([f"n{number}/0#0" for number in range(4)], 4, 24, 1, dp=2, pp=2)
    first, second = holders(plan)[0]
    both = (*first, *second)
    assert not is_lost(plan, first, None)
    assert is_lost(plan, both, None)
    # The copy of a worker's part is on the next worker of another node.
    assert is_lost(plan, ("n0/0#0", "n1/0#0"), 1)
    assert not is_lost(plan, ("n0/0#0", "n2/0#0"), 1)
    assert not is_lost(plan, ("n0/0#0", "n1/0#0"), 2)
    assert not is_lost(plan, (), 1)
    changes = [*present(NODES), NodeChange(110.0, left=("n0", "n1"))]
    run = simulate_job(replace(JOB, dp=2, pp=2), make_strategy("auto", TIMINGS), changes, 300.0, TIMINGS)
    assert run.undone > 0
    assert "state was lost with its copies" in run.changes[1].reason


def test_a_slow_node_is_seen_after_some_steps_and_gets_less_to_do() -> None:
    changes = [*present(NODES), NodeChange(50.0, speeds={"n1": 0.25}), NodeChange(400.0, speeds={"n1": 1.0})]
    runs = {
        name: simulate_job(JOB, make_strategy(name, TIMINGS), changes, 600.0, TIMINGS) for name in ("auto", "restart")
    }
    for run in runs.values():
        check_books(run)
    (ignored,) = runs["restart"].changes
    assert ignored.at_s == 0.0
    seen = runs["auto"].changes[1]
    # It takes four times as long for 12 steps and what is left of that in which they end.
    slowed_s = ignored.step_s * 4
    assert 50 + 12 * slowed_s <= seen.at_s - seen.stopped_s <= 50 + 14 * slowed_s
    assert seen.step_s < 0.6 * slowed_s
    assert runs["auto"].steps > runs["restart"].steps


def test_everybody_lost_means_a_restart_from_the_checkpoint() -> None:
    changes = [*present(NODES[:2]), NodeChange(70.0, left=("n0", "n1")), NodeChange(80.0, joined=("n7",))]
    run = simulate_job(JOB, make_strategy("auto", TIMINGS), changes, 300.0, TIMINGS)
    check_books(run)
    assert run.changes[-1].reason == "nobody is left of those before"
    assert run.undone > 0
    assert run.spans[-1].members == 1


CHANGES = st.lists(
    st.tuples(st.floats(1.0, 290.0), st.sampled_from(NODES), st.sampled_from(["add", "remove"])), max_size=8
)


def alternating(given: list[tuple[float, str, str]]) -> list[NodeChange]:
    """Of random changes those that make sense, one node at least staying."""
    here, found = set(NODES), present(NODES)
    for at_s, node, kind in sorted(given):
        if (node in here) == (kind == "add") or (kind == "remove" and len(here) == 1):
            continue
        here ^= {node}
        found.append(NodeChange(at_s, (node,)) if kind == "add" else NodeChange(at_s, (), (node,)))
    return merged(found)


@settings(max_examples=scaled(15, 100), deadline=None)
@given(changes=CHANGES.map(alternating), name=st.sampled_from(STRATEGIES))
def test_whatever_happens_the_books_are_right_and_the_same_each_time(changes: list[NodeChange], name: str) -> None:
    run = simulate_job(JOB, make_strategy(name, TIMINGS), changes, 300.0, TIMINGS)
    check_books(run)
    assert run == simulate_job(JOB, make_strategy(name, TIMINGS), changes, 300.0, TIMINGS)


@settings(max_examples=scaled(10, 60), deadline=None)
@given(changes=CHANGES.map(alternating))
def test_a_twin_in_small_ticks_does_as_many_steps(changes: list[NodeChange]) -> None:
    run = simulate_job(JOB, Even(), changes, 300.0, TIMINGS)
    # Where a tick falls on the other side of a step's end, a step and its change come later.
    assert abs(run.steps - ticked(changes, 300.0)) <= 1 + len(changes)


def ticked(changes: list[NodeChange], until_s: float, tick_s: float = 0.01) -> int:
    """Returns the steps of `Even` under JOB and TIMINGS, in small ticks."""
    events = sorted((change.at_s, number, change) for number, change in enumerate(changes))
    there: dict[str, float] = {}  # nodes, and when they can train
    members: set[str] = set()
    steps, done, stopped_until_s, leaving, between = 0, 0.0, 0.0, False, True
    for tick in range(int(until_s / tick_s)):
        now_s = tick * tick_s
        while events and events[0][0] <= now_s:
            change = events.pop(0)[2]
            for node in change.left:
                there.pop(node, None)
            there |= dict.fromkeys(change.joined, now_s + TIMINGS.join_s if members else now_s)
            if not members:
                members = set(there)
            if members & set(change.left):
                members -= set(change.left)
                done, stopped_until_s, leaving = 0.0, now_s + TIMINGS.detect_s + (TIMINGS.decide_s or 0.0), True
        if now_s < stopped_until_s:
            continue
        ready = {node for node, at_s in there.items() if at_s <= now_s}
        if leaving or (ready != members and between):
            members, leaving, done = ready, False, 0.0
            stopped_until_s = now_s + 0.5
            continue
        done += tick_s / step_s(len(members))
        between = done >= 1.0
        if between:
            steps, done = steps + 1, done - 1.0
    return steps


def test_names_of_nodes_do_not_matter_to_a_choice() -> None:
    first = plain_names(["a/0#0", "b/0#3", "a/1#0", "a/0#1"])
    assert first == {"a/0#0": "n0/0#0", "b/0#3": "n1/0#0", "a/1#0": "n0/1#0", "a/0#1": "n0/0#1"}
    runs = []
    for prefix in ("n", "x"):
        names = [f"{prefix}{number}" for number in range(4)]
        changes = [*present(names), *exponential(NODES, 1e9, 1.0, 0), NodeChange(50.0, left=(names[2],))]
        runs.append(simulate_job(JOB, make_strategy("auto", TIMINGS), changes, 200.0, TIMINGS))
    assert runs[0].spans == runs[1].spans


def test_a_node_holds_whole_tensor_parallel_groups() -> None:
    with pytest.raises(UsageError, match="3 workers, which make no whole tensor-parallel groups of 2"):
        JobModel(replace(PROFILE, width=2, tensor_parallel=2), 8, 1, per_node=3)
    job = JobModel(replace(PROFILE, width=2, tensor_parallel=2), 8, 1, per_node=2)
    run = simulate_job(job, make_strategy("auto", TIMINGS), present(["a", "b"]), 10.0, TIMINGS)
    assert run.spans[0].members == 4
    assert run.device_s() == 40.0
