"""What the agent that hosts the rendezvous says to whoever comes too late, and itself when it begins anew."""

from __future__ import annotations

import selectors

import pytest

from elaunch.agent.decisions.outage import Patience
from elaunch.agent.inbox import Inbox
from elaunch.agent.participation import LATE_S, JobListener, stay_s
from tests.unit.test_lifecycle import Node


@pytest.mark.parametrize(("most", "expected_s"), [(1, 0.0), (2, LATE_S)])
def test_it_stays_for_late_nodes_only_after_a_job_that_had_room_for_them(most: int, expected_s: float) -> None:
    node = Node(1, 1, None)
    node.life.on_resized(1, most, node.now_s)
    assert stay_s(node.life) == LATE_S, "a job that has not begun has room"
    node.start()
    assert stay_s(node.life) == expected_s


@pytest.mark.parametrize(
    ("hosts", "more"),
    [
        ("", ""),
        (
            "10.0.0.2:29400",
            "; this node hosts the rendezvous at 10.0.0.2:29400; if a job has met there before, it has ended",
        ),
    ],
)
def test_until_its_job_has_begun_it_says_that_a_job_from_before_has_ended(hosts: str, more: str) -> None:
    node, said = Node(1, 1, None), list[str]()
    with selectors.DefaultSelector() as selector:
        inbox = Inbox(selector)
        listener = JobListener(inbox, said.append, lambda found: None, Patience(node.life, 300.0, False), hosts)
        listener.waits("waiting: 1 of 2")
        node.start()
        assert node.life.generation is not None
        listener.announced(node.life.generation)
        listener.waits("waiting: 1 of 2")
    assert said == [f"waiting: 1 of 2{more}", "waiting: 1 of 2"]
