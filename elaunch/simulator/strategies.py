"""How a simulated job goes on when its members change: as elaunch does, and as others do.

auto                 elaunch: every policy is priced, the best one is taken (`elaunch.policy.select.choose`)
reroute              the same, with that policy alone as long as it has a plan (ReCycle: with its decoupled backward, as
                     an order of the schedule, without its staggered optimizer)
resize               likewise (ElasWave)
reparallelize        likewise (Chameleon's dynamic parallelism)
templates            pipelines of depths that were planned before (Oobleck)
drop-replica         a pipeline that has lost somebody is dropped as a whole (torchft)
morph                the best symmetric plan, from a checkpoint that is written before if nobody is lost (Varuna)
restart              as many whole pipelines as before have place, from the last checkpoint (torchrun)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, get_args

from elaunch.plan import Plan
from elaunch.policy.candidates.structure import NotPossible, stages_of
from elaunch.policy.estimate import ordered
from elaunch.policy.profile import Profile
from elaunch.policy.select import Choice, SelectorSettings, choose, fill
from elaunch.policy.settings import Policy
from elaunch.policy.transition import estimate_transition
from elaunch.rendezvous.membership import node_of, slot_of
from elaunch.simulator.baselines import depths_of, drop_replica, template_switch
from elaunch.simulator.first import fastest_symmetric, first_plan
from elaunch.simulator.model import JobModel, JobSituation, Timings, Way

OWN: tuple[Policy, ...] = get_args(Policy)


class Strategy(Protocol):
    """Decides how a job goes on."""

    name: str
    sees_slow: bool
    """Whether it does anything about slow workers."""
    has_copies: bool
    """Whether each worker's part of the state has a copy; otherwise each replica has all of its layers' state."""

    def first(self, job: JobModel, members: Sequence[str]) -> Plan:
        """Returns the plan with which the job begins.

        Raises:
            NotPossible: the members cannot train it.
        """

    def next(self, here: JobSituation) -> Way:
        """Returns how the job goes on.

        Raises:
            NotPossible: it cannot, with these members.
        """


class Chosen:
    """elaunch: what the first survivor of a real job would choose."""

    sees_slow = has_copies = True

    def __init__(self, policy: Policy, timings: Timings) -> None:
        self.name: str = policy
        self._timings = timings
        self._settings = SelectorSettings(policy=policy)
        self._known: dict[tuple[str, ...], tuple[Choice, float]] = {}

    def first(self, job: JobModel, members: Sequence[str]) -> Plan:
        """Returns the fastest plan that there is."""
        return first_plan(job, members)

    def next(self, here: JobSituation) -> Way:
        """Returns what is chosen for the real job."""
        choice, decide_s = self._chosen(here)
        way = choice.chosen.transition
        assert way is not None
        return Way(
            choice.plan,
            choice.preferred_plan,
            choice.chosen.policy,
            way.total_s,
            way.moved_bytes,
            reason=choice.reason,
            decide_s=decide_s,
        )

    def _chosen(self, here: JobSituation) -> tuple[Choice, float]:
        """Asks for each situation once, whatever its nodes are called, and to two digits of `next_s`.

        Returns the answer, and the seconds that it took when it was asked for.
        """
        names = plain_names([*here.now.workers, *here.preferred_plan.workers, *here.members])
        back = {plain: name for name, plain in names.items()}
        now, preferred = here.now.renamed(names), here.preferred_plan.renamed(names)
        members = [names[member] for member in here.members]
        slots = {slot_of(name): slot_of(plain) for name, plain in names.items()}
        workers = {slots[slot]: one for slot, one in here.profile.workers.items() if slot in slots}
        settings = replace(self._settings, next_s=float(f"{here.next_s:.2g}"))
        key = (str(now), str(preferred), ",".join(members), str(sorted(workers.items())), settings.to_json())
        if key not in self._known:
            profile = replace(self._timings.known_to(here.profile), workers=workers)
            began_s = time.perf_counter()
            choice = choose(now, preferred, members, profile, settings)
            self._known[key] = choice, time.perf_counter() - began_s
        choice, decide_s = self._known[key]
        return choice.renamed(back), decide_s


class Templates:
    """Oobleck: every worker has a place in a pipeline of a depth that was planned before."""

    name = "templates"
    sees_slow = has_copies = False

    def __init__(self, timings: Timings) -> None:
        self._timings = timings
        self._depths: range = range(0)

    def first(self, job: JobModel, members: Sequence[str]) -> Plan:
        """Returns pipelines from templates around the depth that is fastest."""
        symmetric = fastest_symmetric(job, members)
        if not self._depths:
            self._depths = depths_of(len({tile.layers.start for tile in symmetric.tiles}))
        return self._made(symmetric, members, job.profile)

    def next(self, here: JobSituation) -> Way:
        """Returns the templates for the members, and what copying their layers takes."""
        plan = self._made(here.now, here.members, here.profile)
        way = estimate_transition(here.now, plan, self._timings.known_to(here.profile), here.lost)
        stall_s = self._timings.template_s + way.change_s + way.transfer_s
        return Way(plan, plan, self.name, stall_s, way.moved_bytes, reason="templates for the members")

    def _made(self, plan: Plan, members: Sequence[str], profile: Profile) -> Plan:
        return fitting(template_switch(plan, members, profile, self._depths), profile)


class DropReplica:
    """torchft: whole pipelines go on, and one that has lost somebody comes back when it is whole again."""

    name = "drop-replica"
    sees_slow = has_copies = False

    def __init__(self, timings: Timings) -> None:
        self._timings = timings

    def first(self, job: JobModel, members: Sequence[str]) -> Plan:
        """Returns the fastest symmetric plan."""
        return fastest_symmetric(job, members)

    def next(self, here: JobSituation) -> Way:
        """Returns the whole pipelines of the plan with every place filled, newcomers in the places of the lost."""
        filled = fill(here.preferred_plan, here.members)
        plan = fitting(drop_replica(filled, here.members), here.profile)
        way = estimate_transition(here.now, plan, self._timings.known_to(here.profile), here.lost)
        stall_s = way.change_s + way.transfer_s
        return Way(plan, filled, self.name, stall_s, way.moved_bytes, reason="the pipelines that are whole")


class Morph:
    """Varuna: the best symmetric plan for the members, by way of a checkpoint."""

    name = "morph"
    sees_slow = has_copies = False

    def __init__(self, timings: Timings) -> None:
        self._timings = timings

    def first(self, job: JobModel, members: Sequence[str]) -> Plan:
        """Returns the fastest symmetric plan."""
        return fastest_symmetric(job, members)

    def next(self, here: JobSituation) -> Way:
        """Returns the fastest symmetric plan; steps are lost only if a worker is."""
        plan = fastest_symmetric(here.job, here.members)
        stall_s = self._timings.restart_of(here.job)
        return Way(plan, plan, self.name, stall_s, 0, True, bool(here.lost), "the best symmetric plan")


class Restart:
    """torchrun: all start again with as many pipelines of the first depth as there is place for."""

    name = "restart"
    sees_slow = has_copies = False

    def __init__(self, timings: Timings) -> None:
        self._timings = timings
        self._pp: int | None = None

    def first(self, job: JobModel, members: Sequence[str]) -> Plan:
        """Returns the fastest symmetric plan; later ones have as many stages."""
        found = fastest_symmetric(job if self._pp is None else replace(job, pp=self._pp, dp=None), members)
        self._pp = len(stages_of(found))
        return found

    def next(self, here: JobSituation) -> Way:
        """Returns a restart, which loses the steps since the last checkpoint."""
        plan = self.first(here.job, here.members)
        stall_s = self._timings.restart_of(here.job)
        return Way(plan, plan, self.name, stall_s, 0, True, True, "a restart from the last checkpoint")


OTHERS: Mapping[str, Callable[[Timings], Strategy]] = {
    "templates": Templates,
    "drop-replica": DropReplica,
    "morph": Morph,
    "restart": Restart,
}

STRATEGIES: tuple[str, ...] = (*OWN, *OTHERS)


def make_strategy(name: str, timings: Timings) -> Strategy:
    """Returns a strategy by its name, one of STRATEGIES."""
    if name in OTHERS:
        return OTHERS[name](timings)
    return Chosen(next(one for one in OWN if one == name), timings)


def fitting(plan: Plan, profile: Profile) -> Plan:
    """Returns a plan in its fastest order.

    Raises:
        NotPossible: it needs more memory than there is.
    """
    found, step = ordered(plan, profile)
    if over := step.over(profile):
        worker, (needed, cap) = max(over.items(), key=lambda item: item[1][0])
        raise NotPossible(f"{worker} needs {needed:,} bytes and may use {cap:,.0f}")
    return found


def plain_names(workers: Sequence[str]) -> dict[str, str]:
    """Returns other names for workers: equal for situations that differ by the names of nodes alone."""
    nodes: dict[str, int] = {}
    slots: dict[str, int] = {}
    found: dict[str, str] = {}
    for worker in workers:
        if worker in found:
            continue
        node, slot = node_of(worker), slot_of(worker)
        number = nodes.setdefault(node, len(nodes))
        slots[slot] = slots.get(slot, -1) + 1
        found[worker] = f"n{number}{slot.removeprefix(node)}#{slots[slot]}"
    return found
