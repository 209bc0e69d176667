"""The policy side of a member: its selector, and the plans of the job.

use_plans, make_selector    before the job begins
note                        what to tell the others at the coming commit barrier
heard                       what they told; returns what the agent has to know
choose, entered             a change: how the members go on
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from elaunch.errors import StateError
from elaunch.plan.tiling import Plan
from elaunch.policy.decision import Decision, History
from elaunch.policy.dvfs import ClockRange
from elaunch.policy.profile import LayerProfile
from elaunch.policy.sample import MeasuredStep
from elaunch.policy.selector import Selector, make_selector
from elaunch.rendezvous.membership import Generation
from elaunch.wire import Evict, Message, Profiled, Report
from elaunch.workers.agent_client import Client
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.transport import Transport
from elaunch.workers.hooks import Verdict
from elaunch.workers.member.notes import Notes
from elaunch.workers.member.planner import FACTS, Planner

_HISTORY = "elaunch.history"
"""Among the facts of a vote: what the selector of the voter knows of the job's changes."""


class Policy:
    """What one member measures, tells and decides. Without a selector it does nothing.

    Args:
        client: of this worker.
        saved: returns the number of steps in the newest checkpoint; None: there is none.

    Attributes:
        selector: the policy selector, where the membership can change and the job has one.
        memory_bytes, clocks: what the selector tells the other members of this worker's device, if it is known.
    """

    def __init__(self, client: Client, saved: Callable[[], int | None]) -> None:
        self._client, self._saved = client, saved
        self._planner: Planner | None = None
        self.selector: Selector | None = None
        self.memory_bytes: int | None = None
        self.clocks: Callable[[], ClockRange | None] = lambda: None

    def make_selector(
        self,
        layers: Sequence[LayerProfile],
        elements: Sequence[int],
        row_samples: float = 1.0,
        plan_widths: Collection[int] = (),
    ) -> None:
        """Makes the selector, where the membership can change; see `elaunch.policy.selector.make_selector`.

        Raises:
            UsageError: a setting is none.
            StateError: the profile that was given is none, or of another model.
        """
        client = self._client
        if client.elastic:
            self.selector = make_selector(
                client.worker, layers, elements, "this job", row_samples, client.min_nodes, plan_widths
            )

    def use_plans(self, plan: Plan, layers: Sequence[LayerProfile], elements: Sequence[int] | None) -> None:
        """Has the selector choose the plans of the job; see `Member.use_plans`."""
        plan.validate()
        if len(layers) != plan.n_layers:
            raise StateError(f"the plan has {plan.n_layers} layers, and {len(layers)} are described")
        counts = [1] * len(layers) if elements is None else elements
        self.make_selector(layers, counts, plan_widths={len(tile.workers) for tile in plan.tiles})
        self._planner = Planner(plan, self.selector, self._saved)

    def choose(self, generation: Generation, group: Group, verdict: Verdict) -> Decision:
        """Returns how the members go on, the same on all of them; see `Member.choose`."""
        if self._planner is None:
            raise StateError("call use_plans() before join(): this job has no plan to go on from")
        return self._planner.choose(generation, group, verdict)

    @property
    def plans(self) -> bool:
        """Returns whether the job's plans are chosen here."""
        return self._planner is not None

    def check(self, plan: Plan, members: Sequence[str]) -> None:
        """Checks that the job can be asked for a plan; see `Planner.check`."""
        plan.validate()
        if self._planner is not None:
            self._planner.check(plan, members)

    def facts(self) -> dict[str, Any]:
        """Returns what a vote tells workers that join, as JSON values."""
        facts: dict[str, Any] = {}
        if self.selector is not None:
            facts[_HISTORY] = self.selector.told_history()
        if self._planner is not None:
            facts[FACTS] = self._planner.facts()
        return facts

    def entered(self, generation: Generation, members: Sequence[str], verdict: Verdict) -> None:
        """Notes that the members go on by the plan that was chosen, if it was chosen here."""
        if self._planner is not None:
            decision = self._planner.entered(generation)
            if self.selector is not None and decision is not None:
                self.selector.entered(decision.plan, decision.preferred_plan, members, history_of(verdict))

    def took(self, seconds: float, rows: int) -> None:
        """Tells the selector what this worker's own part of the step under way took; see `Member.took`."""
        if self.selector is not None and self.selector.measures():
            self.measured(seconds, rows)

    def measured(self, seconds: float, rows: int) -> None:
        """Tells the selector what this worker's own part of a step took that was to be measured."""
        if self.selector is not None and rows:
            self.selector.add([MeasuredStep.of(seconds, rows)], {}, 0.0, 0)

    def note(self, transport: Transport) -> dict[str, Any]:
        """Returns what to tell the others at the coming barrier, as JSON values; mostly nothing."""
        if self.selector is None:
            return {}
        return self.selector.note(transport.rates, self.memory_bytes, self.clocks(), transport.carried)

    def heard(self, notes: Notes, generation: int, members: Sequence[str], step: int, seconds: float) -> list[Message]:
        """Takes in what the members told at the barrier of a step that has committed.

        Args:
            notes: of all members.
            generation: number of their generation.
            members: in their order.
            step: its number.
            seconds: from the commit before.

        Returns:
            What the agent has to know: what was found of slow workers, the profile, and the request that this worker
            leave.
        """
        selector = self.selector
        if selector is None:
            return []
        profile = selector.heard(notes.of_selectors(members), seconds, step)
        news: list[Message] = [Report("slow", {"generation": generation, **event}) for event in selector.events()]
        news += [Report("profile_doubtful", {"generation": generation, **event}) for event in selector.doubts()]
        if profile is not None:
            news.append(Profiled(profile.to_json()))
        eviction = selector.eviction()
        if eviction is not None:
            news.append(Evict(eviction.replace, eviction.why))
        return news

    @property
    def due(self) -> bool:
        """Whether the members are to go on by another plan, as all of them know since the last barrier."""
        return self.selector is not None and self.selector.due

    def change_took(self, seconds: float) -> None:
        """Takes in what a change of members took that does not depend on what moves."""
        if self.selector is not None:
            self.selector.measured.change_took(seconds)

    def close(self) -> None:
        """Ends the planning ahead."""
        if self.selector is not None:
            self.selector.close()


def history_of(verdict: Verdict) -> History | None:
    """Returns what a member that had committed all steps knew of the job's changes."""
    return History.from_json(verdict.facts[verdict.passed].get(_HISTORY))
