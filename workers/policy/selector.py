"""The policy selector of a worker: what it measures, what it knows of all workers, and how the members go on.

    steps     the first ones and one in EVERY are measured -> told at the next commit barrier -> profile of the job
    a change  the first member that has the state chooses, with what it knows, and tells the others
    ahead     what is likely to happen next is planned before it does, by a process of its own

A member whose speed changes makes the first member look for a better plan; if there is one, all go over to it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from elaunch.errors import ProtocolError, StateError
from elaunch.policies import from_environment
from elaunch.rendezvous.membership import slot_of
from elaunch.workers.plan.tiling import Plan
from elaunch.workers.policy.ahead import Ahead
from elaunch.workers.policy.dvfs import Clocking, ClockRange, upclocked
from elaunch.workers.policy.measure import Measured, Recorder, Sample, Turn
from elaunch.workers.policy.profile import LayerProfile, Profile
from elaunch.workers.policy.select import Choice, Settings, choose
from elaunch.workers.policy.structure import NotPossible

WARM_UP = 1
"""Steps at the start and after each change that are not measured: memory is allocated in them, kernels are chosen."""

FIRST = 4
"""Steps after them that are."""

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
    """What the members go on by; the same for all.

    Attributes:
        plan: for exactly them.
        home: to which the job returns when everybody is back.
        event: fields of the `decision` event; of `clocks_mhz`, by slot, those that devices are to be locked at.
    """

    plan: Plan
    home: Plan
    event: Mapping[str, Any]

    @classmethod
    def of(cls, choice: Choice, clocking: Clocking | None = None, more: str = "") -> Decision:
        """What was chosen; `more` is added to the reason."""
        event = choice.event()
        if clocking is not None:
            more = f"; {clocking.reason}{more}"
            event["clocks_mhz"] = dict(clocking.clocks_mhz)
        return cls(choice.plan, choice.home, {**event, "reason": event["reason"] + more})

    def clock_mhz(self, worker: str) -> int | None:
        """At which the device of a worker is to be locked; None: it chooses by itself."""
        clocks: Mapping[str, int] = self.event.get("clocks_mhz", {})
        return clocks.get(slot_of(worker))

    @classmethod
    def given(cls, plan: Plan, policy: str, reason: str) -> Decision:
        """Nothing was chosen."""
        return cls(plan, plan, {"policy": policy, "reason": reason, "candidates": [], "plan": str(plan)})

    def with_idle(self, workers: Sequence[str]) -> Decision:
        """The same, with more workers, which have nothing to do."""
        if not workers:
            return self
        plan = replace(self.plan, idle=(*self.plan.idle, *workers))
        return replace(self, plan=plan, event={**self.event, "plan": str(plan)})

    def to_bytes(self) -> bytes:
        """For the other members."""
        return json.dumps({"home": str(self.home), "event": self.event}).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> Decision:
        """The inverse of `to_bytes`."""
        said = json.loads(text)
        return cls(Plan.parse(said["event"]["plan"]), Plan.parse(said["home"]), said["event"])


@dataclass(frozen=True)
class History:
    """The changes of a job so far, as its members tell them to who joins.

    Attributes:
        since_t: when it began, in Unix seconds.
        changes: of membership.
        last_lost: workers that were lost together, the last ones; without those whose slot has a worker again.
    """

    since_t: float
    changes: int = 0
    last_lost: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, said: Mapping[str, Any] | None) -> History | None:
        """From the fields, as JSON has them."""
        return None if said is None else cls(said["since_t"], said["changes"], tuple(said["last_lost"]))

    def after(self, before: Sequence[str], members: Sequence[str]) -> History:
        """With a change from some members to others."""
        if set(before) == set(members):
            return self
        here, slots = set(members), set(map(slot_of, members))
        lost = [worker for worker in before if worker not in here] or self.last_lost
        return History(self.since_t, self.changes + 1, tuple(one for one in lost if slot_of(one) not in slots))

    def next_s(self, now_t: float) -> float:
        """Expected seconds to the next change: the mean so far, with one at FIRST_GUESS_S assumed."""
        return (max(0.0, now_t - self.since_t) + FIRST_GUESS_S) / (self.changes + 1)


class Selector:
    """Of the worker `me`.

    Args:
        me: its name.
        measured: nothing yet.
        settings: what the user wants.
        file: where the profile is kept, if anywhere.

    Attributes:
        due: the members are to go on by another plan, as all know since the last barrier.
    """

    def __init__(self, me: str, measured: Measured, settings: Settings, file: Path | None = None) -> None:
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

    # -- in every step --------------------------------------------------------------------------------------------

    def measures(self) -> bool:
        """Whether the coming step is to be measured."""
        step = self._steps - WARM_UP
        warm = step >= 0 and self._since_change >= WARM_UP
        return warm and (step < FIRST or step % EVERY == 0)

    def meters(self) -> bool:
        """Whether in the coming step, if it is measured, the kept bytes are to be counted too: once is enough."""
        return not self._metered

    def add(self, turns: Iterable[Turn], kept_bytes: Mapping[int, float], update_s: float, elements: int) -> None:
        """What this worker has measured in a step; see `Recorder.add`."""
        self._metered = self._metered or bool(kept_bytes)
        self._recorder.add(turns, kept_bytes, update_s, elements)

    def note(
        self,
        links: Callable[[], Mapping[str, tuple[float, float]]],
        memory_bytes: int | None = None,
        clocks: ClockRange | None = None,
    ) -> dict[str, Any]:
        """What to tell the others at the next barrier, as JSON; mostly nothing. See `Recorder.news`."""
        note: dict[str, Any] = {}
        sample = self._recorder.news(links, memory_bytes, clocks, self._anew)
        if sample is not None:
            note["news"], self._anew = sample.to_json(), False
        if self._is_first() and self._better():
            note["reconsider"] = True
        return note

    def heard(self, notes: Mapping[str, Mapping[str, Any]], seconds: float) -> Profile | None:
        """A step has committed.

        Args:
            notes: of all members, in their order.
            seconds: from the commit before.

        Returns:
            On the first member, from time to time, what is known of the job.
        """
        self._steps += 1
        self._since_change += 1
        self.due = any("reconsider" in note for note in notes.values())
        told = {worker: note["news"] for worker, note in notes.items() if "news" in note}
        for worker, one in told.items():
            self.measured.take(slot_of(worker), Sample.from_json(one))
        if self._since_change > 1:  # in the first one something moved
            self.measured.step_took(seconds)
        if self._steps % EVERY == 0 and self._is_first():
            before, self._speeds = self._speeds, self.measured.speeds()
            # Twice the same: once may be anything.
            moved = _alike(self._speeds, before) and not _alike(self._speeds, self._speeds_then)
            if moved and not self._asked and self._settings.policy == "auto":
                self._asked = True
                self._plan_ahead()
        if self._since_change == SETTLED:
            self._plan_ahead()
        since_s = time.monotonic() - self._published_s
        if not self._is_first() or since_s < (PUBLISH_S if told else REPEAT_S) or self.measured.empty:
            return None
        self._published_s = time.monotonic()
        profile = self.profile()
        if self._file is not None:
            _write(self._file, profile)
        return profile

    @property
    def known(self) -> bool:
        """Whether this worker has measured something."""
        return self._steps > WARM_UP

    def _better(self) -> bool:
        """Whether the members would do better by another plan, since speeds have changed."""
        here = self._here
        if here is None or not self._asked:
            return False
        found = self._ahead.find(*here)
        if found is None:
            return False
        self._asked, self._speeds_then = False, self._speeds
        stay = next((one for one in found.candidates if one.policy == "stay" and not one.rejected), None)
        return stay is not None and found.chosen.score > (1 + GAIN) * stay.score

    def profile(self) -> Profile:
        """What is known of the job."""
        return self.measured.profile(None if self._here is None else self._here.plan)

    # -- changes --------------------------------------------------------------------------------------------------

    def decide(self, now: Plan, home: Plan, members: Sequence[str]) -> Choice:
        """How these members go on.

        Args:
            now: the plan by which the state is distributed.
            home: the plan with all places filled.
            members: of the generation.

        Raises:
            NotPossible: no candidate has a plan; names the reasons.
        """
        found = self._ahead.find(now, home, members)
        return choose(now, home, members, self.profile(), self._now()) if found is None else found

    def clocking(self, plan: Plan) -> Clocking | None:
        """The clocks at which stragglers of a plan hold nobody up; None: none are to be set."""
        devices = self.measured.clocks()
        if not devices:
            return None
        try:
            return upclocked(plan, self.profile(), devices)
        except NotPossible:
            return None

    def entered(self, plan: Plan, home: Plan, members: Sequence[str], history: History | None) -> None:
        """The members go on by a plan.

        Args:
            plan: for them.
            home: with all places filled.
            members: of the generation.
            history: until then, as the one knew it who decided, if anybody did.
        """
        before = self._here.members if self._here is not None else ()
        if before:
            self.history = self.history.after(before, members)
        elif history is not None:
            self.history = history
        self._anew = self._anew or not set(members) <= set(before)
        self._here = _Here(plan, home, tuple(members))
        self.measured.keep({slot_of(worker) for worker in members})
        self.measured.plan_changed()
        self._since_change, self._asked, self._speeds_then, self.due = 0, False, self._speeds, False

    def close(self) -> None:
        """End what plans ahead."""
        self._ahead.close()

    def _is_first(self) -> bool:
        return self._here is not None and self._here.members[0] == self._me

    def _now(self) -> Settings:
        return replace(self._settings, next_s=self.history.next_s(time.time()))

    def _plan_ahead(self) -> None:
        assert self._here is not None
        self._ahead.settings = self._now()
        self._ahead.begin(*self._here, self._me, self.profile(), self.history.last_lost, again=self._asked)


def _alike(speeds: Mapping[str, float], others: Mapping[str, float]) -> bool:
    """Whether the same workers are slow, and about as slow."""
    if speeds.keys() != others.keys():
        return False
    return all(abs(speed - others[slot]) <= WAVER * others[slot] for slot, speed in speeds.items())


def make_selector(
    worker: str, layers: Sequence[LayerProfile], elements: Sequence[int], name: str, slot_samples: float = 1.0
) -> Selector:
    """For a worker of a job, with the settings of its environment; see `Measured`, and `Settings.slot_samples`.

    Raises:
        UsageError: a setting is none.
        StateError: the profile that was given is none, or of another model.
    """
    wishes = from_environment(os.environ)
    prior = None
    if wishes.profile is not None and wishes.profile.exists():
        try:
            prior = Profile.load(wishes.profile)
        except (ProtocolError, OSError) as error:
            raise StateError(f"--profile: {error}; give another file, or remove it to have it written anew") from error
        if len(prior.layers) != len(layers):
            raise StateError(
                f"--profile={wishes.profile} has {len(prior.layers)} layers and the model {len(layers)}; give the file "
                "of this model, or the name of a new one"
            )
    settings = Settings(wishes.policy, wishes.consistency or "fast", slot_samples=slot_samples)
    return Selector(worker, Measured(name, layers, elements, prior), settings, wishes.profile)


def _write(file: Path, profile: Profile) -> None:
    """What cannot be written is not: the job goes on."""
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
    home: Plan
    members: tuple[str, ...]
