"""What is done about a slow worker, by what the user wants."""

from __future__ import annotations

from typing import Any

import pytest

from elaunch.errors import UsageError
from elaunch.policy.settings import SLOW_POLICIES, SLOW_POLICY, PolicyConfig, SlowPolicy, from_environment
from elaunch.policy.stragglers.remedies import Eviction, Remedies
from elaunch.policy.stragglers.track import Change

MEMBERS = ["n0/0#0", "n0/1#0", "n1/0#0", "n1/1#0"]
GAIN = 0.03


def slow(*workers: str, state: Any = "slow", kind: Any = "worker") -> Change:
    return Change(state, kind, workers[:1], workers, 1.5, 40, 28, {"looks": 8})


@pytest.mark.parametrize("policy", SLOW_POLICIES)
@pytest.mark.parametrize(
    "change", [slow("n0/1#0", state="recovered"), slow("n0/0#0", "n0/1#0", kind="link")], ids=["recovered", "link"]
)
def test_nobody_leaves_who_has_recovered_or_for_a_slow_link(policy: SlowPolicy, change: Change) -> None:
    one = Remedies(policy)
    assert not one.weighs(change, MEMBERS)
    assert one.answer(change) == {"action": "report" if policy == "report" else "rebalance"}
    assert one.take() is None


def test_who_is_to_be_replaced_is_told_until_all_have_heard_and_only_once_for_each_slot() -> None:
    one = Remedies("replace")
    assert one.answer(slow("n0/1#0")) == {"action": "replace"}
    eviction = one.take()
    assert eviction == one.take() == Eviction(("n0/1#0",), True, str(slow("n0/1#0")))
    assert not bool(one.rebalances)
    one.heard(eviction)
    assert one.take() is None
    assert one.answer(slow("n1/0#0"))["reason"] == "another worker is being replaced"
    assert one.entered([MEMBERS[0], *MEMBERS[2:]]) is None
    assert bool(one.rebalances)
    again = one.answer(slow("n0/1#1"))
    assert again == {"action": "rebalance", "reason": "n0/1 had another process already"}
    assert one.answer(slow("n1/0#0")) == {"action": "replace"}


def test_who_has_died_before_it_was_told_is_not_told_any_more() -> None:
    one = Remedies("replace")
    one.answer(slow("n0/1#0"))
    one.entered(["n0/0#0", "n0/1#1", "n1/0#0"])
    assert one.take() is None
    assert bool(one.rebalances)


@pytest.mark.parametrize(
    ("stay", "best", "without", "action"),
    [
        (10.0, 12.0, 12.0, "exclude"),
        (10.0, 12.3, 12.0, "exclude"),
        (10.0, 13.0, 12.0, "rebalance"),  # with less to do it still helps
        (10.0, 10.0, 10.2, "rebalance"),
        (10.0, 12.0, None, "rebalance"),
        (None, None, 12.0, "exclude"),
    ],
)
def test_who_is_left_out_is_decided_by_estimates(
    stay: float | None, best: float | None, without: float | None, action: str
) -> None:
    one = Remedies("exclude")
    assert one.weighs(slow("n0/1#0"), MEMBERS)
    assert list(one.weighed) == ["n0/1#0"]
    assert not bool(one.rebalances)
    event = one.decide(stay, best, without, GAIN)
    assert (event["worker"], event["action"]) == ("n0/1#0", action)
    assert event["reason"]
    assert len(one.weighed) == 0
    eviction = one.take()
    assert (eviction is not None) == (action == "exclude") == (not bool(one.rebalances))
    assert eviction is None or not eviction.replace


def test_the_minimum_of_nodes_stays() -> None:
    node = slow("n1/0#0", "n1/1#0", kind="node")
    one = Remedies("exclude", min_nodes=2)
    assert not one.weighs(node, MEMBERS)
    assert one.answer(node) == {"action": "rebalance", "reason": "1 of at least 2 nodes would be left"}
    assert one.weighs(slow("n1/0#0"), MEMBERS)
    assert Remedies("exclude", min_nodes=1).weighs(node, MEMBERS)


def test_a_change_of_members_ends_the_weighing() -> None:
    one = Remedies("exclude")
    one.weighs(slow("n0/1#0"), MEMBERS)
    event = one.entered(MEMBERS[1:])
    assert event is not None
    assert (event["action"], event["reason"]) == ("rebalance", "the members changed meanwhile")
    assert bool(one.rebalances)


def test_the_wish_goes_to_the_workers_by_their_environment() -> None:
    assert from_environment(PolicyConfig(slow_policy="exclude").variables()) == PolicyConfig(slow_policy="exclude")
    assert from_environment({}).slow_policy == "rebalance"
    with pytest.raises(UsageError, match="ELAUNCH_SLOW_POLICY=ignore: expected one of rebalance, replace, exclude"):
        from_environment({SLOW_POLICY: "ignore"})
