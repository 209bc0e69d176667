"""The control plane of whole jobs under random faults, in simulated time."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest

from elaunch.agent.decisions.slots import SlotState
from elaunch.rendezvous.membership import GenerationStage
from tests.helpers import soak
from tests.simulation.control_faults import random_fault
from tests.simulation.control_worker import STEP_S
from tests.simulation.control_world import Case, World
from tests.simulation.transcript import generation_text, render

FAULTS_S = 25.0  # faults come until here
BOUND_S = 75.0  # so long after the last fault a job has a result, or all its workers train
TRACE_LINES = 120


def make_case(seed: int) -> Case:
    rng = random.Random(seed)
    max_nodes = rng.randint(1, 4)
    spares = random.Random(f"spares {seed}").choice([0, 0, 1, 2])
    return Case(
        seed=seed,
        nodes=max_nodes + spares,
        slots=rng.randint(1, 2),
        min_nodes=rng.randint(1, max_nodes),
        max_nodes=max_nodes,
        max_restarts=rng.choice([None, None, None, 0, 2, 10]),
        steps=rng.choice([20, 1000]),
        faults=rng.choice([0, 1, 2, 4, 8]),
        elastic=rng.random() < 0.85,
        spares=spares,
        spare_state=spares > 0 and random.Random(f"spare state {seed}").random() < 0.5,
    )


def check_that_it_goes_on(world: World) -> None:
    """What has to hold some time after the last fault."""
    store, case = world.store, world.case
    agents = [node for node in world.nodes.values() if not node.ended]
    if not agents:
        return
    assert store.result is None, f"these have not heard of the result: {[node.name for node in agents]}"
    generation = store.generation
    assert generation is not None, "no generation was ever agreed on"
    if not case.elastic:
        assert generation.stage is GenerationStage.START
        return
    assert generation.stage is GenerationStage.TRAIN, f"nobody trains: {generation_text(None, generation)}"
    assert not generation.hold, "the job waits for nodes for ever"
    members = {one for one in generation.ids if world.workers[one].alive}
    assert members == set(generation.ids), f"dead members: {set(generation.ids) - members}"
    for one in members:
        worker = world.workers[one]
        assert worker.active is not None, f"{one} has not entered any generation"
        assert worker.active.number == generation.number, f"{one} is in generation {worker.active.number}"
        assert not worker.entering, f"{one} has not settled"
    for node in agents:
        said = node.life.doc().progress.plan_request
        assert said == (generation.plan_request if node.name in generation.nodes else ""), f"{node.name} says {said!r}"
    assert world.now_s - world.last_commit_s < 20 * STEP_S, "no step commits any more"
    over = (SlotState.GIVEN_UP, SlotState.LEFT)
    for node in agents:
        in_place = node.name in generation.nodes or len(generation.nodes) < world.settings.max_nodes
        in_place = in_place or (world.settings.spare_state and node.name in store.spares)
        for slot in node.life.slots:
            if in_place and not (slot.state in over or slot.state.leaving or node.life.ending.draining):
                assert slot.worker in members, f"{slot.worker or node.name} is no member"
            if node.name in store.spares and node.name not in generation.nodes and slot.state not in over:
                assert slot.state is SlotState.READY, f"{slot.worker or node.name} of a spare is {slot.state}"


def simulate(case: Case, fault: Callable[[World], None] | None = None) -> World:
    """Run a case; `fault` happens to it in the middle, beside the random ones."""
    world = World(case)
    try:
        for _ in range(case.nodes):
            world.at(world.rng.random() * 0.5, world.add_node)
        for _ in range(case.faults):
            world.at(world.rng.random() * FAULTS_S, partial(random_fault, world))
        if fault is not None:
            world.at(FAULTS_S / 2, partial(fault, world))
        world.run(100.0 + FAULTS_S + BOUND_S)
        check_that_it_goes_on(world)
    except AssertionError as error:
        tail = "\n".join(render(world.events)[-TRACE_LINES:])
        pytest.fail(f"{error}\n{case}\n{tail}", pytrace=False)
    return world


@pytest.mark.parametrize("block", [*range(3), *map(soak, range(3, 10))])
def test_a_job_goes_on_or_ends_whatever_happens_to_it(block: int) -> None:
    for seed in range(block * 40, block * 40 + 40):
        simulate(make_case(seed))
