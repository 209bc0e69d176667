"""The policy selector of a worker: what it measures, what it knows of all workers, and how the members go on.

    steps     the first ones and one in EVERY are measured -> told at the next commit barrier -> profile of the job
    a change  the first member that has the state chooses, with what it knows, and tells the others
    ahead     what is likely to happen next is planned before it does, by a process of its own

A member that becomes slow, or recovers, makes the first member look for a better plan; if there is one, all go over to
it. Or, as the user wants it, the first member tells the slow one to leave (`elaunch.policy.slow`).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from elaunch.errors import ProtocolError, StateError
from elaunch.plan.tiling import Plan
from elaunch.policy.ahead import Ahead
from elaunch.policy.dvfs import Clocking, ClockRange, upclocked
from elaunch.policy.matching import prepare
from elaunch.policy.measure import Measured, Recorder, Sample, Turn
from elaunch.policy.profile import LayerProfile, Profile
from elaunch.policy.reparallelize import Degrees
from elaunch.policy.select import Candidate, Choice, Settings, choose
from elaunch.policy.settings import SlowPolicy, from_environment
from elaunch.policy.slow import Excuse, Remedies
from elaunch.policy.stragglers.slow_links import LinkWatch, Slower
from elaunch.policy.stragglers.track import SPAN_STEPS, Change
from elaunch.policy.structure import NotPossible
from elaunch.rendezvous.membership import slot_of

WARM_UP = 1
"""Steps at the start and after each change that are not measured: memory is allocated in them, kernels are chosen."""

FIRST = 8
"""Steps after them that are: enough to know what is usual (`elaunch.policy.stragglers.track.LEARN`)."""

EVERY = 4
"""Of the steps after those, one in so many is."""

SETTLED = 10
"""Steps after a change after which the next ones are planned: until then little is measured."""

WAVER = 0.1
"""Speeds of two looks that differ by less are the same."""

GAIN = 0.03
"""A plan for the same members must be worth so much more than the present one."""

PUBLISH_S = 5.0
"""From one account of the profile to the next, if there is news."""

REPEAT_S = 60.0
"""If there is none: figures that stay as they are become stable."""

FIRST_GUESS_S = 3600.0
"""Seconds to the next change, before there was any."""


@dataclass(frozen=True)
class Decision:
    """What the members go on by; the same on all of them.

    Attributes:
        plan: for exactly them.
        preferred_plan: to which the job returns when everybody is back.
        event: fields of the `decision` event; of `clocks_mhz`, by slot, those that devices are to be locked at.
    """

    plan: Plan
    preferred_plan: Plan
    event: Mapping[str, Any]

    @classmethod
    def of(cls, choice: Choice, clocking: Clocking | None = None, more: str = "") -> Decision:
        """Returns the decision for a choice; `more` is added to the reason."""
        event = choice.event()
        if clocking is not None:
            more = f"; {clocking.reason}{more}"
            event["clocks_mhz"] = dict(clocking.clocks_mhz)
        return cls(choice.plan, choice.preferred_plan, {**event, "reason": event["reason"] + more})

    def clock_mhz(self, worker: str) -> int | None:
        """Returns the clock at which to lock a worker's device; None: the device chooses."""
        clocks: Mapping[str, int] = self.event.get("clocks_mhz", {})
        return clocks.get(slot_of(worker))

    @classmethod
    def given(cls, plan: Plan, policy: str, reason: str) -> Decision:
        """Returns a decision in which nothing was chosen."""
        return cls(plan, plan, {"policy": policy, "reason": reason, "candidates": [], "plan": str(plan)})

    def with_idle(self, workers: Sequence[str]) -> Decision:
        """Returns the same with more workers, which have nothing to do."""
        if not workers:
            return self
        plan = replace(self.plan, idle=(*self.plan.idle, *workers))
        return replace(self, plan=plan, event={**self.event, "plan": str(plan)})

    def to_bytes(self) -> bytes:
        """Returns the bytes that the other members get."""
        return json.dumps({"preferred_plan": str(self.preferred_plan), "event": self.event}).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> Decision:
        """Reverses `to_bytes`."""
        fields = json.loads(text)
        return cls(Plan.parse(fields["event"]["plan"]), Plan.parse(fields["preferred_plan"]), fields["event"])


