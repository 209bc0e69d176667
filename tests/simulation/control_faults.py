"""Faults of simulated jobs, drawn at random."""

from __future__ import annotations

import signal

from elaunch.rendezvous.membership import slot_of
from tests.simulation.control_world import World


def random_fault(world: World) -> None:
    """Something happens to somebody, as `world.rng` has it."""
    rng = world.rng
    alive = [worker for worker in world.workers.values() if worker.alive]
    agents = [node for node in world.nodes.values() if not node.ended]
    kind = rng.choice(["kill"] * 5 + ["exit1", "exit0", "crash", "drain", "ail", "join", "join", "outage", "away"])
    if alive:
        kind = rng.choice([kind] * 8 + ["cut"] * 4 + ["plan", "plan", "sick", "deaf", "curse"])
    if kind in ("kill", "exit1", "exit0") and alive:
        victim = rng.choice(alive)
        world.note("FAULT:", f"{kind} {victim.id}")
        victim.end({"exit1": 1, "exit0": 0}.get(kind), signal.SIGKILL if kind == "kill" else None)
        if kind == "kill" and rng.random() < 0.4 and len(alive) > 1:
            other = rng.choice([worker for worker in alive if worker is not victim])
            world.at(rng.random() * 0.1, lambda: other.end(None, signal.SIGKILL))
    elif kind == "cut" and len(alive) > 1:
        one, other = rng.sample(alive, 2)
        world.break_link(one.id, other.id)
    elif kind == "sick":
        world.fall_sick(rng.choice(alive).id)
    elif kind == "deaf":
        world.fall_deaf(rng.choice(alive).id)
    elif kind == "curse" and len(alive) > 1:
        one, other = rng.sample(alive, 2)
        world.curse(slot_of(one.id), slot_of(other.id))
    elif kind == "plan":
        world.store.ask_for_plan()
        if rng.random() < 0.5:
            victim = rng.choice(alive)
            world.at(rng.random() * 0.5, lambda: victim.end(None, signal.SIGKILL))
    elif kind == "crash" and agents:
        node = rng.choice(agents)
        node.crash()
        if rng.random() < 0.5:
            world.at(rng.random() * 3, lambda: world.add_node(node.name))
    elif kind == "drain" and agents:
        world.terminate(rng.choice(agents).name)
    elif kind == "ail" and agents:
        for node in rng.sample(agents, min(2, len(agents))):
            world.note("FAULT:", f"a device of {node.name} is about to fail")
            node.step(lambda node=node: node.life.on_sick("GPU 3: XID 95"))  # type: ignore[misc]
    elif kind == "join":
        world.add_node()
    elif kind == "outage" and world.store.up:
        world.store.go_away(rng.choice([0.3, 2.0, 8.0]))
    elif kind == "away" and agents:
        rng.choice(agents).be_cut_off(rng.choice([0.3, 3.0, 12.0]))
