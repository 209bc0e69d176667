"""What a member offers to hooks whose work is described by a plan."""

from __future__ import annotations

from collections.abc import Sequence

from elaunch.plan.tiling import Plan
from elaunch.policy.decision import Decision
from elaunch.policy.profile import LayerProfile
from elaunch.policy.selector import Selector
from elaunch.rendezvous.membership import Generation
from elaunch.workers.comm.group import Group
from elaunch.workers.hooks import Verdict
from elaunch.workers.member.policy import Policy


class Planned:
    """The part of a member that has to do with plans.

    Attributes:
        policy: its policy selector, and the plans of the job.
    """

    policy: Policy

    @property
    def selector(self) -> Selector | None:
        """The policy selector, where the membership can change and the job has one."""
        return self.policy.selector

    def use_plans(self, plan: Plan, layers: Sequence[LayerProfile], elements: Sequence[int] | None = None) -> None:
        """Has the policy selector choose the plans of this job: call it before `join`, and `choose` in the hook `plan`.

        Args:
            plan: the one to begin with, for as many workers as there are then. Its workers, in the order in which it
                names them, become the members in the order of their ranks; so any names will do.
            layers: what is known of the layers beforehand; seconds may be 0, they are measured (`took`).
            elements: how many parameters each layer trains; for what the optimizer's step takes.

        Raises:
            PlanError: the plan does not tile layers and samples.
            StateError: it has another number of layers, or `--profile` is of another model.
        """
        self.policy.use_plans(plan, layers, elements)

    def choose(self, generation: Generation, group: Group, verdict: Verdict) -> Decision:
        """Returns the plan by which the members go on, the same on all of them; for the hook `plan`, which gets these.

        One member asks its policy selector and tells the others. Where `elaunch ctl plan --set` has asked for a plan
        that these members can follow, it is that.

        Raises:
            StateError: there is no plan for these members.
        """
        return self.policy.choose(generation, group, verdict)

    def took(self, seconds: float, rows: int) -> None:
        """Tells the selector what this worker's own part of the step under way took.

        For plans of a single layer; others measure by layer and call `selector.add`.

        Args:
            seconds: of computing, forward and backward, without waiting for other members.
            rows: of the plan's rows that were computed in them.
        """
        self.policy.took(seconds, rows)
