"""When members go over to their native group: the choice, and the wait before the first step of a generation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from elaunch.errors import GenerationChanged, LinkLost, StepInterrupted
from elaunch.wire import Report
from elaunch.workers.barrier import StepRecord
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.native.groups import MOST_OPENINGS, NativeGroups
from elaunch.workers.comm.native.opening import GroupKey
from elaunch.workers.comm.transport import Transport
from elaunch.workers.hooks import Verdict
from elaunch.workers.member.swap_choice import (
    FEW,
    MARGIN,
    MOST_SIZES,
    WARM_UP_STEPS,
    StepTimes,
    SwapChoice,
    SwapReport,
    choose,
)
from elaunch.workers.member.swaps import SWAP, Swaps
from tests.helpers import wait_until
from tests.unit.comm_crew import Task, crew, outcomes
from tests.unit.test_member_parts import Client
from tests.unit.test_native import Device

QUICK = SwapReport(((3, 0.1),), links_s=1.0, native_s=0.2)


class TestChoice:
    @pytest.mark.parametrize(
        ("open_s", "links_s", "native_s", "waits"),
        [
            (0.1, 1.0, 0.2, True),
            (0.4, 1.0, 0.2, True),  # twice that is what the step gains
            (0.41, 1.0, 0.2, False),
            (0.01, 0.2, 1.0, False),  # as over Gloo, where links are quicker
            (0.0, 0.5, 0.5, True),
        ],
    )
    def test_members_wait_where_twice_the_opening_is_no_longer_than_what_the_step_gains(
        self, open_s: float, links_s: float, native_s: float, waits: bool
    ) -> None:
        chosen = choose([SwapReport(((3, open_s),), links_s, native_s)] * 3, 3)
        assert chosen == SwapChoice(waits, open_s, links_s, native_s)
        assert chosen.longest_s == MARGIN * open_s
        assert chosen.fields() == {"open_s": open_s, "links_s": links_s, "native_s": native_s}

    def test_the_slowest_opening_and_the_least_gain_count_whoever_has_them(self) -> None:
        late, content = SwapReport(((3, 0.3),), 9.0, 0.1), SwapReport(((3, 0.01),), 0.7, 0.2)
        assert choose([QUICK, late, content], 3) == SwapChoice(False, 0.3, 0.7, 0.2)
        assert choose([QUICK, late, QUICK], 3) == SwapChoice(True, 0.3, 1.0, 0.2)

    def test_links_serve_where_a_member_has_not_measured_all_of_it(self) -> None:
        assert choose([QUICK, None, QUICK], 3) is None
        assert choose([QUICK, SwapReport((), 1.0, 0.2)], 2) is None
        assert choose([QUICK], 1) is None, "alone there is nothing to open"
        assert choose([], 0) is None

    def test_an_opening_among_fewer_members_says_nothing_of_one_among_more(self) -> None:
        known = SwapReport(((4, 0.4), (2, 0.01)), 2.0, 0.2)
        assert known.open_s(2) == 0.01
        assert known.open_s(3) == 0.4
        assert known.open_s(5) is None
        assert choose([known] * 5, 5) is None
        again = SwapReport(((4, 1.5), (4, 0.4)), 2.0, 0.2)
        assert again.open_s(4) == 0.4, "the newest: the first one of a process also loads the library"


seconds = st.floats(0, 100, allow_nan=False)
reports = st.builds(
    SwapReport, st.lists(st.tuples(st.integers(2, 5), seconds), max_size=3).map(tuple), seconds, seconds
)


def twin(told: Sequence[SwapReport | None], size: int) -> bool:
    """Whether the members wait, as the module's head has it."""
    if size < 2 or None in told:
        return False
    slowest_s, least_s = 0.0, float("inf")
    for one in told:
        assert one is not None
        opened = [took_s for members, took_s in one.openings if members >= size]
        if not opened:
            return False
        slowest_s, least_s = max(slowest_s, opened[-1]), min(least_s, one.links_s - one.native_s)
    return 2 * slowest_s <= least_s


