"""Who hangs, from what the workers of a node show of themselves: pure decisions.

In a synchronous job one worker that does not go on is soon waited for by all others. So a worker that waits for peers
is never blamed for that; who is, is one that

- shows nothing: the interpreter's lock has been held by one call, or its process has used no processor time, or its
  training thread has gone round in one loop that calls nothing (`Still`), for longer than the *short* limit, while
  another worker of the node waits. The limit is learnt from the job's own steps:

      max(FLOOR_S + STEPS x median step, STILL_FACTOR x the longest time for which a worker that then went on did so)

  The step is a common one, so any worker's times do. FLOOR_S and STEPS are what a hang may cost. The second term is for
  scripts whose steps do contain such times, a sleep or a slow read; it is of the last `MEMORY_STEPS` steps.
- is busy in the same step or between the same two for longer than the *long* limit, max(LONG_S, LONG_STEPS x median
  step). Whoever computes may be in the middle of an evaluation, of which the steps before tell nothing: one every
  hundred steps that takes five steps' time, or five hundred. So work is no evidence, only its absence is, and
  `LONG_S` is what torch itself gives a collective.

Nothing is known before `MIN_STEPS` steps have been seen. First steps compile, tune kernels and fill caches, which may
take many minutes; so until then all limits are one that the user can set (`first_steps_timeout`), and a job of one
member, for which nobody waits, has none. The first step after a change of
members or plan, a change itself and the saving of a checkpoint get `CHANGE_S` more. So does the script's own code,
between two steps or in one (`Phase.SCRIPT`), where one worker saves, logs, uploads or evaluates for all; how long it
usually takes there is learnt apart from the rest. And so does a worker that nobody on its node waits for, since then
all of them may have the same reason, a slow file system for one.

A device waits for peers by itself, and the training thread for the device. The beating thread sees when that has come
to it (`OnDevice`): then the worker waits for peers. If the beats stop meanwhile, a call that keeps the interpreter's
lock may wait for the device, or hang by itself: such a worker has the long limit.

An elastic function is not judged: it waits in groups of its own, so nobody sees for whom. But when the members change
its groups are freed, and whoever waits in them with them. One that does nothing for `LEAVE_S` after that waits for
something that nobody ends, such as a message that Gloo has lost, and all others wait for it.

If all wait for each other, that is a deadlock (`elaunch.rendezvous.rules.deadlock`). Where all members are workers of
this node that is known after the short limit, and one of them is taken out, so that the others do the step again. Where
there are other nodes their workers may be at fault, which their agents see. So all that is found here is that those of
this node are stalled, after CHANGE_S more: what holds them all up may be a network that is about to be well again, or
whose failure the links are about to find. Bytes that arrive are a sign of progress. Whom it costs its place is found
when all nodes say so.

The last member that holds the state is not blamed while others could be waited for; see
`elaunch.rendezvous.rules.holders`.

One worker is blamed at a time, and all clocks start anew with it. If it happens again in the same step, the script
may do something there that looks like a hang: each time the limit is `AGAIN_FACTOR` times as long.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from elaunch.detect.heartbeat import BEAT_S, LATE_BEAT_S, HeartbeatReading, Phase, Still
from elaunch.errors import UsageError
from elaunch.rendezvous.membership import Deadlock, Stalled, node_of
from elaunch.rendezvous.rules import deadlock
from elaunch.rendezvous.rules.holders import grace_s

VARIABLE = "ELAUNCH_HANG_TIMEOUT"
FLAG = "--hang-timeout"

FLOOR_S = 1.5
"""With the beats and the checks, which come every quarter of a second, and a look at the stacks: below 2 s."""

STEPS = 3
STILL_FACTOR = 3
LONG_S = 600.0
LONG_STEPS = 20
CHANGE_S = 30.0
LEAVE_S = 15.0
"""For an elastic function that does nothing although its groups have been freed: what it waits for may never end."""

AGAIN_FACTOR = 4
MIN_STEPS = 10
FIRST_STEPS_S = 1800.0
FIRST_STEPS_KEY = "--rdzv-conf first_steps_timeout=SECONDS"
STEPS_KEPT = 64
MEMORY_STEPS = 1000
WITNESS_S = 1.0
"""For how long another worker must have waited; at most half the limit."""

GAP_S = 1.0
"""An agent that could not look for so long was stopped or had no processor, and so perhaps had its workers."""

_QUIET = (Phase.LOADING, Phase.AGREEING, Phase.ENDED, Phase.FUNCTION)
_OWN = (Phase.BETWEEN, Phase.SCRIPT)
"""The script's own time: it may sleep there for reasons of which steps tell nothing."""

