"""Which policy: every candidate is made, priced and ranked (Chameleon III and fig. 2).

    stay            the plan goes on as it is; who has come takes the place of who was lost
    reroute         micro-batches of who was lost go whole to same-layer peers
    resize          their rows are cut over same-layer peers, and layers move between stages
    reparallelize   new numbers and depths of pipelines
    expand          newcomers become replicas or stages of the plan that there is

A plan is worth its throughput x the part of the time until the next change in which the job trains (Chameleon eq. 8).
"""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from elaunch.errors import ProtocolError
from elaunch.plan.tiling import Plan, PlanError
from elaunch.policy.candidates.expand import expanded
from elaunch.policy.candidates.reparallelize import Degrees, reparallelized
from elaunch.policy.candidates.reroute import deferrals, rerouted
from elaunch.policy.candidates.resize import resized
from elaunch.policy.candidates.structure import NotPossible
from elaunch.policy.estimate import StepEstimate, ordered
from elaunch.policy.profile import Profile
from elaunch.policy.settings import Consistency, Policy
from elaunch.policy.transition import TransitionEstimate, estimate_transition
from elaunch.rendezvous.membership import names_text, slot_of

FREE = ("stay", "expand")
"""Candidates that the user's choice of a policy does not exclude: nobody need take over anything."""


@dataclass(frozen=True)
class SelectorSettings:
    """The user's settings.

    Attributes:
        policy: the only one that may be chosen, as long as it has a plan.
        consistency: "bitwise": micro-batches are not cut and TP groups keep their width, so that all sums are the same.
        degrees: of `reparallelize`.
        widths: of tensor-parallel groups, beside the present ones, that `expand` and `reparallelize` may make.
        next_s: expected seconds from one change to the next.
        row_samples: samples of the data set that a sample of the plan stands for.
    """

    policy: Policy = "auto"
    consistency: Consistency = "fast"
    degrees: Degrees = field(default_factory=Degrees)
    widths: tuple[int, ...] = ()
    next_s: float = 3600.0
    row_samples: float = 1.0

    def rate(self, plan: Plan, step: StepEstimate) -> float:
        """Returns the samples per second while the job trains."""
        return self.row_samples * plan.global_batch_size / step.step_s if step.step_s else 0.0

    def to_json(self) -> str:
        """Returns the JSON form, on one line; `from_json` gives the same settings."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> SelectorSettings:
        """Reads the JSON form.

        Raises:
            ProtocolError: it is none.
        """
        try:
            fields = json.loads(text)
            dp, pp = fields["degrees"]["dp"], fields["degrees"]["pp"]
            degrees = Degrees(dp if dp is None else tuple(dp), tuple(pp))
            return cls(**fields | {"degrees": degrees, "widths": tuple(fields["widths"])})
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise ProtocolError(f"expected settings of the choice, found {text[:80]!r} ({error})") from error


@dataclass(frozen=True)
class Candidate:
    """A policy's proposal.

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
        """Returns an entry of `candidates` in the `decision` event."""
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

    def renamed(self, names: Mapping[str, str]) -> Candidate:
        """Returns the same for other workers, by the names of those that get another one."""

        def of(figures: Mapping[str, Any]) -> dict[str, Any]:
            return {names.get(worker, worker): figure for worker, figure in figures.items()}

        step = self.step
        return replace(
            self,
            plan=None if self.plan is None else self.plan.renamed(names),
            step=None if step is None else replace(step, busy_s=of(step.busy_s), peak_bytes=of(step.peak_bytes)),
            rejected=_renamed(self.rejected, names),
        )

    def document(self) -> dict[str, Any]:
        """Returns all of it in JSON values; `from_document` gives the same candidate."""
        return {
            "policy": self.policy,
            "plan": None if self.plan is None else str(self.plan),
            "step": None if self.step is None else asdict(self.step),
            "transition": None if self.transition is None else asdict(self.transition),
            "score": self.score,
            "rejected": self.rejected,
        }

    @classmethod
    def from_document(cls, fields: Mapping[str, Any]) -> Candidate:
        """Reads what `document` gives; on anything else it raises whatever error results."""
        plan, step, way = fields["plan"], fields["step"], fields["transition"]
        return cls(
            fields["policy"],
            None if plan is None else Plan.parse(plan),
            None if step is None else StepEstimate(**step),
            None if way is None else TransitionEstimate(**way),
            fields["score"],
            fields["rejected"],
        )


