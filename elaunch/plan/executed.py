"""When a worker began and ended the actions of a step, as executed; `elaunch.plan.timeline` has them as estimated.

A worker tells it in an event of the log, `actions`, which is bounded: the moments are whole microseconds from the first
one, and of a worker's actions the first `MOST_ACTIONS` are told.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from elaunch.plan.tiling import Plan
from elaunch.plan.timeline import Action

MOST_ACTIONS = 256
"""Of one worker and step, in an event; those that it began with."""

MOST_PHASES = 16
"""Of one worker and step, in an event."""

MOST_PHASE_NAME = 32
"""Characters."""

MOST_US = 1 << 53
"""No step takes so many microseconds."""

_ACTION = re.compile(r"([FBIW])([0-9]{1,9})\.([0-9]{1,9})", re.ASCII)


class ExecutedAction(NamedTuple):
    """An action, and its moments in seconds, of which none is before the one that it follows.

    Attributes:
        action: what was done.
        awaits_s: the worker began to wait for its rows; `begins_s` where it needed none of others.
        begins_s: it began.
        sends_s: the worker began to send its rows; `ends_s` where it had none for others.
        sent_s: they were handed on.
        ends_s: it ended.
    """

    action: Action
    awaits_s: float
    begins_s: float
    sends_s: float
    sent_s: float
    ends_s: float


class ExecutedPhase(NamedTuple):
    """What a worker did in a step beside its actions, and when it began and ended, in seconds."""

    name: str
    begins_s: float
    ends_s: float


def digest_of_plan(plan: Plan) -> str:
    """Returns eight digits that differ between the plans of a job, as far as anybody need care."""
    return f"{zlib.crc32(str(plan).encode()):08x}"


@dataclass(frozen=True)
class ExecutedStep:
    """What one worker did in one step, and when, by the clock of its host.

    Attributes:
        worker: who.
        step: its number.
        plan: the digest of the plan that the actions belong to.
        begin_t: Unix time, in seconds, from which the moments count.
        actions: in the order in which they were done.
        phases: likewise.
        left_out: so many more actions followed.
    """

    worker: str
    step: int
    plan: str
    begin_t: float
    actions: Sequence[ExecutedAction]
    phases: Sequence[ExecutedPhase]
    left_out: int = 0

    @classmethod
    def of(
        cls,
        worker: str,
        step: int,
        plan: str,
        actions: Sequence[ExecutedAction],
        phases: Sequence[ExecutedPhase],
        clock_t: float,
    ) -> ExecutedStep:
        """Returns what a worker did, with moments from the first one on.

        Args:
            worker, step, plan: as the attributes.
            actions: with moments of some clock.
            phases: likewise.
            clock_t: Unix time, in seconds, at which that clock was 0.
        """
        begin_s = min([one.awaits_s for one in actions] + [one.begins_s for one in phases], default=0.0)
        return cls(
            worker,
            step,
            plan,
            clock_t + begin_s,
            [ExecutedAction(one.action, *(moment - begin_s for moment in one[1:])) for one in actions],
            [ExecutedPhase(one.name, one.begins_s - begin_s, one.ends_s - begin_s) for one in phases],
        )

    def fields(self) -> dict[str, Any]:
        """Returns the fields of the event, as JSON values of bounded size."""
        told = self.actions[:MOST_ACTIONS]
        return {
            "worker": self.worker,
            "step": self.step,
            "plan": self.plan,
            "begin_t": round(self.begin_t, 6),
            "actions_us": [[str(one.action), *map(_us, one[1:])] for one in told],
            "phases_us": [
                [one.name[:MOST_PHASE_NAME], _us(one.begins_s), _us(one.ends_s)] for one in self.phases[:MOST_PHASES]
            ],
            "left_out": self.left_out + len(self.actions) - len(told),
        }

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> ExecutedStep | None:
        """Returns what an event tells; None: it is none that a worker writes."""
        worker, step, plan = fields.get("worker"), fields.get("step"), fields.get("plan")
        begin_t, left_out = fields.get("begin_t"), fields.get("left_out")
        if not (isinstance(worker, str) and isinstance(plan, str) and isinstance(begin_t, int | float)):
            return None
        if not (0 <= begin_t < MOST_US and _is_count(step) and _is_count(left_out)):
            return None
        actions = [_read_action(one) for one in _listed(fields.get("actions_us"))]
        phases = [_read_phase(one) for one in _listed(fields.get("phases_us"))]
        if None in actions or None in phases:
            return None
        told = [one for one in actions if one is not None], [one for one in phases if one is not None]
        return cls(worker, int(step or 0), plan, float(begin_t), *told, int(left_out or 0))


def _us(seconds: float) -> int:
    return min(max(0, round(seconds * 1e6)), MOST_US - 1)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < MOST_US


def _listed(value: object) -> Iterable[Any]:
    return value if isinstance(value, list) else ()


def _read_action(told: object) -> ExecutedAction | None:
    """Returns an action; None: its text or its moments are none."""
    if not (isinstance(told, list) and len(told) == 6 and isinstance(told[0], str)):
        return None
    found, moments = _ACTION.fullmatch(told[0]), _moments_s(told[1:])
    if found is None or moments is None:
        return None
    kind, tile, micro_batch = found.groups()
    return ExecutedAction(Action(kind, int(tile), int(micro_batch)), *moments)  # type: ignore[arg-type]


def _read_phase(told: object) -> ExecutedPhase | None:
    if not (isinstance(told, list) and len(told) == 3 and isinstance(told[0], str) and told[0]):
        return None
    moments = _moments_s(told[1:])
    return None if moments is None else ExecutedPhase(told[0][:MOST_PHASE_NAME], *moments)


def _moments_s(told: Sequence[Any]) -> list[float] | None:
    """Returns moments in seconds; None: they are no moments that follow each other."""
    if not all(map(_is_count, told)) or any(before > after for before, after in pairwise(told)):
        return None
    return [one / 1e6 for one in told]
