"""The world of simulated jobs whose workers run the real runtime."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from elaunch.agent.decisions.actions import Record
from elaunch.rendezvous.membership import Generation, node_of
from elaunch.wire import AGAIN
from tests.simulation.control_node import Node
from tests.simulation.control_store import Document
from tests.simulation.control_world import SILENT_S, Case, World
from tests.simulation.native import Room
from tests.simulation.network import Network
from tests.simulation.worker import Worker

LOOKS_S = 2.0
"""Links are looked at once a second."""


class _Clock:
    """The time of a simulation, in the place of the module `time`."""

    def __init__(self, world: JobWorld) -> None:
        self._world = world

    def monotonic(self) -> float:
        return self._world.now_s

    time = monotonic


class JobWorld(World):
    """Simulated time, the store, the agents, and workers with the real runtime over simulated links."""

    workers: dict[str, Any]  # of this package's own kind

    def __init__(self, case: Case, native: bool = False) -> None:
        super().__init__(case)
        self.network = Network()
        self.native, self.native_on_device = native, case.seed % 3 > 0
        self.checks_kills = not native  # which two faults together may cost the state, jobs without them show
        self.native_rooms: dict[str, Room] = {}
        self.native_values: dict[str, Any] = {}
        self.carriers: dict[tuple[int, int], tuple[str, bool]] = {}
        self.refusals = 0.0  # how many openings of native groups fail
        self.awaited_s = (0.0, 0.0, 0.02, 5.0)[case.seed % 4]  # so long the members wait for theirs before a first step
        self.clock = _Clock(self)
        self.step_s = 0.4
        self.log: dict[tuple[int, int], list[tuple[str, bool]]] = {}
        self.lost_s: dict[str, float] = {}

    def close(self) -> None:
        """Ends what still runs."""
        for worker in self.workers.values():
            worker.alive = False  # its script closes nothing any more
            worker.process.kill()

    def through_json(self, document: Document) -> Document:
        """Returns the document itself: writing and reading took a third of the time; the control simulation does it."""
        return document

    def make_worker(self, node: Node, id: str) -> Any:
        self.lost_s.pop(id, None)  # a machine that was started again may begin with the names it had
        return Worker(self, node, id)

    # -- what links need ------------------------------------------------------------------------------------------

    def notice_s(self) -> float:
        return self.delay_s("kernel")

    def refuses(self, one: str, other: str) -> bool:
        return bool(self.deaf & {one, other})

    def silent_since_s(self, one: str, other: str) -> float:
        if self.lost_s and (self.lost_s.keys() & {one, other}):
            return min(self.lost_s.get(one, inf), self.lost_s.get(other, inf))
        return self.parted.get(frozenset((node_of(one), node_of(other))), inf) if self.parted else inf

    # -- faults ---------------------------------------------------------------------------------------------------

    def break_link(self, one: str, other: str) -> None:
        self.note("FAULT:", f"the link {' - '.join(sorted((one, other)))} breaks")
        self.n_broken += 1
        for end in self.network.ends(one, other):
            end.cut_short(self.notice_s())

    def look_around_all(self) -> None:
        """Somebody's links fail from now on."""
        for transport in list(self.network.transports.values()):
            for end in list(transport._links.values()):
                if self.fails(transport.worker, end.peer):
                    end.hang_up(self.notice_s())  # type: ignore[attr-defined]
        self.network.look()

    def heal(self, one: str, other: str) -> None:
        self.check_patience(one, other)
        super().heal(one, other)
        self.network.send_again(self.now_s, self.delay_s)
        for room in self.native_rooms.values():
            room.look()

    def break_native(self, worker: str) -> None:
        """The native group of a worker breaks, on all members or on it alone, and nobody has ended."""
        bulks = [bulk for bulk in self.workers[worker].bulks if bulk.opened and not bulk.poisoned]
        if bulks and bulks[-1].room is not None:
            self.note("FAULT:", f"the native group of {worker} breaks")
            self.n_broken += 1  # whose link it was nobody can tell
            everywhere = self.rng.random() < 0.5
            for bulk in bulks[-1].room.bulks.values() if everywhere else bulks[-1:]:
                bulk.break_down("network error")

    def stop(self, worker: str, seconds: float) -> None:
        """A process is stopped for a while, as by SIGSTOP and SIGCONT."""
        self.note("FAULT:", f"{worker} is stopped for {seconds:g} s")
        process = self.workers[worker].process
        process.stopped_until_s = max(process.stopped_until_s, self.now_s + seconds)

    # -- what must hold -------------------------------------------------------------------------------------------

    def sums(self, worker: str, step: int, generation: Generation, natively: bool) -> None:
        """A member begins to sum the gradients of a step: all members of it do so over the same."""
        first, before = self.carriers.setdefault((generation.number, step), (worker, natively))
        assert before is natively, (
            f"{first} sums step {step} of generation {generation.number} "
            f"{'natively' if before else 'over links'}, and {worker} does not"
        )

    def check_patience(self, one: str, other: str) -> None:
        """No member has waited natively for another one for much longer than a link may be silent."""
        for worker in self.workers.values():
            generation = worker.active
            if not worker.alive or generation is None or not {one, other} <= set(generation.nodes):
                continue
            if worker.node.name in (one, other):
                since_s = max(
                    worker.waits_since_s, self.parted[frozenset((one, other))], worker.process.stopped_until_s
                )
                assert self.now_s - since_s < SILENT_S + LOOKS_S, f"{worker.id} waits for a machine that is cut off"

    def applied(self, worker: str, step: int, generation: Generation) -> None:
        """A step is applied by agreement: a member must have committed it, and no member may have done so twice."""
        key = (generation.attempt, step)
        _, had = self.commits.get(key, (0, set[str]()))
        assert had & set(generation.ids), (
            f"{worker} applies step {step} by agreement, which no member of generation {generation.number} committed"
        )
        assert worker not in had, f"{worker} commits step {step} twice"
        had.add(worker)

    def record(self, line: Record) -> None:
        """An agent writes a worker's line on a step, as `WorkerMessages` and `Journal` do."""
        worker, fields = self.workers[line.worker], line.report.fields
        node, lines = worker.node, worker.node.life.workers.lines
        if not lines.has(line):
            self.logged(worker.id, fields, any(line is hurried for hurried in node.hurried))
        lines.note(line.report)
        worker.note_logged(line.report)

    def logged(self, worker: str, fields: dict[str, Any], is_hurried: bool) -> None:
        """The event log gets a step; `is_hurried`: as the worker ends, before it is known what another log has."""
        generation = next(one for one in self.store.announced if one.number == fields["generation"])
        key = (generation.attempt, fields["step"])
        former = self.log.get(key)
        if former is not None:
            # Only where nobody can know what another log has may there be a second line.
            nodes = [self.workers[one].node for one in (worker, *dict(former))]
            lost = [node.name for node in nodes if node.ended or node.was_absent]
            text = f"step {fields['step']} is logged by {former} and {worker}, again: {fields.get(AGAIN)}"
            assert worker not in dict(former), text
            # Unmarked only if its own agent is lost, or nobody is left who knows that it was logged.
            knows = any(self.workers[one].alive for one in dict(former))
            assert AGAIN in fields or nodes[0].name in lost or not knows, text
            assert lost or is_hurried, text
        self.log[key] = [*(former or []), (worker, AGAIN in fields)]

    def check_log(self) -> None:
        """Each step that has committed is in a log, but for the newest, whose report may be on its way.

        Only where all that knew of it have died may it be in none, and where a live agent holds the line, for a few
        seconds, until it knows what another log has.
        """
        newest: dict[int, int] = {}
        for attempt, step in self.commits:
            newest[attempt] = max(step, newest.get(attempt, 0))
        for attempt, step in self.commits:
            there = [one for one in self.commits[attempt, newest[attempt]][1] if self.workers[one].knows]
            is_newest = step == newest[attempt] and not any(self.workers[one].finished for one in there)
            is_held = any(step in self._held(self.workers[one].node) for one in there)
            assert (attempt, step) in self.log or is_newest or is_held or not there, f"step {step} is in no log"

    def _held(self, node: Any) -> set[int]:
        """Returns the steps whose lines wait in a live agent for what another log has."""
        lines = node.life.workers.lines
        is_late = self.now_s >= lines._until_s + 1.0
        return set() if node.ended or is_late else {line.report.fields["step"] for line in lines._waiting}

    def check_lost(self, finder: Worker, part: int, members: Sequence[str]) -> None:
        """Somebody says that a part of the state is lost: no live member may have it.

        What a member had got while it waited for the others counts if one of them has gone on from there.
        """
        live = [worker for worker in self.workers.values() if worker.alive and worker.id in members]
        for worker in live:
            hooks = worker.hooks
            if hooks is not None:
                assert part not in hooks.parts, f"{finder.id} takes part {part} for lost, which {worker.id} holds"
                given_away = [other.id for other in live if other.activations & {hooks.staged_for}]
                assert not given_away or part not in (hooks.staged or {}), (
                    f"{finder.id} takes part {part} for lost, which {worker.id} had got; {given_away} went on from that"
                )
