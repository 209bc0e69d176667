"""How the members go on: one of them asks its policy selector, and all get the same decision.

The runtime has a `Planner` for a job whose work is described by a `Plan`: of `elaunch.hybrid()`, or of a framework that
calls `Member.use_plans`. It keeps the plan by which the state is distributed and the one the job prefers, carries both
to workers that join, and takes the plans that `elaunch ctl plan --set` and the script ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from elaunch.errors import StateError
from elaunch.plan.tiling import Plan, PlanError
from elaunch.policy.candidates.structure import NotPossible
from elaunch.policy.decision import Decision
from elaunch.policy.selector import Selector
from elaunch.rendezvous.membership import Generation, names_text
from elaunch.workers.comm.group import Group
from elaunch.workers.hooks import Verdict
from elaunch.workers.member.replans import ReplanCall, asked, fitted

FACTS = "elaunch.plan"
"""Where among the facts of a vote those of `Planner.facts` are."""

_REFUSED = b"refused "
"""Before the reasons why there is no plan."""


class Planner:
    """The plans of a job, as one of its workers knows them.

    Args:
        given: the plan with which the script begins; any names of workers will do.
        selector: of this worker; None where the membership cannot change.
        saved: returns the number of steps in the newest checkpoint; None: there is none.

    Attributes:
        decision: the newest one, which the members are going over to or follow.
    """

    def __init__(self, given: Plan, selector: Selector | None, saved: Callable[[], int | None]) -> None:
        self.decision: Decision | None = None
        self._given, self._selector, self._saved = given, selector, saved
        self._followed: Decision | None = None  # the state is distributed by its plan
        self._lends = False  # the weights alone go by the decision
        self._request = ""

    def facts(self) -> dict[str, str]:
        """Returns what a member tells those that join, as JSON values."""
        return {"preferred": str(self._followed.preferred_plan) if self._followed else "", "request": self._request}

    def choose(self, generation: Generation, group: Group, verdict: Verdict) -> Decision:
        """Chooses how the members go on; the same on all of them.

        Args:
            generation: which is being entered.
            group: its members.
            verdict: of their agreement.

        Raises:
            StateError: there is no plan for these members.
        """
        self.decision = self._chosen(generation, group, verdict)
        return self.decision

    def entered(self, generation: Generation) -> Decision | None:
        """Notes that the members go on by the decision, and returns it; None if the weights alone do."""
        assert self.decision is not None, "the hooks entered a generation without a plan: call choose() in plan()"
        if self._lends:
            return None
        self._followed, self._request = self.decision, generation.plan_request
        return self.decision

    def check(self, plan: Plan, members: Sequence[str]) -> None:
        """Checks that a job with these members can be asked for a plan, with all places filled or some of them empty.

        Raises:
            PlanError: it is none.
            StateError: it is of another size.
        """
        plan.validate()
        sizes, ours = _sizes(plan), _sizes(self._given)
        if sizes != ours:
            raise StateError(
                f"replan(): the plan has (layers, batch, micro-batch) {sizes}, and the job has {ours}; give a plan for "
                "these"
            )
        followed = self._followed.preferred_plan.workers if self._followed is not None else ()
        places = max(len(self._given.workers), len(followed), len(members))
        if len(plan.workers) > places:
            raise StateError(
                f"replan(): the plan is for {len(plan.workers)} workers, and the job is for {places} "
                f"({', '.join(members)} are there); give a plan for at most {places}"
            )

    def _chosen(self, generation: Generation, group: Group, verdict: Verdict) -> Decision:
        members = generation.ids
        call, self._lends = asked(verdict, generation), False
        if verdict.fresh:
            if len(self._given.workers) == len(members):
                here = self._given.renamed(dict(zip(self._given.workers, members, strict=True)))
                return Decision.given(here, "given", "the script gave the plan")
            if verdict.saved is None:
                raise StateError(
                    f"the plan is for {len(self._given.workers)} workers and the job has {len(members)} "
                    f"({', '.join(members)}); start as many workers as the plan has, or give another plan"
                )
            return self._from_one(group, 0, self._given, self._given)
        known: Mapping[str, str] = verdict.facts[verdict.passed][FACTS]
        refused, preferred = "", Plan.parse(known["preferred"])
        if call is not None:
            self._lends = call.weights_only
            return self._called(call, group, verdict, preferred)
        if generation.plan_request != known["request"] and generation.plan:
            requested = Plan.parse(generation.plan)
            refused = _unfit(requested, preferred, members)
            if not refused:
                return Decision.given(requested, "asked", "the plan was asked for")
            refused = f"; the plan asked for {refused}"
        present = self._followed.plan if self._followed is not None else None
        return self._from_one(group, verdict.passed, present, preferred, refused, verdict.leaving)

    def _called(self, call: ReplanCall, group: Group, verdict: Verdict, preferred: Plan) -> Decision:
        """Returns the plan that the script asks for; where places have no member, how to do best without them."""
        plan, here = Plan.parse(call.plan), [one for one in group.members if one not in verdict.leaving]
        empty = [worker for worker in preferred.workers if worker not in here]
        found = fitted(plan, here, [*empty, *(f"nobody/{number}#0" for number in range(len(plan.workers)))])
        assert found is not None
        if set(found.workers) <= set(here):
            reason = "the script asked for the plan"
            if call.completes:
                reason = "the script asked for another plan, and the change to this one had not ended"
            elif call.weights_only:
                reason += " for the weights alone"
            return Decision.given(found, "asked", reason).with_idle(verdict.leaving)
        return self._from_one(group, verdict.passed, found, found, "; the script asked for a plan", verdict.leaving)

    def _from_one(
        self,
        group: Group,
        rank: int,
        present: Plan | None,
        preferred: Plan,
        more: str = "",
        leaving: Sequence[str] = (),
    ) -> Decision:
        """Returns what one member decides: what was measured and planned ahead differs between members.

        Args:
            group: of all members.
            rank: of the one that decides.
            present: the plan by which the state is distributed; there, it must be given.
            preferred: the plan with all places filled.
            more: for the reason.
            leaving: members that are to have nothing.

        Raises:
            StateError: there is no plan for these members.
        """
        told = b""
        if group.rank == rank:
            assert present is not None
            told = self._decided(present, preferred, group.members, more, leaving)
        decided = group.all_gather_bytes(told)[rank]
        if decided.startswith(_REFUSED):
            saved = self._saved()
            where = f"from its checkpoint after {saved} steps" if saved is not None else "from the start"
            raise StateError(
                f"{decided.removeprefix(_REFUSED).decode()}; start the job with more workers or memory, and it goes on "
                f"{where}"
            )
        return Decision.from_bytes(decided)

    def _decided(
        self, present: Plan, preferred: Plan, members: Sequence[str], more: str, leaving: Sequence[str]
    ) -> bytes:
        selector = self._selector
        assert selector is not None, "a membership that changes without an agent"
        left = [worker for worker in present.idle if worker not in members]
        if left and set(members) == set(present.workers) - set(left):
            plan = replace(present, idle=tuple(worker for worker in present.idle if worker in members))
            reason = f"{names_text(left)} left, and had nothing any more{more}"
            return replace(Decision.given(plan, "stay", reason), preferred_plan=preferred).to_bytes()
        try:
            choice = selector.decide(present, preferred, [worker for worker in members if worker not in leaving])
            chosen = Decision.of(choice, selector.clocking(choice.plan), more)
            return chosen.with_idle(leaving).to_bytes()
        except NotPossible as error:
            return _REFUSED + str(error).encode()


def _unfit(requested: Plan, preferred: Plan, members: Sequence[str]) -> str:
    """Returns why a plan that was asked for cannot be followed; empty if it can."""
    sizes, ours = _sizes(requested), _sizes(preferred)
    if sizes != ours:
        return f"has (layers, batch, micro-batch) {sizes}, and the job has {ours}"
    if set(requested.workers) != set(members):
        return f"is for {', '.join(requested.workers)}, and the members are {', '.join(members)}"
    try:
        requested.validate(members)
    except PlanError as error:
        return str(error)
    return ""


def _sizes(plan: Plan) -> tuple[int, int, int]:
    """Returns what no change of plan may change: layers, samples of a step, and of a micro-batch."""
    return plan.n_layers, plan.global_batch_size, plan.micro_batch_size