_ROUTINE = (Phase.STEP, *_OWN)


@dataclass(frozen=True, slots=True)
class HangTimeout:
    """What the user wants: limits that are learnt (auto), one of so many seconds, or none (off)."""

    mode: str = "auto"
    seconds: float = 0.0

    def __str__(self) -> str:
        return self.mode if self.mode != "seconds" else f"{self.seconds:g}"

    @property
    def fixed_s(self) -> float | None:
        """Returns the limit that the user gave, in seconds; None where it is learnt or there is none."""
        return self.seconds if self.mode == "seconds" else None


def parse(text: str, name: str = FLAG) -> HangTimeout:
    """Reads the setting; empty: not given.

    Raises:
        UsageError: it is neither auto, off nor a number of seconds above 0.
    """
    word = text.strip().lower()
    if word in ("", "auto"):
        return HangTimeout()
    if word == "off":
        return HangTimeout("off")
    try:
        seconds = float(word)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UsageError(f"{name}={text}: expected auto, off, or a number of seconds above 0")
    return HangTimeout("seconds", seconds)


@dataclass(frozen=True, slots=True)
class Sight:
    """A worker, as it is seen at one moment.

    Attributes:
        heartbeat: what it shows.
        training, beating: state of the two threads, as in /proc; R: it runs, or would if it had a processor.
        children_work: processes that it has started have used processor time since the last look.
    """

    heartbeat: HeartbeatReading
    training: str = "S"
    beating: str = "S"
    children_work: bool = False


@dataclass(frozen=True, slots=True)
class Hang:
    """A worker that is to be taken out, and why.

    Attributes:
        worker: its identity.
        step: in flight.
        doing: what it is about.
        since_s: for how long.
        limit_s: the time that it had.
        typical_step_s: median of the last steps; None: not known.
        moment_s: its sign of progress before that, in `time.monotonic`; another one since then clears it.
        waits: in a deadlock, who waits for whom; else empty.
        is_early: whether the limit is that of first steps.
    """

    worker: str
    step: int
    doing: str
    since_s: float
    limit_s: float
    typical_step_s: float | None
    moment_s: float
    waits: tuple[str, ...] = ()
    is_early: bool = False


@dataclass(frozen=True, slots=True)
class _Seen:
    """Of one worker, at the last look; `is_own`: it was in code of the script."""

    step: int
    step_since_s: float
    is_own: bool = False
    still_s: float = 0.0
    still_from_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Wait:
    """All members on this node wait for others, since a moment, and may do so for so long."""

    stalled: tuple[Stalled, ...]
    from_s: float
    limit_s: float


