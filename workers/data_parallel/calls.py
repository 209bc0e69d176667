"""The calls of `step` that took effect, by registered object: they must be the same on all members."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence

from elaunch.workers.barrier import UNSAID, Span

_CURE = (
    "what changes the model must run once in each step on all workers: use `for step in job.steps(...)`, and call it "
    "after the loop over the micro-batches"
)


class StepCalls:
    """Counts the calls of `step` from one commit to the next.

    Attributes:
        counts: since the last commit, by the name under which the object is registered.
        complete: whether that was a commit of this worker: it has made all calls that the others have.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.complete = False

    @property
    def span(self) -> Span:
        """Returns what a member brings to the barrier; nothing before it has committed a step itself."""
        digest = zlib.crc32(json.dumps(sorted(self.counts.items())).encode())
        return (digest, digest) if self.complete else UNSAID

    def add(self, name: str) -> None:
        """Counts one."""
        self.counts[name] += 1

    def committed(self) -> dict[str, int] | None:
        """Begins anew, since a step has committed; returns the calls up to it, or None if they are not all."""
        counts = dict(self.counts) if self.complete else None
        self.counts, self.complete = Counter(), True
        return counts


def differ(span: Span) -> bool:
    """Returns whether the calls of all members, as their barrier has it, are not the same."""
    least, most = span
    return least < most


def text(workers: Sequence[str], counts: Sequence[Mapping[str, int] | None], step: int) -> str:
    """Returns which calls differ, for people.

    Args:
        workers: the members.
        counts: their calls; None: of one that was not yet there.
        step: number of the step.
    """
    held = {worker: calls for worker, calls in zip(workers, counts, strict=True) if calls is not None}
    names = dict.fromkeys(name for calls in held.values() for name in calls)
    name = next(name for name in names if len({calls.get(name, 0) for calls in held.values()}) > 1)
    by_number: dict[int, list[str]] = {}
    for worker, calls in held.items():
        by_number.setdefault(calls.get(name, 0), []).append(worker)
    told = "; ".join(
        f"{'never' if not number else 'once' if number == 1 else f'{number} times'} on {', '.join(those)}"
        for number, those in sorted(by_number.items(), reverse=True)
    )
    return f"in step {step}, `{name}.step()` took effect {told}: {_CURE}"
