"""A toy store for simulated jobs: documents with leases, which connected nodes see after a delay, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elaunch.rendezvous.codec import from_json, to_json
from elaunch.rendezvous.membership import Generation, NodeDoc, PlanRequest, Result, Stage, with_order
from tests.unit.transcript import Announced, Reported

if TYPE_CHECKING:
    from tests.unit.control_node import Node
    from tests.unit.control_world import World


class Store:
    """Documents with leases. A change is seen by each connected node after a delay, in order."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.up = True
        self.revision = 0
        self.docs: dict[str, tuple[bytes, int]] = {}
        self.leader = ""
        self.generation = b""
        self.generation_revision = 0
        self.result: Result | None = None
        self.request: PlanRequest | None = None
        self.announced: list[Generation] = []
        self.generations: list[int] = [0]
        self.expired_s: dict[str, float] = {}
        self.back_s = 0.0

    def go_away(self, duration_s: float) -> None:
        self.world.note("FAULT:", f"the store is away for {duration_s:g} s")
        self.up = False
        for node in self.world.nodes.values():
            node.disconnect()
        self.world.at(duration_s, self.come_back)

    def come_back(self) -> None:
        self.world.note("FAULT ENDS:", "the store is back")
        self.up, self.back_s = True, self.world.now_s
        for node in self.world.all_nodes:
            if node.ended:
                self.watch_lease(node)
            else:
                self.world.at(self.world.rng.random() * 0.3, node.connect)

    def watch_lease(self, node: Node) -> None:
        """Let the lease of a node run out if it is still silent then."""
        silence = node.silence
        self.world.at(self.world.settings.lease_s, lambda: self.expire(node, silence))

    def expire(self, node: Node, silence: int) -> None:
        if self.up and not node.connected and node.silence == silence and node.present:
            self.world.note(node.name, "has lost its lease: nothing was heard from it")
            self.remove(node)

    def remove(self, node: Node) -> None:
        self.docs.pop(node.name)
        self.expired_s[node.name] = self.world.now_s
        node.present = False
        self._tell_leader(node.name, None)
        if self.leader == node.name:
            self.leader = ""
            for other in self.world.nodes.values():
                other.later(other.try_to_lead)

    def put(self, doc: NodeDoc) -> None:
        self.revision += 1
        known = doc.node in self.docs
        self.world.keep(Reported(self.world.t_s, self.read(doc.node) if known else None, doc))
        created = self.docs[doc.node][1] if known else self.revision
        self.docs[doc.node] = (to_json(doc), created)
        self.expired_s.pop(doc.node, None)
        self._tell_leader(doc.node, self.read(doc.node))

    def read(self, node: str) -> NodeDoc:
        data, created = self.docs[node]
        return with_order(from_json(NodeDoc, data), created)

    def _tell_leader(self, name: str, doc: NodeDoc | None) -> None:
        leader = self.world.nodes.get(self.leader)
        if leader is not None:
            leader.later(lambda: leader.see_doc(name, doc))

    def announce(self, generation: Generation, expected: int, by: str) -> bool:
        if expected != self.generation_revision:
            return False
        world = self.world
        former = self.announced[-1] if self.announced else None
        world.keep(Announced(world.t_s, by, former, generation))
        assert generation.number > max(self.generations), (
            f"generation {generation.number} follows {self.generations[-1]}"
        )
        assert len(set(generation.ids)) == len(generation.ids), "a worker stands in a generation twice"
        assert not set(generation.ids) & set(generation.leaving), "a worker leaves and stays"
        most = max(world.settings.max_nodes, len(former.nodes) if former else 0)  # it may have been lowered
        assert len(generation.nodes) <= most, "more nodes than the maximum"
        doubt_s = world.settings.lease_s if world.now_s < self.back_s + 2 * world.settings.lease_s else 0.0
        for name in generation.nodes:
            gone_s = world.now_s - self.expired_s.get(name, world.now_s)
            assert gone_s < doubt_s + 1.0, f"{name} has been gone for {gone_s:.3f} s"
        self.check_plan(generation)
        self.announced.append(generation)
        self.generations.append(generation.number)
        if generation.stage is Stage.TRAIN:
            world.members.update(generation.ids)
        self.revision += 1
        self.generation, self.generation_revision = to_json(generation), self.revision
        for node in world.nodes.values():
            node.later(node.read_generation(self.generation, self.revision))
        return True

    def ask_for_plan(self) -> None:
        if self.up and self.announced:
            generation = self.announced[-1]
            self.world.note(
                "REQUEST:", f"the members of generation {generation.number} are to go by plan r{self.revision}"
            )
            self.request = PlanRequest(
                f"r{self.revision}", generation.number, f"plan {self.revision}", self.world.now_s
            )
            self.revision += 1
            leader = self.world.nodes.get(self.leader)
            if leader is not None:
                leader.later(leader.see_request(self.request))

    def tell_of_size(self, min_nodes: int, max_nodes: int) -> None:
        for node in self.world.nodes.values():
            node.later(node.see_size(min_nodes, max_nodes))

    def check_plan(self, generation: Generation) -> None:
        """It is carried on through an attempt; a generation that brings a new one changes nothing else."""
        former = self.announced[-1] if self.announced else None
        plan = generation.plan, generation.plan_request
        if former is None or former.attempt != generation.attempt:
            assert plan == ("", ""), f"a new attempt has {plan}"
        elif generation.plan_request != former.plan_request:
            assert self.request is not None
            assert plan == (self.request.plan, self.request.id)
            assert former.number == self.request.generation, "it was made for another generation"
            assert (generation.workers, generation.aborts_step_before, generation.stage) == (
                former.workers,
                former.aborts_step_before,
                former.stage,
            )
        else:
            assert plan == (former.plan, former.plan_request), f"{plan} is no more what was asked for"

    def end(self, result: Result) -> None:
        if self.result is None:
            self.world.note("RESULT:", f"{'success' if result.succeeded else 'failure'}, {result.message}")
            self.result = result
            for node in self.world.nodes.values():
                node.later(lambda node=node: node.see_result(result))  # type: ignore[misc]
