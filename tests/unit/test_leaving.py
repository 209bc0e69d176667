"""A worker on its way into a generation hears that all leave: it enters first, and saves at the next boundary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from elaunch.rendezvous.membership import Generation, Stage, Worker
from elaunch.workers.comm.fabric import Fabric
from elaunch.workers.hooks import Left, Membership, Verdict, Vote
from tests.unit.comm_crew import crew

ME = "a/0#0"


class Agent:
    """What a worker has of its agent: it tells of generations one after the other."""

    worker = ME

    def __init__(self) -> None:
        self._newest: Generation | None = None
        self._heard: Callable[[Generation], None] = lambda generation: None

    def listen(self, heard: Callable[[Generation], None]) -> None:
        self._heard = heard

    def newest(self) -> Generation | None:
        return self._newest

    def wait_beyond(self, epoch: int, timeout_s: float | None) -> Generation | None:
        newest = self._newest
        return newest if newest is not None and newest.epoch > epoch else None

    def send(self, message: object) -> None:
        pass

    def tells(self, generation: Generation) -> None:
        self._newest = generation
        self._heard(generation)


class Runtime:
    """Counts the generations that it goes on in. `on_the_way` is called in the middle of entering one."""

    def __init__(self) -> None:
        self.entered: list[int] = []
        self.on_the_way: Callable[[], None] = lambda: None

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
        self.entered.append(generation.epoch)


@pytest.fixture
def job() -> Iterator[SimpleNamespace]:
    with crew(1) as fabrics:
        yield _job(fabrics[0])


def _job(fabric: Fabric) -> SimpleNamespace:
    agent, runtime = Agent(), Runtime()
    here = Worker(ME, "a", 0, fabric.address)

    def tell(epoch: int, member: bool = True, urgent: int = 2, hold: bool = False) -> None:
        workers, leaving = ((here,), ("b/0#0",)) if member else ((), (ME, "b/0#0"))
        agent.tells(Generation(epoch, Stage.TRAIN, workers, urgent=urgent, begun=True, leaving=leaving, hold=hold))

    membership = Membership(agent, fabric, runtime)  # type: ignore[arg-type]
    tell(2)
    membership.settle()
    assert runtime.entered == [2]
    return SimpleNamespace(tell=tell, membership=membership, runtime=runtime)


def at_a_boundary(membership: Membership) -> bool:
    """Whether a planned change is due."""
    return membership.all_know([membership.newest_epoch()])


def test_told_after_the_boundary_it_enters_the_generation_of_those_who_stay(job: SimpleNamespace) -> None:
    membership = job.membership
    job.tell(3)
    assert at_a_boundary(membership)
    assert not membership.all_leave
    job.tell(4, member=False)
    membership.agree()
    membership.settle()
    assert job.runtime.entered == [2, 3]
    assert at_a_boundary(membership)
    assert membership.all_leave, "now the state is saved"
    with pytest.raises(Left) as left:
        membership.agree()
    assert left.value.generation.epoch == 4


def test_told_while_it_enters_it_goes_on(job: SimpleNamespace) -> None:
    membership = job.membership
    job.tell(3)
    assert at_a_boundary(membership)
    job.runtime.on_the_way = lambda: job.tell(4, member=False)
    membership.agree()
    membership.settle()
    assert job.runtime.entered == [2, 3]
    assert at_a_boundary(membership)
    assert membership.all_leave


def test_told_at_the_boundary_it_leaves_from_where_it_is(job: SimpleNamespace) -> None:
    membership = job.membership
    job.tell(3)
    job.tell(4, member=False)
    assert at_a_boundary(membership)
    assert membership.all_leave
    with pytest.raises(Left):
        membership.agree()
    assert job.runtime.entered == [2]


@pytest.mark.parametrize("hold, urgent", [(False, 4), (True, 2)])
def test_it_does_not_enter_one_whose_members_have_died_or_are_too_few(
    job: SimpleNamespace, hold: bool, urgent: int
) -> None:
    membership = job.membership
    job.tell(3, hold=hold)
    assert at_a_boundary(membership)
    job.tell(4, member=False, urgent=urgent)
    with pytest.raises(Left):
        membership.agree()
    assert job.runtime.entered == [2]
