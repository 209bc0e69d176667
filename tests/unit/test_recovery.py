"""What a worker does, and in which order, to enter a generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pytest

from elaunch.errors import GenerationChanged, LinkLost
from elaunch.rendezvous.membership import BrokenLink, Generation, GenerationStage, Streak, Worker
from elaunch.wire import Joined
from elaunch.workers import recovery
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.transport import Transport
from elaunch.workers.hooks import Verdict, Vote
from elaunch.workers.recovery import Recovery
from tests.helpers import wait_until
from tests.unit.comm_crew import PATIENCE_S, addresses, connect_all, crew, make_transport
from tests.unit.test_leaving import ME, Agent, Runtime

ORDER = ["pause", "vote", "agreed", "plan", "transfer", "barrier", "resume", "joined"]


class Recorded(Runtime):
    """Hooks and an agent's connection that write down what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def vote(self) -> Vote:
        self.calls.append("vote")
        return super().vote()

    def pause(self) -> None:
        self.calls.append("pause")

    def agreed(self, generation: Generation, verdict: Verdict) -> None:
        self.calls.append("agreed")

    def plan(self, generation: Generation, group: Any, verdict: Verdict) -> dict[str, Any]:
        self.calls.append("plan")
        return {}

    def transfer(self, group: Any, verdict: Verdict) -> int:
        self.calls.append("transfer")
        return 7

    def resume(self, generation: Generation, group: Any, verdict: Verdict) -> None:
        self.calls.append("resume")


class Listening(Agent):
    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self._calls = calls
        self.sent: list[object] = []

    def send(self, message: object) -> None:
        self.sent.append(message)
        if isinstance(message, Joined):
            self._calls.append("joined")


@pytest.fixture
def transports() -> Iterator[Sequence[Transport]]:
    with crew(2) as made:
        yield made


def entered(
    transport: Transport, monkeypatch: pytest.MonkeyPatch, generations: Sequence[int]
) -> tuple[Recorded, Listening]:
    """A worker that has entered these generations, alone."""
    hooks = Recorded()
    agent = Listening(hooks.calls)

    class Watched(Group):
        def all_gather_bytes(self, payload: bytes) -> list[bytes]:
            if hooks.calls[-1] == "transfer":
                hooks.calls.append("barrier")
            return super().all_gather_bytes(payload)

    monkeypatch.setattr(recovery, "Group", Watched)
    membership = Recovery(agent, transport, hooks)  # type: ignore[arg-type]
    for number in generations:
        here = Worker(ME, "a", 0, transport.address)
        agent.tells(Generation(number, GenerationStage.TRAIN, (here,), aborts_step_before=number, begun=True))
        membership.agree()
        membership.settle()
    return hooks, agent