@given(st.lists(st.one_of(st.none(), reports), min_size=1, max_size=5), st.data())
def test_all_members_choose_alike_from_what_they_told_each_other(
    told: list[SwapReport | None], data: st.DataObject
) -> None:
    size = len(told)
    chosen = choose(told, size)
    assert (chosen is not None and chosen.waits) == twin(told, size)
    assert choose(data.draw(st.permutations(told)), size) == chosen, "in whatever order"
    sent = [None if one is None else one.to_json() for one in told]
    heard = [[None if one is None else SwapReport.of(one) for one in sent] for _ in told]
    assert len({choose(one, size) for one in heard}) == 1


class TestStepTimes:
    def test_both_kinds_of_step_must_have_been_measured_twice(self) -> None:
        times = StepTimes()
        for natively, took_s in [(False, 3.0), (True, 1.0), (True, 2.0), (True, 9.0)]:
            times.add(4, natively, took_s)
            assert times.figures() is None
        times.add(4, False, 2.5)
        assert times.figures() == (2.5, 2.0), "the least over links, and the median in the group"

    def test_only_steps_of_as_many_members_are_compared(self) -> None:
        times = StepTimes()
        for size, natively, took_s in [(4, False, 2.0), (4, True, 1.0)] * 2 + [(3, False, 5.0)] * 2:
            times.add(size, natively, took_s)
        assert times.figures() == (2.0, 1.0)
        for _ in range(2):
            times.add(3, True, 3.0)
        assert times.figures() == (5.0, 3.0), "of the newest members for which both are known"

    def test_steps_after_somebody_has_joined_do_not_count(self) -> None:
        times = StepTimes()
        times.leave_out(WARM_UP_STEPS)
        for took_s in [60.0] * WARM_UP_STEPS + [2.0, 2.0]:
            times.add(2, False, took_s)
        for _ in range(2):
            times.add(2, True, 1.0)
        assert times.figures() == (2.0, 1.0)

    def test_whoever_joins_takes_over_what_the_others_know_of_steps_until_it_has_seen_both_kinds(self) -> None:
        times = StepTimes()
        times.hear([None, QUICK, SwapReport(((3, 0.1),), 0.7, 0.2), None])
        assert times.figures() == (0.7, 0.2), "of the one that gains least"
        times.hear([None, None])
        assert times.figures() == (0.7, 0.2)
        for natively, took_s in [(True, 0.3), (False, 0.8)] * 2:
            assert times.figures() == (0.7, 0.2)
            times.add(3, natively, took_s)
        times.hear([QUICK])
        assert times.figures() == (0.8, 0.3)

    @given(st.lists(st.tuples(st.integers(2, 9), st.booleans(), seconds), max_size=60))
    def test_the_newest_few_count_as_a_list_of_all_steps_has_it(self, steps: list[tuple[int, bool, float]]) -> None:
        times = StepTimes()
        for step in steps:
            times.add(*step)
        newest_first = list(dict.fromkeys(size for size, _, _ in reversed(steps)))
        expected = None
        for size in newest_first[:MOST_SIZES]:
            links, native = ([s for n, way, s in steps if n == size and way is natively] for natively in (False, True))
            if len(links) >= 2 and len(native) >= 2:
                expected = min(links[-FEW:]), median(native[-FEW:])
                break
        if len(newest_first) <= MOST_SIZES:  # of one that was forgotten earlier steps are gone
            assert times.figures() == expected


# -- the wait ------------------------------------------------------------------------------------------------------


