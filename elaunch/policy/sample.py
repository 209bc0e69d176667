"""What one worker has measured of its layers, as it is told to the others."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, Protocol

from elaunch.errors import ClockError, ProtocolError
from elaunch.policy.dvfs import ClockRange
from elaunch.policy.measuring.profile_fields import is_number, is_whole

SAME = 0.05
"""Figures that differ by less are the same: they are not told again, and count as stable."""

Point = tuple[int, int, int]
"""A layer, a number of rows, and the workers of the tensor-parallel group that does them."""


class MeasuredTurn(Protocol):
    """See `elaunch.workers.layers.timing.Turn`."""

    @property
    def layer(self) -> int:
        """Returns the index of the layer."""

    @property
    def rows(self) -> int:
        """Returns how many samples the micro-batch has."""

    @property
    def width(self) -> int:
        """Returns how many workers shared the layer as one tensor-parallel group."""

    @property
    def forward_s(self) -> float:
        """Returns the seconds of its forward, with those in which the tensor-parallel group was waited for."""

    @property
    def backward_s(self) -> float:
        """Returns the seconds of its backward, likewise."""

    @property
    def waited_s(self) -> float:
        """Returns the seconds of both in which the tensor-parallel group was waited for."""


@dataclass(frozen=True)
class MeasuredStep:
    """A turn of a model that is treated as a single layer."""

    layer: int
    rows: int
    width: int
    forward_s: float
    backward_s: float
    waited_s: float

    @classmethod
    def of(cls, seconds: float, rows: int) -> MeasuredStep:
        """Returns a step from its seconds, forward and backward together."""
        return cls(0, rows, 1, seconds / 3, 2 * seconds / 3, 0.0)


@dataclass(frozen=True)
class Overheads:
    """What a worker spends beside its layers, in seconds.

    Attributes:
        action_s: of a forward or a backward: all that is in no layer, sending left out; the mean of the two.
        send_s: of sending the rows of an action to another worker; 0: it sends none.
        load_s_per_row: of getting the samples of a row, where the first or the last layer is; 0: it gets none.
        end_s: of the end of a step, from its last gradient until it has committed here; None: not measured. Who comes
            last waits for nobody in it.
    """

    action_s: float = 0.0
    send_s: float = 0.0
    load_s_per_row: float = 0.0
    end_s: float | None = None


@dataclass(frozen=True)
class Sample:
    """The figures that one worker has measured.

    Attributes:
        turns: by layer, rows and width: seconds of forward and backward, and those of both in which it waited for
            others of its tensor-parallel group.
        kept_bytes: by layer, for backward, of a row.
        weights: by layer whose weight gradients were deferred: their part of the backward, and the bytes of a row that
            are kept for them beside the activations.
        update_s: of the optimizer, per element that this worker owns.
        links: by the slot of the receiver: bytes per second, seconds.
        memory_bytes: of its device; None: of a host.
        clocks: of its device, if they may be set.
        overheads: what it spends beside its layers, if that was measured.
    """

    turns: Mapping[Point, tuple[float, float, float]] = field(default_factory=dict)
    kept_bytes: Mapping[int, float] = field(default_factory=dict)
    update_s: float = 0.0
    links: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    memory_bytes: int | None = None
    clocks: ClockRange | None = None
    weights: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    overheads: Overheads | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values, kept short because they go to all members."""
        return {
            "turns": [[*point, *(_short(seconds) for seconds in spent)] for point, spent in self.turns.items()],
            "kept": {str(layer): round(n) for layer, n in self.kept_bytes.items()},
            "update": _short(self.update_s),
            "links": {slot: [round(rate), _short(latency_s)] for slot, (rate, latency_s) in self.links.items()},
            "memory": self.memory_bytes,
            "clocks": None if self.clocks is None else astuple(self.clocks),
            "weights": {str(layer): [_short(part), round(n)] for layer, (part, n) in self.weights.items()},
            "overheads": None if self.overheads is None else [_shortened(one) for one in astuple(self.overheads)],
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Sample:
        """Reverses `to_json`, up to rounding.

        Raises:
            ProtocolError: it is none.
        """
        try:
            return cls(
                dict(_turn(*turn) for turn in fields["turns"]),
                {int(layer): _number(n) for layer, n in fields["kept"].items()},
                _number(fields["update"]),
                {slot: (_number(rate), _number(latency_s)) for slot, (rate, latency_s) in fields["links"].items()},
                None if fields["memory"] is None else _whole(fields["memory"]),
                None if fields["clocks"] is None else _clock_range(*fields["clocks"]),
                {int(layer): (_number(part), _number(n)) for layer, (part, n) in fields["weights"].items()},
                None if fields["overheads"] is None else _overheads(*fields["overheads"]),
            )
        except (ValueError, TypeError, LookupError, AttributeError, ClockError) as error:
            raise ProtocolError(f"expected the figures of a worker, found {reprlib.repr(fields)} ({error})") from error

    def differs(self, other: Sample | None) -> bool:
        """Returns whether any figure differs."""
        if other is None or self.turns.keys() != other.turns.keys() or self.kept_bytes != other.kept_bytes:
            return True
        if self.weights.keys() != other.weights.keys():
            return True
        pairs = [(sum(self.turns[point][:2]), sum(other.turns[point][:2])) for point in self.turns]
        if any(moved(*pair) for pair in pairs):
            return True
        if self.overheads is None or other.overheads is None:
            return self.overheads is not other.overheads
        # What is beside the layers varies more, and counts as far as it changes what an action takes.
        here_s, there_s = (2 * (one.action_s + one.send_s) for one in (self.overheads, other.overheads))
        action_s = sum(now for now, _ in pairs)
        return abs(here_s - there_s) > SAME / 2 * (action_s + there_s)


def _clock_range(base_mhz: int, supported_mhz: Sequence[int], measured_mhz: int) -> ClockRange:
    return ClockRange(_whole(base_mhz), tuple(map(_whole, supported_mhz)), _whole(measured_mhz))


def _turn(
    layer: int, rows: int, width: int, forward_s: float, backward_s: float, wait_s: float
) -> tuple[Point, tuple[float, float, float]]:
    point = _whole(layer), _whole(rows), _whole(width)
    return point, (_number(forward_s), _number(backward_s), _number(wait_s))


def _overheads(action_s: float, send_s: float, load_s_per_row: float, end_s: float | None) -> Overheads:
    end_s = None if end_s is None else _number(end_s)
    return Overheads(_number(action_s), _number(send_s), _number(load_s_per_row), end_s)


def _whole(value: Any) -> int:
    if not is_whole(value):
        raise TypeError(f"expected a whole number, found {reprlib.repr(value)}")
    return int(value)


def _number(value: Any) -> float:
    if not is_number(value):
        raise TypeError(f"expected a number, found {reprlib.repr(value)}")
    return value  # type: ignore[no-any-return]  # whole ones stay whole


def moved(now: float, before: float) -> bool:
    """Returns whether a figure differs from what it was."""
    return abs(now - before) > SAME * before


def _shortened(seconds: float | None) -> float | None:
    return None if seconds is None else _short(seconds)


def _short(seconds: float) -> float:
    return float(f"{seconds:.4g}")
