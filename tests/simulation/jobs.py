"""Random jobs with the real runtime of workers: the cases, their faults, and what must hold in the end."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from unittest.mock import patch

from elaunch.workers import recovery
from elaunch.workers.comm import group, transport
from elaunch.workers.member import reports
from tests.simulation.control_faults import random_fault
from tests.simulation.control_world import START_S, Case
from tests.simulation.native import backends_of
from tests.simulation.test_control_simulation import check_that_it_goes_on
from tests.simulation.transcript import render
from tests.simulation.world import JobWorld

BOUND_S = 60.0
"""So long after the last fault a job has a result, or all its members commit steps."""

TRACE_LINES = 160


class InvariantBroken(AssertionError):
    """A simulated job did what it must not do; the text is its transcript."""


def make_case(seed: int) -> Case:
    """Returns a small job: what it takes to go through many in a minute."""
    rng = random.Random(seed)
    max_nodes = rng.choice([1, 2, 2, 3, 3, 4])
    spares = random.Random(f"spares {seed}").choice([0, 0, 1, 2])
    return Case(
        seed=seed,
        nodes=max_nodes + spares,
        slots=rng.choice([1, 1, 2]),
        min_nodes=rng.randint(1, max_nodes),
        max_nodes=max_nodes,
        max_restarts=rng.choice([None, None, None, 0, 2, 10]),
        steps=rng.choice([8, 1000]),
        faults=rng.choice([1, 2, 3, 5]),
        spares=spares,
        spare_state=spares > 0 and random.Random(f"spare state {seed}").random() < 0.5,
    )


def simulate(seed: int, native: bool = False, tree: bool = False) -> JobWorld:
    """Runs the job of a seed until it has ended, or trains again after the last fault.

    Args:
        seed: of all that is random.
        native: whether its gradients are summed by native groups (tests/simulation/native.py).
        tree: whether members have links to their neighbours alone, as in a large job.

    Raises:
        InvariantBroken: something that must hold does not.
    """
    case = make_case(seed)
    if tree:
        case = replace(case, nodes=case.nodes + 2, max_nodes=case.max_nodes + 2)
    world = JobWorld(case, native)
    try:
        with _time_of(world), _trees() if tree else nullcontext():
            _run(world)
    except Exception as error:
        lines = "\n".join(render(world.events)[-TRACE_LINES:])
        raise InvariantBroken(f"{type(error).__name__}: {error}\n{case}\n{lines}") from error
    finally:
        world.close()
    return world


def simulate_all(seeds: range, native: bool = False, tree: bool = False) -> dict[int, str]:
    """Runs the jobs of these seeds; returns the transcripts of those that failed.

    Garbage is collected between jobs: they make much of it, and all at once.
    """
    failed = {}
    gc.freeze()  # what was imported is no garbage, and looking through it takes as long as some jobs
    gc.disable()
    try:
        for seed in seeds:
            try:
                simulate(seed, native, tree)
            except InvariantBroken as error:
                failed[seed] = str(error)
            if seed % 50 == 0:
                gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()
    return failed


def _run(world: JobWorld) -> None:
    """Lets the job begin, then the faults come in one or several bursts; after them it has time to go on."""
    rng, at_s = world.rng, world.rng.random() * 6
    world.step_s = rng.choice([0.2, 0.5, 1.5])
    if world.native:
        world.step_s, world.refusals = rng.choice([0.1, 0.2, 0.5]), rng.choice([0.0, 0.0, 0.1])
    for _ in range(world.case.nodes):
        world.at(rng.random() * 0.3, world.add_node)
    for _ in range(world.case.faults):
        world.at(at_s, partial(_fault, world))
        at_s += rng.choice([0.02, 0.2, 1.0, 4.0]) * rng.random()
    until_s, deadline_s = at_s + 1.0, at_s + BOUND_S
    world.run(START_S + until_s)
    while not world.over():
        try:
            check_that_all_train(world)
        except AssertionError:
            if until_s > deadline_s:
                raise
            until_s += 1.0
            world.run(START_S + until_s)
        else:
            break
    world.check_log()


def _fault(world: JobWorld) -> None:
    alive = [worker for worker in world.workers.values() if worker.alive]
    if world.native and alive and world.rng.random() < 0.1:
        world.break_native(world.rng.choice(alive).id)
        return
    kind = world.rng.random()
    if alive and kind < 0.1:
        world.stop(world.rng.choice(alive).id, world.rng.choice([0.05, 0.5, 2.0]))
    elif kind < 0.15:
        low = world.rng.randint(1, 4)
        world.resize(low, world.rng.randint(low, 4))
    elif kind < 0.2 and len(world.nodes) > 1:
        one, other = world.rng.sample(sorted(world.nodes), 2)
        if frozenset((one, other)) not in world.parted:
            world.part(one, other)
            world.at(world.rng.choice([0.5, 3.0, 12.0]), partial(world.heal, one, other))
    elif kind < 0.24 and (agents := [node for node in world.nodes.values() if not node.ended]):
        world.rng.choice(agents).kill_agent(world.rng.choice([0.1, 1.0, 4.0]))
    else:
        random_fault(world)


def check_that_all_train(world: JobWorld) -> None:
    """Checks that the faults are over, that all members are in the newest generation, and that they commit steps."""
    assert world.store.up, "the store is away"
    assert not any(node.cut_off for node in world.nodes.values() if not node.ended), "a node is cut off from the store"
    outliving = [worker.id for worker in world.workers.values() if worker.alive and worker.node.ended]
    assert not outliving, f"{outliving} have outlived their agents"
    assert not world.parted, "nodes cannot reach each other"
    check_that_it_goes_on(world)
    generation = world.store.generation
    assert generation is not None
    newest = [commit for (attempt, _), commit in list(world.commits.items())[-3:] if attempt == generation.attempt]
    for one in generation.ids:
        assert any(number == generation.number and one in workers for number, workers in newest), (
            f"{one} has not committed a step in generation {generation.number}"
        )
        held = sum(bulk.opened and not bulk.closed for bulk in world.workers[one].bulks)
        assert held <= 1, f"{one} holds {held} native groups"


@contextmanager
def _time_of(world: JobWorld) -> Iterator[None]:
    """Has the runtime read the time of the simulation."""
    with ExitStack() as patches:
        for module in (recovery, transport, reports):
            patches.enter_context(patch.object(module, "time", world.clock))
        if world.native:
            patches.enter_context(backends_of(world))
        yield


@contextmanager
def _trees() -> Iterator[None]:
    """Makes trees of jobs as small as these: with more than two members, not all have links to all."""
    with patch.object(group, "DIRECT_MEMBERS", 2), patch.object(group, "BRANCHES", 2):
        yield
