"""How a data-parallel job goes by plans for the members that work, while others are on standby with the state."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from elaunch.errors import StateError
from elaunch.plan.tiling import Plan
from elaunch.rendezvous.membership import Generation, GenerationStage, Worker
from elaunch.workers.barrier import coverage_of
from elaunch.workers.data_parallel.gradients import GradientBuckets
from elaunch.workers.data_parallel.layout import SampleLayout, Share
from elaunch.workers.data_parallel.plans import Plans
from elaunch.workers.hooks import Verdict
from elaunch.workers.refusals import refuse_spare_state

LAYOUT = SampleLayout(24, 3, False, 100, 0, True)
A, B, C, D, E = (f"{name}/0#0" for name in "abcde")


def generation(*ids: str, standby: tuple[str, ...] = (), number: int = 1) -> Generation:
    workers = tuple(Worker(one, one[0], 0) for one in ids)
    return Generation(number, GenerationStage.TRAIN, workers, standby=standby)


class Choosing:
    """A selector that keeps a plan, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
        self.entered_by: list[tuple[str, ...]] = []
        self.due = False

    def decide(self, now: Plan, preferred_plan: Plan, members: Any) -> Any:
        self.asked.append((now.workers, tuple(members)))
        plan = now if set(now.workers) == set(members) else LAYOUT.even_plan(tuple(members))
        return SimpleNamespace(plan=plan, event=lambda: {"policy": "stay", "reason": "", "candidates": []})

    def profile(self) -> Any:
        return SimpleNamespace(speed=lambda worker: 1.0)

    def entered(self, plan: Plan, preferred_plan: Plan, members: tuple[str, ...], history: Any) -> None:
        self.entered_by.append(members)


class Worked:
    """The plans of one worker that goes through generations."""

    def __init__(self, worker: str, selector: Choosing | None) -> None:
        self.member: Any = SimpleNamespace(
            worker=worker, selector=selector, elastic=False, rank=1, generation=generation(A), send=print
        )
        self.plans = Plans(cast(Any, self.member), lambda: 0)

    def enters(self, after: Generation, choice: bytes = b"") -> tuple[dict[str, Any], Share, bytes]:
        told: list[bytes] = []

        def gather(own: bytes) -> list[bytes]:
            told.append(own or choice)
            return [own or choice]

        rank = 0 if self.member.selector is not None else 1
        group: Any = SimpleNamespace(rank=rank, members=after.ids, all_gather_bytes=gather)
        verdict = Verdict(3, (), (0,), (), facts=({},) * len(after.ids))
        event = self.plans.decide(LAYOUT, after, group, verdict)
        self.member.generation = after
        return event, self.plans.share(LAYOUT), told[0]


def test_whoever_is_on_standby_does_no_unit_and_covers_nothing() -> None:
    spare = Worked(D, None)
    _, share, _ = spare.enters(generation(A, B, C, D, standby=(D,)))
    assert (share.units, share.counts, share.coverage) == (range(0), False, coverage_of(range(0)))
    assert share.micro_batches == (range(3),), "a micro-batch that does not count"
    worker = Worked(B, None)
    _, beside, _ = worker.enters(generation(A, B, C, D, standby=(D,)))
    _, alone, _ = Worked(B, None).enters(generation(A, B, C))
    assert beside == alone, "what the others do does not depend on it"
    assert share.whole_coverage == alone.whole_coverage


def test_the_plan_stays_when_only_those_on_standby_change() -> None:
    selector = Choosing()
    first = Worked(A, selector)
    first.enters(generation(A, B, C))
    for after in (generation(A, B, C, D, standby=(D,)), generation(A, B, C), generation(A, B, C, E, standby=(E,))):
        event, share, told = first.enters(after)
        assert (event, selector.asked) == ({}, []), "nothing is decided"
        assert share.units == range(3)
        # Whoever joins hears of the plan.
        _, theirs, _ = Worked(B, None).enters(after, told)
        assert theirs.units == range(3, 6)
    assert selector.entered_by == [(A, B, C)]
    selector.due = True
    event, _, _ = first.enters(generation(A, B, C, E, standby=(E,), number=5))
    assert event["policy"] == "stay", "unless another plan is due"


def test_whoever_takes_over_has_the_state_so_nothing_is_moved_and_its_share_is_that_of_the_lost_one() -> None:
    selector = Choosing()
    first = Worked(A, selector)
    first.enters(generation(A, B, C, D, standby=(D,)))
    before = first.plans.share(LAYOUT)
    event, after, told = first.enters(generation(A, D, C))
    assert selector.asked == [((A, D, C), (A, D, C))], "each place of the plan has its worker"
    assert Plan.parse(event["plan"]).workers == (A, D, C)
    assert after == before
    _, heir, _ = Worked(D, None).enters(generation(A, D, C), told)
    assert heir.units == range(3, 6)
    assert selector.entered_by[-1] == (A, D, C)


def test_where_the_spare_is_lost_beside_a_worker_those_who_are_left_share_its_units() -> None:
    selector = Choosing()
    first = Worked(A, selector)
    first.enters(generation(A, B, C, D, standby=(D,)))
    _, share, _ = first.enters(generation(A, C))
    assert selector.asked == [((A, B, C), (A, C))]
    assert share.units == range(4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_micro_batch_that_does_not_count_adds_nothing_even_where_it_is_not_finite(value: float) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    buckets = GradientBuckets([parameter], lambda number, flat: None)
    buckets.zero()
    buckets.weight = 0.0
    buckets.arm()
    (parameter * value).sum().backward()
    buckets.flush()
    assert all(torch.equal(flat, torch.zeros(3)) for flat in buckets.flats)


def test_other_kinds_of_jobs_refuse_it(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_spare_state("elaunch.hybrid()")
    monkeypatch.setenv("ELAUNCH_SPARE_STATE", "1")
    with pytest.raises(StateError, match=r"--spare-state works with elaunch.init\(\) only, and this script uses"):
        refuse_spare_state("elaunch.hybrid()")
    monkeypatch.setenv("ELAUNCH_SPARE_STATE", "0")
    refuse_spare_state("elaunch.attach()")


def test_members_are_on_standby_or_work() -> None:
    found = generation(A, B, C, D, standby=(D,))
    assert found.working == (A, B, C)
    assert replace(found, standby=()).working == found.ids
