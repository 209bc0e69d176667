"""Which worker or node is slow: what each takes for its work, beside others and beside its past. Pure.

A *look* is what one measured step has shown. It has a *score* for each worker: the logarithm of what the worker took
for its work, waiting taken off, relative to what that work usually takes and to how the whole job fares in this step.

    usual     of a layer with so many rows: the median of those who do it. Where only one node does, it does not change
              any more once it is known; where only one worker does, it is what it took in the first LEARN looks
    common    the change that most workers share, so that a slow-down of the whole job is nobody's fault
    score     log(seconds / (usual * common))

`elaunch.policy.stragglers.track` says what follows from scores, and how sure it is. Looks come every few steps;
`Detector.doubts` says that every step should be looked at until it is clear. Fail-slow workers, and what is to be done
with them: ElasWave 3 and 7.7.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elaunch.policy.stragglers.track import (
    LEARN,
    THRESHOLD,
    Change,
    Look,
    SpeedState,
    Track,
    centre,
    mad,
    short,
    spread,
)
from elaunch.rendezvous.membership import node_of, slot_of

TOLD_AGAIN = math.log(1.25)
"""Who is slow, and becomes slower or faster by more, is told of again."""

MANY = 8
"""So many workers show how much looks deviate before there is a past."""

HOLD = 8
"""Looks for which a slow worker is not told of while the others of its node seem to become slow as well."""

Work = Hashable
"""What workers have in common: a layer and a number of rows."""


class Detector:
    """Finds the slow workers of a job. All methods take O(workers), or O(layers of all workers) after news.

    Workers are told apart by their slots, since what makes one slow mostly does so to its replacement.
    """

    def __init__(self) -> None:
        self._workers: dict[str, str] = {}
        # The last worker of each slot, also of those that are away.
        self._names: dict[str, str] = {}
        self._told: dict[str, dict[Work, float]] = {}
        self._usual: dict[Work, float] = {}
        # The number of looks when work was first told of.
        self._since: dict[Work, int] = {}
        self._tracks: dict[str, Track] = {}
        # Of workers whose work nobody on another node does: what their looks are taken relative to, once it is known.
        self._own: dict[str, _Own] = {}
        self._sums: dict[str, tuple[float, float]] = {}
        self._common: deque[float] = deque([0.0], maxlen=3)
        self._waiting: dict[str, _Countdown] = {}
        self._reported: dict[str, float] = {}
        self._reported_nodes: set[str] = set()
        self._renewed: set[str] = set()
        self._stale = False
        self._n_nodes = 0
        self._looks = 0
        # How far workers are from each other in the first looks, where they are so many that a slow one does not count.
        self._across: list[float] = []

    def entered(self, workers: Collection[str]) -> None:
        """Sets the members; what is known of the speed of other slots counts again when they return."""
        now = {slot_of(worker): worker for worker in workers}
        for slot, worker in now.items():
            if self._names.get(slot, worker) != worker and slot in self._tracks:
                # A new process, by which its slot is to be judged anew; if it is slow too, that is told.
                self._tracks[slot].restart()
                self._renewed.add(slot)
        self._workers = now
        self._names |= now
        self._n_nodes = len({node_of(slot) for slot in now})
        self._told = {slot: told for slot, told in self._told.items() if slot in now}
        self._waiting = {slot: one for slot, one in self._waiting.items() if slot in now}
        self._stale = True

    def told(self, slot: str, seconds: Mapping[Work, float]) -> None:
        """Takes in the seconds of computing that the worker of a slot took in recent steps, by kind of work."""
        spent_s = {work: max(1e-9, spent) for work, spent in seconds.items()}
        if self._told.get(slot, {}).keys() != spent_s.keys():
            self._own.pop(slot, None)
            if slot in self._tracks and not self._tracks[slot].side:
                self._tracks[slot].restart()
        self._told[slot] = spent_s
        self._stale = True

    def look(self, step: int, time_s: float, paces: Mapping[str, float]) -> list[Change]:
        """Looks at all workers and returns what has changed.

        Args:
            step: of the job.
            time_s: seconds, of any clock that does not go back.
            paces: by slot, the seconds of the step relative to those that were `told` last.

        Returns:
            What has changed and is sure by now; each change once.
        """
        if self._stale:
            self._rebuild()
        relative = {}
        for slot, pace in paces.items():
            if slot in self._sums and pace > 0:
                own_s, usual_s = self._sums[slot]
                relative[slot] = math.log(pace * own_s / usual_s)
        if not relative:
            return []
        settled = {slot: value - self._level(slot) for slot, value in relative.items()}
        common = centre(settled.values(), statistics.median(self._common))
        self._common.append(common)
        found = []
        if len(settled) >= MANY and self._looks < 4 * LEARN:
            self._across.append(spread(settled.values()))
            self._expect()
        for slot, value in relative.items():
            score = value - common
            own = self._own.get(slot)
            track = self._tracks.setdefault(slot, Track())
            if own is not None:
                if own.offset is None:
                    own.begin(score - track.level, track)
                    continue
                score -= own.offset
            if track.add(Look(step, time_s, score)) or self._moved(slot, track):
                found.append(slot)
            if own is not None and track.side == 0 and abs(score) < THRESHOLD:
                own.learn(score)
        self._looks += 1
        if self._looks % LEARN == 0:
            self._expect()
        return self._changes(found, step)

    @property
    def doubts(self) -> bool:
        """Returns whether somebody may be about to become slow or to recover, so that every step should be measured."""
        return any(self._tracks[slot].doubtful for slot in self._workers if slot in self._tracks)

    @property
    def waits(self) -> bool:
        """Returns whether a slow worker is not reported yet because others of its node may be slow as well."""
        return bool(self._waiting)

    def may_be_slow(self, slot: str) -> bool:
        """Returns whether a worker is slow, or may be about to be."""
        track = self._tracks.get(slot)
        return track is not None and (track.side == 1 or (track.doubtful and track.votes(track.looks[-1].score) == 1))

    def speeds(self) -> dict[str, float]:
        """Returns the speeds of slots that are slow or fast: the inverse of how long their work takes."""
        return {slot: max(0.01, round(math.exp(-one.level), 2)) for slot, one in self._tracks.items() if one.side}

    def usual_s(self, slot: str, work: Work) -> float | None:
        """Returns what work that only this slot's node does usually takes; None: not learnt, or others tell."""
        own = self._own.get(slot)
        if own is None or own.offset is None or work not in self._usual:
            return None
        return self._usual[work] * math.exp(own.offset + statistics.median(self._common))

    def known(self) -> dict[str, float]:
        """Returns who is slow or fast, as factors by slot, for `adopt`."""
        return {slot: round(math.exp(one.level), 4) for slot, one in self._tracks.items() if one.side}

    def adopt(self, factors: Mapping[str, float]) -> None:
        """Begins with what others know, which they have reported."""
        for slot, factor in factors.items():
            track = self._tracks.setdefault(slot, Track())
            track.level = math.log(factor)
            track.side = 1 if factor > 1 else -1
            self._reported[slot] = track.level

    def _expect(self) -> None:
        """Keeps a short past from looking too quiet: no look deviates by less than those of most workers do."""
        noise = [one.noise for slot, one in self._tracks.items() if slot in self._workers]
        known = [one for one in noise if one is not None] or self._across
        if known:
            most = statistics.median(known)
            for slot in self._workers:
                if slot in self._tracks:
                    self._tracks[slot].expect(most)

    # -- what work takes ------------------------------------------------------------------------------------------

    def _level(self, slot: str) -> float:
        track = self._tracks.get(slot)
        return track.level if track is not None else 0.0

    def _rebuild(self) -> None:
        """Finds, after news, what each kind of work takes at speed 1."""
        self._stale = False
        common = statistics.median(self._common)
        holders: dict[Work, list[str]] = defaultdict(list)
        for slot, told in self._told.items():
            for work in told:
                holders[work].append(slot)
        alone: dict[str, bool] = {}
        for work, slots in holders.items():
            before = self._usual.get(work)
            on_nodes = {node_of(slot) for slot in slots}
            young = self._looks - self._since.setdefault(work, self._looks) < LEARN
            shared = len(slots) > 1
            # If all of a node become slower alike, that is the node; if those of several nodes do, it is the work.
            if before is None or (shared and (young or len(on_nodes) > 1 or self._n_nodes == 1)):
                # Of who is slow, how slow it is now is not known as well as what others take.
                normal = [slot for slot in slots if not self._level(slot)] or slots
                values = [math.log(self._told[slot][work]) - self._level(slot) - common for slot in normal]
                self._usual[work] = math.exp(centre(values, None if before is None else math.log(before)))
            for slot in slots:
                alone[slot] = alone.get(slot, True) and not shared
        for slot, only in alone.items():
            if not only:
                self._own.pop(slot, None)
            elif slot not in self._own:
                self._own[slot] = _Own()
        self._sums = {
            slot: (sum(told.values()), sum(self._usual[work] for work in told))
            for slot, told in self._told.items()
            if told
        }

    # -- what is told ---------------------------------------------------------------------------------------------

    def _moved(self, slot: str, track: Track) -> bool:
        """Returns whether a worker that was reported as slow has another factor now, or is another process."""
        reported = self._reported.get(slot)
        if track.side != 1 or reported is None or slot in self._waiting or not track.sure:
            return False
        return slot in self._renewed or abs(track.level - reported) > TOLD_AGAIN

    def _changes(self, found: Iterable[str], step: int) -> list[Change]:
        """Returns what to report of those that have changed, and of those that waited for others of their node."""
        for slot in found:
            told_slow = slot in self._reported
            if self._tracks[slot].side == 1 or told_slow:
                self._waiting[slot] = _Countdown(HOLD)
        ready: dict[tuple[str, SpeedState], list[str]] = defaultdict(list)
        for slot, waiting in list(self._waiting.items()):
            waiting.left -= 1
            node = node_of(slot)
            mates = [one for one in self._workers if node_of(one) == node and one not in self._waiting]
            coming = self._n_nodes > 1 and any(one in self._tracks and self._tracks[one].doubtful for one in mates)
            if coming and waiting.left > 0:
                continue
            ready[node, "slow" if self._tracks[slot].side == 1 else "recovered"].append(slot)
        changes = []
        for (node, state), slots in ready.items():
            for slot in slots:
                del self._waiting[slot]
            whole = sorted(slots) == sorted(slot for slot in self._workers if node_of(slot) == node)
            if whole and len(slots) > 1 and self._n_nodes > 1:
                if state == "slow":
                    self._reported_nodes.add(node)
                if state == "slow" or node in self._reported_nodes:
                    changes.append(self._node_change(node, state, slots, step))
                    continue
            changes += [
                self._worker_change(slot, state, step) for slot in slots if state == "slow" or slot in self._reported
            ]
        for (node, state), slots in ready.items():
            for slot in slots:
                self._renewed.discard(slot)
                if state == "slow":
                    self._reported[slot] = self._tracks[slot].level
                else:
                    self._reported.pop(slot, None)
            if state == "recovered":
                self._reported_nodes.discard(node)
        return changes

    def _worker_change(self, slot: str, state: SpeedState, step: int) -> Change:
        track = self._tracks[slot]
        agreeing, since_step = track.agreeing
        worker = self._workers[slot]
        figures = self._evidence([slot]) | {"looks": len(track.looks), "agreeing": agreeing}
        factor = math.exp(statistics.median(look.score for look in track.looks))
        return Change(state, "worker", (worker,), (worker,), factor, step, since_step, figures)

    def _node_change(self, node: str, state: SpeedState, slots: Sequence[str], step: int) -> Change:
        tracks = [self._tracks[slot] for slot in slots]
        scores = [statistics.median(look.score for look in track.looks) for track in tracks]
        figures = self._evidence(slots) | {
            "looks": sum(len(track.looks) for track in tracks),
            "agreeing": sum(track.agreeing[0] for track in tracks),
        }
        since_step = min(track.agreeing[1] for track in tracks)
        workers = tuple(self._workers[slot] for slot in slots)
        return Change(state, "node", (node,), workers, math.exp(statistics.median(scores)), step, since_step, figures)

    def _evidence(self, slots: Sequence[str]) -> dict[str, Any]:
        """Returns the median seconds of these workers' work, all layers together, and how far the others are from
        theirs.
        """
        common = math.exp(statistics.median(self._common))
        levels = [math.exp(statistics.median(look.score for look in self._tracks[slot].looks)) for slot in slots]
        usual_s = [
            self._sums[slot][1] * common * math.exp(own.offset or 0.0 if (own := self._own.get(slot)) else 0.0)
            for slot in slots
        ]
        others = [
            statistics.median(look.score for look in track.looks)
            for slot, track in self._tracks.items()
            if slot not in slots and slot in self._workers and track.looks and not track.side
        ]
        past = all(slot in self._own for slot in slots)
        return {
            "basis": "past" if past else "peers",
            "own_s": short(statistics.median(level * usual for level, usual in zip(levels, usual_s, strict=True))),
            "usual_s": short(statistics.median(usual_s)),
            "mad_s": short(mad(others) * statistics.median(usual_s)) if others else None,
            "peers": len(others),
        }


class _Own:
    """The past of a worker whose work nobody on another node does.

    Attributes:
        offset: of its scores when it was as fast as ever; None: fewer than LEARN looks were seen yet.
    """

    def __init__(self) -> None:
        self.offset: float | None = None
        self._seen: list[float] = []

    def begin(self, raw: float, track: Track) -> None:
        """Takes one of the first scores; what is learnt of its noise goes to the track of this worker."""
        self._seen.append(raw)
        if len(self._seen) == LEARN:
            self.offset = statistics.median(self._seen)
            track.begin(score - self.offset for score in self._seen)

    def learn(self, score: float) -> None:
        """Takes an ordinary score; the first ones define what is usual, and that stays."""
        if self.offset is not None and len(self._seen) < 4 * LEARN:
            self._seen.append(score + self.offset)
            self.offset = statistics.median(self._seen)


@dataclass(slots=True)
class _Countdown:
    left: int
