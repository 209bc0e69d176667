"""Whether all members of a job wait for each other, and which one is taken out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaunch.rendezvous.codec import from_json, to_json
from elaunch.rendezvous.membership import (
    Deadlock,
    Generation,
    GenerationStage,
    NodeDoc,
    NodeWorker,
    Result,
    Stalled,
    Worker,
    WorkerState,
    by_node,
    node_of,
)
from elaunch.rendezvous.rules.deadlock import SHOWN, describe, find, victim
from elaunch.rendezvous.view import View
from tests.unit.documents import changed_report

NUMBER = 5


def waits(worker: str, *peers: str, step: int = 7, operation: int = 40) -> Stalled:
    return Stalled(worker, step, f"in step {step}", NUMBER, operation, peers)


def job(*members: Stalled) -> View:
    """All of these members wait, and their nodes say so."""
    stalled = {one.worker: one for one in members}
    nodes = tuple(
        changed_report(NodeDoc(name, "h", len(some)), generation=NUMBER, stalled=tuple(map(stalled.__getitem__, some)))
        for name, some in by_node(stalled).items()
    )
    workers = tuple(Worker(worker, node_of(worker), slot) for slot, worker in enumerate(stalled))
    return View(nodes=nodes, generation=Generation(NUMBER, GenerationStage.TRAIN, workers))


CIRCLE = (waits("a/0#0", "a/1#0"), waits("a/1#0", "b/0#0"), waits("b/0#0", "a/0#0"))


def changed(view: View, place: int, **fields: object) -> View:
    nodes = list(view.nodes)
    nodes[place] = changed_report(nodes[place], **fields)
    return replace(view, nodes=tuple(nodes))


def test_the_node_of_the_victim_is_told_who_waits_for_whom() -> None:
    found = find(job(*CIRCLE))
    assert found == Deadlock("b/0#0", 3, tuple(map(describe, CIRCLE)))
    assert found.waits[1] == "a/1#0 for b/0#0, in step 7, operation 40"


def test_others_that_are_not_named_are_counted() -> None:
    assert describe(replace(CIRCLE[0], others=3)) == "a/0#0 for a/1#0 and 3 more, in step 7, operation 40"
    assert describe(replace(CIRCLE[0], peers=())) == "a/0#0 for its peers, in step 7, operation 40"


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(changed(job(*CIRCLE), 1, stalled=()), id="a node goes on"),
        pytest.param(changed(job(*CIRCLE), 0, stalled=CIRCLE[:1]), id="one of its workers is not among them"),
        pytest.param(changed(job(*CIRCLE), 0, generation=NUMBER - 1), id="it tells of the generation before"),
        pytest.param(replace(job(*CIRCLE), nodes=job(*CIRCLE).nodes[:1]), id="a node is absent"),
        pytest.param(job(waits("a/0#0", "a/1#0"), waits("a/1#0", "a/0#0")), id="a matter of one node"),
        pytest.param(replace(job(*CIRCLE), generation=None), id="nobody trains"),
        pytest.param(replace(job(*CIRCLE), result=Result(True)), id="the job is over"),
        pytest.param(
            replace(job(*CIRCLE), generation=replace(job(*CIRCLE).generation, hold=True)),  # type: ignore[type-var]
            id="they wait for nodes",
        ),
        pytest.param(
            replace(job(*CIRCLE), generation=replace(job(*CIRCLE).generation, stage=GenerationStage.START)),  # type: ignore[type-var]
            id="they start",
        ),
    ],
)
def test_as_long_as_somebody_may_go_on_nobody_is_taken_out(view: View) -> None:
    assert find(view) is None


def test_a_spare_node_has_no_part_in_it() -> None:
    view = job(*CIRCLE)
    assert find(replace(view, nodes=(*view.nodes, changed_report(NodeDoc("c", "h", 1), generation=NUMBER)))) is not None


def test_a_large_job_names_some_with_the_victim_first() -> None:
    members = [waits(f"n{node}/{slot}#0", f"n{node}/{(slot + 1) % 8}#0") for node in range(1250) for slot in range(8)]
    members[9000] = replace(members[9000], step=6)
    found = find(job(*members))
    assert found is not None
    assert (found.worker, found.members, len(found.waits)) == ("n1125/0#0", 10000, SHOWN)
    assert found.waits[0].startswith("n1125/0#0 for ")
    assert from_json(Deadlock, to_json(found)) == found
    assert len(to_json(found)) < 10_000


@pytest.mark.parametrize(
    ("changes", "worker"),
    [
        pytest.param({1: {"step": 6}}, "a/1#0", id="behind in step"),
        pytest.param({0: {"operation": 39}}, "a/0#0", id="alone in its operation"),
        pytest.param({2: {"peers": ("a/1#0",)}}, "a/0#0", id="nobody waits for it"),
        pytest.param({}, "b/0#0", id="all alike"),
    ],
)
def test_whom_it_costs_its_place(changes: dict[int, dict[str, object]], worker: str) -> None:
    members = [replace(one, **changes.get(place, {})) for place, one in enumerate(CIRCLE)]  # type: ignore[arg-type]
    assert victim(members).worker == worker


@given(st.data())
def test_the_victim_waits_and_nobody_is_further_behind(data: st.DataObject) -> None:
    names = [
        f"{node}/{slot}#0"
        for node in "ab"[: data.draw(st.integers(1, 2))]
        for slot in range(data.draw(st.integers(1, 3)))
    ]
    members = [
        waits(
            name,
            *data.draw(st.sets(st.sampled_from(names))),
            step=data.draw(st.integers(3, 5)),
            operation=data.draw(st.integers(1, 3)),
        )
        for name in names
    ]
    found = victim(members)
    assert found in members
    assert found.step == min(one.step for one in members)


def test_the_last_that_holds_the_state_is_not_the_victim() -> None:
    """The others are being filled, and can be filled again."""
    assert victim(CIRCLE, ["b/0#0"]).worker == "a/1#0"
    assert victim(CIRCLE, ["a/0#0", "b/0#0"]).worker == "b/0#0"
    assert victim(CIRCLE[:1], ["a/0#0"]).worker == "a/0#0", "there is nobody else"
    holder = (NodeWorker("b/0#0", 0, WorkerState.MEMBER),)
    view = job(*CIRCLE)
    nodes = (view.nodes[0], replace(view.nodes[1], workers=holder))
    found = find(replace(view, nodes=nodes))
    assert found is not None
    assert found.worker == "a/1#0"
