"""A worker that is told to leave while it enters a generation enters it: what it has is to be given away or saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from elaunch.errors import GenerationChanged, LinkLost
from elaunch.rendezvous.membership import Generation, GenerationStage, Worker
from elaunch.workers.comm.transport import Transport
from elaunch.workers.hooks import Verdict, Vote
from elaunch.workers.recovery import Left, Recovery
from tests.unit.comm_crew import crew

ME = "a/0#0"
OTHER = Worker("b/0#0", "b", 0, "127.0.0.1:1")


class Agent:
    """What a worker has of its agent: it tells of generations one after the other."""

    worker = ME

    def __init__(self) -> None:
        self._newest: Generation | None = None
        self.when_waited: Callable[[], None] = lambda: None
        self._heard: Callable[[Generation], None] = lambda generation: None

    def listen(self, heard: Callable[[Generation], None]) -> None:
        self._heard = heard

    def newest(self) -> Generation | None:
        return self._newest

    def wait_beyond(self, generation: int, timeout_s: float | None) -> Generation | None:
        if self._newest is None or self._newest.number <= generation:
            self.when_waited()
        newest = self._newest
        return newest if newest is not None and newest.number > generation else None

    def send(self, message: object) -> None:
        pass

    def tells(self, generation: Generation) -> None:
        self._newest = generation
        self._heard(generation)


class Runtime:
    """Counts the generations that it goes on in.

    `on_the_way` is called in the middle of entering one, `at_the_end` when the state has moved.
    """

    def __init__(self) -> None:
        self.entered: list[int] = []
        self.on_the_way: Callable[[], None] = lambda: None
        self.at_the_end: Callable[[], None] = lambda: None

    def vote(self) -> Vote:
        self.on_the_way()
        return Vote(3, False, True, {}, saved=None, every=0)

    def pause(self) -> None:
        pass

    def agreed(self, generation: Generation, verdict: Verdict) -> None:
        pass

    def plan(self, generation: Generation, group: Any, verdict: Verdict) -> dict[str, Any]:
        return {}

    def transfer(self, group: Any, verdict: Verdict) -> int:
        return 0

    def resume(self, generation: Generation, group: Any, verdict: Verdict) -> None:
        self.entered.append(generation.number)
        self.at_the_end()


@pytest.fixture
def job() -> Iterator[SimpleNamespace]:
    with crew(1) as transports:
        yield _job(transports[0])


def _job(transport: Transport) -> SimpleNamespace:
    agent, runtime = Agent(), Runtime()
    here = Worker(ME, "a", 0, transport.address)

    def tell(generation: int, *workers: Worker, urgent: int = 2, hold: bool = False) -> None:
        leaving = tuple(one.id for one in (here, OTHER) if one not in workers)
        agent.tells(
            Generation(
                generation,
                GenerationStage.TRAIN,
                workers,
                aborts_step_before=urgent,
                begun=True,
                leaving=leaving,
                hold=hold,
            )
        )

    membership = Recovery(agent, transport, runtime)  # type: ignore[arg-type]
    tell(2, here)
    membership.settle()
    assert runtime.entered == [2]
    return SimpleNamespace(
        tell=tell, here=here, membership=membership, runtime=runtime, agent=agent, transport=transport
    )


def at_a_boundary(membership: Recovery) -> bool:
    """Whether a planned change is due."""
    return membership.all_know([membership.newest_generation()])


def test_told_after_the_boundary_it_enters_the_generation_of_those_who_stay(job: SimpleNamespace) -> None:
    membership = job.membership
    job.tell(3, job.here)
    assert at_a_boundary(membership)
    assert not membership.all_leave
    job.tell(4)
    membership.agree()
    membership.settle()
    assert job.runtime.entered == [2, 3]
    assert at_a_boundary(membership)
    assert membership.all_leave, "now the state is saved"
    with pytest.raises(Left) as left:
        membership.agree()
    assert left.value.generation.number == 4


def test_told_while_it_enters_it_goes_on(job: SimpleNamespace) -> None:
    membership = job.membership
    job.tell(3, job.here)
    assert at_a_boundary(membership)
    job.runtime.on_the_way = lambda: job.tell(4)
    membership.agree()
    membership.settle()
    assert job.runtime.entered == [2, 3]
    assert at_a_boundary(membership)
    assert membership.all_leave


def test_told_at_the_boundary_it_leaves_from_where_it_is(job: SimpleNamespace) -> None:
    membership = job.membership
    job.tell(3, job.here)
    job.tell(4)
    assert at_a_boundary(membership)
    assert membership.all_leave
    with pytest.raises(Left):
        membership.agree()
    assert job.runtime.entered == [2]


def test_after_a_death_it_enters_the_generation_of_those_who_are_left(job: SimpleNamespace) -> None:
    job.tell(3, job.here, urgent=3)
    job.tell(4, urgent=3)
    job.membership.agree(GenerationChanged(3))
    job.membership.settle()
    assert job.runtime.entered == [2, 3]


def test_it_does_not_enter_one_whose_members_have_died(job: SimpleNamespace) -> None:
    membership = job.membership
    job.tell(3, job.here)
    assert at_a_boundary(membership)
    job.tell(4, urgent=4)
    with pytest.raises(Left):
        membership.agree()
    assert job.runtime.entered == [2]


def test_it_does_not_wait_for_more_nodes_where_others_go_on_without_it(job: SimpleNamespace) -> None:
    membership = job.membership
    job.tell(3, job.here, hold=True)
    assert at_a_boundary(membership)
    job.tell(4, OTHER)
    with pytest.raises(Left):
        membership.agree()
    assert job.runtime.entered == [2]


def test_one_that_was_to_wait_for_more_nodes_saves_the_state_where_all_leave(job: SimpleNamespace) -> None:
    membership = job.membership
    job.tell(3, job.here, hold=True)
    assert at_a_boundary(membership)
    job.tell(4)
    membership.agree()
    membership.settle()
    assert job.runtime.entered == [2, 3]
    assert at_a_boundary(membership)
    assert membership.all_leave


def test_told_after_the_boundary_that_the_others_go_on_without_it_it_enters_first(job: SimpleNamespace) -> None:
    """What only it has, it gives away at the next boundary."""
    membership = job.membership
    job.tell(3, job.here)
    assert at_a_boundary(membership)
    job.tell(4, OTHER)
    job.runtime.on_the_way = lambda: job.tell(5, OTHER)
    membership.agree()
    job.tell(6, OTHER)
    membership.settle()
    assert job.runtime.entered == [2, 3]
    assert at_a_boundary(membership)
    with pytest.raises(Left) as left:
        membership.agree()
    assert left.value.generation.number == 6


def test_on_the_way_out_of_a_broken_step_a_planned_change_that_lets_members_go_waits_for_the_next_boundary(
    job: SimpleNamespace,
) -> None:
    """Those that have arrived may be in the step already, and it cannot be done without those that are to go."""
    job.tell(3, job.here, urgent=3)
    job.runtime.on_the_way = lambda: job.tell(4, OTHER, urgent=3)
    job.membership.agree(GenerationChanged(3))
    job.membership.settle()
    assert job.runtime.entered == [2, 3]
    assert at_a_boundary(job.membership)
    with pytest.raises(Left) as left:
        job.membership.agree()
    assert left.value.generation.number == 4


def test_told_while_it_goes_over_to_another_plan_it_does_so_first(job: SimpleNamespace) -> None:
    job.runtime.on_the_way = lambda: job.tell(3, OTHER)
    job.membership.reconsider("another plan")
    job.tell(4, OTHER)
    job.membership.settle()
    assert job.runtime.entered == [2, 2]
    assert at_a_boundary(job.membership)


def test_told_when_the_state_has_moved_it_goes_on(job: SimpleNamespace) -> None:
    job.runtime.at_the_end = lambda: job.tell(4, OTHER)
    job.tell(3, job.here, urgent=3)
    job.membership.agree()
    job.membership.settle()
    assert job.runtime.entered == [2, 3]
    job.transport.exchange(3, 0, [], [])  # nothing has interrupted it


def test_with_a_joiner_it_follows_the_newest(job: SimpleNamespace) -> None:
    """The joiner may have heard of that one alone, and waits there. Nobody is told to leave then (`decide`)."""
    job.tell(3, job.here, OTHER)
    assert at_a_boundary(job.membership)
    job.tell(4, job.here)
    job.membership.agree()
    job.membership.settle()
    assert job.runtime.entered == [2, 4]


@pytest.mark.parametrize("planned", [False, True])
def test_it_does_not_leave_a_step_that_broke_by_a_planned_change(job: SimpleNamespace, planned: bool) -> None:
    """Of the death that broke it, it has not heard yet; it may be taken back then."""
    membership = job.membership
    job.tell(3, OTHER)
    job.agent.when_waited = lambda: job.tell(4, job.here, urgent=4)
    if planned:
        membership.reconsider("another plan")
    membership.agree(LinkLost(ME, "closed by the peer"))
    membership.settle()
    assert job.runtime.entered == [2, 4]


@pytest.mark.parametrize("is_back", [False, True])
def test_one_that_is_let_go_leaves_where_the_boundary_breaks_unless_the_others_have_it_back(
    job: SimpleNamespace, is_back: bool
) -> None:
    """They may have gone on by then, and be steps ahead: it could not go on with them from where it is."""
    membership = job.membership
    membership.leave_if_due()
    job.tell(3, OTHER)
    membership._active = replace(membership.generation, workers=(job.here, OTHER))
    membership.leave_if_due()
    assert at_a_boundary(membership)
    if is_back:
        job.tell(4, OTHER, job.here, urgent=4)
        membership.leave_if_due()
    else:
        with pytest.raises(Left):
            membership.leave_if_due()


def test_where_all_leave_the_state_is_saved_before(job: SimpleNamespace) -> None:
    membership = job.membership
    job.tell(3)
    assert at_a_boundary(membership)
    membership.leave_if_due()