@dataclass(slots=True)
class HangDetector:
    """What one node has learnt, and its judgement.

    Args:
        setting: what the user wants.
        first_steps_s: how long a worker may show no progress before `MIN_STEPS` steps have been seen, in seconds.
    """

    setting: HangTimeout = HangTimeout()
    first_steps_s: float = FIRST_STEPS_S
    _steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_KEPT))
    _counted: int = 0
    # Of the script's own code and of the rest: step and seconds, ever shorter ones.
    _stills: dict[bool, deque[tuple[int, float]]] = field(default_factory=lambda: {False: deque(), True: deque()})
    _seen: dict[str, _Seen] = field(default_factory=dict)
    _from_s: float = -math.inf
    _looked_s: float = -math.inf
    _generation: int = 0
    _members: int = 0
    _strikes: int = 0
    _struck_step: int = -1
    _stall: _Wait | None = None

    @property
    def stalled(self) -> tuple[Stalled, ...]:
        """Returns the members on this node, once all have exceeded the wait limit and there are others elsewhere."""
        return self._stall.stalled if self._stall is not None else ()

    @property
    def typical_step_s(self) -> float | None:
        """Returns the median of the last steps; None before `MIN_STEPS`."""
        return statistics.median_high(self._steps_s) if len(self._steps_s) >= MIN_STEPS else None

    @property
    def early_s(self) -> float | None:
        """Returns the limit of first steps, in seconds, while it holds; else None."""
        holds = self.setting.mode == "auto" and self._members > 1 and self.typical_step_s is None
        return self.first_steps_s if holds else None

    def look(
        self,
        now_s: float,
        sights: Mapping[str, Sight],
        generation: int = 0,
        members: Sequence[str] = (),
        holders: Sequence[str] = (),
    ) -> Hang | None:
        """Takes in what the workers show now, and says who is to be taken out, if anybody.

        Args:
            now_s: `time.monotonic` when they were looked at.
            sights: of the workers of this node that use elaunch and can be judged: they run, and are not stopped.
            generation: of the newest generation.
            members: of that, in their order.
            holders: those of them that hold the state, where that is to be saved; the last one has `LAST_S` more.
        """
        if self.setting.mode == "off":
            return None
        if now_s - self._looked_s > GAP_S or generation != self._generation:
            self._from_s = now_s
        self._looked_s, self._generation, self._members = now_s, generation, len(members)
        self._stall = None
        self._seen = {worker: seen for worker, seen in self._seen.items() if worker in sights}
        for worker, sight in sights.items():
            self._learn(now_s, worker, sight)
        found = self._stuck(now_s, sights, holders) or self._deadlock(now_s, sights, members, holders)
        if found is not None:
            self._strike(found, now_s)
        return found

    def take_out(self, now_s: float, found: Deadlock) -> Hang | None:
        """Blames the worker that the leader has chosen of all members of the job; None: it is stalled no more."""
        wait = self._stall
        one = next((one for one in self.stalled if one.worker == found.worker), None)
        if wait is None or one is None:
            return None
        hang = self._hang_of(now_s, one, wait, found.members, found.waits)
        self._strike(hang, now_s)
        return hang

    def _strike(self, found: Hang, now_s: float) -> None:
        again = self._struck_step <= found.step <= self._struck_step + 1
        self._strikes, self._struck_step = self._strikes + 1 if again else 1, found.step
        self._from_s = now_s
        self._stall = None

    # -- learning -----------------------------------------------------------------------------------------------

    def _learn(self, now_s: float, worker: str, sight: Sight) -> None:
        heartbeat, before = sight.heartbeat, self._seen.get(worker)
        if before is None:
            before = _Seen(heartbeat.step, heartbeat.step_since_s)
        if heartbeat.step < before.step:
            self._counted = min(self._counted, heartbeat.step)  # it went back to a checkpoint
        n_steps = heartbeat.step - before.step
        # The first step after a change is not like others.
        if 0 < n_steps < heartbeat.steps_here and heartbeat.step > self._counted:
            mean_s = (heartbeat.step_since_s - before.step_since_s) / n_steps
            self._steps_s.extend([mean_s] * min(n_steps, STEPS_KEPT))
            self._counted = heartbeat.step
        shown_s, from_s = _shown_still(now_s, heartbeat), self._still_from(now_s, sight)
        # One and the same stillness, whatever its threads were about when it was looked at.
        same = shown_s is not None and shown_s == before.still_from_s
        still_s = before.still_s if same else 0.0
        if from_s is not None and heartbeat.steps_here and heartbeat.phase in _ROUTINE:
            still_s = max(still_s, now_s - from_s)
        if before.still_s > BEAT_S and not same:
            # It went on by itself, so this is usual here. What is older and shorter does not matter any more.
            stills = self._stills[before.is_own]
            while stills and stills[-1][1] <= before.still_s:
                stills.pop()
            stills.append((before.step, before.still_s))
        for stills in self._stills.values():
            while stills and stills[0][0] < heartbeat.step - MEMORY_STEPS:
                stills.popleft()
        self._seen[worker] = _Seen(heartbeat.step, heartbeat.step_since_s, heartbeat.phase in _OWN, still_s, shown_s)

    def _still_from(self, now_s: float, sight: Sight) -> float | None:
        """Since when a worker that does not wait has shown nothing; None: it works, or lacks a processor to do so."""
        heartbeat = sight.heartbeat
        if heartbeat.waits or heartbeat.is_doubtful(now_s):
            return None
        from_s: float | None = None
        if heartbeat.still is Still.SPINS or (
            heartbeat.still is Still.ASLEEP and sight.training not in ("R", "D") and not sight.children_work
        ):
            from_s = heartbeat.still_since_s
        if now_s - heartbeat.beat_s > LATE_BEAT_S:
            if sight.beating == "R":
                return None
            from_s = heartbeat.beat_s if from_s is None else from_s
        return None if from_s is None else max(from_s, heartbeat.since_s, self._from_s)

    # -- limits -------------------------------------------------------------------------------------------------

    def limits(self, heartbeat: HeartbeatReading) -> tuple[float, float]:
        """Returns the short and the long limit, in seconds, for a worker that shows this; infinite if unknown."""
        fixed_s = self.setting.fixed_s
        if heartbeat.phase is Phase.LEAVING:
            return LEAVE_S if fixed_s is None else fixed_s, math.inf
        if fixed_s is not None:
            return fixed_s, fixed_s
        again = self._struck_step <= heartbeat.step <= self._struck_step + 1
        times = AGAIN_FACTOR**self._strikes if again else 1
        typical_s = self.typical_step_s
        if typical_s is None:
            early_s = math.inf if self.early_s is None else self.early_s * times
            return early_s, early_s
        stills = self._stills[heartbeat.phase in _OWN]
        longest_s = stills[0][1] if stills else 0.0
        short_s = max(FLOOR_S + STEPS * typical_s, STILL_FACTOR * longest_s) * times
        if heartbeat.phase is not Phase.STEP or not heartbeat.steps_here:
            short_s += CHANGE_S
        long_s = max(LONG_S, LONG_STEPS * typical_s)
        return min(short_s, long_s), long_s

    # -- judging ------------------------------------------------------------------------------------------------

    def _stuck(self, now_s: float, sights: Mapping[str, Sight], holders: Sequence[str]) -> Hang | None:
        """Of those that do not wait and are beyond their limit, the one that is so by most."""
        found: list[tuple[float, Hang]] = []
        sound = {worker for worker, sight in sights.items() if self._still_from(now_s, sight) is None}
        for worker, sight in sights.items():
            heartbeat = sight.heartbeat
            if heartbeat.phase in _QUIET or _waits(now_s, heartbeat):
                continue
            short_s, long_s = self.limits(heartbeat)
            more_s = grace_s(worker, holders, sound - {worker})
            since_s = max(heartbeat.since_s, self._from_s)
            limit_s, from_s = long_s, since_s
            how = _how(now_s, heartbeat) if heartbeat.is_doubtful(now_s) else "busy"
            still_from_s = self._still_from(now_s, sight)
            if still_from_s is not None:
                how = _how(now_s, heartbeat)
                if self.setting.fixed_s is None and not self._is_waited_for(now_s, worker, sights, short_s):
                    short_s = min(short_s + CHANGE_S, long_s)
                if now_s - still_from_s > short_s + more_s:
                    limit_s, from_s = short_s, still_from_s
            limit_s += more_s
            over_s = now_s - from_s - limit_s
            if over_s > 0:
                doing = f"{_doing(heartbeat)}, {how}"
                hang = Hang(
                    worker,
                    heartbeat.step,
                    doing,
                    now_s - from_s,
                    limit_s,
                    self.typical_step_s,
                    heartbeat.since_s,
                    is_early=self.early_s is not None,
                )
                found.append((over_s, hang))
        return max(found, key=lambda one: one[0])[1] if found else None

    def _is_waited_for(self, now_s: float, worker: str, sights: Mapping[str, Sight], limit_s: float) -> bool:
        long_enough_s = min(WITNESS_S, limit_s / 2)
        return any(
            other != worker and sight.heartbeat.waits and now_s - sight.heartbeat.since_s >= long_enough_s
            for other, sight in sights.items()
        )

    def _deadlock(
        self, now_s: float, sights: Mapping[str, Sight], members: Sequence[str], holders: Sequence[str]
    ) -> Hang | None:
        """Whom to take out of those that all wait for each other; of members that are elsewhere too, only note it."""
        wait = self._all_wait(now_s, sights, members)
        if wait is None or now_s - wait.from_s <= wait.limit_s:
            return None
        if len(wait.stalled) < len(members):
            self._stall = wait
            return None
        waits = tuple(map(deadlock.describe, wait.stalled))
        return self._hang_of(now_s, deadlock.victim(wait.stalled, holders), wait, len(members), waits)

    def _all_wait(self, now_s: float, sights: Mapping[str, Sight], members: Sequence[str]) -> _Wait | None:
        """None: one of this node's members does not wait, or is not to be seen."""
        nodes = {node_of(worker) for worker in sights}
        local = [worker for worker in members if node_of(worker) in nodes]
        if not local or len(members) < 2 or not sights.keys() >= set(local):
            return None
        heartbeats = {worker: sights[worker].heartbeat for worker in local}
        if any(heartbeat.phase in _QUIET or not _waits(now_s, heartbeat) for heartbeat in heartbeats.values()):
            return None
        limit_s = 0.0
        for heartbeat in heartbeats.values():
            short_s, long_s = self.limits(heartbeat)
            if self.setting.fixed_s is None and len(local) < len(members):
                short_s = min(short_s + CHANGE_S, long_s)
            # Moving the state, or a checkpoint's last part, may be one long wait for all.
            limit_s = max(limit_s, short_s if heartbeat.phase in _ROUTINE else long_s)
        from_s = max(self._from_s, *(heartbeat.since_s for heartbeat in heartbeats.values()))
        return _Wait(tuple(_stalled(worker, heartbeat) for worker, heartbeat in heartbeats.items()), from_s, limit_s)

    def _hang_of(self, now_s: float, one: Stalled, wait: _Wait, n_members: int, waits: tuple[str, ...]) -> Hang:
        doing = f"{one.doing}, waits like all {n_members} members"
        return Hang(
            one.worker,
            one.step,
            doing,
            now_s - wait.from_s,
            wait.limit_s,
            self.typical_step_s,
            wait.from_s,
            waits,
            self.early_s is not None,
        )