class Waiters:
    """Members of generation 1 that have agreed, each with a native group that opens when a test lets it."""

    def __init__(self, transports: Sequence[Transport]) -> None:
        self.members = tuple(transport.worker for transport in transports)
        self.store = dist.HashStore()
        self.devices = [Device() for _ in transports]
        self.natives = [NativeGroups(partial(iter([device, Device()]).__next__)) for device in self.devices]
        self.clients = [Client(worker) for worker in self.members]
        self.swaps = [Swaps(*one) for one in zip(self.clients, self.natives, strict=True)]  # type: ignore[arg-type]
        self.groups = [Group(transport, 1, self.members) for transport in transports]
        for transport, native in zip(transports, self.natives, strict=True):
            transport.watch(native.poison)

    def agree(self, report: SwapReport | None) -> None:
        """All have told each other the same."""
        facts = {} if report is None else {SWAP: report.to_json()}
        places = tuple(range(len(self.members)))
        for place, swaps in enumerate(self.swaps):
            swaps.agreed(Verdict(7, (), places, (), facts=(facts,) * len(places)))
            self.natives[place].enter(1, self.members, place, lambda: self.store)

    def begin(self) -> list[Task]:
        """Each begins step 7 in a thread of its own."""
        return [
            Task(partial(swaps.begin, group, lambda: 7)) for swaps, group in zip(self.swaps, self.groups, strict=True)
        ]

    def open(self, *places: int) -> None:
        for place in places:
            self.devices[place].opens.set()

    def events(self) -> list[dict[str, Any]]:
        """What the members have told the event log, all together."""
        return [dict(one.fields) for client in self.clients for one in client.sent if isinstance(one, Report)]


@contextmanager
def waiters(size: int) -> Iterator[Waiters]:
    with crew(size) as transports:
        made = Waiters(transports)
        try:
            yield made
        finally:
            for native in made.natives:
                native.close()


LONG = SwapReport(((9, 30.0),), links_s=100.0, native_s=1.0)


def test_the_first_step_is_done_in_the_group_for_which_the_members_wait() -> None:
    with waiters(3) as crew_of:
        crew_of.agree(LONG)
        begun = crew_of.begin()
        crew_of.open(0, 1)
        assert all(task.running for task in begun), "one has no group yet"
        assert not any(native.are_used for native in crew_of.natives)
        crew_of.open(2)
        for task in begun:
            task.result(20)
        assert [native.current for native in crew_of.natives] == crew_of.devices
        (event,) = crew_of.events()
        assert (event["generation"], event["step"], event["backend"]) == (1, 7, "device")
        for swaps in crew_of.swaps:
            told = dict(swaps.first_step)
            assert 0 < told.pop("waited_s") < 60
            assert told == {"over": "native", "open_s": 30.0, "links_s": 100.0, "native_s": 1.0}


@pytest.mark.parametrize("report", [None, SwapReport(((9, 30.0),), links_s=1.0, native_s=1.0)])
def test_where_links_are_quicker_or_nothing_was_measured_nobody_waits_and_the_swap_comes_in_the_barrier(
    report: SwapReport | None,
) -> None:
    with waiters(2) as crew_of:
        crew_of.agree(report)
        for task in crew_of.begin():
            task.result(20)
        assert not any(native.are_used for native in crew_of.natives)
        told = {"over": "links", "waited_s": 0.0, "open_s": 30.0, "links_s": 1.0, "native_s": 1.0}
        assert [dict(swaps.first_step) for swaps in crew_of.swaps] == [{} if report is None else told] * 2
        crew_of.open(0, 1)
        for native in crew_of.natives:
            wait_until(lambda native=native: native.ready() == 1, 20, "the group to open")  # type: ignore[misc]
        for swaps, group in zip(crew_of.swaps, crew_of.groups, strict=True):
            swaps.committed(group, StepRecord.at(7, native=(0, 1)))
            assert not swaps._native.are_used, "not all have it"
            swaps.committed(group, StepRecord.at(8, native=(1, 1)))
            assert swaps._native.are_used
        assert [(event["generation"], event["step"]) for event in crew_of.events()] == [(1, 9)]