@dataclass(frozen=True)
class History:
    """The changes of a job so far, as its members tell them to those that join.

    Attributes:
        since_t: when it began, in Unix seconds.
        changes: of membership.
        last_lost: workers that were lost together, the last ones; without those whose slot has a worker again.
        factors: of slots that are slow or fast: how many times as long their work takes.
        replaced: slots whose slow workers were replaced.
    """

    since_t: float
    changes: int = 0
    last_lost: tuple[str, ...] = ()
    factors: Mapping[str, float] = field(default_factory=dict)
    replaced: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, fields: Mapping[str, Any] | None) -> History | None:
        """Reads the fields from JSON values."""
        if fields is None:
            return None
        since_t, changes, last_lost = fields["since_t"], fields["changes"], tuple(fields["last_lost"])
        return cls(since_t, changes, last_lost, fields["factors"], tuple(fields["replaced"]))

    def after(self, before: Sequence[str], members: Sequence[str]) -> History:
        """Returns the history with one more change, from some members to others."""
        if set(before) == set(members):
            return self
        here, slots = set(members), set(map(slot_of, members))
        lost = [worker for worker in before if worker not in here] or self.last_lost
        return History(self.since_t, self.changes + 1, tuple(one for one in lost if slot_of(one) not in slots))

    def next_s(self, now_t: float) -> float:
        """Returns the expected seconds to the next change: the mean so far, with one at FIRST_GUESS_S assumed."""
        return (max(0.0, now_t - self.since_t) + FIRST_GUESS_S) / (self.changes + 1)


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
        settings: Settings,
        file: Path | None = None,
        slow_policy: SlowPolicy = "rebalance",
        min_nodes: int = 1,
    ) -> None:
        self._me, self._settings, self._file = me, settings, file
        self._published_s = -REPEAT_S
        self.due = False
        self.measured = measured
        self.history = History(time.time())
        self._recorder = Recorder()
        self._ahead = Ahead(settings)
        self._steps = 0
        self._since_change = 0
        self._anew = True
        self._metered = False
        self._here: _Here | None = None
        # Of workers that are not as fast as the others: when the members went on by their plan, and at the last news.
        self._speeds_then: dict[str, float] = {}
        self._speeds: dict[str, float] = {}
        self._asked = False
        self._own_links = LinkWatch()
        self._closer_until = 0
        self._clock_s = 0.0
        self._remedies = Remedies(slow_policy, min_nodes)
        self._events: list[dict[str, Any]] = []
        self._publish = False
        self._excused: Excuse | None = None

    # -- in every step --------------------------------------------------------------------------------------------

    def measures(self) -> bool:
        """Returns whether to measure the coming step."""
        # Counted from the last change, so that all members look at the same steps, who has joined included.
        step = self._since_change - WARM_UP
        return step >= 0 and (step < FIRST or step % EVERY == 0 or self._since_change < self._closer_until)

    def meters(self) -> bool:
        """Returns whether to count the kept bytes, too, if the coming step is measured: once is enough."""
        return not self._metered

    def add(self, turns: Iterable[Turn], kept_bytes: Mapping[int, float], update_s: float, elements: int) -> None:
        """Takes in what this worker has measured in a step; see `Recorder.add`."""
        self._metered = self._metered or bool(kept_bytes)
        self._recorder.add(turns, kept_bytes, update_s, elements)

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
            if self.measured.doubts and self._since_change >= self._closer_until:
                note["closer"] = True
            if (excuse := self._remedies.take()) is not None:
                note["excuse"] = excuse.to_json()
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
        self._steps += 1
        self._since_change += 1
        self._clock_s += seconds
        self.due = any("reconsider" in note for note in notes.values())
        told = {worker: note["news"] for worker, note in notes.items() if "news" in note}
        for worker, one in told.items():
            self.measured.take(slot_of(worker), Sample.from_json(one))
        # What is told at the barrier of a step is of the one before.
        self._look(notes, (self._steps if number is None else number) - 1)
        if self._since_change > 1:  # in the first one something moved
            self.measured.step_took(seconds)
        if self._since_change == SETTLED:
            self._plan_ahead()
        since_s = time.monotonic() - self._published_s
        due = self._publish or since_s >= (PUBLISH_S if told else REPEAT_S)
        if not self._is_first() or not due or self.measured.empty:
            return None
        self._publish = False
        self._published_s = time.monotonic()
        profile = self.profile()
        if self._file is not None:
            _write(self._file, profile)
        return profile

    @property
    def known(self) -> bool:
        """Returns whether this worker has measured anything."""
        return self._steps > WARM_UP

    def events(self) -> list[dict[str, Any]]:
        """Returns the fields of the `slow` events since the last call; on the first member only."""
        events, self._events = self._events, []
        return events

    def excused(self) -> Excuse | None:
        """Returns, once, the request for this worker to leave, when all members know it since the last barrier."""
        excuse, self._excused = self._excused, None
        return excuse

    def _look(self, notes: Mapping[str, Mapping[str, Any]], step: int) -> None:
        """Takes in what all have told of the measured step, and the first member's conclusions."""
        paces = {slot_of(worker): note["pace"] for worker, note in notes.items() if "pace" in note}
        for worker, note in notes.items():
            if "links" in note:
                usual = {slot: (rate, carried) for slot, (rate, carried) in note["links"].items()}
                self.measured.take_links(slot_of(worker), usual)
            if "closer" in note:
                self._closer_until = self._since_change + SPAN_STEPS
            if "excuse" in note:
                excuse = Excuse.from_json(note["excuse"])
                self._remedies.heard(excuse)
                self._excused = excuse if self._me in excuse.workers else None
        if not paces:
            return
        slower = {
            (slot_of(worker), slot): Slower(*one)
            for worker, note in notes.items()
            for slot, one in note.get("slower", {}).items()
        }
        changes = self.measured.look(step, self._clock_s, paces, slower)
        if not self._is_first():
            return
        before, self._speeds = self._speeds, self.measured.speeds()
        self._publish = self._publish or bool(changes)
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
        self._closer_until = 0
        if (event := self._remedies.entered(members)) is not None and self._is_first():
            self._events.append(event)
        self._since_change, self._asked, self._speeds_then, self.due = 0, False, self._speeds, False
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

    def _now(self) -> Settings:
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
    """Returns a selector for a worker, with the settings of its environment; see `Measured` and `Settings`.

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
    settings = Settings(
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