def test_the_hooks_are_called_in_order_and_nobody_goes_on_before_all_have_the_state(
    transports: Sequence[Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks, _ = entered(transports[0], monkeypatch, [2, 3])
    assert hooks.calls == ORDER * 2


def test_the_agent_hears_which_generation_was_entered(
    transports: Sequence[Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, agent = entered(transports[0], monkeypatch, [2, 3])
    assert [message for message in agent.sent if isinstance(message, Joined)] == [Joined(2), Joined(3)]


def test_links_to_those_who_are_no_members_any_more_are_closed(
    transports: Sequence[Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, other = transports
    assert other.worker in transport.peers
    entered(transport, monkeypatch, [2])
    assert not transport.peers


def test_the_link_of_one_that_joins_in_a_newer_generation_is_not_closed(
    transports: Sequence[Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This worker may not have heard of it yet, and the other one would take that for a link that failed."""
    transport = transports[0]
    joiner = make_transport("b/0#0")
    try:
        joiner.hear(3)
        joiner.prepare(addresses([transport, joiner]))
        wait_until(lambda: joiner.worker in transport.peers, PATIENCE_S, "the link of the joiner")
        entered(transport, monkeypatch, [2])
        assert transport.peers == (joiner.worker,)
        entered(transport, monkeypatch, [3])
        assert not transport.peers
    finally:
        joiner.close()


def test_a_new_generation_does_not_wait_for_what_a_silent_machine_may_answer(
    transports: Sequence[Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, agent, seen = transports[0], Agent(), list[bool]()
    here = Worker(ME, "a", 0, transport.address)
    following = [Generation(n, GenerationStage.TRAIN, (here,), aborts_step_before=n, begun=True) for n in (2, 3)]

    def probe(address: str, timeout_s: float, peer: str, is_over: Callable[[], bool]) -> str:
        seen.append(is_over())
        agent.tells(following[1])
        seen.append(is_over())
        return "busy"

    monkeypatch.setattr(transport, "probe", probe)
    membership = Recovery(agent, transport, hooks := Runtime())  # type: ignore[arg-type]
    agent.tells(following[0])
    membership.settle()
    membership.agree(LinkLost("b/0#0", "it is silent"))
    membership.settle()
    assert seen == [False, True]
    assert hooks.entered == [2, 3]


class Moving(Runtime):
    """Hooks that count where they go on from; `interrupted`: the barrier after the transfer does not end there."""

    def __init__(self, facts: list[str]) -> None:
        super().__init__()
        self.calls = facts

    def vote(self) -> Vote:
        self.calls.append("vote")
        return Vote(3, False, True)

    def transfer(self, group: Any, verdict: Verdict) -> int:
        self.calls.append(f"transfer {group.generation}")
        return 7

    def resume(self, generation: Generation, group: Any, verdict: Verdict) -> None:
        self.calls.append(f"resume {generation.number}")


@pytest.mark.parametrize("others_went_on", [False, True])
def test_who_was_interrupted_after_the_transfer_goes_on_from_it_if_another_member_has(
    transports: Sequence[Transport], monkeypatch: pytest.MonkeyPatch, others_went_on: bool
) -> None:
    """The other one may have let go of what it gave away."""
    transport = transports[0]
    here = Worker(ME, "a", 0, transport.address)
    hooks, agent = Moving([]), Agent()

    class Interrupted(Group):
        """A group whose barrier breaks in generation 3, and in which another member votes as well."""

        def all_gather_bytes(self, payload: bytes) -> list[bytes]:
            if self.generation == 3 and payload == b"7":
                agent.tells(Generation(4, GenerationStage.TRAIN, (here,), aborts_step_before=4, begun=True))
                raise GenerationChanged(4)
            return super().all_gather_bytes(payload)

        def all_gather_json(self, value: Any) -> list[Any]:
            other = {**value, "transferred": "", "activated": "3.1" if others_went_on else "2.1"}
            return [*super().all_gather_json(value), other]

    monkeypatch.setattr(recovery, "Group", Interrupted)
    membership = Recovery(agent, transport, hooks)  # type: ignore[arg-type]
    agent.tells(Generation(3, GenerationStage.TRAIN, (here,), aborts_step_before=3, begun=True))
    membership.settle()
    first = ["vote", "transfer 3", "vote"]
    goes_on = ["resume 3", "vote"] if others_went_on else []
    assert hooks.calls == [*first, *goes_on, "transfer 4", "resume 4"]


def test_those_that_may_have_settled_the_step_while_this_worker_was_interrupted_are_named_until_it_has_settled_it(
    transports: Sequence[Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In generation 3 all votes have come to the other member, and not to this one; then the other one is lost."""
    transport, other = transports
    here, there = Worker(ME, "a", 0, transport.address), Worker(other.worker, "b", 0, other.address)
    agent, verdicts = Agent(), list[tuple[int, tuple[str, ...]]]()

    class Settling(Runtime):
        def agreed(self, generation: Generation, verdict: Verdict) -> None:
            verdicts.append((generation.number, verdict.unsettled))

    class Interrupted(Group):
        def gather_on_entry(self, value: Any) -> list[Any]:
            if self.generation == 3:
                agent.tells(Generation(4, GenerationStage.TRAIN, (here,), aborts_step_before=4, begun=True))
                raise GenerationChanged(4)
            return super().gather_on_entry(value)

    monkeypatch.setattr(recovery, "Group", Interrupted)
    membership = Recovery(agent, transport, Settling())  # type: ignore[arg-type]
    agent.tells(Generation(3, GenerationStage.TRAIN, (here, there), aborts_step_before=3, begun=True))
    membership.settle()
    agent.tells(Generation(5, GenerationStage.TRAIN, (here,), aborts_step_before=5, begun=True))
    membership.agree()
    assert verdicts == [(4, (other.worker,)), (5, ())]


class EnoughSeenError(Exception):
    """Ends a test."""


@pytest.mark.parametrize(("finished", "entered"), [(False, [2]), (True, [])])
def test_one_that_has_no_state_yet_gets_none_once_another_has_finished(
    finished: bool, entered: list[int], transports: Sequence[Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of it may be gone with that one, and the others end."""
    hooks, agent = Runtime(), Agent()
    monkeypatch.setattr(hooks, "vote", lambda: Vote(3, False, False))

    class Watched(Group):
        """A group in which another member votes as well, which has the state."""

        def gather_on_entry(self, value: Any) -> list[Any]:
            return [*super().gather_on_entry(value), {**value, "holds": True}]

    def enough() -> None:
        raise EnoughSeenError

    monkeypatch.setattr(recovery, "Group", Watched)
    agent.when_waited = enough
    membership = Recovery(agent, transports[0], hooks)  # type: ignore[arg-type]
    here = (Worker(ME, "a", 0, transports[0].address),)
    agent.tells(Generation(2, GenerationStage.TRAIN, here, aborts_step_before=2, begun=True, finished=finished))
    with pytest.raises(EnoughSeenError) if finished else nullcontext():
        membership.settle()
    assert hooks.entered == entered


@pytest.mark.parametrize(
    ("breaks", "is_told", "made_in"), [(False, False, 1), (True, False, 1), (False, True, 1), (False, True, 2)]
)
def test_a_link_that_broke_is_made_anew_before_the_votes_although_no_collective_needs_it(
    breaks: bool, is_told: bool, made_in: int, transports: Sequence[Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later nobody would know whether its peer had sent something of this generation over the old one.

    It may seem to work here, where only the other end has noticed that it broke, and told so.
    """
    transport, other = transports
    workers = tuple(Worker(one.worker, "a", rank, one.address) for rank, one in enumerate(transports))
    agent, made = Agent(), list[str]()
    if made_in == 2:
        for one in transports:
            one.retain(())
        connect_all(transports, generation=2)
    if breaks:
        other.retain(())
        wait_until(lambda: transport.hung_up([other.worker]) != (), PATIENCE_S, "the link breaks")

    def connect(members: Mapping[str, str], *, generation: int, timeout_s: float) -> None:
        made.extend(members)
        raise EnoughSeenError

    monkeypatch.setattr(recovery, "neighbours", lambda members, me: ())
    monkeypatch.setattr(transport, "connect", connect)
    membership = Recovery(agent, transport, Runtime())  # type: ignore[arg-type]
    streak = Streak(broken=(BrokenLink(other.worker, ME),) if is_told else ())
    agent.tells(Generation(2, GenerationStage.TRAIN, workers, aborts_step_before=2, begun=True, streak=streak))
    with pytest.raises(EnoughSeenError):
        membership.agree()
    assert made == [ME, *[other.worker] * (breaks or is_told)]
    assert transport.hung_up([other.worker]) == (other.worker,) * breaks
    assert (transport.peers == ()) is (is_told and made_in < 2)