def test_an_opening_that_fails_on_one_member_leaves_the_step_to_links_on_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: Any, **more: Any) -> None:
        raise RuntimeError("no route to host")

    with waiters(3) as crew_of:
        monkeypatch.setattr(crew_of.devices[1], "open", refuse)
        crew_of.open(0, 2)
        crew_of.agree(LONG)
        for task in crew_of.begin():
            task.result(20)  # much less than the wait may last
        assert not any(native.are_used for native in crew_of.natives)
        assert {swaps.first_step["over"] for swaps in crew_of.swaps} == {"links"}
        assert crew_of.events() == []
    assert "links serve: no route to host" in capsys.readouterr().err


def test_an_opening_that_takes_longer_than_its_bound_is_not_waited_for_and_serves_later() -> None:
    with waiters(2) as crew_of:
        crew_of.agree(SwapReport(((9, 0.05),), links_s=100.0, native_s=1.0))
        crew_of.open(0)
        for task in crew_of.begin():
            task.result(20)
        assert not any(native.are_used for native in crew_of.natives)
        assert all(swaps.first_step["waited_s"] >= 0.05 for swaps in crew_of.swaps)
        crew_of.open(1)
        wait_until(lambda: all(native.ready() for native in crew_of.natives), 20, "the groups to open")
        for swaps, group in zip(crew_of.swaps, crew_of.groups, strict=True):
            swaps.committed(group, StepRecord.at(7, native=(1, 1)))
        assert all(native.are_used for native in crew_of.natives)


def test_whoever_waits_for_the_group_of_one_that_dies_is_freed() -> None:
    with waiters(3) as crew_of:
        crew_of.agree(LONG)
        begun = crew_of.begin()
        assert all(task.running for task in begun)
        crew_of.groups[2].transport.close()
        found = outcomes([partial(task.result, 20) for task in begun[:2]])
        assert all(isinstance(one, LinkLost) and one.peer == crew_of.members[2] for one in found), found
        assert not any(native.are_used for native in crew_of.natives)


def test_one_that_dies_before_it_says_what_it_has_leaves_nobody_with_the_group() -> None:
    with waiters(3) as crew_of:
        crew_of.agree(LONG)
        crew_of.open(0, 1, 2)
        begun = [Task(partial(one.begin, group, lambda: 7)) for one, group in zip(crew_of.swaps[:2], crew_of.groups)]
        for native in crew_of.natives:
            wait_until(lambda native=native: native.ready() == 1, 20, "the group to open")  # type: ignore[misc]
        assert all(task.running for task in begun), "the third one has not said so"
        crew_of.groups[2].transport.close()
        found = outcomes([partial(task.result, 20) for task in begun])
        assert all(isinstance(one, StepInterrupted) for one in found), found
        assert not any(native.are_used for native in crew_of.natives)


def test_a_newer_generation_ends_the_wait_and_the_next_agreement_begins_anew() -> None:
    with waiters(2) as crew_of:
        crew_of.agree(LONG)
        begun = crew_of.begin()
        assert all(task.running for task in begun)
        for group in crew_of.groups:
            group.transport.interrupt(2)
        found = outcomes([partial(task.result, 20) for task in begun])
        assert all(isinstance(one, GenerationChanged) for one in found), found
        for native in crew_of.natives:
            assert native.ready() == 0
            native.pause()
            native.settled(())
        store, places = dist.HashStore(), (0, 1)
        for place, (swaps, native) in enumerate(zip(crew_of.swaps, crew_of.natives, strict=True)):
            swaps.agreed(Verdict(7, (), places, (), facts=({}, {})))
            native.enter(2, crew_of.members, place, lambda: store)
            swaps.begin(
                Group(crew_of.groups[place].transport, 2, crew_of.members), lambda: 7
            )  # nobody waits: links serve
            assert not native.are_used
            assert dict(swaps.first_step) == {}