def _stalled(worker: str, heartbeat: HeartbeatReading) -> Stalled:
    awaited = heartbeat.awaited
    return Stalled(
        worker,
        heartbeat.step,
        _doing(heartbeat),
        awaited.generation,
        awaited.operation,
        awaited.peers,
        awaited.others,
    )


def _shown_still(now_s: float, heartbeat: HeartbeatReading) -> float | None:
    """Since when a worker that does not wait has shown nothing, as it shows it itself; None: it moves.

    As long as this is the same it has not gone on: a thread that only tries to get the interpreter's lock, or wakes up
    and sleeps again, runs at some looks too.
    """
    if heartbeat.waits:
        return None
    if heartbeat.still is not Still.MOVES:
        return max(heartbeat.still_since_s, heartbeat.since_s)
    return max(heartbeat.beat_s, heartbeat.since_s) if now_s - heartbeat.beat_s > LATE_BEAT_S else None


def _waits(now_s: float, heartbeat: HeartbeatReading) -> bool:
    return heartbeat.waits and not heartbeat.is_doubtful(now_s)


def _how(now_s: float, heartbeat: HeartbeatReading) -> str:
    if now_s - heartbeat.beat_s > LATE_BEAT_S:
        return "in a call that keeps the interpreter's lock"
    return {
        Still.SPINS: "in a loop that calls nothing",
        Still.ASLEEP: "asleep",
        Still.MOVES: "busy",
    }[heartbeat.still]


def _doing(heartbeat: HeartbeatReading) -> str:
    return {
        Phase.LOADING: "loading",
        Phase.STEP: f"in step {heartbeat.step}",
        Phase.BETWEEN: f"before step {heartbeat.step}",
        Phase.SCRIPT: f"in the script's own code, in step {heartbeat.step}",
        Phase.CHANGING: "changing over to other members or another plan",
        Phase.SAVING: "saving a checkpoint",
        Phase.AGREEING: "waiting for a generation",
        Phase.ENDED: "ended",
        Phase.FUNCTION: f"in its function, in step {heartbeat.step}",
        Phase.LEAVING: f"in its function, in step {heartbeat.step}, which it is to leave",
    }[heartbeat.phase]
