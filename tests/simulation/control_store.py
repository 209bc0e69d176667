"""A toy store for simulated jobs: documents with leases, which connected nodes see after a delay, in order."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, TypeVar

from elaunch.rendezvous.intake import with_order
from elaunch.rendezvous.membership import Generation, GenerationStage, NodeDoc, PlanRequest, Result, node_of
from elaunch.rendezvous.rules.edit import edit_between, follow
from elaunch.rendezvous.view import MembershipSettings
from tests.simulation.transcript import Announced, Reported

if TYPE_CHECKING:
    from tests.simulation.control_node import Node
    from tests.simulation.control_world import World


Document = TypeVar("Document")


def check_standby(generation: Generation, settings: MembershipSettings) -> None:
    """Whole nodes are on standby, those beyond the ones that work; and none while a place is empty."""
    idle = {node_of(one) for one in generation.standby}
    assert generation.standby == generation.ids[len(generation.ids) - len(generation.standby) :], "they are not last"
    assert generation.standby == tuple(one for one in generation.ids if node_of(one) in idle), "a node is in part"
    if generation.stage is GenerationStage.TRAIN:
        beyond = max(0, len(generation.nodes) - settings.max_nodes) if settings.spare_state else 0
        assert len(idle) == beyond, f"{sorted(idle)} are on standby, of {generation.nodes}"
    else:
        assert not idle


class Store:
    """Documents with leases. A change is seen by each connected node after a delay, in order."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.up = True
        self.revision = 0
        self.docs: dict[str, tuple[NodeDoc, int]] = {}
        self.leader = ""
        self.generation: Generation | None = None
        self.generation_revision = 0
        self.result: Result | None = None
        self.request: PlanRequest | None = None
        self.size: tuple[int, int] | None = None
        self.spares: tuple[str, ...] = ()
        self.requests: dict[str, PlanRequest] = {}
        self.announced: list[Generation] = []
        self.holders_besides: dict[str, list[str]] = {}  # when a worker was replaced: who held the state without it
        self.generations: list[int] = [0]
        self.expired_s: dict[str, float] = {}
        self.left_draining: set[str] = set()  # nodes that said so when they ended; the leader may not know of that yet
        self.back_s = 0.0

    def reaches(self, node: Node) -> bool:
        """Whether a node can connect."""
        return self.up

    def users(self) -> list[Node]:
        """The nodes that use this store, whether they are connected or not."""
        return [node for node in self.world.nodes.values() if node.store is self]

    def go_away(self, duration_s: float) -> None:
        self.world.note("FAULT:", f"the store is away for {duration_s:g} s")
        self.up = False
        for node in self.users():
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
        node.present, node.was_absent = False, True
        self.forget(node)

    def forget(self, node: Node) -> None:
        if self.docs.pop(node.name)[0].draining:
            self.left_draining.add(node.name)
        self.expired_s[node.name] = self.world.now_s
        self._tell_leader(node.name, None)
        if self.leader == node.name:
            self.leader = ""
            for other in self.users():
                other.later(other.try_to_lead)

    def put(self, doc: NodeDoc) -> None:
        self.revision += 1
        known = doc.node in self.docs
        self.world.keep(Reported(self.world.t_s, self.read(doc.node) if known else None, doc))
        created = self.docs[doc.node][1] if known else self.revision
        self.docs[doc.node] = (self.world.through_json(doc), created)
        self.expired_s.pop(doc.node, None)
        self.left_draining.discard(doc.node)
        self._tell_leader(doc.node, self.read(doc.node))

    def read(self, node: str) -> NodeDoc:
        return with_order(*self.docs[node])

    def _tell_leader(self, name: str, doc: NodeDoc | None) -> None:
        leader = self.world.nodes.get(self.leader)
        if leader is not None and leader.store is self:
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
        # It may have been lowered, and those that were told to leave may be taken back.
        there = {node_of(one) for one in (*former.ids, *former.leaving)} if former else set()
        most = max(world.settings.most_nodes, len(there))
        draining = {name for name, (doc, _) in self.docs.items() if doc.draining} | self.left_draining
        assert len(set(generation.nodes) - draining) <= most, "more nodes than the maximum"
        # Whoever could not reach the store believes in absences a lease later only.
        back_s = max(self.back_s, world.nodes[by].view.outage_end_s or 0.0)
        lease_s = world.settings.lease_s
        doubt_s = inf if world.now_s < back_s + lease_s else lease_s if world.now_s < back_s + 2 * lease_s else 0.0
        for name in generation.nodes:
            gone_s = world.now_s - self.expired_s.get(name, world.now_s)
            assert gone_s < doubt_s + 1.0, f"{name} has been gone for {gone_s:.3f} s"
        check_standby(generation, world.settings)
        self.check_plan(generation)
        self.announced.append(generation)
        for worker in set(generation.streak.replaced).difference(self.holders_besides):
            known = world.may_replace() or not world.workers[worker].alive
            assert known, f"{worker} lives and is replaced, although links broke {world.n_broken} times at most"
            others = (world.workers[one] for one in generation.ids)
            self.holders_besides[worker] = [one.id for one in others if one.alive and one.holds]
        self.generations.append(generation.number)
        if generation.stage is GenerationStage.TRAIN:
            world.members.update(generation.ids)
        self.revision += 1
        self.check_edit(generation)
        self.generation, self.generation_revision = world.through_json(generation), self.revision
        for node in self.users():
            node.later(node.read_generation(self.generation, self.revision))
        return True

    def settle(self, generation: Generation, expected: int) -> None:
        """The generation is written anew, with what has come to be known of it."""
        if expected == self.generation_revision:
            self.revision += 1
            self.check_edit(generation)
            self.generation, self.generation_revision = self.world.through_json(generation), self.revision
            for node in self.users():
                node.later(node.read_generation(self.generation, self.revision))

    def ask_for_plan(self) -> None:
        if self.up and self.announced:
            generation = self.announced[-1]
            self.world.note(
                "REQUEST:", f"the members of generation {generation.number} are to go by plan r{self.revision}"
            )
            self.request = PlanRequest(
                f"r{self.revision}", generation.number, f"plan {self.revision}", self.world.now_s
            )
            self.requests[self.request.id] = self.request
            self.revision += 1
            leader = self.world.nodes.get(self.leader)
            if leader is not None:
                leader.later(leader.see_request(self.request))

    def tell_of_size(self, min_nodes: int, max_nodes: int) -> None:
        self.size = min_nodes, max_nodes
        for node in self.users():
            node.later(node.see_size(min_nodes, max_nodes))

    def hold_spares(self, nodes: tuple[str, ...], by: str) -> None:
        """The leader writes which nodes hold workers ready."""
        if nodes != self.spares:
            self.world.note(by, f"has {', '.join(nodes) or 'no node'} held ready")
            self.spares = nodes
            for node in self.world.nodes.values():
                node.later(node.see_spares(nodes))

    def check_plan(self, generation: Generation) -> None:
        """It is carried on through an attempt; a generation that brings a new one changes nothing else."""
        former = self.announced[-1] if self.announced else None
        plan = generation.plan, generation.plan_request
        if former is None or former.attempt != generation.attempt:
            assert plan == ("", ""), f"a new attempt has {plan}"
        elif generation.plan_request != former.plan_request:
            request = self.requests[generation.plan_request]  # the leader may not have seen a newer one
            assert plan == (request.plan, request.id)
            assert former.number == request.generation, "it was made for another generation"
            assert (generation.workers, generation.aborts_step_before, generation.stage) == (
                former.workers,
                former.aborts_step_before,
                former.stage,
            )
        else:
            assert plan == (former.plan, former.plan_request), f"{plan} is no more what was asked for"

    def check_edit(self, generation: Generation) -> None:
        """Whoever knows the generation before makes this one of it."""
        edit = self.world.through_json(edit_between(self.generation, generation))
        if edit.former:
            assert follow(self.generation, edit) == generation

    def end(self, result: Result) -> None:
        if self.result is None:
            self.world.note("RESULT:", f"{'success' if result.succeeded else 'failure'}, {result.message}")
            assert "made anew 0 times" not in result.message, "deaths alone have used up the changes without a step"
            self.result = result
            for node in self.users():
                node.later(lambda node=node: node.see_result(result))  # type: ignore[misc]
