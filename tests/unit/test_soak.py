"""What tests/soak decides and finds: which faults come, and whether a process has grown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tests.soak.growth import ALLOWED, LOOKS, MB, Growth, Look, grown
from tests.soak.report import Tried, summary
from tests.soak.run import Findings, Met
from tests.soak.schedule import HOSTS, KINDS, SETTINGS, STORES, Fault, Round, ends, make_round, possible, sparing
from tests.soak.steps import Event, StepLog, Unmet, check_steps, done_again
from tests.soak.stores import StoreOnNodes

SMALL = Look(40 * MB, 20, 5)


def test_a_seed_and_a_number_name_a_job() -> None:
    assert make_round(3, 17, 12) == make_round(3, 17, 12)
    assert make_round(3, 17, 12) != make_round(4, 17, 12)


def test_each_setting_comes_as_often_as_the_others_and_each_fault_some_time() -> None:
    rounds = [make_round(0, number, 12) for number in range(90)]
    assert set(Counter(round_.setting for round_ in rounds).values()) == {90 // len(SETTINGS)}
    assert {fault.kind for round_ in rounds for fault in round_.faults} == set(KINDS)
    for round_ in rounds:
        assert {fault.kind for fault in round_.faults} <= set(possible(round_.setting, round_.has_clocks))


def test_each_setting_comes_over_each_store_as_often_as_over_the_others() -> None:
    count = len(SETTINGS) * len(STORES)
    rounds = [make_round(2, number, 0) for number in range(count)]
    assert len({(round_.setting, round_.store) for round_ in rounds}) == count
    assert {make_round(seed, 0, 0).store for seed in range(len(STORES))} == set(STORES)


def test_one_worker_of_each_job_and_its_agent_meet_nothing_that_ends_them() -> None:
    rounds = [make_round(1, number, 12) for number in range(90)]
    for round_ in rounds:
        assert all(round_.spared not in ends(fault, round_.api) for fault in round_.faults)
    assert {round_.spared for round_ in rounds} == {(host, slot) for host in HOSTS for slot in (0, 1)}
    # Its agent sees workers beside it end.
    assert any(
        (fault.host, fault.kind) == (round_.spared[0], "KILL")
        for round_ in rounds
        if round_.spared
        for fault in round_.faults
    )


@pytest.mark.parametrize(
    ("kind", "slot", "api", "hit"),
    [
        ("KILL", 0, "init", ("a", 1)),
        ("KILL", 1, "init", ("a", 1)),
        ("drain", 1, "init", ("b", 1)),
        ("two at once", 0, "init", ("a", 1)),  # and b/0
        ("two at once", 0, "hybrid", ("b", 0)),  # and b/1
        ("resize", 0, "init", ("a", 0)),  # which node goes is the leader's choice
        ("slow worker", 0, "init", ("a", 0)),
    ],
)
def test_a_fault_that_would_end_the_spared_worker_comes_beside_it(
    kind: str, slot: int, api: str, hit: tuple[str, int]
) -> None:
    fault = sparing(Fault(kind, "a", slot, 1.0, 0.5), api, ("a", 0))
    assert (fault.host, fault.slot) == hit
    assert (fault.kind, fault.seconds, fault.pause_s) == (kind, 1.0, 0.5)


def test_a_job_that_can_meet_none_of_what_is_asked_for_is_refused() -> None:
    with pytest.raises(ValueError, match="a job of 'attach' meets none of disk full"):
        make_round(0, 0, 5, ["attach"], ["disk full"])


def test_native_groups_of_another_plan_are_no_growth_where_new_workers_have_them_too() -> None:
    """Seen: a plan of two stages, whose groups have six threads more; what is kept of each fault is still found."""
    looks = [Look(SMALL.memory, 35, 12)] * 9 + [Look(SMALL.memory, 41, 18)] * 3
    new = [Look(SMALL.memory, 39, 16)] * 2
    assert "threads 12 -> 18" in grown("worker a", looks, ALLOWED["worker"])
    assert grown("worker a", looks, ALLOWED["worker"], new) == ""
    kept = [Look(SMALL.memory, 35 + number, 12 + number) for number in range(20)]
    assert "threads" in grown("worker a", kept, ALLOWED["worker"], new)
    memory = [Look(SMALL.memory + 10 * number * MB, 35, 12) for number in range(20)]
    assert "memory" in grown("worker a", memory, ALLOWED["worker"], [Look(4 * SMALL.memory, 35, 12)])


def test_only_workers_that_came_late_show_what_a_plan_needs() -> None:
    growth = Growth()

    def looked(name: str, from_: int, threads: Callable[[int], int]) -> None:
        growth._looks[("worker", name, 1)] = [
            (float(at), Look(SMALL.memory, 20, threads(at)), Counter()) for at in range(from_, 20)
        ]

    looked("old", 0, lambda at: 5 + at)
    looked("as old", 0, lambda at: 5 + at)
    assert len(growth.found()) == 2
    looked("new", 17, lambda at: 20)
    assert growth.found() == []


def test_what_stays_within_its_bounds_has_not_grown() -> None:
    looks = [Look(SMALL.memory + (number % 3) * MB, 20 + number % 2, 5) for number in range(20)]
    assert grown("agent a", looks, ALLOWED["agent"]) == ""
    # Nor has what was large at first.
    assert grown("agent a", [Look(90 * MB, 50, 9), *looks], ALLOWED["agent"]) == ""


@pytest.mark.parametrize(
    ("last", "what"),
    [
        (Look(47 * MB, 20, 5), "memory 40000000 -> 47000000"),
        (Look(40 * MB, 25, 5), "files 20 -> 25"),
        (Look(40 * MB, 20, 14), "threads 5 -> 14"),
    ],
)
def test_what_has_grown_is_told_with_its_figures(last: Look, what: str) -> None:
    looks = [SMALL] * 6 + [last] * 4
    assert grown("agent a", looks, ALLOWED["agent"]) == f"agent a grows in {len(looks)} looks: {what}"


def test_a_process_that_was_seen_a_few_times_only_is_not_judged() -> None:
    assert grown("worker a/0#0", [SMALL] * 3 + [Look(400 * MB, 90, 50)] * (LOOKS - 4), ALLOWED["worker"]) == ""


def step(number: int, loss: float = 2.0, digest: str = "a") -> Event:
    return {"kind": "step", "step": number, "loss": loss, "digest": digest, "generation": 3}


def log(node: str, *events: Event, lost_after: tuple[int, ...] = ()) -> StepLog:
    return StepLog(node, events, lost_after)


UNDISTURBED = dict.fromkeys(range(4), ("a", 2.0))
OTHER_SUM = 2.0 + 1e-15
MEMBERS: Event = {"kind": "generation", "generation": 3, "stage": "train", "workers": ["a/0#0", "b/0#1"]}
DIED: Event = {"kind": "worker_exited", "worker": "a/0#0", "signal": 9}
ENDED: Event = {"kind": "worker_exited", "worker": "a/0#0", "exitcode": 0}


def test_a_job_that_did_each_step_as_one_that_was_left_alone_has_passed() -> None:
    logs = [log("a", step(0), MEMBERS, step(1, OTHER_SUM), step(3)), log("b", MEMBERS, step(2))]
    assert check_steps(logs, {}, UNDISTURBED) == []


@pytest.mark.parametrize(
    ("logs", "what"),
    [
        ([log("a", *map(step, range(4)), step(2))], "step 2 has 2 lines: the log of a has step 2 of generation 3"),
        ([log("a", *map(step, range(4))), log("b", step(3))], "step 3 has 2 lines: the log of a .*; the log of b has"),
        # Not one of the last two that a lost agent had.
        (
            [log("a", step(0), step(1), step(2), lost_after=(3,)), log("b", step(0), step(3))],
            "step 0 has 2 lines: the log of a has step 0 of generation 3 .*; the log of b has step 0",
        ),
        # Nor before the loss of its agent.
        ([log("a", *map(step, range(4)), lost_after=(2,)), log("b", step(3))], "step 3 has 2 lines"),
        # In the same log twice, whoever was lost.
        ([log("a", *map(step, range(4)), step(3), lost_after=(5,))], "step 3 has 2 lines"),
        # One agent was lost, and two others have the step.
        (
            [log("a", *map(step, range(4)), lost_after=(4,)), log("b", step(3)), log("c", step(3))],
            "step 3 has 3 lines: the log of a, whose agent was lost then, has step 3",
        ),
        # A worker of one node died, and its agent could say what the log has; or workers have just ended.
        ([log("a", *map(step, range(4)), DIED), log("b", step(3), MEMBERS)], "step 3 has 2 lines"),
        ([log("a", *map(step, range(4)), ENDED), log("b", step(3), ENDED)], "step 3 has 2 lines"),
        ([log("a", *map(step, range(4)), DIED), log("b", step(0), step(1), step(2), DIED)], "step 0 has 2 lines"),
        ([log("a", step(0), MEMBERS, step(1)), log("b", step(3))], "step 2 is missing: .*the log of a has step 1 of"),
        ([log("a", *map(step, range(5)))], "step 4 is none of the undisturbed job's: the log of a has step 4"),
        ([log("a", *map(step, range(3)), step(3, digest="b"))], "step 3 was done with other samples: the log of a"),
        ([log("a", *map(step, range(3)), step(3, 2.1))], "step 3 has the loss 2.1, in the undisturbed job it is 2.0"),
        (
            [log("a", *map(step, range(4)), lost_after=(4,)), log("b", step(3, OTHER_SUM))],
            "step 3 was done twice: the log of a, whose agent was lost then, has step 3 .*; the log of b has step 3",
        ),
    ],
)
def test_a_step_that_is_missing_or_done_otherwise_or_told_of_twice_is_named(logs: list[StepLog], what: str) -> None:
    with pytest.raises(Unmet, match=what):
        check_steps(logs, {}, UNDISTURBED)


def test_a_step_that_is_named_comes_with_the_members_that_did_it() -> None:
    with pytest.raises(Unmet, match=r"the log of b has step 3 of generation 3 \(a/0#0, b/0#1\), loss 2\.0, digest a$"):
        check_steps([log("a", *map(step, range(4))), log("b", MEMBERS, step(3))], {}, UNDISTURBED)


@pytest.mark.parametrize(
    "logs",
    [
        # Nobody knows what the log of a lost agent has; a host that was cut off goes on with its log.
        [log("a", step(0), step(1), step(2), lost_after=(3,)), log("b", step(1), step(2), step(3))],
        [log("a", step(0), step(1), step(2), step(3), lost_after=(3,)), log("b", step(1), step(2))],
        # The worker that asked has ended before it knew.
        [log("a", step(0), step(1), step(2), DIED), log("b", step(1), step(2), DIED, step(3))],
    ],
)
def test_the_last_two_steps_may_have_a_line_more_where_nobody_could_ask(logs: list[StepLog]) -> None:
    assert check_steps(logs, {}, UNDISTURBED) == [1, 2]


def test_a_job_that_went_back_has_the_steps_that_it_did_again_once_more() -> None:
    resume: Event = {"kind": "resume", "step": 1, "again": 2}
    logs = [log("a", step(0), step(1), step(2), resume, step(1, OTHER_SUM), step(2), step(3))]
    assert done_again([], logs) == {1: 1, 2: 1}
    assert check_steps(logs, done_again([], logs), UNDISTURBED) == []
    text = "[elaunch] copies of step 2 were not complete when a worker was lost: going on from step 1\n"
    assert done_again([text], []) == {1: 1}
    with pytest.raises(Unmet, match="step 2 has 2 lines"):
        check_steps(logs, done_again([text], []), UNDISTURBED)


# -- where the store is --


def test_a_node_that_comes_later_is_told_where_the_store_is_by_then() -> None:
    addresses = {"a": "10.0.0.2", "b": "10.0.0.3", "c": "10.0.0.4"}
    one, three = StoreOnNodes(addresses, 1), StoreOnNodes(addresses, 3)
    assert one.flags == ("--rdzv-backend=c10d", "--rdzv-endpoint=10.0.0.2:29400")
    for store in (one, three):
        store.note("b", b"[elaunch b] this node serves the rendezvous store, too, at 10.0.0.3:31000\n")
    assert one.endpoint == "10.0.0.2:29400"
    for store in (one, three):
        store.note("c", b"...; this node serves another one at 10.0.0.4:29401: other nodes that come from now on\n")
    assert one.endpoint == "10.0.0.4:29401"
    for store in (one, three):  # the others have not come there
        store.note("c", b"[elaunch c] this node goes over to the rendezvous store at 10.0.0.2:29400\n")
    assert one.endpoint == "10.0.0.2:29400"
    assert three.endpoint == "10.0.0.2:29400,10.0.0.3:31000,10.0.0.4:29401"


# -- what is told at the end --


def test_the_table_has_each_kind_of_fault_and_each_setting_with_its_failures() -> None:
    faults = [Fault(kind, "a", 0, 1.0, 0.0) for kind in ("KILL", "drain", "KILL")]
    first = Round(0, "init", False, tuple(faults[:2]), "etcd")
    second = Round(1, "hybrid", True, tuple(faults[2:]), "three nodes")
    met = [Met(fault, 0.25 * (number + 1), number + 1.0) for number, fault in enumerate(faults)]
    passed = Tried(first, Findings(met[:2], [7], [], {"agent": 2, "worker": 1}))
    failed = Tried(second, Findings(met[2:]), "after KILL: step 3 is missing")
    report = summary([passed, failed], 5, 12.34, ["no 'disk full' here: only root"])
    assert report.title == "3 random faults in 2 jobs, 1 of which failed; 12.3 minutes"
    kill, drain, *settings, total = report.rows
    assert (kill["fault"], kill["times"], kill["jobs"], kill["settings"], kill["stores"]) == ("KILL", 2, 2, 2, 2)
    assert (kill["two_steps_median_s"], kill["all_back_worst_s"], drain["jobs"]) == (0.5, 3.0, 1)
    assert [(row["setting"], row["store"], row["faults"], row["failed"]) for row in settings] == [
        ("hybrid", "three nodes", 1, 1),
        ("init", "etcd", 2, 0),
    ]
    assert (total["minutes"], total["lines_told_twice"], total["agents_judged"]) == (12.3, 1, 2)
    assert report.notes == [
        "round 1 (hybrid; three nodes, clocks) failed: after KILL: step 3 is missing",
        "no 'disk full' here: only root",
    ]
