"""How the samples of a stream are dealt out to the micro-batches of a step; pure.

A stream has shards, and a unit (a micro-batch of the step, by its number) reads one shard at a time, from its start to
its end, then takes the next one that nobody has begun. So as long as there are shards left, no shard is read by two
units. Where there are fewer, units take turns at a shard, and whoever does one of them reads all of it.

What a step consists of follows from the position before it and from how many samples the shards have, which is found
when they end. It does not depend on who does which unit.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ShardInPass = tuple[int, int]
"""The number of a pass over the stream, and that of a shard."""

Mark = tuple[int, Any]
"""A number of samples of a shard, and the `state_dict` after them."""


@dataclass(frozen=True, slots=True)
class SampleRun:
    """Samples `start`, …, `stop` - 1 of a shard, in pass `turn` over the stream."""

    turn: int
    shard: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """How far a stream has been used at a step boundary.

    Attributes:
        turn: number of passes that are over.
        shards: from which each unit reads.
        begun: this many shards have been given to units in this pass: those below this number.
        used: samples that have been used, of each of `shards`.
    """

    turn: int
    shards: tuple[int, ...]
    begun: int
    used: Mapping[int, int]

    @classmethod
    def begin(cls, n_shards: int, n_units: int, turn: int = 0) -> StreamPosition:
        """Returns the position at the beginning of a pass."""
        shards = tuple(unit if n_shards >= n_units else unit * n_shards // n_units for unit in range(n_units))
        return cls(turn, shards, min(n_shards, n_units), dict.fromkeys(shards, 0))

    def used_of(self, turn: int, shard: int) -> int | None:
        """Returns how many samples of a shard have been used; None: all."""
        if turn == self.turn:
            return self.used.get(shard, 0 if shard >= self.begun else None)
        return 0 if turn > self.turn else None


@dataclass(frozen=True, slots=True)
class DealtStep:
    """The samples of a step.

    Attributes:
        runs: in the order of the step.
        after: the position after it; None: the stream ends before the step is full.
    """

    runs: tuple[SampleRun, ...]
    after: StreamPosition | None

    @property
    def n_samples(self) -> int:
        """Number of samples in it."""
        return sum(run.stop - run.start for run in self.runs)

    def place_of(self, key: ShardInPass, at: int) -> int:
        """Returns the place in the step of a sample that it has."""
        place = 0
        for run in self.runs:
            if (run.turn, run.shard) == key and run.start <= at < run.stop:
                return place + at - run.start
            place += run.stop - run.start
        raise ValueError(f"sample {at} of (pass, shard) {key} is not in this step")

    def of(self, places: range) -> list[SampleRun]:
        """Returns the samples at some places of the step, in their order."""
        ends, found = [0], []
        for run in self.runs:
            ends.append(ends[-1] + run.stop - run.start)
        for index in range(bisect_right(ends, places.start) - 1, len(self.runs)):
            first, run = ends[index], self.runs[index]
            if first >= places.stop:
                break
            start, stop = max(places.start - first, 0), min(places.stop - first, run.stop - run.start)
            found.append(SampleRun(run.turn, run.shard, run.start + start, run.start + stop))
        return found


def deal(
    before: StreamPosition,
    ends: Mapping[ShardInPass, int],
    n_shards: int,
    unit_sizes: Iterable[int],
    passes: int | None,
) -> DealtStep:
    """Returns the samples of the next step.

    Args:
        before: the position.
        ends: how many samples shards have, as far as it is known. A run may go beyond the end of any other.
        n_shards: of the stream.
        unit_sizes: samples of each unit.
        passes: how often the stream is used; None: there is no end.

    Raises:
        ValueError: the stream has no samples.
    """
    turn, begun = before.turn, before.begun
    shards, used = list(before.shards), dict(before.used)
    runs: list[SampleRun] = []
    # The pass in which a sample has been used, here or before.
    not_empty = -1 if before == StreamPosition.begin(n_shards, len(shards), turn) else turn

    def left(shard: int) -> float:
        return ends.get((turn, shard), float("inf")) - used[shard]

    for unit, size in enumerate(unit_sizes):
        while size:
            shard = shards[unit]
            taken = int(min(size, left(shard)))
            if taken > 0:
                runs.append(SampleRun(turn, shard, used[shard], used[shard] + taken))
                used[shard] += taken
                size -= taken
                not_empty = turn
                continue
            if begun < n_shards:
                shards[unit], used[begun], begun = begun, 0, begun + 1
                continue
            units_at = Counter(one for one in shards if left(one) > 0)
            if units_at:
                shards[unit] = min(units_at, key=lambda one: (units_at[one], one))
                continue
            if not_empty != turn:
                raise ValueError("the stream has no samples")
            turn += 1
            if turn == passes:
                return DealtStep(tuple(runs), None)
            fresh = StreamPosition.begin(n_shards, len(shards), turn)
            shards, begun, used = list(fresh.shards), fresh.begun, dict(fresh.used)
    after = StreamPosition(turn, tuple(shards), begun, {shard: used[shard] for shard in shards})
    return DealtStep(tuple(runs), after)


@dataclass(frozen=True, slots=True)
class StreamNews:
    """What members tell each other before a step, or several have told.

    Attributes:
        ends: the least and the greatest number of samples that members have found in a shard.
        known: the least number of ends by which a member has dealt the step.
        marks: of shards.
    """

    ends: Mapping[ShardInPass, tuple[int, int]]
    known: int
    marks: Mapping[ShardInPass, Mark]

    def pack(self) -> bytes:
        """Returns it as JSON."""
        ends = [[*key, *span] for key, span in self.ends.items()]
        marks = [[*key, *mark] for key, mark in self.marks.items()]
        return json.dumps([self.known, ends, marks]).encode()

    @classmethod
    def unpack(cls, packed: bytes) -> StreamNews:
        """Returns what `pack` wrote."""
        known, ends, marks = json.loads(packed)
        return cls(
            {(turn, shard): (least, most) for turn, shard, least, most in ends},
            known,
            {(turn, shard): (count, state) for turn, shard, count, state in marks},
        )

    @classmethod
    def of_all(cls, told: Sequence[StreamNews]) -> StreamNews:
        """Returns what some members have told together; neither their order nor any grouping changes it."""
        ends: dict[ShardInPass, tuple[int, int]] = {}
        marks: dict[ShardInPass, Mark] = {}
        for news in told:
            for key, (least, most) in news.ends.items():
                known = ends.get(key, (least, most))
                ends[key] = min(least, known[0]), max(most, known[1])
            for key, mark in news.marks.items():
                marks[key] = max(marks.get(key, mark), mark, key=lambda one: one[0])
        return cls(ends, min(news.known for news in told), marks)

    @property
    def settled(self) -> bool:
        """Whether every member knew all ends before it told them: all have dealt the step alike."""
        return self.known == len(self.ends)
