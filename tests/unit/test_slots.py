"""The table of a slot's states: it is whole, nothing of it is dead, and the documents show it."""

from __future__ import annotations

import random
import signal
from collections import Counter
from itertools import product

import pytest

from elaunch.agent import local_workers
from elaunch.agent.lifecycle import Lifecycle
from elaunch.agent.node_state import NodeSettings
from elaunch.agent.slots import (
    ALIVE,
    IGNORED,
    IMPOSSIBLE,
    TRANSITIONS,
    Event,
    Guard,
    News,
    Slot,
    State,
    Transition,
    cells,
    find_transition,
)
from elaunch.rendezvous.membership import Generation, Result, Stage, Worker
from tests import slot_diagram

OTHERS = ("b/0#0", "b/1#0")
SEQUENCES = 900
LENGTH = 60


def test_the_table_decides_on_every_event_in_every_state_once() -> None:
    decided = Counter([*TRANSITIONS, *cells(IGNORED), *cells(IMPOSSIBLE)])
    assert set(decided) == set(product(State, Event))
    assert {cell for cell, times in decided.items() if times > 1} == set()


def test_one_row_always_holds_and_the_last_one_only() -> None:
    guards = {tuple(row.guard for row in rows) for rows in TRANSITIONS.values()}
    assert all(found.index(Guard.ALWAYS) == len(found) - 1 for found in guards)


def test_every_state_can_be_reached_from_an_empty_slot() -> None:
    reached, before = {State.EMPTY}, set[State]()
    while reached != before:
        before = set(reached)
        reached |= {row.state for (state, _), rows in TRANSITIONS.items() if state in before for row in rows}
    assert reached == set(State)


def test_only_what_has_a_process_changes_by_what_a_worker_says() -> None:
    said = (Event.ATTACH, Event.REGISTER, Event.JOIN, Event.COMMIT, Event.LEAVE, Event.FINISH)
    assert {state for state, event in TRANSITIONS if event in said} <= ALIVE


@pytest.mark.parametrize("cell", sorted(cells(IMPOSSIBLE), key=str), ids=lambda cell: f"{cell[0].name}-{cell[1].name}")
def test_what_the_agent_never_makes_of_itself_is_a_defect_and_no_fall_through(cell: tuple[State, Event]) -> None:
    with pytest.raises(AssertionError, match=f"{cell[1].name} cannot happen"):
        find_transition(Slot(0, cell[0]), cell[1], News())


@pytest.mark.parametrize("cell", sorted(cells(IGNORED), key=str), ids=lambda cell: f"{cell[0].name}-{cell[1].name}")
def test_what_is_ignored_changes_nothing(cell: tuple[State, Event]) -> None:
    life = Lifecycle(NodeSettings("a", "h", 1, 1, 1, None), generation=Generation(1, Stage.TRAIN))
    life.slots[0].state, life.slots[0].worker = cell[0], "a/0#0"
    before, doc = repr(life.slots), life.doc()
    assert life.workers.happens(cell[1], "a/0#0", News(generation=life.generation, epoch=1, training=True)) == []
    assert (repr(life.slots), life.doc()) == (before, doc)


def test_the_documents_show_the_table() -> None:
    assert slot_diagram.drawn() == slot_diagram.draw(), (
        "docs/architecture.md differs from elaunch/agent/slots.py; python -m tests.slot_diagram writes it anew"
    )


class Schedule:
    """A node to which random things happen, in any order."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        slots, nodes = self.rng.randint(1, 2), self.rng.randint(1, 3)
        limit = self.rng.choice([None, None, 0, 2])
        self.life = Lifecycle(NodeSettings("a", "h", slots, 1, nodes, limit))
        self.now_s = 100.0
        self.epoch = self.attempt = 0

    def run(self, length: int) -> None:
        ends = self.rng.random() < 0.4
        for _ in range(length):
            self.now_s += self.rng.choice([0.0, 0.3, 3.0])
            happens = self.rng.choices(
                (self.generation, self.message, self.exit, self.peer, self.end), (4, 8, 2, 1, 0.3 if ends else 0)
            )[0]
            happens()
            self.life.on_time(self.now_s)
            self.life.doc()

    def generation(self) -> None:
        rng = self.rng
        self.epoch += 1
        stage = rng.choices((Stage.TRAIN, Stage.START), (9, 1 if self.epoch > 1 else 9))[0]
        if rng.random() < 0.06:
            self.attempt, stage = self.attempt + 1, rng.choice(list(Stage))
        ids, leaving = [one for one in OTHERS if rng.random() < 0.5], []
        for slot in self.life.slots:
            if stage is Stage.START:
                ids.append(f"a/{slot.local_rank}")
            elif slot.worker:
                rng.choices((ids, leaving, []), (8, 1, 1))[0].append(slot.worker)
        workers = tuple(Worker(one, one[0], int(one[2])) for one in ids)
        news = Generation(self.epoch, stage, workers, attempt=self.attempt, leaving=tuple(leaving))
        self.life.on_generation(news, self.now_s)

    def message(self) -> None:
        life, rng = self.life, self.rng
        worker = rng.choice(life.slots).worker
        says = rng.choices(
            (
                lambda: life.on_attach(worker),
                lambda: life.on_ready(worker, "h:1"),
                lambda: life.on_joined(worker, self.epoch),
                lambda: life.on_progress(worker, self.epoch),
                lambda: life.evict(worker, rng.random() < 0.5, "x"),
                lambda: life.on_leaving(worker),
                lambda: life.on_finished(worker),
            ),
            (4, 4, 4, 2, 2, 1, 0.5),
        )[0]
        says()

    def exit(self) -> None:
        code = self.rng.choice([0, 1, None])
        worker = self.rng.choice(self.life.slots).worker
        self.life.on_exit(worker, code, signal.SIGKILL if code is None else None, self.now_s, self.now_s)

    def peer(self) -> None:
        worker = self.rng.choice(self.life.slots).worker
        self.life.on_unreachable(self.epoch, worker, self.rng.random() < 0.9, self.now_s)

    def end(self) -> None:
        ends = self.rng.choice(
            (
                lambda: self.life.drain("x", self.now_s),
                lambda: self.life.on_signal(signal.SIGTERM, self.now_s),
                lambda: self.life.on_result(Result(self.rng.random() < 0.5), self.now_s),
            )
        )
        ends()


def test_random_schedules_meet_every_row_and_nothing_impossible(monkeypatch: pytest.MonkeyPatch) -> None:
    met = set[tuple[State, Event, Transition | None]]()

    def find(slot: Slot, event: Event, news: News) -> Transition | None:
        state = slot.state
        met.add((state, event, transition := find_transition(slot, event, news)))
        return transition

    monkeypatch.setattr(local_workers, "find_transition", find)
    for seed in range(SEQUENCES):
        Schedule(seed).run(LENGTH)
    rows = {(*cell, row) for cell, found in TRANSITIONS.items() for row in found}
    assert sorted(f"{state.name} {event.name}: {row}" for state, event, row in rows - met) == []
    ignored = {(*cell, None) for cell in cells(IGNORED)}
    assert sorted(f"{state.name} {event.name}" for state, event, _ in ignored - met) == []