@dataclass(frozen=True)
class Choice:
    """A plan and the reason for choosing it.

    Attributes:
        chosen: the candidate.
        preferred_plan: the plan to which the job returns when everybody is back.
        candidates: all of them, the best first.
        reason: for people.
    """

    chosen: Candidate
    preferred_plan: Plan
    candidates: tuple[Candidate, ...]
    reason: str

    @property
    def plan(self) -> Plan:
        """Returns the plan of the chosen candidate."""
        assert self.chosen.plan is not None
        return self.chosen.plan

    def event(self) -> dict[str, Any]:
        """Returns the fields of the `decision` event."""
        return {
            "policy": self.chosen.policy,
            "reason": self.reason,
            "candidates": [candidate.event() for candidate in self.candidates],
            "plan": str(self.plan),
        }

    def renamed(self, names: Mapping[str, str]) -> Choice:
        """Returns the same for other workers, by the names of those that get another one."""
        candidates = tuple(one.renamed(names) for one in self.candidates)
        chosen = candidates[self.candidates.index(self.chosen)]
        return Choice(chosen, self.preferred_plan.renamed(names), candidates, _renamed(self.reason, names))

    def to_json(self) -> str:
        """Returns the JSON form, on one line; `from_json` gives the same choice."""
        document = {
            "reason": self.reason,
            "preferred_plan": str(self.preferred_plan),
            "chosen": self.candidates.index(self.chosen),
            "candidates": [candidate.document() for candidate in self.candidates],
        }
        return json.dumps(document)

    @classmethod
    def from_json(cls, text: str) -> Choice:
        """Reads the JSON form. Its plans are not validated.

        Raises:
            ProtocolError: it is none.
        """
        try:
            fields = json.loads(text)
            candidates = tuple(map(Candidate.from_document, fields["candidates"]))
            chosen = candidates[fields["chosen"]]
            if chosen.plan is None:
                raise ValueError(f"{chosen.policy} was chosen and has no plan")
            return cls(chosen, Plan.parse(fields["preferred_plan"]), candidates, fields["reason"])
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise ProtocolError(f"expected a choice of a plan, found {text[:80]!r} ({error})") from error


