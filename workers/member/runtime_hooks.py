"""The framework's hooks, and what the runtime does at the same moments."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from elaunch.rendezvous.membership import Generation
from elaunch.workers.agent_client import Client
from elaunch.workers.checkpoints import Checkpoints
from elaunch.workers.comm.c10d.native import NativeWorks
from elaunch.workers.comm.c10d.store import store_of
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.native.groups import NativeGroups
from elaunch.workers.hooks import Hooks, Verdict, Vote
from elaunch.workers.member.policy import Policy
from elaunch.workers.member.replans import REPLAN, Replans
from elaunch.workers.member.reports import StepReports, is_planned
from elaunch.workers.member.swaps import Swaps
from elaunch.workers.state.paths.offers import Offers

NATIVE = "elaunch.native"
"""Among the facts of a vote: the generation whose native group the voter may still be in."""


class RuntimeHooks:
    """What `Recovery` calls on a member.

    Args:
        client: the channel to this worker's agent.
        hooks: the framework's.
        step: returns the number of steps that have committed here; by default, what the hooks vote.
        checkpoints, policy, reports, native, works: of this worker.

    Attributes:
        entered: whether this worker has complete gradients of a step that has not committed: what it votes.
        group: the members, or in `transfer` those of the next generation; None before this worker joins.
        replans: the plans that the script asks for.
        swaps: when the members go over from links to native groups.
    """

    def __init__(
        self,
        client: Client,
        hooks: Hooks,
        step: Callable[[], int] | None,
        checkpoints: Checkpoints,
        policy: Policy,
        reports: StepReports,
        native: NativeGroups,
        works: NativeWorks,
    ) -> None:
        self._hooks, self._step = hooks, step
        self._checkpoints, self._policy, self._reports = checkpoints, policy, reports
        self._native, self._works = native, works
        self._offers, self.swaps = Offers(native), Swaps(client, native)
        self.entered = False
        self.group: Group | None = None
        self.replans = Replans()
        self._agreed = 0  # number of the generation of the last agreement

    @property
    def step(self) -> int:
        """Number of steps that have committed here."""
        return self._step() if self._step is not None else self._hooks.vote().step

    @property
    def _first(self) -> str:
        return self.group.members[0] if self.group is not None else ""

    def vote(self) -> Vote:
        """Adds to the framework's vote what the runtime tells the others."""
        vote, saved = self._hooks.vote(), self._checkpoints
        ours = {NATIVE: self._native.ready(), REPLAN: self.replans.facts()}
        measured = self._offers.facts() | self.swaps.facts() | self._policy.facts()
        facts = {**vote.facts, **ours, **measured, **self._reports.facts(self._first, self._agreed)}
        newest = saved.newest()
        return replace(vote, facts=facts, saved=vote.saved if newest is None else newest, every=saved.every)

    def pause(self) -> None:
        """Has the framework stop all communication of the generation left behind."""
        self._native.pause()
        self._works.drop()
        self._hooks.pause()

    def agreed(self, generation: Generation, verdict: Verdict) -> None:
        """Has the framework settle the step in flight; reports it, if whoever should have may not have."""
        self._native.settled([facts.get(NATIVE, 0) for facts in verdict.facts])
        self.replans.agreed(verdict)
        self._offers.agreed(verdict.facts, lambda: store_of(generation))
        self.swaps.agreed(verdict)
        self._hooks.agreed(generation, verdict)
        self.entered = False
        self._reports.inherit(verdict)
        planned, self._agreed = is_planned(generation, self._agreed), generation.number
        self._reports.learn(verdict.step, generation.streak.logged, planned, self._first)
        self._reports.agree(verdict, generation)

    def plan(self, generation: Generation, group: Group, verdict: Verdict) -> dict[str, Any]:
        """Has the framework choose how the members go on."""
        shown = self.replans.planned(generation, verdict)
        return self._hooks.plan(generation if self._policy.plans else shown, group, verdict)

    def transfer(self, group: Group, verdict: Verdict) -> int:
        """Has the framework move the state over the new group, which is that of the member from now on."""
        self.group = group
        group.paths = self._offers
        return self._hooks.transfer(group, verdict)

    def resume(self, generation: Generation, group: Group, verdict: Verdict) -> None:
        """Has the framework go on, and tells all parts of the runtime who the members are."""
        self._hooks.resume(generation, group, verdict)
        self._policy.entered(generation, group.members, verdict)
        self.replans.resumed(generation.number)
        self.entered = False
        self._checkpoints.entered(group.members, verdict.fresh and verdict.saved is None)
        self.swaps.entered(verdict)
        self._native.state_moved()
        self._native.enter(generation.number, group.members, group.rank, lambda: store_of(generation))
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(group.rank), str(group.size)
