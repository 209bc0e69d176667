"""Who tells whom what in a step, from the plan alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from elaunch.plan import Plan, symmetric
from elaunch.workers.comm import group as groups
from elaunch.workers.comm.traffic import Traffic
from elaunch.workers.comm.transport import Transport
from elaunch.workers.layers.messages import Rows, exchanges, peers
from elaunch.workers.layers.snapshots import links
from tests.helpers import scaled
from tests.unit.engine_crew import train
from tests.unit.plan_strategies import valid_plans

Told = set[tuple[str, str, int, int]]


def told(plan: Plan, side: str, outgoing: bool) -> Told:
    """(from, to, number, rows) of all messages of a kind, as one end of each sees them."""
    found: Told = set()
    for worker in plan.workers:
        for exchange in exchanges(plan, worker).values():
            rows: Rows
            for rows in getattr(exchange, side):
                pair = (worker, rows.peer) if outgoing else (rows.peer, worker)
                entry = (*pair, rows.number, rows.count)
                assert entry not in found, "a number comes twice between the same workers"
                found.add(entry)
    return found


@settings(max_examples=scaled(50, 150), deadline=None)
@given(valid_plans(tp=(1, 2)))
def test_both_ends_of_every_message_agree(plan: Plan) -> None:
    assert told(plan, "y_to", outgoing=True) == told(plan, "x_from", outgoing=False)
    assert told(plan, "dx_to", outgoing=True) == told(plan, "dy_from", outgoing=False)


@settings(max_examples=scaled(50, 150), deadline=None)
@given(valid_plans(tp=(1, 2)))
def test_links_are_needed_on_both_sides(plan: Plan) -> None:
    needed = {worker: peers(plan, worker) for worker in plan.workers}
    for worker, others in needed.items():
        assert worker not in others
        assert all(worker in needed[other] for other in others)


def test_a_large_group_trains_over_the_links_that_its_plan_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with more than 16 members, where the collectives go round a ring."""
    plan = symmetric([f"a/{number}#0" for number in range(10)], 5, 8, 1, dp=2, pp=5)
    alone = symmetric(["a"], 5, 8, 1)
    expected, _ = train(alone, 2)
    monkeypatch.setattr(groups, "DIRECT_MEMBERS", 2)
    monkeypatch.setattr(groups, "BRANCHES", 2)
    connect = Transport.connect

    def some(transport: Transport, members: dict[str, str], **settings: Any) -> None:
        near = {transport.worker, *groups.neighbours(plan.workers, transport.worker), *links(plan, transport.worker, 1)}
        assert len(near) < len(members)
        connect(transport, {name: members[name] for name in members if name in near}, **settings)

    monkeypatch.setattr(Transport, "connect", some)
    assert train(plan, 2, snapshots=1)[0] == expected


@pytest.mark.parametrize(("dp", "pp", "operations"), [(1, 2, 1), (2, 1, 2)])
def test_where_each_layer_has_one_holder_no_operation_is_opened_for_its_new_values(
    monkeypatch: pytest.MonkeyPatch, dp: int, pp: int, operations: int
) -> None:
    workers = ["a/0#0", "a/1#0"]
    alone, _ = train(symmetric(["a"], 5, 8, 1), 2)
    opened: list[int] = []
    open_one = groups.Group.open

    def counted(group: groups.Group) -> Traffic:
        opened.append(group.rank)
        return open_one(group)

    monkeypatch.setattr(groups.Group, "open", counted)
    expected, _ = train(symmetric(workers, 5, 8, 1, dp=dp, pp=pp), 2)
    assert expected == alone
    assert sorted(opened) == sorted([0, 1] * 2 * operations)
