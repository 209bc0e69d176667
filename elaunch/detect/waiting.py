"""Lines about workers that wait for long, from what they show of themselves. Pure.

Whether a wait is anybody's fault is for `hang` to judge, and it has its limits. Here it is only said that there is one:
whoever looks at the job shall never wonder what it is about.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elaunch.detect.hang import FIRST_STEPS_KEY, MIN_STEPS
from elaunch.detect.heartbeat import HeartbeatReading, Phase
from elaunch.rendezvous.membership import names_text
from elaunch.waits import Pace

QUIET_S = 10.0
"""So long a worker waits without a line."""

LONGEST_PAUSE_S = 60.0


@dataclass(slots=True)
class WorkerWaits:
    """The waits of the workers of a node.

    Attributes:
        pace: of the lines; one for all workers, since they usually wait for the same.
    """

    pace: Pace = field(default_factory=lambda: Pace.begin(0.0, QUIET_S, LONGEST_PAUSE_S))
    _since_s: dict[str, tuple[str, float]] = field(default_factory=dict)

    def look(self, now_s: float, readings: Mapping[str, HeartbeatReading], early_s: float | None = None) -> str:
        """Takes what the workers show now, and returns a line if one is due; else nothing.

        A worker waits as long as it is seen to wait for the same at each look, whether bytes come or not.

        Args:
            now_s: `time.monotonic`.
            readings: of the workers of this node.
            early_s: the limit of first steps, in seconds, while it holds: far beyond what steps take, so it is told.
        """
        former, self._since_s = self._since_s, {}
        for worker, reading in readings.items():
            what = _what(reading)
            if what:
                before, since_s = former.get(worker, ("", now_s))
                self._since_s[worker] = (what, since_s if before == what else now_s)
        waits = [(since_s, worker, what) for worker, (what, since_s) in self._since_s.items()]
        since_s, worker, what = min(waits, default=(now_s, "", ""))
        if now_s - since_s < QUIET_S:
            self.pace.reset(now_s - QUIET_S)  # the first line is due as soon as a wait has lasted
            return ""
        if not self.pace.is_due(now_s):
            return ""
        others = len([one for one, _, _ in waits if now_s - one >= QUIET_S]) - 1
        more = f"; so have {others} more of this node, for this or another reason" if others else ""
        early = ""
        if early_s is not None and readings[worker].waits:
            early = f"; in the first {MIN_STEPS} steps, whoever makes no progress is killed after {early_s:g} s"
            early = f"{early} ({FIRST_STEPS_KEY})"
        return f"worker {worker} has waited {now_s - since_s:.0f} s for {what}{more}{early}"


def _what(reading: HeartbeatReading) -> str:
    """Returns what a worker waits for; empty: it does not wait, or is past its last step."""
    if reading.phase is Phase.ENDED:
        return ""
    if reading.phase is Phase.AGREEING:
        return "the job to agree on its members"
    if reading.waits:
        awaited = reading.awaited
        others = f" and {awaited.others} more" if awaited.others else ""
        peers = f"{names_text(awaited.peers)}{others}" if awaited.peers else "other members"
        return f"{peers}, {_where(reading)}"
    if reading.phase is Phase.SAVING:
        return f"its own checkpoint to be on the disk, after {reading.step} steps"
    return ""


def _where(reading: HeartbeatReading) -> str:
    operation = f", operation {reading.awaited.operation}" if reading.awaited.operation else ""
    match reading.phase:
        case Phase.LOADING:
            return f"before its first step{operation}"
        case Phase.CHANGING:
            return f"in a change of members or plan{operation}"
        case Phase.SAVING:
            return f"which save the state, too, after {reading.step} steps"
    return f"in step {reading.step}{operation}"