@contextmanager
def _uncollected() -> Iterator[None]:
    """Turns off the collector of cycles: a decision makes very many small values, and no cycles."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@_uncollected()
def choose(
    now: Plan, preferred_plan: Plan, members: Sequence[str], profile: Profile, settings: SelectorSettings | None = None
) -> Choice:
    """Returns the best plan for the members, or `preferred_plan` if each of its places has a worker and none is slow.

    Args:
        now: under which the state is distributed; valid.
        preferred_plan: with every place filled, by the names of those who had the places last; valid.
        members: who there is.
        profile: of the model; for workers of which it says nothing, speed 1 is assumed.
        settings: what the user wants.

    Raises:
        NotPossible: no candidate has a plan; names the reasons.
        PlanError: the profile is of another model.
    """
    profile.check(now)
    settings = settings or SelectorSettings()
    here = set(members)
    lost = [worker for worker in now.workers if worker not in here]
    filled = fill(preferred_plan, members)
    bases = [now] if filled.tiles == now.tiles else [now, filled]
    makers: list[tuple[str, Callable[[], Plan]]] = []
    bitwise = settings.consistency == "bitwise"
    for base in bases:
        makers += [
            ("stay", partial(_as_it_is, base, members)),
            ("reroute", partial(rerouted, base, members, profile)),
            ("resize", partial(resized, base, members, profile, whole=bitwise)),
        ]
    widths = () if bitwise else settings.widths
    makers += [
        ("reparallelize", partial(reparallelized, now, members, profile, settings.degrees, widths)),
        ("expand", partial(expanded, now, members, profile, widths=widths)),
    ]
    found = [_candidate(policy, make, now, lost, profile, settings) for policy, make in makers]
    at_preferred = None
    if set(filled.workers) == here and all(profile.speed(member) == 1 for member in members):
        # It is the plan that the user gave, or asked for, and nothing speaks against it.
        at_preferred = next(one for one in reversed(found) if one.policy == "stay")
        found = [one for one in found if one.policy != "stay" or one is at_preferred]
    ranked = _ranked(found)
    able = [one for one in ranked if not one.rejected]
    if not able:
        raise NotPossible(
            f"no plan for {len(members)} members: " + "; ".join(f"{one.policy}: {one.rejected}" for one in ranked)
        )
    allowed = [one for one in able if settings.policy in ("auto", one.policy) or one.policy in FREE]
    chosen = at_preferred if at_preferred in able else (allowed or able)[0]
    before = set(now.workers)
    new = [worker for worker in members if worker not in before]
    assert chosen.plan is not None
    assert chosen.step is not None
    why = _reason(chosen, ranked, lost, new, settings.rate(chosen.plan, chosen.step), chosen is at_preferred)
    if not allowed:
        refused = next(one.rejected for one in ranked if one.policy == settings.policy)
        why = f"{why}; --policy={settings.policy} is not possible here: {refused}"
    grown = _n_busy(chosen.plan) > _n_busy(filled)
    return Choice(chosen, chosen.plan if grown else filled, tuple(ranked), why)


def fill(preferred_plan: Plan, members: Sequence[str]) -> Plan:
    """Returns the plan with the places of the lost taken by members without a place; on the same slot, if free."""
    here, idle = set(members), set(preferred_plan.idle)
    places = dict.fromkeys(worker for worker in preferred_plan.workers if worker not in idle)
    lost = [worker for worker in places if worker not in here]
    free = [worker for worker in members if worker not in places]
    taken: dict[str, str] = {}
    for same in (True, False):
        for worker in lost:
            fits = [one for one in free if not same or slot_of(one) == slot_of(worker)]
            if worker not in taken and fits:
                taken[worker] = fits[0]
                free.remove(fits[0])
    return replace(preferred_plan, idle=()).renamed({worker: taken.get(worker, worker) for worker in places})


def _n_busy(plan: Plan) -> int:
    return len(plan.workers) - len(plan.idle)


def _as_it_is(base: Plan, members: Sequence[str]) -> Plan:
    busy, here = {worker for tile in base.tiles for worker in tile.workers}, set(members)
    if missing := [worker for worker in base.workers if worker in busy and worker not in here]:
        raise NotPossible(f"{', '.join(missing)} must be replaced")
    return replace(base, idle=tuple(member for member in members if member not in busy))


def _candidate(
    policy: str,
    make: Callable[[], Plan],
    now: Plan,
    lost: Sequence[str],
    profile: Profile,
    settings: SelectorSettings,
) -> Candidate:
    try:
        plan = make()
    except NotPossible as error:
        return Candidate(policy, rejected=str(error))
    try:
        plan.validate()
    except PlanError as error:  # a policy has erred; the others may not have
        return Candidate(policy, rejected=f"it made no plan: {error}")
    if settings.consistency == "bitwise" and (why := _other_sums(plan, now)):
        return Candidate(policy, rejected=f"{why}, and the consistency is bitwise")
    # A plan that defers weight gradients may go on doing so.
    most = deferrals(plan, profile) if policy == "reroute" else (plan.deferred,)
    plan, step = ordered(plan, profile, most)
    # The first half of the step is done under the plan before.
    way = estimate_transition(now, plan, profile, lost, step.step_s / 2)
    over = step.over(profile)
    if over:
        worker, (needed, cap) = max(over.items(), key=lambda item: item[1][0] - item[1][1])
        rejected = f"{worker} needs {needed:,} bytes and may use {cap:,.0f}"
        return Candidate(policy, plan, step, way, 0.0, rejected)
    score = settings.rate(plan, step) * max(0.0, 1 - way.total_s / settings.next_s)
    return Candidate(policy, plan, step, way, score)


def _other_sums(plan: Plan, now: Plan) -> str:
    """Returns why the plan's results differ from those of `now` in some bit; empty if they do not."""
    size = plan.micro_batch_size
    for tile in plan.tiles:
        if any(len(runs) > 1 or runs[0] != plan.unit(runs[0].start // size) for runs in tile.micro_batches):
            return f"it cuts micro-batches of {','.join(tile.workers)}"
    widths = [sorted({len(tile.workers) for tile in one.tiles}) for one in (now, plan)]
    return f"its TP groups have other widths: {widths[0]} and {widths[1]}" if widths[0] != widths[1] else ""


def _ranked(found: Sequence[Candidate]) -> list[Candidate]:
    """Sorts candidates, best first, one per policy; among equal ones the one that moves the least."""
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


def _reason(
    chosen: Candidate,
    ranked: Sequence[Candidate],
    lost: Sequence[str],
    new: Sequence[str],
    rate: float,
    at_preferred: bool,
) -> str:
    what = [f"{names_text(lost)} left" if lost else "", f"{names_text(new)} joined" if new else ""]
    event = "; ".join(filter(None, what)) or "the same members go on"
    if at_preferred:
        return f"{event}: every place of the plan has its worker, and none is slow ({rate:.4g} samples/s)"
    others = [one for one in ranked if one is not chosen and not one.rejected]
    beside = f", before {others[0].policy} with {others[0].score:.4g}" if others else ""
    return f"{event}: {chosen.policy} is worth {chosen.score:.4g} samples/s ({rate:.4g} while it trains){beside}"


def _renamed(text: str, names: Mapping[str, str]) -> str:
    """Replaces names of workers in a text for people; a name that is part of another one stays."""
    if not names:
        return text
    either = "|".join(map(re.escape, names))
    return re.sub(rf"(?<![^\s,;:()])(?:{either})(?![^\s,;:()])", lambda match: names[match[0]], text)
