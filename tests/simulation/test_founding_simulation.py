"""Whole jobs that host their store, whose nodes are killed, lost and cut off from each other, in simulated time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from tests.helpers import soak
from tests.simulation.control_founding import FoundingWorld, random_loss
from tests.simulation.control_worker import STEP_S
from tests.simulation.control_world import Case, World
from tests.simulation.transcript import render

FAULTS_S = 20.0
END_S = 100.0 + FAULTS_S + 30.0
TRACE_LINES = 150


def make_case(seed: int) -> Case:
    rng = random.Random(f"founding {seed}")
    nodes = rng.randint(2, 5)
    return Case(
        seed=seed,
        nodes=nodes,
        slots=rng.choice([1, 1, 2]),
        min_nodes=1,
        max_nodes=nodes + rng.randint(0, 1),
        max_restarts=rng.choice([None, 5]),
        steps=1000,
        faults=rng.choice([1, 2, 3, 5, 8]),
        elastic=True,
    )


def simulate(
    case: Case, fault: Callable[[World], None] = random_loss, first_s: float = 3.0, faults_s: float = FAULTS_S
) -> FoundingWorld:
    world = FoundingWorld(case)
    try:
        for _ in range(case.nodes):
            world.at(world.rng.random() * 0.5, world.add_node)
        for _ in range(case.faults):
            world.at(first_s + world.rng.random() * faults_s, partial(fault, world))
        world.run(END_S)
        if fault is one_loss:
            assert world.now_s - world.last_commit_s < 10 * STEP_S, "no step commits any more"
    except AssertionError as error:
        tail = "\n".join(render(world.events)[-TRACE_LINES:])
        pytest.fail(f"{error}\n{case}\n{tail}", pytrace=False)
    return world


@pytest.mark.parametrize("block", [*range(2), *map(soak, range(2, 50))])
def test_no_two_parts_of_a_job_go_on_beside_each_other(block: int) -> None:
    for seed in range(block * 100, block * 100 + 100):
        simulate(make_case(seed))


def with_one_fault(seed: int) -> Case:
    """A job of three nodes or more."""
    case = make_case(seed)
    return replace(case, nodes=max(3, case.nodes), max_nodes=max(3, case.max_nodes), faults=1)


def one_loss(world: World) -> None:
    """One node is lost: its agent is killed, its machine is lost, or it is cut off, for a while or for ever."""
    assert isinstance(world, FoundingWorld)
    first = world.host_of(world.stores[-1])
    host, *others = [first, *(node for node in world.agents() if node is not first)]
    node = world.rng.choice([host, host, *others])
    kind = world.rng.choice(["agent", "machine", "cut"])
    if kind == "agent":
        node.kill_agent(world.rng.random() * 0.02)
    elif kind == "machine":
        node.crash()
    else:
        world.cut([node.name], list(world.nodes), world.rng.choice([4.0, 8.0, 1000.0]))


@pytest.mark.parametrize("block", [0, *map(soak, range(1, 20))])
def test_a_job_of_three_nodes_or_more_goes_on_after_the_loss_of_any_one(block: int) -> None:
    for seed in range(block * 100, block * 100 + 100):
        simulate(with_one_fault(seed), one_loss)


@pytest.mark.parametrize("block", [0, *map(soak, range(1, 20))])
def test_so_it_does_where_that_node_is_lost_while_the_workers_start(block: int) -> None:
    for seed in range(block * 100, block * 100 + 100):
        simulate(with_one_fault(seed), one_loss, 1.7, 1.8)  # all have heard by then that workers are to start
