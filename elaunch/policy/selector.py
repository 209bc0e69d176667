"""The policy selector of a worker: what it measures, what it knows of all workers, and how the members go on.

    steps     the first ones and one in EVERY are measured -> told at the next commit barrier -> profile of the job
    a change  the first member that has the state chooses, with what it knows, and tells the others
    ahead     what is likely to happen next is planned before it does, by a process of its own

A member that becomes slow, or recovers, makes the first member look for a better plan; if there is one, all go over to
it. Or, as the user wants it, the first member tells the slow one to leave (`elaunch.policy.stragglers.remedies`).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from elaunch.errors import ProtocolError, StateError
from elaunch.plan.tiling import Plan
from elaunch.policy.ahead import Ahead
from elaunch.policy.cadence import WARM_UP, Cadence, Publishing
from elaunch.policy.candidates.matching import prepare
from elaunch.policy.candidates.reparallelize import Degrees
from elaunch.policy.candidates.structure import NotPossible
from elaunch.policy.decision import History
from elaunch.policy.dvfs import Clocking, ClockRange, upclocked
from elaunch.policy.measure import Measured, Recorder
from elaunch.policy.measuring.contradictions import Doubts
from elaunch.policy.profile import LayerProfile, Profile
from elaunch.policy.sample import MeasuredTurn, Overheads, Sample
from elaunch.policy.select import Candidate, Choice, SelectorSettings, choose
from elaunch.policy.settings import SlowPolicy, from_environment
from elaunch.policy.stragglers.remedies import Eviction, Remedies
from elaunch.policy.stragglers.slow_links import LinkWatch, Slower
from elaunch.policy.stragglers.track import Change
from elaunch.rendezvous.membership import slot_of

SETTLED = 10
"""Steps after a change after which the next ones are planned: until then little is measured."""

WAVER = 0.1
"""Speeds of two looks that differ by less are the same."""

GAIN = 0.03
"""A plan for the same members must be worth so much more than the present one."""


class Selector:
    """What the worker `me` measures, tells and knows, and how the members choose their plan.

    Args:
        me: its name.
        measured: nothing yet.
        settings: what the user wants.
        file: where the profile is kept, if anywhere.
        slow_policy: what is done about slow workers.
        min_nodes: so many are to be left.

    Attributes:
        due: the members are to go on by another plan, as all know since the last barrier.
    """

    def __init__(
        self,
        me: str,
        measured: Measured,
        settings: SelectorSettings,
        file: Path | None = None,
        slow_policy: SlowPolicy = "rebalance",
        min_nodes: int = 1,
    ) -> None:
        self._me, self._settings, self._file = me, settings, file
        self.due = False
        self.measured = measured
        self.history = History(time.time())
        self._recorder = Recorder()
        self._ahead = Ahead(settings)
        self._cadence = Cadence()
        self._publishing = Publishing()
        self._anew = True
        self._here: _Here | None = None
        # Of workers that are not as fast as the others: when the members went on by their plan, and at the last news.
        self._speeds_then: dict[str, float] = {}
        self._speeds: dict[str, float] = {}
        self._asked = False
        self._own_links = LinkWatch()
        self._remedies = Remedies(slow_policy, min_nodes)
        self._events: list[dict[str, Any]] = []
        self._doubts = Doubts()
        self._eviction: Eviction | None = None

    # -- in every step --------------------------------------------------------------------------------------------

    def measures(self) -> bool:
        """Returns whether to measure the coming step."""
        return self._cadence.measures()

    def meters(self) -> bool:
        """Returns whether to count the kept bytes, too, if the coming step is measured: once is enough."""
        return not self._cadence.metered

    def add(
        self,
        turns: Iterable[MeasuredTurn],
        kept_bytes: Mapping[int, float],
        update_s: float,
        elements: int,
        weights: Mapping[int, tuple[float, float]] | None = None,
        overheads: Overheads | None = None,
    ) -> None:
        """Takes in what this worker has measured in a step; see `Recorder.add`."""
        self._cadence.metered = self._cadence.metered or bool(kept_bytes)
        self._recorder.add(turns, kept_bytes, update_s, elements, weights, overheads)

    def note(
        self,
        links: Callable[[], Mapping[str, tuple[float, float]]],
        memory_bytes: int | None = None,
        clocks: ClockRange | None = None,
        carried: Callable[[], Mapping[str, tuple[int, float, float]]] = dict,
    ) -> dict[str, Any]:
        """Returns what to tell the others at the next barrier, as JSON values; mostly nothing.

        Args:
            links, memory_bytes, clocks: see `Recorder.news`.
            carried: what the links of this worker have carried so far; see `LinkWatch.look`.
        """
        note: dict[str, Any] = {}
        sample = self._recorder.news(links, memory_bytes, clocks, self._anew)
        if sample is not None:
            note["news"], self._anew = sample.to_json(), False
        pace = self._recorder.pace()
        if pace is not None:
            note["pace"] = round(pace, 4)
            if slower := self._own_links.look(carried()):
                note["slower"] = {slot: [round(figure, 3) for figure in one] for slot, one in slower.items()}
            if "news" in note and (usual := self._own_links.usual()):
                note["links"] = {slot: [round(rate), carried_bytes] for slot, (rate, carried_bytes) in usual.items()}
        if self._is_first():
            self._weigh()
            if self._better():
                note["reconsider"] = True
            if self.measured.doubts and not self._cadence.looks_closer:
                note["closer"] = True
            if (eviction := self._remedies.take()) is not None:
                note["eviction"] = eviction.to_json()
        return note

    def heard(
        self, notes: Mapping[str, Mapping[str, Any]], seconds: float, number: int | None = None
    ) -> Profile | None:
        """Takes in what the members told with a step that has committed.

        Args:
            notes: of all members, in their order.
            seconds: from the commit before.
            number: of the step; None: as many as were heard of.

        Returns:
            On the first member, from time to time, what is known of the job.
        """
        self._cadence.committed(seconds)
        self.due = any("reconsider" in note for note in notes.values())
        told = {worker: note["news"] for worker, note in notes.items() if "news" in note}
        for worker, one in told.items():
            self.measured.take(slot_of(worker), Sample.from_json(one))
        # What is told at the barrier of a step is of the one before.
        self._look(notes, (self._cadence.steps if number is None else number) - 1)
        if self._cadence.since_change > 1:  # in the first one something moved
            self.measured.step_took(seconds)
        if self._cadence.since_change == SETTLED:
            self._plan_ahead()
        if not self._is_first() or not self._publishing.due(bool(told)) or self.measured.empty:
            return None
        self._publishing.told()
        profile = self.profile()
        found = self.measured.contradictions(profile)
        self._doubts.hear(found)
        profile = replace(profile, contradictions=tuple(one.text for one in found))
        if self._file is not None:
            _write(self._file, profile)
        return profile

    @property
    def known(self) -> bool:
        """Returns whether this worker has measured anything."""
        return self._cadence.steps > WARM_UP

    def events(self) -> list[dict[str, Any]]:
        """Returns the fields of the `slow` events since the last call; on the first member only."""
        events, self._events = self._events, []
        return events

    def doubts(self) -> list[dict[str, Any]]:
        """Returns the fields of the `profile_doubtful` events since the last call; on the first member only."""
        return self._doubts.take()

    def eviction(self) -> Eviction | None:
        """Returns, once, the request for this worker to leave, when all members know it since the last barrier."""
        eviction, self._eviction = self._eviction, None
        return eviction

    def _look(self, notes: Mapping[str, Mapping[str, Any]], step: int) -> None:
        """Takes in what all have told of the measured step, and the first member's conclusions."""
        paces = {slot_of(worker): note["pace"] for worker, note in notes.items() if "pace" in note}
        for worker, note in notes.items():
            if "links" in note:
                usual = {slot: (rate, carried) for slot, (rate, carried) in note["links"].items()}
                self.measured.take_links(slot_of(worker), usual)
            if "closer" in note:
                self._cadence.look_closer()
            if "eviction" in note:
                eviction = Eviction.from_json(note["eviction"])
                self._remedies.heard(eviction)
                self._eviction = eviction if self._me in eviction.workers else None
        if not paces:
            return
        slower = {
            (slot_of(worker), slot): Slower(*one)
            for worker, note in notes.items()
            for slot, one in note.get("slower", {}).items()
        }
        changes = self.measured.look(step, self._cadence.clock_s, paces, slower)
        if not self._is_first():
            return
        before, self._speeds = self._speeds, self.measured.speeds()
        self._publishing.at_once = self._publishing.at_once or bool(changes)
        for change in changes:
            self._answer(change)
        # Twice the same: when a worker becomes slow, what is known of it moves for some looks.
        moved = _alike(self._speeds, before) and not _alike(self._speeds, self._speeds_then)
        moved = moved or any(change.kind == "link" for change in changes)
        if moved and not self._asked and not self.measured.waits and self._may_rebalance():
            self._asked = True
            self._plan_ahead()

    def _may_rebalance(self) -> bool:
        return self._settings.policy == "auto" and self._remedies.rebalances

    def _answer(self, change: Change) -> None:
        """Reacts to a change, and reports it once the reaction is known."""
        assert self._here is not None
        if self._remedies.weighs(change, self._here.members):
            self._plan_ahead()
            return
        self._events.append({**change.fields(), **self._remedies.answer(change)})

    def _weigh(self) -> None:
        """Finds out whether the members would do better without the slow ones, once that can be known."""
        here, weighed = self._here, self._remedies.weighed
        if here is None or not weighed:
            return
        rest = tuple(member for member in here.members if member not in weighed)
        with_them, without = self._ahead.find(*here), self._ahead.find(here.plan, here.preferred_plan, rest)
        if self._ahead.left and (with_them is None or without is None):
            return
        stay = None if with_them is None else _staying(with_them)
        best, rest_best = (None if choice is None else choice.chosen.score for choice in (with_them, without))
        score = None if stay is None else stay.score
        self._events.append(self._remedies.decide(score, best, rest_best, GAIN))

    def _better(self) -> bool:
        """Returns whether the members would do better by another plan, since speeds have changed."""
        here = self._here
        if here is None or not self._asked:
            return False
        found = self._ahead.find(*here)
        if found is None:
            return False
        self._asked, self._speeds_then = False, self._speeds
        stay = _staying(found)
        return stay is not None and found.chosen.score > (1 + GAIN) * stay.score

    def profile(self) -> Profile:
        """Returns what is known of the job."""
        return self.measured.profile(None if self._here is None else self._here.plan)

    # -- changes --------------------------------------------------------------------------------------------------

    def decide(self, now: Plan, preferred_plan: Plan, members: Sequence[str]) -> Choice:
        """Decides how these members go on.

        Args:
            now: the plan by which the state is distributed.
            preferred_plan: the plan with all places filled.
            members: of the generation.

        Raises:
            NotPossible: no candidate has a plan; names the reasons.
        """
        found = self._ahead.find(now, preferred_plan, members)
        return choose(now, preferred_plan, members, self.profile(), self._now()) if found is None else found

    def clocking(self, plan: Plan) -> Clocking | None:
        """Returns the clocks at which stragglers of a plan hold nobody up; None: none are to be set."""
        devices = self.measured.clocks()
        if not devices:
            return None
        try:
            return upclocked(plan, self.profile(), devices)
        except NotPossible:
            return None

    def entered(self, plan: Plan, preferred_plan: Plan, members: Sequence[str], history: History | None) -> None:
        """Notes the plan by which the members go on.

        Args:
            plan: for them.
            preferred_plan: with all places filled.
            members: of the generation.
            history: until then, as the one knew it who decided, if anybody did.
        """
        before = self._here.members if self._here is not None else ()
        if before:
            self.history = self.history.after(before, members)
        elif history is not None:
            self.history = history
            self.measured.adopt(history.factors)
            self._remedies.replaced |= set(history.replaced)
        self._anew = self._anew or not set(members) <= set(before)
        self._here = _Here(plan, preferred_plan, tuple(members))
        self.measured.keep(members)
        self.measured.plan_changed()
        self._own_links.forget()
        if (event := self._remedies.entered(members)) is not None and self._is_first():
            self._events.append(event)
        self._cadence.changed()
        self._asked, self._speeds_then, self.due = False, self._speeds, False
        if not before and self._is_first():
            # When the job begins, and never while it waits to go on after a change.
            prepare(len({tile.workers for tile in plan.tiles}))

    def told_history(self) -> dict[str, Any]:
        """Returns what members tell those that join, as JSON values; `History.from_json` reads it."""
        known = replace(self.history, factors=self.measured.known(), replaced=tuple(sorted(self._remedies.replaced)))
        return asdict(known)

    def close(self) -> None:
        """Ends the planning ahead."""
        self._ahead.close()

    def _is_first(self) -> bool:
        return self._here is not None and self._here.members[0] == self._me

    def _now(self) -> SelectorSettings:
        return replace(self._settings, next_s=self.history.next_s(time.time()))

    def _plan_ahead(self) -> None:
        assert self._here is not None
        self._ahead.settings = self._now()
        without, lost = self._remedies.weighed, self.history.last_lost
        again = self._asked or bool(without)
        self._ahead.begin(*self._here, self._me, self.profile(), lost, again=again, without=without)


