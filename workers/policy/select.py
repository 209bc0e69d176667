"""Which policy: every candidate is made, priced and ranked (DESIGN section 8; Chameleon III and fig. 2).

    stay            the plan goes on as it is; who has come takes the place of who was lost
    reroute         micro-batches of who was lost go whole to same-layer peers
    resize          their rows are cut over same-layer peers, and layers move between stages
    reparallelize   new numbers and depths of pipelines
    expand          newcomers become replicas or stages of the plan that there is

A plan is worth its throughput x the part of the time until the next change in which the job trains (Chameleon eq. 8).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, get_args

from elaunch.workers.plan.tiling import Plan, PlanError
from elaunch.workers.policy.estimate import (
    StepEstimate,
    TransitionEstimate,
    estimate_step,
    estimate_transition,
)
from elaunch.workers.policy.expand import expanded
from elaunch.workers.policy.profile import Profile
from elaunch.workers.policy.reparallelize import Degrees, reparallelized
from elaunch.workers.policy.reroute import rerouted
from elaunch.workers.policy.resize import resized
from elaunch.workers.policy.structure import NotPossible

Pinned = Literal["auto", "reroute", "resize", "reparallelize"]
PINNED: tuple[str, ...] = get_args(Pinned)

FREE = ("stay", "expand")
"""Candidates that the user's choice of a policy does not exclude: nobody need take over anything."""


@dataclass(frozen=True)
class Settings:
    """What the user wants.

    Attributes:
        policy: the only one that may be chosen, as long as it has a plan.
        degrees: of `reparallelize`.
        widths: of tensor-parallel tuples, beside the present one, that the layers can be cut for.
        next_s: expected seconds from one change to the next.
    """

    policy: Pinned = "auto"
    degrees: Degrees = field(default_factory=Degrees)
    widths: tuple[int, ...] = ()
    next_s: float = 3600.0


@dataclass(frozen=True)
class Candidate:
    """What a policy proposes.

    Attributes:
        policy: its name.
        plan: None: it is not possible.
        step: of the plan.
        transition: the way to it.
        score: samples a second until the next change.
        rejected: why it cannot be chosen; empty if it can.
    """

    policy: str
    plan: Plan | None = None
    step: StepEstimate | None = None
    transition: TransitionEstimate | None = None
    score: float = 0.0
    rejected: str = ""

    def event(self) -> dict[str, Any]:
        """An entry of `candidates` in the `decision` event."""
        step, way = self.step, self.transition
        return {
            "policy": self.policy,
            "step_s": None if step is None else round(step.step_s, 6),
            "bubble": None if step is None else round(step.bubble, 4),
            "transition_s": None if way is None else round(way.total_s, 6),
            "moved_bytes": None if way is None else way.moved_bytes,
            "peak_bytes": None if step is None else max(step.peak_bytes.values()),
            "score": round(self.score, 6) if self.plan is not None else None,
            "rejected": self.rejected or None,
        }


@dataclass(frozen=True)
class Choice:
    """A plan and why it was chosen.

    Attributes:
        chosen: the candidate.
        home: the plan to which the job returns when everybody is back.
        candidates: all of them, the best first.
        reason: for people.
    """

    chosen: Candidate
    home: Plan
    candidates: tuple[Candidate, ...]
    reason: str

    @property
    def plan(self) -> Plan:
        """Of the candidate that was chosen."""
        assert self.chosen.plan is not None
        return self.chosen.plan


def choose(now: Plan, home: Plan, members: Sequence[str], profile: Profile, settings: Settings | None = None) -> Choice:
    """The best plan for the members.

    Args:
        now: under which the state is distributed; valid.
        home: with every place filled, by the names of those who had the places last; valid.
        members: who there is.
        profile: of the model; for workers of which it says nothing, speed 1 is assumed.
        settings: what the user wants.

    Raises:
        NotPossible: no candidate has a plan; names the reasons.
        PlanError: the profile is of another model.
    """
    profile.check(now)
    settings = settings or Settings()
    here = set(members)
    lost = [worker for worker in now.workers if worker not in here]
    filled = fill(home, members)
    bases = [now] if filled.tiles == now.tiles else [now, filled]
    makers: list[tuple[str, Callable[[], Plan]]] = []
    for base in bases:
        makers += [
            ("stay", partial(_as_it_is, base, members)),
            ("reroute", partial(rerouted, base, members, profile)),
            ("resize", partial(resized, base, members, profile)),
        ]
    makers += [
        ("reparallelize", partial(reparallelized, now, members, profile, settings.degrees)),
        ("expand", partial(expanded, now, members, profile, widths=settings.widths)),
    ]
    found = [_candidate(policy, make, now, lost, profile, settings) for policy, make in makers]
    ranked = _ranked(found)
    able = [one for one in ranked if not one.rejected]
    if not able:
        raise NotPossible(
            f"no plan for {len(members)} members: " + "; ".join(f"{one.policy}: {one.rejected}" for one in ranked)
        )
    allowed = [one for one in able if settings.policy in ("auto", one.policy) or one.policy in FREE]
    chosen = (allowed or able)[0]
    why = _reason(chosen, ranked, lost, [worker for worker in members if worker not in now.workers])
    if not allowed:
        refused = next(one.rejected for one in ranked if one.policy == settings.policy)
        why = f"{why}; --policy={settings.policy} is not possible here: {refused}"
    assert chosen.plan is not None
    grown = _n_busy(chosen.plan) > _n_busy(filled) or set(filled.workers) <= here
    return Choice(chosen, chosen.plan if grown else filled, tuple(ranked), why)


