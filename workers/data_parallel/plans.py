"""By which plan the members of a data-parallel job do a step, and how the policy selector is asked for it.

The plan has one stage, and is for the members that work: those on standby, of spares that hold the state, do no unit,
and policies do not decide about them. For the policies the job is one layer, whose rows are the units (micro-batches)
of a step.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from elaunch.plan.build import data_parallel
from elaunch.plan.tiling import Plan
from elaunch.plan.views import shares_of
from elaunch.policy.candidates.balance import shares_by_speed
from elaunch.policy.decision import History
from elaunch.policy.profile import LayerProfile
from elaunch.rendezvous.membership import Generation
from elaunch.workers.comm.group import Group
from elaunch.workers.data_parallel.layout import SampleLayout, Share
from elaunch.workers.hooks import Verdict
from elaunch.workers.member.policy import history_of
from elaunch.workers.runtime import Member


class Plans:
    """The plans of one worker's job, one after the other.

    Args:
        member: its runtime.
        model_bytes: returns the bytes of the parameters that are trained.
    """

    def __init__(self, member: Member, model_bytes: Callable[[], int]) -> None:
        self._member, self._model_bytes = member, model_bytes
        self._plan: Plan | None = None
        self._history: History | None = None
        self._followed: Plan | None = None
        self._share: Share | None = None
        self._working: tuple[str, ...] = ()
        self._standby: tuple[str, ...] = ()

    def decide(
        self, layout: SampleLayout | None, generation: Generation, group: Group, verdict: Verdict
    ) -> dict[str, Any]:
        """Chooses the next plan, the same on all members; for the hook `plan`.

        One member asks its selector and tells the others. Without a choice the first step makes an even plan.

        Args:
            layout: of the steps; None: it is not known yet.
            generation: that which they enter.
            group: the members that go on.
            verdict: of their agreement.

        Returns:
            The fields of the `decision` event; empty if nothing was chosen.
        """
        self._history = history_of(verdict)
        if verdict.fresh:
            return {}  # the settings are not known before `batches` is called
        choice_text, before, selector = b"", self._plan, self._member.selector
        working = generation.working
        decides = group.rank == verdict.passed
        # A script may call `batches` again with other sizes; then the plan before is of no use.
        if decides and selector is not None and layout is not None and before is not None and layout.fits(before):
            has_spares = bool(generation.standby or self._standby)
            if has_spares and set(before.workers) == set(working) and not selector.due:
                choice_text = json.dumps({"plan": str(before)}).encode()  # only those on standby have changed
            else:
                now = _by_unit(before.renamed(self._heirs(working)))
                choice = selector.decide(now, now, working)
                plan = layout.plan(shares_by_speed(choice.plan, working, selector.profile()))
                choice_text = json.dumps({**choice.event(), "plan": str(plan)}).encode()
        choice_text = group.all_gather_bytes(choice_text)[verdict.passed]
        event: dict[str, Any] = json.loads(choice_text) if choice_text else {}
        self._plan = Plan.parse(event["plan"]) if event else None
        self._working, self._standby = working, generation.standby
        return event if "policy" in event else {}

    def _heirs(self, working: tuple[str, ...]) -> dict[str, str]:
        """Returns who has taken over from whom: they hold the state, so the plan stays, and nothing is moved."""
        places = zip(self._working, working)
        return {lost: heir for lost, heir in places if heir in self._standby and lost not in working}

    def share(self, layout: SampleLayout) -> Share:
        """Returns what this worker does in the step that begins; makes plan and selector where there are none."""
        member, working = self._member, self._member.generation.working
        self._working, self._standby = working, member.generation.standby
        plan = self._plan
        if plan is None or set(plan.workers) != set(working) or not layout.fits(plan):
            plan = self._plan = layout.even_plan(working)
            if member.rank == 0:
                reason = f"the {plan.n_units} micro-batches are shared out evenly over {len(plan.workers)} members"
                member.send("decision", {"policy": "given", "reason": reason, "candidates": [], "plan": str(plan)})
        if member.elastic and member.selector is None:
            samples = layout.global_batch_size / plan.n_units
            member.policy.make_selector([_whole_model(self._model_bytes())], [1], samples)
        if self._share is None or self._followed != plan:
            self._followed, self._share = plan, Share.of(plan, member.worker)
            if member.selector is not None:
                now = _by_unit(plan)
                member.selector.entered(now, now, working, self._history)
        return self._share


def _whole_model(n_bytes: int) -> LayerProfile:
    """Returns a model as one layer; its optimizer has two states as large as the parameters."""
    return LayerProfile(0.0, 0.0, n_bytes, 2 * n_bytes, 0, 0)


def _by_unit(plan: Plan) -> Plan:
    """Returns a plan with a sample for each unit: policies are not to cut units, and a unit is what is measured."""
    return data_parallel(plan.n_units, 1, shares_of(plan))
