"""The table of a slot's states: it is whole, nothing of it is dead, and the documents show it."""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Callable
from itertools import product

import pytest

from elaunch.agent.decisions import local_workers
from elaunch.agent.decisions.lifecycle import Lifecycle
from elaunch.agent.decisions.node_state import NodeSettings
from elaunch.agent.decisions.slots import (
    ALIVE,
    IGNORED,
    IMPOSSIBLE,
    TRANSITIONS,
    Guard,
    News,
    Slot,
    SlotEvent,
    SlotState,
    Transition,
    cells,
    find_transition,
)
from elaunch.rendezvous.membership import Generation, GenerationStage, Result, Streak, Worker
from tests import slot_diagram
from tests.helpers import scaled

OTHERS = ("b/0#0", "b/1#0")
LEAST, SEQUENCES = scaled(200, 500), 6000  # schedules: some of them, and more until all rows were met
RARE = (200, 214, 243, 247, 259, 262, 268, 291, 332, 338, 418, 481, 731, 862)  # met new rows
LENGTH = 60


def test_the_table_decides_on_every_event_in_every_state_once() -> None:
    decided = Counter([*TRANSITIONS, *cells(IGNORED), *cells(IMPOSSIBLE)])
    assert set(decided) == set(product(SlotState, SlotEvent))
    assert {cell for cell, times in decided.items() if times > 1} == set()


def test_one_row_always_holds_and_the_last_one_only() -> None:
    guards = {tuple(row.guard for row in rows) for rows in TRANSITIONS.values()}
    assert all(found.index(Guard.ALWAYS) == len(found) - 1 for found in guards)


def test_every_state_can_be_reached_from_an_empty_slot() -> None:
    reached, before = {SlotState.EMPTY}, set[SlotState]()
    while reached != before:
        before = set(reached)
        reached |= {row.state for (state, _), rows in TRANSITIONS.items() if state in before for row in rows}
    assert reached == set(SlotState)


def test_only_what_has_a_process_changes_by_what_a_worker_says() -> None:
    said = (SlotEvent.ATTACH, SlotEvent.REGISTER, SlotEvent.JOIN, SlotEvent.COMMIT, SlotEvent.LEAVE, SlotEvent.FINISH)
    assert {state for state, event in TRANSITIONS if event in said} <= ALIVE


def test_what_the_agent_never_makes_of_itself_is_a_defect_and_no_fall_through() -> None:
    for state, event in cells(IMPOSSIBLE):
        with pytest.raises(AssertionError, match=f"{state.name}: {event.name} cannot happen"):
            find_transition(Slot(0, state), event, News())


def test_what_is_ignored_changes_nothing() -> None:
    life = Lifecycle(NodeSettings("a", "h", 1, 1, 1, None), generation=Generation(1, GenerationStage.TRAIN))
    news = News(generation=life.generation, number=1, training=True)
    for state, event in cells(IGNORED):
        life.slots[0].state, life.slots[0].worker = state, "a/0#0"
        before, doc = repr(life.slots), life.doc()
        assert life.workers.happens(event, "a/0#0", news) == [], f"{state} {event}"
        assert (repr(life.slots), life.doc()) == (before, doc), f"{state} {event}"


def test_the_documents_show_the_table() -> None:
    assert slot_diagram.drawn() == slot_diagram.draw(), (
        "docs/architecture.md differs from the table of elaunch.agent.decisions.slots; "
        "python -m tests.slot_diagram writes it anew"
    )


