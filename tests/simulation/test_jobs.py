"""Whole jobs whose workers run the real runtime and recovery, under random faults, in simulated time.

More seeds, on all cores: `make simulate`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from elaunch.agent.decisions import step_lines
from elaunch.agent.decisions.actions import Record
from elaunch.rendezvous.rules import training
from elaunch.workers import recovery, runtime
from elaunch.workers.comm import group, transport
from elaunch.workers.comm.native import ended
from elaunch.workers.comm.native.groups import NativeGroups
from elaunch.workers.data_parallel import reducer
from elaunch.workers.member import reports, swaps
from elaunch.workers.recovery import Recovery
from tests.helpers import soak
from tests.simulation.jobs import simulate, simulate_all
from tests.simulation.native import SimulatedBulk
from tests.simulation.transcript import render

BLOCK = 100


@pytest.mark.parametrize("block", [*range(4), *map(soak, range(4, 106))])
def test_every_step_commits_once_and_no_state_is_lost_whatever_happens(block: int) -> None:
    failed = simulate_all(range(block * BLOCK, block * BLOCK + BLOCK))
    assert not failed, "\n\n".join(f"seed {seed}: {text}" for seed, text in failed.items())


@pytest.mark.parametrize("block", [*range(4), *map(soak, range(4, 54))])
def test_nobody_trains_on_garbage_of_a_native_group_nor_waits_in_it_for_ever(block: int) -> None:
    """Members sum by the same group or all over links; none is closed before all survivors have left it; none leaks."""
    failed = simulate_all(range(block * BLOCK, block * BLOCK + BLOCK), native=True)
    assert not failed, "\n\n".join(f"seed {seed}: {text}" for seed, text in failed.items())


@pytest.mark.parametrize("block", [0, *map(soak, range(1, 54))])
def test_nobody_waits_for_one_that_has_gone_on_where_votes_go_up_a_tree(block: int) -> None:
    """As in jobs of more than `DIRECT_MEMBERS`, where not all have links to all."""
    failed = simulate_all(range(block * BLOCK, block * BLOCK + BLOCK), tree=True)
    assert not failed, "\n\n".join(f"seed {seed}: {text}" for seed, text in failed.items())


@pytest.mark.parametrize("native", [False, True])
def test_a_seed_is_the_same_job_each_time(native: bool) -> None:
    assert render(simulate(5, native).events) == render(simulate(5, native).events)


# -- the simulation finds defects: each of these was one, or is a line that recovery cannot do without --


def _drops_a_step_that_others_committed() -> Any:
    def agree(votes: Any, begun: bool) -> Any:
        verdict = recovery_agree(votes, begun)
        return replace(verdict, step=min((vote.step for vote in votes if vote.holds), default=0), committing=())

    recovery_agree = recovery.agree
    return recovery, "agree", agree


def _lets_go_of_what_others_have_not_taken_over() -> Any:
    def poll(self: Recovery, *args: Any) -> None:
        self._transferred = None
        original(self, *args)

    original = Recovery._poll
    return Recovery, "_poll", poll


def _goes_on_before_all_have_their_state() -> Any:
    def all_gather(self: group.Group, payload: bytes) -> list[bytes]:
        return original(self, payload) if not payload.isdigit() else [payload] * self.size

    original = group.Group.all_gather_bytes
    return group.Group, "all_gather_bytes", all_gather


def _commits_alone() -> Any:
    def pass_barrier(self: Any, record: Any, note: bytes = b"") -> Any:
        return replace(record, generation=(0, 0))

    return runtime.Member, "pass_barrier", pass_barrier


def _leaves_the_report_to_a_first_member_that_died() -> Any:
    return reports, "tells_again", lambda verdict, generation, worker, known: False


def _keeps_the_last_report_alone() -> Any:
    return reports, "lost_steps", lambda verdict, generation: ("", range(0))


def _leaves_what_a_lost_agent_had_not_written_at_the_end() -> Any:
    return reports.StepReports, "end", lambda self, group: group.barrier()


def _writes_what_the_log_of_a_lost_member_may_have() -> Any:
    return step_lines.StepLines, "take", lambda self, worker, report, now_s: [Record(worker, report)]


def _does_not_say_who_may_have_reported_the_step_that_is_done_again() -> Any:
    def facts(self: reports.StepReports, *left: Any) -> dict[str, Any]:
        return {**original(self, *left), reports.TELLERS: []}

    original = reports.StepReports.facts
    return reports.StepReports, "facts", facts


def _forgets_links_that_failed_before_a_planned_generation() -> Any:
    def compare(view: Any, generation: Any, *args: Any) -> Any:
        # The generation's own number in the place of the last one that ended a step.
        seen = [
            replace(doc, peers=replace(doc.peers, reset_generation=0))
            if doc.peers.reset_generation < generation.number
            else doc
            for doc in args[0]
        ]
        return original(view, generation, tuple(seen), *args[1:])

    original = training._compare
    return training, "_compare", compare


@pytest.mark.parametrize(
    ("defect", "shown", "seeds"),
    [
        (_drops_a_step_that_others_committed, (48,), 400),
        (_lets_go_of_what_others_have_not_taken_over, (365, 1099, 1367), 3000),
        (_goes_on_before_all_have_their_state, (0,), 400),
        (_commits_alone, (0,), 50),
        (_leaves_the_report_to_a_first_member_that_died, (35,), 1500),
        (_keeps_the_last_report_alone, (437, 948, 1351), 3000),
        (_leaves_what_a_lost_agent_had_not_written_at_the_end, (1972, 2394, 2553), 3000),
        (_writes_what_the_log_of_a_lost_member_may_have, (50, 583, 883), 3000),
        (_does_not_say_who_may_have_reported_the_step_that_is_done_again, (1135, 1255, 2091), 3000),
        soak(_forgets_links_that_failed_before_a_planned_generation, (0,), 8000),
    ],
)
@pytest.mark.job
@pytest.mark.timeout(600)
def test_a_defect_does_not_go_unseen(
    defect: Callable[[], Any], shown: tuple[int, ...], seeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seeds `shown` have shown it before; where the jobs of all seeds have become others, one of so many does."""
    monkeypatch.setattr(*defect())
    assert any(map(simulate_all, blocks(shown, seeds)))


