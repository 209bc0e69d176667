"""What the event logs of a job must say of its steps: each has one line in all of them together. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

Event = dict[str, Any]

Steps = dict[int, tuple[str, float]]
"""Of each step, the digest of its samples and its loss."""

ROUNDING = 1e-9
"""What the loss of a step may differ by from that of the undisturbed job, relative to it."""

LAST = 2
"""So many of the last steps in the log of an agent that is lost may stand in another one, too (docs/failures.md)."""

WENT_BACK = re.compile(r"copies of step (\d+) were not complete when a worker was lost: going on from step (\d+)")


class Unmet(Exception):  # a condition that does not hold, of the job that is tested
    """Something that must be true of the job is not."""


@dataclass(frozen=True)
class StepLog:
    """What one agent has logged.

    Attributes:
        node: its name.
        events: the lines, in their order.
        lost_after: how many of them there were each time that nobody could ask the agent what its log has: when it was
            killed, and when its host was in reach again after it had been cut off for so long that it was left out.
    """

    node: str
    events: Sequence[Event]
    lost_after: Sequence[int] = ()


@dataclass(frozen=True)
class _StepLine:
    """A step in a log: where it stands there, and whether another log may have it for the end of an agent or worker."""

    log: StepLog
    event: Event
    is_of_lost: bool
    ends_with_worker: bool


def done_again(texts: Iterable[str], logs: Iterable[StepLog]) -> Counter[int]:
    """Returns the steps that a job has done again, since it went back, and how often each.

    Args:
        texts: what its members have printed: jobs of hooks go back to copies of the step before.
        logs: with the lines of a job that goes back to a checkpoint.
    """
    again: Counter[int] = Counter()
    for had, step in chain.from_iterable(map(WENT_BACK.findall, texts)):
        again.update(range(int(step), int(had)))
    for log in logs:
        for event in log.events:
            if event["kind"] == "resume":
                again.update(range(event["step"], event["step"] + event["again"]))
    return again


def check_steps(logs: Sequence[StepLog], again: Mapping[int, int], expected: Steps) -> list[int]:
    """Checks that each step was done once, with the samples and the loss of the undisturbed job, and is logged once.

    Args:
        logs: of all agents.
        again: steps that the job has done again, as it went back, and how often: other members did that, so the loss
            may differ in its last bits.
        expected: of the undisturbed job.

    Returns:
        Steps that have a line more, of an agent that is lost, or that nobody could ask in time.

    Raises:
        Unmet: they were not.
    """
    found = _lines(logs)
    if more := sorted(set(found) - set(expected)):
        raise Unmet(f"step {more[0]} is none of the undisturbed job's: {_where(found[more[0]], logs)}")
    twice = []
    for step, (digest, loss) in sorted(expected.items()):
        lines = found.get(step, [])
        if not lines:
            near = [line for other in (step - 1, step + 1) for line in found.get(other, [])]
            raise Unmet(f"step {step} is missing: it stands in no log; of those beside it {_where(near, logs)}")
        for line in lines:
            if line.event["digest"] != digest:
                raise Unmet(f"step {step} was done with other samples: {_where(lines, logs)}")
            if abs(line.event["loss"] - loss) > ROUNDING * abs(loss):
                text = f"step {step} has the loss {line.event['loss']!r}, in the undisturbed job it is {loss!r}"
                raise Unmet(f"{text}: {_where(lines, logs)}")
        if len(lines) - 1 > again.get(step, 0):
            if not _is_excused(lines, again.get(step, 0)):
                raise Unmet(f"step {step} has {len(lines)} lines: {_where(lines, logs)}")
            twice.append(step)
        if step not in again and len({line.event["loss"] for line in lines}) > 1:
            raise Unmet(f"step {step} was done twice: {_where(lines, logs)}")
    return twice


def _lines(logs: Sequence[StepLog]) -> dict[int, list[_StepLine]]:
    """The lines on each step."""
    found: dict[int, list[_StepLine]] = {}
    for log in logs:
        places = [place for place, event in enumerate(log.events) if event["kind"] == "step"]
        lost = {place for end in log.lost_after for place in [one for one in places if one < end][-LAST:]}
        for number, place in enumerate(places):
            end = places[number + LAST] if number + LAST < len(places) else len(log.events)
            dies = any(
                event["kind"] == "worker_exited" and event.get("exitcode") != 0 for event in log.events[place:end]
            )
            event = log.events[place]
            found.setdefault(event["step"], []).append(_StepLine(log, event, place in lost, dies))
    return found


def _is_excused(lines: Sequence[_StepLine], again: int) -> bool:
    """Whether a step may have so many lines more than it was done again.

    Each of them is of another agent. For each but one nobody could say whether the log had it: its agent was lost, or
    the worker that asked had ended, too, before it had the answer.
    """
    more = len(lines) - 1 - again
    if more > len({line.log.node for line in lines}) - 1:
        return False
    return more <= sum(line.is_of_lost for line in lines) or more < sum(line.ends_with_worker for line in lines)


def _where(lines: Sequence[_StepLine], logs: Sequence[StepLog]) -> str:
    """In which logs lines stand, and whose they are."""
    workers = {
        event["generation"]: event["workers"]
        for log in logs
        for event in log.events
        if event["kind"] == "generation" and event.get("stage") == "train"
    }

    def told(line: _StepLine) -> str:
        generation, loss = line.event["generation"], line.event["loss"]
        members = ", ".join(workers.get(generation, ["members not known"]))
        lost = ", whose agent was lost then," if line.is_of_lost else ""
        text = f"the log of {line.log.node}{lost} has step {line.event['step']} of generation {generation} ({members})"
        return f"{text}, loss {loss!r}, digest {line.event['digest']}"

    return "; ".join(map(told, lines))
