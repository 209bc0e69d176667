"""Plans for the next likely events, made in the background before they happen.

In a running job the first member of the new generation chooses the plan. So a worker needs plans only for those events
after which it is the first: the first rank for nearly all of them, the next ones for the loss of those before.

    begin   after a change: the events that may come next go to a process of their own (`ahead_process`)
    find    at the next one: the plan that was made for exactly these members, or None; then it has to be made now

A plan is kept under all that it was made of. Only the incarnation of a newcomer need not be the same, since it is not
known before: `choose` orders workers of different slots without looking at it. Such a plan is found by the slot and
handed out with the true name.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from elaunch.errors import ProtocolError
from elaunch.plan.tiling import Plan, PlanError
from elaunch.policy.ahead_process import Answer, MembershipChange, PlanningRequest, Process
from elaunch.policy.profile import Profile
from elaunch.policy.select import Choice, SelectorSettings
from elaunch.rendezvous.membership import by_node, incarnation, slot_of


def events(
    members: Sequence[str], me: str, last_lost: Sequence[str] = (), again: bool = False, without: Sequence[str] = ()
) -> list[MembershipChange]:
    """Returns the events that are likely to come next and after which `me` is the first member, the likeliest first.

    Those who were lost last return, together or one of them: a replacement is started at once. Or somebody is lost, or
    a node with all its workers.

    Args:
        members: of the present generation, in order of ranks.
        me: one of them.
        last_lost: workers that were lost together; who returns is named with the next incarnation.
        again: whether these members are to be planned anew, before all else.
        without: workers that may be told to leave: planned next, whoever is the first member then.
    """
    assert not isinstance(last_lost, str), "a list of workers"
    slots = set(map(slot_of, members))
    back = [f"{slot_of(one)}#{incarnation(one) + 1}" for one in last_lost if slot_of(one) not in slots]
    found = [MembershipChange()] if again else []
    found += [MembershipChange(joined=tuple(back)), *(MembershipChange(joined=(one,)) for one in back)] if back else []
    found += [MembershipChange(lost=(worker,)) for worker in members]
    found += [MembershipChange(lost=tuple(some)) for some in by_node(members).values()]
    wanted = [MembershipChange(lost=tuple(without))] if without else []
    likely = [event for event in dict.fromkeys(found) if _first(event, members) == me]
    return list(dict.fromkeys([*likely[: int(again)], *wanted, *likely[int(again) :]]))


def _first(event: MembershipChange, members: Iterable[str]) -> str | None:
    # Who joins does not decide.
    return next((worker for worker in members if worker not in event.lost), None)


class Key(NamedTuple):
    """All that determines a plan, as texts; a newcomer's incarnation is left out.

    Attributes:
        now: the plan before.
        preferred_plan: the plan to which the job returns.
        members: in order of ranks.
        settings: in their JSON form.
        profile: digest of its JSON form.
    """

    now: str
    preferred_plan: str
    members: tuple[str, ...]
    settings: str
    profile: str


def key(now: Plan, preferred_plan: Plan, members: Sequence[str], settings: SelectorSettings, profile: str) -> Key:
    """Returns the key under which a plan is kept; `profile` is its digest."""
    known = {*now.workers, *preferred_plan.workers}
    slots = Counter(map(slot_of, members))

    def place(worker: str) -> str:
        slot = slot_of(worker)
        new = worker not in known and slot != worker and slots[slot] == 1
        # No name has a blank in it.
        return f"{slot} anew" if new else worker

    return Key(str(now), str(preferred_plan), tuple(map(place, members)), settings.to_json(), profile)


def digest(profile: str) -> str:
    """Returns the identity of a profile in its JSON form."""
    return hashlib.sha256(profile.encode()).hexdigest()


class Cache:
    """The choices that were made for the events of one job.

    Args:
        job: names the events.
        now, preferred_plan: its plans.
        settings: its settings.
    """

    def __init__(self, job: PlanningRequest, now: Plan, preferred_plan: Plan, settings: SelectorSettings) -> None:
        self.job = job
        self.profile = digest(job.profile)
        self._given = now, preferred_plan, settings
        self._left = set(range(len(job.events)))
        self._found: dict[Key, tuple[tuple[str, ...], str]] = {}

    @property
    def left(self) -> int:
        """Returns the number of events without an answer."""
        return len(self._left)

    def take(self, answer: Answer) -> None:
        """Keeps an answer if it belongs to this job."""
        if answer.number != self.job.number or answer.event not in self._left:
            return
        if answer.choice is not None:
            members = self.job.events[answer.event].members(self.job.members)
            now, preferred_plan, settings = self._given
            self._found[key(now, preferred_plan, members, settings, self.profile)] = members, answer.choice
        self._left.remove(answer.event)

    def find(self, wanted: Key, members: Sequence[str]) -> Choice | None:
        """Returns the choice for exactly these members, whose key is `wanted`; None if none can be used."""
        made_for, text = self._found.get(wanted, ((), ""))
        if not text:
            return None
        names = {before: now for before, now in zip(made_for, members, strict=True) if before != now}
        try:
            choice = Choice.from_json(text)
            if names:
                choice = choice.renamed(names)
            choice.plan.validate(members)
            choice.preferred_plan.validate()
        except (PlanError, ProtocolError):
            return None
        return choice


class PlanningProcess(Protocol):
    """Something that makes plans: a `Process`, or a substitute in tests."""

    @property
    def ended(self) -> bool:
        """Returns whether it was seen to end: then whatever it is sent is lost."""

    def send(self, job: PlanningRequest) -> None:
        """Gives it a job, in place of earlier ones that it has not begun."""

    def close(self) -> None:
        """Ends it."""


class Ahead:
    """Plans for the next likely events, seen from one worker. A failure to make them is a miss, never an error.

    Its methods may be called by any thread. In a process that was forked off, it does nothing and finds nothing.

    Args:
        settings: of the choice.
        start: starts what makes the plans, and has its answers given to the function.

    Attributes:
        settings: may be set anew; what was made with others is not found any more.
    """

    def __init__(
        self,
        settings: SelectorSettings | None = None,
        start: Callable[[Callable[[bytes], None]], PlanningProcess] = Process,
    ) -> None:
        self.settings = settings or SelectorSettings()
        self._start = start
        self._lock = threading.Lock()
        self._planner: PlanningProcess | None = None
        # Replaced as a whole, so that who reads it needs no lock.
        self._cache: Cache | None = None
        self._number = 0
        self._closed = False
        self._pid = os.getpid()
        atexit.register(self.close)

    @property
    def left(self) -> int:
        """Returns the number of events of the last `begin` for which no answer has come yet."""
        cache = self._cache
        return 0 if cache is None else cache.left

    def begin(
        self,
        now: Plan,
        preferred_plan: Plan,
        members: Sequence[str],
        me: str,
        profile: Profile,
        last_lost: Sequence[str] = (),
        again: bool = False,
        without: Sequence[str] = (),
    ) -> None:
        """Starts to plan for what may happen to these members, in place of whatever was begun before. Returns at once.

        Args:
            now: under which the state is distributed.
            preferred_plan: with every place filled, as for `choose`.
            members: of the present generation, in order of ranks.
            me: this worker.
            profile: of the model.
            last_lost: workers that were lost together, at last.
            again: whether a plan for the present members is wanted too.
            without: of them, those without whom a plan is wanted too.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            self._number += 1
            settings = self.settings
            job = PlanningRequest(
                self._number,
                str(now),
                str(preferred_plan),
                tuple(members),
                profile.to_json(),
                settings.to_json(),
                tuple(events(members, me, last_lost, again, without)),
            )
            self._cache = Cache(job, now, preferred_plan, settings)
            if self._planner is not None and self._planner.ended:
                self._planner = None
            if self._planner is None and job.events:
                with contextlib.suppress(OSError):
                    self._planner = self._start(self._take)
            if self._planner is not None:
                self._planner.send(job)

    def find(
        self, now: Plan, preferred_plan: Plan, members: Sequence[str], profile: Profile | None = None
    ) -> Choice | None:
        """Returns what `choose` gives for these arguments if it is there already, else None. Returns at once.

        Args:
            now, preferred_plan, members: as for `choose`.
            profile: with which the plan must have been made; None: with that of `begin`, whatever was measured since.
        """
        cache = self._cache
        if cache is None or os.getpid() != self._pid:
            return None
        made_with = cache.profile if profile is None else digest(profile.to_json())
        return cache.find(key(now, preferred_plan, members, self.settings, made_with), members)

    def close(self) -> None:
        """Ends the process. Called automatically at the end of this process."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed, self._cache = True, None
            planner, self._planner = self._planner, None
            if planner is not None:
                planner.close()
        atexit.unregister(self.close)

    def _take(self, line: bytes) -> None:
        cache = self._cache
        if cache is not None:
            with contextlib.suppress(ProtocolError):
                cache.take(Answer.from_json(line))
