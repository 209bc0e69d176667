"""Whole jobs whose store is on three of their nodes: servers that come and go, lost majorities and parted networks."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from elaunch.rendezvous.cluster.servers import AddServer, EtcdMember, ServerOffer, ServerStep
from elaunch.rendezvous.cluster.servers import next_step as after
from elaunch.rendezvous.node import servers
from elaunch.rendezvous.rules import quorum
from elaunch.rendezvous.rules.quorum import is_majority
from tests.helpers import soak
from tests.simulation.control_founding import EVEN_S, FoundingNode, FoundingWorld, random_loss_of_servers
from tests.simulation.control_servers import Cluster
from tests.simulation.control_worker import STEP_S
from tests.simulation.control_world import Case
from tests.simulation.transcript import render

FIRST_S = 4.0
FAULTS_S = 20.0
LONGEST_CUT_S = 15.0
BOUND_S = 20.0  # so long after the last cut has healed a job goes on
END_S = 100.0 + FIRST_S + FAULTS_S + LONGEST_CUT_S + BOUND_S
TRACE_LINES = 150
BLOCK = 50


def make_case(seed: int) -> Case:
    rng = random.Random(f"servers {seed}")
    nodes = rng.randint(3, 6)
    return Case(
        seed=seed,
        nodes=nodes,
        slots=1,
        min_nodes=1,
        max_nodes=nodes + rng.randint(0, 1),
        max_restarts=None,
        steps=1000,
        faults=rng.choice([1, 2, 3, 5, 8]),
        servers=3,
    )


def run(world: FoundingWorld, fault: Callable[[FoundingWorld], None] = random_loss_of_servers) -> None:
    """Simulates a job; raises `AssertionError` where something does not hold."""
    for _ in range(world.case.nodes):
        world.at(world.rng.random() * 0.5, world.add_node)
    for _ in range(world.case.faults):
        world.at(FIRST_S + world.rng.random() * FAULTS_S, partial(fault, world))
    world.watch_voters()
    world.run(END_S)
    if majority_lives(world):
        assert world.now_s - world.last_commit_s < 10 * STEP_S, "no step commits any more"
        check_servers(world)


def simulate(seed: int) -> FoundingWorld:
    world = FoundingWorld(make_case(seed))
    try:
        run(world)
    except AssertionError as error:
        tail = "\n".join(render(world.events)[-TRACE_LINES:])
        pytest.fail(f"{error}\n{world.case}\n{tail}", pytrace=False)
    return world


def majority_lives(world: FoundingWorld) -> bool:
    """Whether the agents that live, and have a say, are so many that the job must go on."""
    agents = {node.address: node for node in world.agents() if not node.ended and node.used is not None}
    known = [node.view.generation for node in agents.values() if node.view.generation is not None]
    if not known or any(store.result is not None for store in world.stores):
        return False
    newest = max(known, key=lambda one: one.number)
    if not newest.seats:  # all have left
        return False
    have_say = {address for address, node in agents.items() if node.standing(away=False).votes}
    return all(
        is_majority({node for node, address in seats if address in have_say}, seats)
        for seats in (newest.seats, newest.former_seats or newest.seats)
    )


def check_servers(world: FoundingWorld) -> None:
    """In the end three nodes serve the store, or one where there are fewer."""
    store = max((one for one in world.stores if one.up), key=lambda one: one.epoch)
    if world.now_s < max(world.disturbed_s, store.cluster.changed_s) + EVEN_S:
        return
    users = [node for node in world.agents() if node.connected and node.store is store]
    voters, members = store.cluster.voters, store.cluster.members
    most = world.most if len(users) >= world.most else 1
    names = [one.peer for one in members]
    assert len(voters) == len(members) == most, f"{len(users)} nodes have {len(voters)} voters, {names}"


@pytest.mark.parametrize("block", [0, *map(soak, range(1, 100))])
def test_a_job_whose_store_is_on_three_nodes_goes_on_in_one_part_whatever_happens_to_them(block: int) -> None:
    for seed in range(block * BLOCK, block * BLOCK + BLOCK):
        simulate(seed)


# -- the simulation finds defects --


def _votes_before_it_has_caught_up() -> Any:
    return Cluster, "is_ready", lambda self, server: True


def _acknowledges_what_no_other_server_has() -> Any:
    def write(self: Cluster) -> None:
        others = [one.server for one in self.members if one is not self.leader and one.server is not None]
        held = [one.held for one in others]
        original(self)
        for server, number in zip(others, held, strict=True):
            server.held = number

    original = Cluster.write
    return Cluster, "write", write


def _adds_a_learner_beside_another() -> Any:
    def next_step(offers: Sequence[ServerOffer], members: Sequence[EtcdMember], *rest: Any) -> ServerStep | None:
        known = {one.peer for one in members}
        free = [one for one in offers if one.peer not in known]
        return AddServer(free[0]) if free and len(members) < 3 else after(offers, members, *rest)

    return servers, "next_step", next_step


def _removes_a_server_that_serves_well() -> Any:
    def next_step(offers: Any, members: Any, most: int, lost: Mapping[str, float], *rest: Any) -> ServerStep | None:
        if len(offers) > most:
            offers, lost = offers[1:], {**lost, offers[0].peer: 10.0}
        return after(offers, members, most, lost, *rest)

    return servers, "next_step", next_step


def _stays_with_two_servers() -> Any:
    def next_step(offers: Sequence[ServerOffer], members: Sequence[EtcdMember], *rest: Any) -> ServerStep | None:
        step = after(offers, members, *rest)
        return None if len(members) == 2 and all(one.votes for one in members) else step

    return servers, "next_step", next_step


def _removes_a_server_without_which_the_others_have_no_quorum() -> Any:
    return servers.ServerKeeper, "_can_spare", lambda self, cluster, members, member: True


def _goes_on_with_a_minority() -> Any:
    return quorum, "is_majority", lambda group, seats: True


def _connects_to_the_store_that_the_job_began_with() -> Any:
    def connect(self: FoundingNode) -> None:
        first, before = self.founding_world.stores[0], self.opener.addresses
        if self.joined and not self.connected:
            self.opener.move(",".join(one.server.endpoint for one in first.cluster.voters if one.server is not None))
            if first.reaches(self):
                self.used = first
            else:
                self.opener.move(",".join(before))
        original(self)

    original = FoundingNode.connect
    return FoundingNode, "connect", connect


@pytest.mark.parametrize(
    ("defect", "text", "shown"),
    [
        (_votes_before_it_has_caught_up, "votes with", 0),
        (_acknowledges_what_no_other_server_has, "leads with", 0),
        (_adds_a_learner_beside_another, "there is one already", 0),
        (_removes_a_server_that_serves_well, "though it serves well", 2),
        (_stays_with_two_servers, "voters", 0),
        (_removes_a_server_without_which_the_others_have_no_quorum, "have no quorum", 131),
        (_goes_on_with_a_minority, "does not follow", 0),
        (_connects_to_the_store_that_the_job_began_with, "acts on", 0),
    ],
)
@pytest.mark.timeout(600)
def test_a_defect_of_the_servers_or_of_founding_does_not_go_unseen(
    defect: Callable[[], Any], text: str, shown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seed `shown` has shown it before; where the jobs of all seeds have become others, one of so many does."""
    place, name, value = defect()
    monkeypatch.setattr(place, name, value)
    find = failure_where_one_returns if place is FoundingNode else failure
    assert any(text in find(seed) for seed in [shown, *range(1500)])


def failure(seed: int) -> str:
    try:
        run(FoundingWorld(make_case(seed)))
    except AssertionError as error:
        return str(error)
    return ""


def failure_where_one_returns(seed: int) -> str:
    """The same of a job whose only server is cut off for a while, and that of the next store is killed at the end."""

    def fault(world: FoundingWorld) -> None:
        host = world.host_of(world.stores[-1]).name
        world.cut([host], [name for name in world.nodes if name != host], 9.0)
        world.at(9.0 - world.rng.random() * 0.1, lambda: world.host_of(world.stores[-1]).end_servers(silently=False))

    try:
        run(FoundingWorld(replace(make_case(seed), servers=1, faults=1)), fault)
    except AssertionError as error:
        return str(error)
    return ""