def fill(home: Plan, members: Sequence[str]) -> Plan:
    """`home` with the places of those who are lost taken by those who have none; on the same slot, if it is free."""
    here = set(members)
    places = [worker for worker in home.workers if worker not in home.idle]
    lost = [worker for worker in places if worker not in here]
    free = [worker for worker in members if worker not in set(places)]
    taken: dict[str, str] = {}
    for same in (True, False):
        for worker in lost:
            fits = [one for one in free if not same or one.partition("#")[0] == worker.partition("#")[0]]
            if worker not in taken and fits:
                taken[worker] = fits[0]
                free.remove(fits[0])
    return replace(home, idle=()).renamed({worker: taken.get(worker, worker) for worker in places})


def _n_busy(plan: Plan) -> int:
    return len(plan.workers) - len(plan.idle)


def _as_it_is(base: Plan, members: Sequence[str]) -> Plan:
    busy = {worker for tile in base.tiles for worker in tile.workers}
    if missing := [worker for worker in base.workers if worker in busy and worker not in set(members)]:
        raise NotPossible(f"{', '.join(missing)} must be replaced")
    return replace(base, idle=tuple(member for member in members if member not in busy))


def _candidate(
    policy: str,
    make: Callable[[], Plan],
    now: Plan,
    lost: Sequence[str],
    profile: Profile,
    settings: Settings,
) -> Candidate:
    try:
        plan = make()
    except NotPossible as error:
        return Candidate(policy, rejected=str(error))
    try:
        plan.validate()
    except PlanError as error:  # a policy has erred; the others may not have
        return Candidate(policy, rejected=f"it made no plan: {error}")
    step = estimate_step(plan, profile)
    # The first half of the step is done under the plan before.
    way = estimate_transition(now, plan, profile, lost, step.step_s / 2)
    over = step.over(profile)
    if over:
        worker, (needed, cap) = max(over.items(), key=lambda item: item[1][0] - item[1][1])
        rejected = f"{worker} needs {needed:,} bytes and may use {cap:,.0f}"
        return Candidate(policy, plan, step, way, 0.0, rejected)
    score = plan.global_batch_size / step.step_s * max(0.0, 1 - way.total_s / settings.next_s) if step.step_s else 0.0
    return Candidate(policy, plan, step, way, score)


def _ranked(found: Sequence[Candidate]) -> list[Candidate]:
    """The best first; of each policy one, and of equal ones that which moves the least."""
    order = sorted(
        found,
        key=lambda one: (
            bool(one.rejected),
            -round(one.score, 9),
            one.transition.moved_bytes if one.transition is not None else 0,
        ),
    )
    best: dict[str, Candidate] = {}
    for one in order:
        best.setdefault(one.policy, one)
    return list(best.values())


def _reason(chosen: Candidate, ranked: Sequence[Candidate], lost: Sequence[str], new: Sequence[str]) -> str:
    what = [f"{_some(lost)} left" if lost else "", f"{_some(new)} joined" if new else ""]
    event = "; ".join(filter(None, what)) or "the same members go on"
    assert chosen.step is not None
    assert chosen.plan is not None
    rate = chosen.plan.global_batch_size / chosen.step.step_s if chosen.step.step_s else 0.0
    others = [one for one in ranked if one is not chosen and not one.rejected]
    beside = f", before {others[0].policy} with {others[0].score:.4g}" if others else ""
    return f"{event}: {chosen.policy} is worth {chosen.score:.4g} samples/s ({rate:.4g} while it trains){beside}"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:8])
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown
