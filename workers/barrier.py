"""The commit barrier of a step: what every member brings, reduced to one record that all get.

A member calls it with complete gradients, so when anybody has the whole record, everybody had them: the step commits
on all members, or on none ("The step transaction" in docs/failures.md). The record has a fixed size, and members
combine the records below them in a tree (`Group.reduce_bytes`): O(log n) hops, and O(1) bytes for each member. Only
notes, which most steps have none of, come to everybody one by one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from elaunch.errors import StateError
from elaunch.workers import exact_sum
from elaunch.workers.comm.group import Group
from elaunch.workers.exact_sum import ExactSum

_FIXED = struct.Struct("<16Q")
_NOTE = struct.Struct("<II")
_WORD = (1 << 64) - 1

Span = tuple[int, int]
"""The least and the greatest of some numbers."""

UNSAID: Span = (_WORD, 0)
"""Of no number: what a member brings that has nothing to say."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one member brings to the barrier, or what several have brought.

    Attributes:
        generation: numbers of the newest generations that the members have heard of.
        step: the step in flight; the same on all members, or the protocol is broken.
        settings: digest of the settings that must be the same on all members.
        effects: digest of the calls of `step` that have taken effect since the commit before, on whoever made that one.
        native: numbers of the generations whose native group the members have open; 0: of none.
        copied: numbers of steps of which others have the whole state in memory, of members whose state has copies.
        stops: number of members whose script has asked to end the job after this step.
        logged: so many steps stand in the event log, as far as the members know.
        coverage: digest of what was computed (`coverage_of`), to be compared with that of the whole step.
        samples: number of samples in `loss`.
        loss: sum of the losses of the samples.
        squares: sum of the squares of the gradient's elements.
        notes: by rank, what members tell all others; empty ones are left out.
    """

    generation: Span
    step: Span
    settings: Span = (0, 0)
    effects: Span = UNSAID
    native: Span = (0, 0)
    copied: Span = UNSAID
    stops: int = 0
    logged: int = 0
    coverage: int = 0
    samples: int = 0
    loss: ExactSum = exact_sum.NOTHING
    squares: ExactSum = exact_sum.NOTHING
    notes: Mapping[int, bytes] = field(default_factory=dict)

    @classmethod
    def at(cls, step: int, **fields: object) -> StepRecord:
        """Returns the record of one member at the barrier of `step`; the generation is filled in by the runtime."""
        return cls((0, 0), (step, step), **fields)  # type: ignore[arg-type]

    def pack(self) -> bytes:
        """Returns the record in the format of the wire: fixed fields, both sums, notes."""
        spans = (*self.generation, *self.step, *self.settings, *self.effects, *self.native, *self.copied)
        fixed = _FIXED.pack(*spans, self.stops, self.logged, self.coverage, self.samples)
        notes = (part for rank, note in self.notes.items() for part in (_NOTE.pack(rank, len(note)), note))
        return b"".join((fixed, self.loss.pack(), self.squares.pack(), *notes))

    @classmethod
    def unpack(cls, packed: bytes) -> StepRecord:
        """Returns the record that `pack` wrote."""
        *ends, stops, logged, coverage, samples = _FIXED.unpack_from(packed)
        generation, step, settings, effects, native, copied = zip(ends[::2], ends[1::2], strict=True)
        at = _FIXED.size
        loss, squares = (ExactSum.unpack(packed[start : start + exact_sum.N_BYTES]) for start in _starts(at))
        at += 2 * exact_sum.N_BYTES
        notes = {}
        while at < len(packed):
            rank, length = _NOTE.unpack_from(packed, at)
            at += _NOTE.size + length
            notes[rank] = packed[at - length : at]
        spans = (generation, step, settings, effects, native, copied)
        return cls(*spans, stops, logged, coverage, samples, loss, squares, notes)

    @classmethod
    def of_all(cls, records: Sequence[StepRecord]) -> StepRecord:
        """Returns what some members have brought together; neither their order nor any grouping changes it."""
        if len(records) == 1:
            return records[0]
        return cls(
            span_of(record.generation for record in records),
            span_of(record.step for record in records),
            span_of(record.settings for record in records),
            span_of(record.effects for record in records),
            span_of(record.native for record in records),
            span_of(record.copied for record in records),
            sum(record.stops for record in records),
            max(record.logged for record in records),
            sum(record.coverage for record in records) & _WORD,
            sum(record.samples for record in records),
            sum((record.loss for record in records), exact_sum.NOTHING),
            sum((record.squares for record in records), exact_sum.NOTHING),
            {rank: note for record in records for rank, note in record.notes.items()},
        )


def reduce(group: Group, record: StepRecord) -> StepRecord:
    """Passes the barrier; returns the record of all members of the group, the same on each.

    Raises:
        StepInterrupted: not all have come.
        StateError: the members run with different settings.
    """
    whole = StepRecord.unpack(group.reduce_bytes(record.pack(), _combined))
    step, settings = record.step[0], record.settings[0]
    assert whole.step == (step, step), f"at the barrier of step {step}, members are at steps {whole.step}"
    if whole.settings != (settings, settings):
        raise DifferentSettings
    return whole


class DifferentSettings(StateError):
    """The members were given different settings; who calls the barrier says which ones it has."""


def coverage_of(pieces: Iterable[int]) -> int:
    """Returns the digest of a set of numbered pieces of work.

    The digests of disjoint sets add up (modulo 2**64) to that of their union; one that lacks a piece or has one twice
    has another digest, but for one case in 2**64.
    """
    return sum(map(_mixed, pieces)) & _WORD


def _mixed(piece: int) -> int:
    """Returns a 64-bit hash of a number (the finalizer of splitmix64, Steele et al., 2014)."""
    z = (piece + 1) * 0x9E3779B97F4A7C15 & _WORD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _WORD
    return z ^ z >> 31


def _combined(packed: Sequence[bytes]) -> bytes:
    return StepRecord.of_all([StepRecord.unpack(one) for one in packed]).pack()


def _starts(first: int) -> tuple[int, int]:
    return first, first + exact_sum.N_BYTES


def span_of(spans: Iterable[Span]) -> Span:
    """Returns the least and the greatest of the numbers that some spans are of."""
    least, most = zip(*spans, strict=True)
    return min(least), max(most)
