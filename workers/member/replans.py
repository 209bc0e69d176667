"""Plans that a script asks for between two steps, by calls that all members make alike.

    call k of this step ─── all have settled in one generation, and vote that they are in it ───> its plan counts
                        ─── else: a recovery, as in any other change, and the same call again

A call is over for all members once one of them has gone on by its plan, whatever interrupted the others: their votes
tell it. So those who make a call again after an interruption make as many as the others. So does who joins in the
middle, and whose script begins with the first call of the step: those that are over return at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from elaunch.errors import StateError, WentBack
from elaunch.plan.tiling import Plan
from elaunch.rendezvous.membership import Generation, RequestedPlan
from elaunch.workers.hooks import Verdict

REPLAN = "elaunch.replan"
"""Among the facts of a vote: what the voter knows of the calls."""

CAUSE = "the script asked for another plan"


@dataclass(frozen=True, slots=True)
class ReplanCall:
    """One call.

    Attributes:
        step: number of steps that have committed.
        number: of the calls at this step, from 1.
        plan: the text of the plan that it asks for.
        weights_only: whether only parameters and buffers follow it.
        completes: a change that was under way is completed first, with the plan of that; the call is not over then.
    """

    step: int
    number: int
    plan: str
    weights_only: bool = False
    completes: bool = False


@dataclass(frozen=True, slots=True)
class StandingRequest:
    """The plan by which a framework that chooses for itself was last asked to go.

    Attributes:
        plan: its text.
        id: of the request, as the framework sees it.
        instead_of: the newest request of `elaunch ctl plan` at that time; a newer one counts.
    """

    plan: str
    id: str
    instead_of: str


def asked(verdict: Verdict, generation: Generation) -> ReplanCall | None:
    """Returns the call that the members are in; the last one, if they are not all in the same.

    Returns:
        None: some member is in none, or has not gone on from its last change in this generation.

    Raises:
        StateError: they ask for different plans.
    """
    told = [facts.get(REPLAN, {}) for facts in verdict.facts]
    if any(one.get("call") is None or one.get("settled") != generation.number for one in told):
        return None
    calls = [ReplanCall(**one["call"]) for one in told]
    last = max(calls, key=lambda call: call.number)
    for member, call in zip(generation.ids, calls, strict=True):
        if call.number == last.number and call != last:
            other = generation.ids[calls.index(last)]
            raise StateError(
                f"replan() number {last.number} at step {last.step}: {other} asked for {_text(last)}, and {member} for "
                f"{_text(call)}; all members must make the same calls at the same step"
            )
    return last


def _text(call: ReplanCall) -> str:
    return f"{call.plan!r}{', for the weights only' if call.weights_only else ''}"


class Replans:
    """The calls of one worker, and what it has heard of those of the others."""

    def __init__(self) -> None:
        self._step = self._calls = self._done = self._settled = 0
        self._pending: ReplanCall | None = None
        self._going: ReplanCall | None = None
        self._standing: StandingRequest | None = None

    def begin(self, step: int, plan: Plan, weights_only: bool) -> ReplanCall:
        """Returns the next call at this step."""
        self._at(step)
        self._calls += 1
        return ReplanCall(step, self._calls, str(plan), weights_only)

    def is_over(self, call: ReplanCall) -> bool:
        """Returns whether a member has gone on by it."""
        return self._step == call.step and self._done >= call.number

    @contextmanager
    def _voting(self, call: ReplanCall) -> Iterator[None]:
        """Tells the others, in each vote that is made inside, that this member is in the call."""
        self._pending = call
        try:
            yield
        finally:
            self._pending = None

    def carry_out(
        self,
        call: ReplanCall,
        settle: Callable[[], None],
        reconsider: Callable[[str], None],
        under_way: Callable[[], Plan | None],
    ) -> None:
        """Has the members go on by the plan of a call, however often that is interrupted.

        Args:
            call: that has begun.
            settle: finishes a change that was interrupted.
            reconsider: has the members choose anew how to go on.
            under_way: returns the plan of a change that goes on in the next step; the same on all members.

        Raises:
            WentBack: the job went on from a checkpoint.
        """
        settle()
        while not self.is_over(call):
            if self._step != call.step:
                raise WentBack(
                    f"replan(): the job went back from {call.step} committed steps to its checkpoint after "
                    f"{self._step}; begin again with what the script does at the job's step"
                )
            plan = under_way() if call.weights_only else None
            first = call if plan is None else replace(call, plan=str(plan), weights_only=False, completes=True)
            with self._voting(first):
                reconsider(CAUSE)
                settle()

    def facts(self) -> dict[str, Any]:
        """Returns what a vote tells the others, as JSON values."""
        return {
            "step": self._step,
            "done": self._done,
            "settled": self._settled,
            "call": None if self._pending is None else asdict(self._pending),
            "standing": None if self._standing is None else asdict(self._standing),
        }

    def agreed(self, verdict: Verdict) -> None:
        """Takes in what the others have voted."""
        self._at(verdict.step)
        told = [facts.get(REPLAN, {}) for facts in verdict.facts]
        self._done = max([self._done, *(one["done"] for one in told if one.get("step") == verdict.step)])
        if not verdict.fresh and (standing := told[verdict.passed].get("standing")) is not None:
            self._standing = StandingRequest(**standing)

    def planned(self, generation: Generation, verdict: Verdict) -> Generation:
        """Takes in that the members choose how to go on; returns the generation with the plan that was asked for last.

        Raises:
            StateError: the members ask for different plans.
        """
        self._going = call = asked(verdict, generation)
        ours = [one for one in generation.ids if one not in verdict.leaving]
        if call is not None and (plan := fitted(Plan.parse(call.plan), ours, ())) is not None:
            request = f"replan {call.step}.{call.number}"
            self._standing = StandingRequest(str(plan), request, generation.plan_request)
        standing = self._standing
        if standing is None or standing.instead_of != generation.plan_request:
            return generation
        return replace(generation, requested_plan=RequestedPlan(standing.plan, standing.id))

    def resumed(self, generation: int) -> None:
        """Takes in that this member goes on in a generation."""
        self._settled = generation
        if self._going is not None and not self._going.completes:
            self._done = max(self._done, self._going.number)
        self._going = None

    def went_back(self) -> None:
        """Forgets all calls: the job goes on from a checkpoint."""
        self._step = self._calls = self._done = 0

    def _at(self, step: int) -> None:
        if step != self._step:
            self._step, self._calls, self._done = step, 0, 0


def fitted(plan: Plan, members: Sequence[str], lost: Sequence[str]) -> Plan | None:
    """Returns a plan for the members: its workers, in the order in which it names them, become these by rank.

    Members for whom it has no place are idle.

    Args:
        plan: of which any names will do.
        members: by rank.
        lost: the names of workers that had a place in the job, for places that have no member; they need not suffice.

    Returns:
        None: a place is left without any name.
    """
    names = [*members, *lost][: len(plan.workers)]
    busy = [worker for worker in plan.workers if worker not in plan.idle]
    if len(names) < len(busy):
        return None
    renamed = replace(plan, idle=()).renamed(dict(zip(busy, names, strict=False)))
    return replace(renamed, idle=tuple(member for member in members if member not in renamed.workers))