def _staying(choice: Choice) -> Candidate | None:
    """Returns the candidate that keeps the present plan; None if it cannot go on."""
    return next((one for one in choice.candidates if one.policy == "stay" and not one.rejected), None)


def _alike(speeds: Mapping[str, float], others: Mapping[str, float]) -> bool:
    """Returns whether the same workers are slow, and about equally so."""
    if speeds.keys() != others.keys():
        return False
    return all(abs(speed - others[slot]) <= WAVER * others[slot] for slot, speed in speeds.items())


def make_selector(
    worker: str,
    layers: Sequence[LayerProfile],
    elements: Sequence[int],
    name: str,
    row_samples: float = 1.0,
    min_nodes: int = 1,
    plan_widths: Collection[int] = (),
) -> Selector:
    """Returns a selector for a worker, with the settings of its environment; see `Measured` and `SelectorSettings`.

    `plan_widths` are the widths of the tiles of the first plan. With `--tp` plans may have those and the plan's own.

    Raises:
        UsageError: a setting is none.
        StateError: the profile that was given is none, or of another model.
    """
    policy_config = from_environment(os.environ)
    prior = None
    if policy_config.profile is not None and policy_config.profile.exists():
        try:
            prior = Profile.load(policy_config.profile)
        except (ProtocolError, OSError) as error:
            raise StateError(f"--profile: {error}; give another file, or remove it to have it written anew") from error
        if len(prior.layers) != len(layers):
            raise StateError(
                f"--profile={policy_config.profile} has {len(prior.layers)} layers and the model {len(layers)}; "
                "give the file of this model, or the name of a new one"
            )
    widths = tuple(sorted({*plan_widths, *policy_config.tp})) if plan_widths and policy_config.tp else ()
    degrees = Degrees(policy_config.dp, policy_config.pp or Degrees.pp)
    settings = SelectorSettings(
        policy_config.policy, policy_config.consistency or "fast", degrees, widths, row_samples=row_samples
    )
    measured = Measured(name, layers, elements, prior)
    return Selector(worker, measured, settings, policy_config.profile, policy_config.slow_policy, min_nodes)


def _write(file: Path, profile: Profile) -> None:
    """Writes a file if it can; the job goes on in either case."""
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        part.write_text(profile.to_json())
        part.replace(file)
    except OSError as error:
        print(f"elaunch: --profile={file}: {error.strerror}; the profile is not written", file=sys.stderr)
        part.unlink(missing_ok=True)


class _Here(NamedTuple):
    """How the members go on."""

    plan: Plan
    preferred_plan: Plan
    members: tuple[str, ...]