class Schedule:
    """A node to which random things happen, in any order."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.links = random.Random(seed)  # which worker that a generation does without is blamed for its links
        slots, nodes = self.rng.randint(1, 2), self.rng.randint(1, 3)
        limit = self.rng.choice([None, None, 0, 2])
        self.life = Lifecycle(NodeSettings("a", "h", slots, 1, nodes, limit))
        self.now_s = 100.0
        self.number = self.attempt = 0
        self.fruitless = self.rng.random() < 0.3  # no step commits

    def run(self, length: int) -> None:
        ends = self.rng.random() < 0.4
        for _ in range(length):
            self.now_s += self.rng.choice([0.0, 0.3, 3.0])
            happens = self.rng.choices(
                (self.generation, self.message, self.exit, self.peer, self.end), (4, 9, 2, 1, 0.4 if ends else 0)
            )[0]
            happens()
            self.life.on_time(self.now_s)
            self.life.doc()

    def generation(self) -> None:
        rng = self.rng
        self.number += 1
        stage = rng.choices((GenerationStage.TRAIN, GenerationStage.START), (9, 1 if self.number > 1 else 9))[0]
        if rng.random() < 0.06:
            self.attempt, stage = self.attempt + 1, rng.choice(list(GenerationStage))
        ids, leaving = [one for one in OTHERS if rng.random() < 0.5], list[str]()
        for slot in self.life.slots:
            if stage is GenerationStage.START:
                ids.append(f"a/{slot.local_rank}")
            elif slot.worker:
                rng.choices((ids, leaving, []), (8, 1, 1))[0].append(slot.worker)
        workers = tuple(Worker(one, one[0], int(one[2])) for one in ids)
        without = [slot.worker for slot in self.life.slots if slot.worker and slot.worker not in (*ids, *leaving)]
        streak = Streak(replaced=tuple(worker for worker in without if self.links.random() < 0.4))
        news = Generation(self.number, stage, workers, attempt=self.attempt, leaving=tuple(leaving), streak=streak)
        self.life.on_generation(news, self.now_s)

    def message(self) -> None:
        """A worker says something, mostly something that the table has a row for."""
        life, rng = self.life, self.rng
        slot = rng.choice(life.slots)
        says: dict[SlotEvent, Callable[[], object]] = {
            SlotEvent.ATTACH: lambda: life.on_attach(slot.worker),
            SlotEvent.REGISTER: lambda: life.on_ready(slot.worker, "h:1"),
            SlotEvent.JOIN: lambda: life.on_joined(slot.worker, self.number),
            SlotEvent.COMMIT: lambda: life.on_progress(slot.worker, self.number),
            SlotEvent.EVICT: lambda: life.evict(slot.worker, False, "x"),
            SlotEvent.REPLACE: lambda: life.evict(slot.worker, True, "x"),
            SlotEvent.LEAVE: lambda: life.on_leaving(slot.worker),
            SlotEvent.FINISH: lambda: life.on_finished(slot.worker),
        }
        if self.fruitless:
            says.pop(SlotEvent.COMMIT)
        fit = [event for event in says if (slot.state, event) in TRANSITIONS]
        says[rng.choice(fit if fit and rng.random() < 0.7 else list(says))]()

    def exit(self) -> None:
        code = self.rng.choice([0, 1, None])
        worker = self.rng.choice(self.life.slots).worker
        self.life.on_exit(worker, code, signal.SIGKILL if code is None else None, self.now_s, self.now_s)

    def peer(self) -> None:
        worker = self.rng.choice(self.life.slots).worker
        self.life.on_unreachable(self.number, worker, self.rng.random() < 0.9, self.now_s)

    def end(self) -> None:
        ends: tuple[Callable[[], object], ...] = (
            lambda: self.life.drain("x", self.now_s),
            lambda: self.life.drain("y", self.now_s, 20.0),
            lambda: self.life.on_signal(signal.SIGTERM, self.now_s),
            lambda: self.life.on_result(Result(self.rng.random() < 0.5), self.now_s),
        )
        self.rng.choice(ends)()


def test_random_schedules_meet_every_row_and_nothing_impossible(monkeypatch: pytest.MonkeyPatch) -> None:
    met = set[tuple[SlotState, SlotEvent, Transition | None]]()

    def find(slot: Slot, event: SlotEvent, news: News) -> Transition | None:
        state = slot.state
        met.add((state, event, transition := find_transition(slot, event, news)))
        return transition

    monkeypatch.setattr(local_workers, "find_transition", find)
    rows = {(*cell, row) for cell, found in TRANSITIONS.items() for row in found}
    ignored = {(*cell, None) for cell in cells(IGNORED)}
    for done, seed in enumerate((*range(LEAST), *RARE, *range(LEAST, SEQUENCES))):
        Schedule(seed).run(LENGTH)
        if done >= LEAST and met >= rows | ignored:
            return
    assert sorted(f"{state.name} {event.name}: {row}" for state, event, row in rows - met) == []
    assert sorted(f"{state.name} {event.name}" for state, event, _ in ignored - met) == []
