"""Recovery: the sequence that every change of members goes through, on one worker.

    interruption -> newest generation -> links -> agreement -> plan -> transfer -> barrier -> step retried

`agree` settles the step in flight; it is pure. `Recovery` runs the sequence on a runtime's hooks. Each phase may be
interrupted by the next failure; then it starts over in the newer generation. What makes this safe is the vote ("The
step transaction" in docs/failures.md): a step counts as committed when any survivor passed its commit barrier, since
nobody passes before all have complete gradients; else everybody drops it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from elaunch.detect.heartbeat import Phase
from elaunch.errors import CollectiveFailed, ElaunchError, GenerationChanged, LinkLost, StateError, StepInterrupted
from elaunch.rendezvous.membership import Generation, names_text
from elaunch.wire import MOST_NAMES, Joined, Progress, Report, Unreachable
from elaunch.workers import heartbeat
from elaunch.workers.agent_client import Client
from elaunch.workers.comm.group import Group, neighbours
from elaunch.workers.comm.transport import Transport
from elaunch.workers.hooks import Hooks, Verdict, Vote
from elaunch.workers.member.transition_times import TransitionTimes

CONNECT_TIMEOUT_S = 10.0
PROBE_DELAY_S = 0.03  # the death of a process usually comes as a generation within this time
PROBE_TIMEOUT_S = 0.5
BLAMELESS_S = 3.0  # without any broken link, a collective that failed is told of after this time
BROKEN = (LinkLost, CollectiveFailed)


def agree(votes: Sequence[Vote], begun: bool) -> Verdict:
    """Settles the step in flight.

    It commits where any member has passed its barrier, or all who hold state have it ready.

    Args:
        votes: of the members, in their order.
        begun: whether the job is known to have had state; then a holder must be among the voters.

    Raises:
        StateError: the state is lost, or the votes contradict the protocol.
    """
    members = range(len(votes))
    facts = tuple(vote.facts for vote in votes)
    saved = votes[0].saved
    holders = [member for member in members if votes[member].holds]
    if not holders:
        if begun and saved is None:
            raise StateError("no surviving worker holds the state of the job; start it again from the last checkpoint")
        every = {vote.every for vote in votes}
        if len(every) > 1:
            raise StateError(
                f"the members save the state every {' or '.join(map(str, sorted(every)))} steps (0: never); give all "
                "nodes the same --checkpoint-dir and --checkpoint-every"
            )
        return Verdict(0, (), (0,), tuple(members[1:]), fresh=True, facts=facts, saved=saved)
    step = max(votes[member].step for member in holders)
    behind = tuple(member for member in holders if votes[member].step < step)
    for member in behind:
        if votes[member].step != step - 1 or not votes[member].entered:
            raise StateError(f"member {member} is at step {votes[member].step}, the others committed {step}: {votes}")
    if all(votes[member].ready == step + 1 for member in holders):
        step, behind = step + 1, tuple(holders)
    receivers = tuple(member for member in members if not votes[member].holds)
    return Verdict(step, behind, tuple(holders), receivers, facts=facts, saved=saved)


def _links_failed(generation: Generation, worker: str) -> set[str]:
    """Returns the peers to which the links of a worker failed, as either end has told: the other may not notice it."""
    ends = [{link.worker, link.peer} for link in generation.streak.broken]
    return set[str]().union(*(both - {worker} for both in ends if worker in both))


class Left(ElaunchError):
    """This worker is no member any more: its node drains, or its peers gave it up."""

    def __init__(self, generation: Generation) -> None:
        super().__init__(f"generation {generation.number} goes on without this worker")
        self.generation = generation


@dataclass(frozen=True, slots=True)
class _Activation:
    """What a member goes on from once all have the state that the plan gives them."""

    name: str
    generation: Generation
    group: Group
    verdict: Verdict


class Recovery:
    """One worker's place in the generations of its job.

    `interrupted` may be read at any time; all else belongs to the training thread.
    """

    def __init__(self, client: Client, transport: Transport, hooks: Hooks) -> None:
        self._client = client
        self._transport = transport
        self._hooks = hooks
        self._lock = threading.Lock()
        self._active: Generation | None = None
        self._entering = True
        self._verdict: Verdict | None = None
        self._group: Group | None = None
        self._told_t: dict[int, float] = {}
        self._transition: TransitionTimes | None = None
        self._noted: Generation | None = None
        self._due: Generation | None = None  # of which all members knew at the last boundary
        self._firm = False  # all come to what is being entered: a planned change waits for the next boundary
        self._last_with_members: Generation | None = None  # the newest that has any members
        self._leaving: tuple[str, ...] = ()
        self._parted: tuple[int, tuple[str, ...]] = (0, ())
        self._transferred: _Activation | None = None  # this worker has its state, and waits for the others
        self._activations = 0  # begun in this generation
        self._activated = ""
        self._progressed = 0  # the newest generation in which a step has committed
        client.listen(self._on_generation)

    @property
    def generation(self) -> Generation:
        """The generation that this worker is a member of, or enters."""
        assert self._active is not None, "no generation has been entered"
        return self._active

    @property
    def interrupted(self) -> bool:
        """Whether the step in flight cannot commit in its generation any more."""
        newest = self._client.newest()
        return newest is not None and self._active is not None and newest.aborts_step_before > self._active.number

    def all_know(self, newest: Iterable[int]) -> bool:
        """Whether a planned change is due: all members, each with its newest generation, have heard of the same one."""
        generations = set(newest)
        know = len(generations) == 1 and generations.pop() > self.generation.number
        self._due = self._noted if know else None
        return know

    @property
    def all_leave(self) -> bool:
        """Whether the planned change, of which all know, is the end of the job here: every member leaves."""
        return self._noted is not None and set(self._noted.ids).isdisjoint(self.generation.ids)

    @property
    def first_leaves(self) -> bool:
        """Whether the planned change, of which all know, goes on without the present first member."""
        return self._noted is not None and self.generation.ids[0] not in self._noted.ids

    def leave_if_due(self) -> None:
        """Leaves where the planned change, of which all know, lets this worker go, and the others go on by it.

        It is for whom has nothing left to give. Where something broke at the boundary the others may be steps ahead.

        Raises:
            Left: it does, unless a newer generation has it back.
        """
        due, newest = self._due, self._client.newest()
        if due is None or newest is None or self.all_leave:
            return
        if self._client.worker in due.leaving and self._client.worker not in newest.ids:
            raise Left(due)

    def newest_generation(self) -> int:
        """What to tell the others with the commit barrier, for `all_know`."""
        self._noted = self._client.newest()
        return self._noted.number if self._noted is not None else 0

    def _on_generation(self, generation: Generation) -> None:
        """In the client's thread: wake the training thread if it must not go on, else prepare the links."""
        self._transport.hear(generation.number)
        with self._lock:
            self._told_t[generation.number] = time.time()
            if generation.ids:
                self._last_with_members = generation
            past = self._overtaken(generation, self._active) if self._active is not None else 0
        if past:
            heartbeat.news()
            self._transport.interrupt(past)
        if self._client.worker in generation.ids:
            self._transport.prepare(self._peers(generation), CONNECT_TIMEOUT_S)

    def _overtaken(self, newer: Generation, active: Generation) -> int:
        """Returns the generation below which a newer one ends what is under way at once; 0: it waits for a boundary.

        Also on the way into a generation a planned one waits that lets members go: some of them may be in its first
        step already, and at the planned end of the job the state is saved at the boundary.
        """
        if self._entering and not self._firm and set(active.ids) <= set(newer.ids):
            return newer.number
        return newer.aborts_step_before if newer.aborts_step_before > active.number else 0

    def _peers(self, generation: Generation) -> dict[str, str]:
        """Addresses of those to whom links are made before the votes, and its own, in the generation's order."""
        near = {self._client.worker, *neighbours(generation.ids, self._client.worker)}
        near |= _links_failed(generation, self._client.worker)
        near.update(self._transport.hung_up(generation.ids))  # before anything of this generation goes
        return {worker.id: worker.address for worker in generation.workers if worker.id in near}

    # -- the sequence -------------------------------------------------------------------------------------------

    def agree(self, error: StepInterrupted | None = None) -> Verdict:
        """Enters the newest generation and settles the step in flight with its members.

        Args:
            error: what interrupted the step; None when the change is planned.
        """
        while True:
            heartbeat.enter(Phase.AGREEING)
            generation = self._next_generation(error)
            heartbeat.enter(Phase.CHANGING)
            try:
                firm = self._is_due(generation) and self._all_are_here(generation)
                self._enter(generation, firm, interrupted=error is not None)
                assert self._verdict is not None
                return self._verdict
            except StepInterrupted as again:
                error = again

    def reconsider(self, cause: str) -> None:
        """Between two steps, have the same members go on by another plan. All call it alike, and `settle` after it.

        Args:
            cause: for people.
        """
        assert self._group is not None
        self.changed()  # no step has followed the last one
        heartbeat.enter(Phase.CHANGING)
        now_t = time.time()
        with self._lock:
            self._entering, self._firm, self._verdict = True, True, None
        if self._parted[0] == self.generation.number:
            self._leaving = self._parted[1]  # they have given all away, and are to get nothing more
        self._transition = TransitionTimes(cause, now_t, now_t)
        try:
            self._poll(self.generation, self._group, self._transition)
        except StepInterrupted as error:
            self.agree(error)

    def part(self) -> bool:
        """Before a planned change of which all know: have those whom it lets go give away what they have.

        All members call it alike between two steps, and `settle` after it; the change itself follows at a later
        boundary. A runtime whose members all have everything needs none of this.

        Returns:
            Whether there was something to do.
        """
        noted, ids = self._noted, self.generation.ids
        leaving = () if noted is None else tuple(one for one in noted.leaving if one in ids and one not in noted.ids)
        if not leaving or len(leaving) == len(ids) or self._parted == (self.generation.number, leaving):
            return False
        self._parted, self._leaving, self._due = (self.generation.number, leaving), leaving, None
        self.reconsider(f"{names_text(leaving)} {'leaves' if len(leaving) == 1 else 'leave'}")
        return True

    def settle(self) -> None:
        """Plans, moves the state and activates the generation; agrees again as often as that is interrupted."""
        while self._entering:
            if self._verdict is None:
                self.agree()
                continue
            heartbeat.enter(Phase.CHANGING)  # a script may have gone on with its own code since the agreement
            try:
                self._activate()
            except StepInterrupted as error:
                self._verdict = None
                self.agree(error)

    def _enter(self, generation: Generation, firm: bool, interrupted: bool) -> None:
        worker = self._client.worker
        started_t = time.time()
        with self._lock:
            self._active, self._entering, self._firm, self._verdict = generation, True, firm, None
        self._leaving, self._activations = (), 0
        self._transport.interrupt(generation.number)
        self._hooks.pause()
        if self._transition is None:
            begin_t = generation.cause_t or self._told_t.get(generation.number, started_t)
            self._transition = TransitionTimes(
                generation.cause, begin_t, self._told_t.get(generation.number, started_t)
            )
        self._transition.interrupted |= interrupted
        newest = self._client.newest()
        if newest is not None and newest.number > generation.number and self._overtaken(newest, generation):
            raise GenerationChanged(newest.number)
        if worker not in generation.ids:
            raise Left(generation)
        self._transport.retain(generation.ids, generation.number)
        kept = set(generation.ids) - _links_failed(generation, worker)
        self._transport.retain(kept, generation.aborts_step_before - 1)
        self._transport.introduce({worker.id: worker.address for worker in generation.workers})
        self._transport.connect(self._peers(generation), generation=generation.number, timeout_s=CONNECT_TIMEOUT_S)
        self._transition.phases["connect_s"] = time.time() - started_t
        domains = {worker.id: worker.domain for worker in generation.workers}
        self._group = Group(self._transport, generation.number, generation.ids, domains=domains)
        self._poll(generation, self._group, self._transition, started_t - self._transition.told_t)

    def _poll(self, generation: Generation, group: Group, transition: TransitionTimes, before_s: float = 0.0) -> None:
        """All votes go to all members.

        Nobody goes on in an activation before all have their state. So where a member has, those that were interrupted
        while they waited for the others do it as well, before they vote again: the sources may have let go of what they
        gave away. It is the rule of the commit barrier, for the place of the state instead of a step.
        """
        begin_t = time.time()
        transition.unsettled.update(generation.ids)
        votes = self._votes(group, transition)
        unfinished = {vote.transferred for vote in votes} & {vote.activated for vote in votes if vote.activated}
        if unfinished:
            if self._transferred is not None and self._transferred.name in unfinished:
                self._go_on(self._transferred)
            votes = self._votes(group, transition)
        self._transferred = None
        unsettled = tuple(sorted({one for vote in votes for one in vote.unsettled}))
        self._verdict = replace(agree(votes, generation.begun), leaving=self._leaving, unsettled=unsettled)
        self._hooks.agreed(generation, self._verdict)
        transition.unsettled.clear()
        transition.phases["agree_s"] = time.time() - begin_t + before_s

    def _votes(self, group: Group, transition: TransitionTimes) -> list[Vote]:
        """Returns the votes of all members, as they are now."""
        transferred = self._transferred.name if self._transferred is not None else ""
        gone = tuple(sorted(transition.unsettled.difference(group.members)))[:MOST_NAMES]
        transition.freed([heartbeat.take_freed_s()])
        vote = replace(
            self._hooks.vote(),
            transferred=transferred,
            activated=self._activated,
            unsettled=gone,
            freed_s=transition.freed_s,
        )
        votes = [Vote(**one) for one in group.gather_on_entry(asdict(vote))]
        transition.freed(vote.freed_s for vote in votes)
        return votes

    def _go_on(self, activation: _Activation) -> None:
        """Has the hooks go on from the state that has moved."""
        self._hooks.resume(activation.generation, activation.group, activation.verdict)
        self._transferred, self._activated = None, activation.name

    def _activate(self) -> None:
        assert self._group is not None
        assert self._verdict is not None
        assert self._transition is not None
        generation, group, verdict = self.generation, self._group, self._verdict
        if generation.finished and group.rank in verdict.receivers:
            raise GenerationChanged(generation.number + 1)  # the others end, and with the job this worker does
        t0 = time.time()
        decision = self._hooks.plan(generation, group, verdict)
        t1 = time.time()
        self._activations += 1
        received_bytes = self._hooks.transfer(group, verdict)
        self._transferred = _Activation(f"{generation.number}.{self._activations}", generation, group, verdict)
        self._transition.bytes_moved += sum(map(int, group.all_gather_bytes(str(received_bytes).encode())))
        with self._lock:
            self._firm = True  # all have what the plan gives them
        t2 = time.time()
        self._transition.phases |= {"plan_s": t1 - t0, "transfer_s": t2 - t1}
        self._go_on(self._transferred)
        with self._lock:
            self._entering = False
            self._verdict = None
        self._leaving = ()
        heartbeat.enter(Phase.BETWEEN, verdict.step, steps_here=0)
        self._client.send(Joined(generation.number))
        if group.rank == 0 and decision:
            self._client.send(Report("decision", {"generation": generation.number, **decision}))

    def committed(self, first_step: Mapping[str, Any]) -> float | None:
        """Tells that a step has committed: the transition before it, if any, is over.

        Args:
            first_step: what the event log is told of the first step after a transition.

        Returns:
            The seconds of the transition that do not depend on what moves: detection, links and the plan.
        """
        if self._entering:
            return None  # it committed by the agreement, and the transition goes on
        if self._progressed != self.generation.number:
            self._progressed = self.generation.number
            self._client.send(Progress(self._progressed))
            self._transport.settle(self._progressed)
        return self.changed(first_step)

    def changed(self, first_step: Mapping[str, Any] | None = None) -> float | None:
        """Tells that the transition is over, where no step follows it at once; returns what `committed` does."""
        transition, self._transition = self._transition, None
        if transition is None or self._group is None:
            return None
        if self._group.rank == 0:
            transition.first_step = first_step or {}
            transition.moved_over = self._group.paths.last if self._group.paths is not None else None
            fields = {"generation": self.generation.number, **transition.event(time.time())}
            self._client.send(Report("transition", fields))
        return transition.fixed_s

    # -- waiting for the generation to enter --------------------------------------------------------------------

    def _next_generation(self, error: StepInterrupted | None) -> Generation:
        """The newest generation that may be entered; waits for one, and finds out about a lost peer meanwhile."""
        active = self._active
        past = active.number if active is not None else 0
        if isinstance(error, GenerationChanged):
            past = max(past, error.generation - 1)
        reported = not isinstance(error, BROKEN)
        timeout_s, begin_s = PROBE_DELAY_S, time.monotonic()
        while True:
            newest = self._client.wait_beyond(past, timeout_s)
            if newest is not None:
                sooner = self._sooner(newest, active, error)
                if sooner is not None:
                    return sooner
                member = self._client.worker in newest.ids
                enters = not newest.hold if member else active is not None
                if enters and self._leads_out(newest, active, error):
                    return newest
                past = newest.number
            if isinstance(error, BROKEN) and not reported:
                reported = self._report(error, active, time.monotonic() - begin_s, past)
            timeout_s = PROBE_TIMEOUT_S

    def _sooner(
        self, newest: Generation, active: Generation | None, error: StepInterrupted | None
    ) -> Generation | None:
        """The generation to enter before the newest one, if that is a planned change that came after the boundary.

        Whom it lets go has given nothing away yet. Where it lets all go, at the next boundary the state is saved, also
        by members that were to wait for more nodes.
        """
        sooner = self._due if newest.ids or self._due is not None else self._last_with_members
        if active is None or sooner is None or not active.number < sooner.number < newest.number:
            return None
        if newest.aborts_step_before > sooner.number or self._client.worker not in sooner.ids:
            return None
        if sooner.hold and newest.ids:
            return None
        # A joiner may be on its way to the newest one already.
        comes = not newest.ids or self._all_are_here(sooner)
        return sooner if comes and self._leads_out(sooner, active, error) else None

    def _is_due(self, generation: Generation) -> bool:
        return self._due is not None and generation.number == self._due.number

    def _all_are_here(self, generation: Generation) -> bool:
        """Whether nobody joins by it."""
        return self._active is not None and set(generation.ids).issubset(self._active.ids)

    def _leads_out(self, newest: Generation, active: Generation | None, error: StepInterrupted | None) -> bool:
        """A planned change is no way out of a step that broke: other members may still wait in that step."""
        broke = isinstance(error, BROKEN) and (self._firm or not self._entering)
        return active is None or not broke or newest.aborts_step_before > active.number

    def _report(
        self, error: LinkLost | CollectiveFailed, active: Generation | None, waited_s: float, past: int
    ) -> bool:
        """Finds out which lost peers are dead, and asks for a generation without them, or with new links to them.

        Of one whose machine does not answer, this node's agent finds out more. A generation above `past` is not kept
        waiting for that.

        The loss of a node breaks several links at once; all of them are told of together. A native collective that
        failed names nobody: where no link has broken for a while, new links to the member before this one are asked
        for, and with that a generation in which all begin anew.
        """
        assert active is not None
        addresses = {worker.id: worker.address for worker in active.workers}
        told = False
        lost = self._transport.hung_up(active.ids)
        if isinstance(error, LinkLost):
            lost = (error.peer, *lost)
        elif not lost and waited_s > BLAMELESS_S:
            place = active.ids.index(self._client.worker)
            lost = (active.ids[place - 1],)
        is_over = partial(self._is_beyond, past)
        for peer in dict.fromkeys(lost):
            answer = self._transport.probe(addresses.get(peer, ""), PROBE_TIMEOUT_S, peer, is_over)
            if answer != "busy":
                found = Unreachable(active.number, peer, refused=answer == "refused", silent=answer == "silent")
                self._client.send(found)
                told = True
        return told

    def _is_beyond(self, past: int) -> bool:
        newest = self._client.newest()
        return newest is not None and newest.number > past