def test_a_member_tells_what_it_has_measured_once_it_has_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(float(number) for number in range(100))
    monkeypatch.setattr("elaunch.workers.member.swaps.time.monotonic", lambda: next(clock))
    with crew(1) as transports:
        native = NativeGroups(None)
        swaps, group = Swaps(Client(), native), Group(transports[0], 1, [transports[0].worker])  # type: ignore[arg-type]
        swaps.agreed(Verdict(0, (), (0,), (), fresh=True, facts=({},)))
        swaps.entered(Verdict(0, (), (0,), (), fresh=True))
        serves, openings = [False], list[tuple[int, float]]()
        monkeypatch.setattr(NativeGroups, "are_used", property(lambda self: serves[0]))
        monkeypatch.setattr(NativeGroups, "openings", property(lambda self: tuple(openings)))
        for step in range(8):
            serves[0] = step >= WARM_UP_STEPS + 2
            swaps.begin(group, lambda step=step: step)  # type: ignore[misc]
            swaps.committed(group, StepRecord.at(step))
            assert swaps.facts() == {}, "no group has been opened"
        openings.append((3, 0.25))
        assert swaps.facts() == {SWAP: {"openings": [[3, 0.25]], "links_s": 1.0, "native_s": 1.0}}


def test_a_newcomer_tells_its_own_openings_with_what_it_has_heard_of_steps() -> None:
    with waiters(2) as crew_of:
        crew_of.agree(None)
        joined = crew_of.swaps[1]
        joined.agreed(Verdict(7, (), (0,), (1,), facts=({SWAP: LONG.to_json()}, {})))
        assert joined.facts() == {}, "it has opened no group"
        crew_of.open(0, 1)
        for native in crew_of.natives:
            native.await_open(20, lambda: None)
        (told,) = joined.facts().values()
        assert [size for size, _ in told.pop("openings")] == [2]
        assert told == {"links_s": 100.0, "native_s": 1.0}


def test_what_openings_of_the_group_of_all_members_took_is_remembered() -> None:
    made: list[Device] = []

    def make() -> Device:
        made.append(Device())
        made[-1].opens.set()
        return made[-1]

    groups, key, sizes = NativeGroups(make), GroupKey("rows", ("a", "b")), range(3, MOST_OPENINGS + 6)
    of_all = groups.needs
    for generation, size in enumerate(sizes, start=1):
        members, store = ("a", "b", *map(str, range(size - 2))), dist.HashStore()
        at = dist.PrefixStore(f"native/{generation}", store)
        at.add("here", size - 1)  # the others have come
        dist.PrefixStore(key.place, at).add("here", len(key.members) - 1)
        groups.needs = _needs(key) if generation == 1 else of_all
        groups.enter(generation, members, 0, lambda store=store: store)  # type: ignore[misc]
        groups.await_open(20, lambda: None)
        assert groups.ready() == generation
        groups.poison(generation + 1)
        groups.pause()
        groups.settled(())
    groups.close()
    assert [size for size, _ in groups.openings] == list(sizes[1:])[-MOST_OPENINGS:]
    assert all(took_s >= 0 for _, took_s in groups.openings)


def _needs(key: GroupKey) -> Callable[[tuple[str, ...]], list[GroupKey]]:
    return lambda members: [key]


def test_who_looks_at_links_ends_the_wait_by_what_it_raises() -> None:
    device = Device()
    groups, looks = NativeGroups(lambda: device), threading.Event()
    store = dist.HashStore()
    groups.enter(1, ("a", "b"), 0, lambda: store)

    def look() -> None:
        looks.set()
        raise LinkLost("b", "it is silent")

    waiting = Task(lambda: groups.await_open(60, look))
    with pytest.raises(LinkLost, match="silent"):
        waiting.result(20)
    assert looks.is_set()
    groups.close()
    NativeGroups(None).await_open(60, look)  # there is nothing to wait for