def blocks(shown: tuple[int, ...], seeds: int) -> Iterator[range]:
    """The seeds to try: some that are known, and then the first so many."""
    yield from (range(seed, seed + 1) for seed in shown)
    yield from (range(first, first + 50) for first in range(0, seeds, 50))


def test_that_nobody_tells_whom_it_has_left_behind_does_not_go_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport.Transport, "entering", lambda self, generation: contextlib.nullcontext())
    assert any(simulate_all(block, tree=True) for block in blocks((148, 216, 810), 3000))


# -- the same for native groups --


def _takes_a_group_that_others_may_not_have() -> Any:
    def passed(self: NativeGroups, ready: tuple[int, int]) -> bool:
        return original(self, (ready[1], ready[1]))

    original = NativeGroups.passed
    return NativeGroups, "passed", passed


def _takes_a_group_as_soon_as_it_is_open() -> Any:
    def current(self: NativeGroups) -> Any:
        return next(iter(self._newest.bulks.values())) if self.ready() and self._newest is not None else None

    return NativeGroups, "current", property(current)


def _closes_a_group_before_the_votes() -> Any:
    def pause(self: NativeGroups) -> None:
        original(self)
        self.settled(())

    original = NativeGroups.pause
    return NativeGroups, "pause", pause


def _never_closes_a_group() -> Any:
    return NativeGroups, "settled", lambda self, others_in: None


def _does_not_ask_the_group_after_the_sums() -> Any:
    return SimulatedBulk, "errored", lambda self: None


def _goes_on_before_the_device_is_done() -> Any:
    return ended, "reach", lambda *arguments, **more: None


def _does_the_step_again_while_the_backend_still_writes() -> Any:
    return reducer.NativeSums, "drop", lambda self: None


def _looks_at_no_link_while_it_waits() -> Any:
    return transport.Transport, "check", lambda self, peers, generation=None: None


def _leaves_a_failed_device_to_itself() -> Any:
    def reach(*arguments: Any, failed: Any, **more: Any) -> None:
        original(*arguments, **more)

    original = ended.reach
    return ended, "reach", reach


def _does_not_name_those_that_it_left_in_an_agreement() -> Any:
    def gone(generation: Any, likeliest: Any, others: Any, unsettled: Any = ()) -> Any:
        return original(generation, likeliest, others)

    original = reports._gone
    return reports, "_gone", gone


def _waits_for_a_group_that_only_some_come_to_have() -> Any:
    return swaps, "_combined", max


NATIVE_DEFECTS = [
    (_waits_for_a_group_that_only_some_come_to_have, (230, 430)),
    (_takes_a_group_that_others_may_not_have, (10,)),
    (_takes_a_group_as_soon_as_it_is_open, (0,)),
    (_closes_a_group_before_the_votes, (0,)),
    (_never_closes_a_group, (0,)),
    (_does_not_ask_the_group_after_the_sums, (280, 625, 908)),
    (_goes_on_before_the_device_is_done, (1,)),
    (_does_the_step_again_while_the_backend_still_writes, (2300, 2512)),
    (_looks_at_no_link_while_it_waits, (27, 340, 1419)),
    (_leaves_a_failed_device_to_itself, (280, 625, 751)),
    (_does_not_name_those_that_it_left_in_an_agreement, (27668,)),
]


@pytest.mark.parametrize(("defect", "shown"), NATIVE_DEFECTS)
@pytest.mark.job
@pytest.mark.timeout(600)
def test_a_defect_of_native_groups_does_not_go_unseen(
    defect: Callable[[], Any], shown: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seeds `shown` have shown it before; where the jobs of all seeds have become others, one of so many does."""
    monkeypatch.setattr(*defect())
    assert any(simulate_all(block, native=True) for block in blocks(shown, 3000))
