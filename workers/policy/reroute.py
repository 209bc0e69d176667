"""Reroute: the micro-batches of lost workers go whole to their peers (ReCycle; Chameleon 4.A).

In a data-parallel job all members hold all layers. So each of them is a same-layer peer of the lost one, no state has
to move for the survivors, and the plan depends on the list of members alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elaunch.rendezvous.membership import Generation
from elaunch.workers.plan.shares import DataParallelPlan


@dataclass(frozen=True, slots=True)
class Decision:
    """A plan and why it was chosen.

    Attributes:
        step_s: estimated seconds of a step under it; None before a step was measured.
    """

    policy: str
    reason: str
    plan: DataParallelPlan
    step_s: float | None

    def event(self) -> dict[str, Any]:
        """The fields of the `decision` event."""
        candidate = {
            "policy": self.policy,
            "step_s": self.step_s,
            "transition_s": None,
            "peak_bytes": None,
            "score": None,
            "rejected": None,
        }
        return {"policy": self.policy, "reason": self.reason, "candidates": [candidate], "plan": str(self.plan)}


def reroute(
    before: DataParallelPlan | None,
    global_batch_size: int,
    micro_batch_size: int,
    generation: Generation,
    step_s: float | None,
) -> Decision:
    """Share the micro-batches of a step evenly over the members.

    Args:
        before: the plan that was left; None at the start.
        global_batch_size: samples of a step.
        micro_batch_size: samples of a micro-batch, which is never cut.
        generation: the members.
        step_s: seconds of the last step under `before`.
    """
    plan = DataParallelPlan.even(global_batch_size, micro_batch_size, generation.ids)
    plan.validate()
    estimate = None
    if before is not None and step_s is not None:
        estimate = round(step_s * _most_units(plan) / _most_units(before), 6)
    lost = [] if before is None else [worker for worker in before.workers if worker not in plan.workers]
    new = [worker for worker in plan.workers if before is None or worker not in before.workers]
    changes = [f"{', '.join(lost)} left" if lost else "", f"{', '.join(new)} joined" if new and before else ""]
    what = "; ".join(filter(None, changes)) or "the same members go on" if before else "the first members"
    reason = (
        f"{what}: every member holds all layers, so the {plan.n_units} micro-batches are shared out over "
        f"{len(plan.workers)} members, at most {_most_units(plan)} each"
    )
    return Decision("reroute", reason, plan, estimate)


def _most_units(plan: DataParallelPlan) -> int:
    return max(1, max(len(units) for _, units in plan.units))
