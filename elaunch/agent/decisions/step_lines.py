"""In which order lines on steps are written, and which of them are not: another node's log may have them. Pure.

When the first member dies, its peers may go on before its own agent knows of its end, and then nobody knows whether
that agent has a line on the last step, or on the one that the others do again. So one of the peers reports the step,
and names the dead one. That line, and those that come after it, wait until the node of the dead one reports its end,
and with it what its log has.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from elaunch.agent.decisions.actions import Action, AskEnd, Record
from elaunch.wire import AGAIN, MOST_NAMES, THROUGH, Report

HOLD_S = 8.0
"""How long a line waits: longer than an agent that does not answer has its lease, as that is by default."""

MOST_CHARACTERS = 512
"""How long the names may be of the workers that a line names."""


@dataclass(slots=True)
class StepLines:
    """The lines on steps of this node's workers, some of which wait.

    Attributes:
        in_log: number of steps up to the last one that these workers have had written into the event log, or of which
            they know that another node's log has it.
        logged: the same, as it was when one of them last finished or ended: what the others must know then.
        asked: the worker whose end is waited for; empty: nothing waits.
    """

    in_log: int = 0
    logged: int = 0
    asked: str = ""
    _until_s: float = 0.0
    _ended: dict[str, int] = field(default_factory=dict)
    _own_ended: deque[str] = field(default_factory=lambda: deque(maxlen=MOST_NAMES))
    _waiting: deque[Record] = field(default_factory=deque)

    def take(self, worker: str, report: Report, now_s: float) -> list[Action]:
        """Takes a worker's report of a step.

        Args:
            worker: of this node; it is told when the line is in a log.
            report: where other workers may have reported the step, `AGAIN` names those that are no members any more.
            now_s: time of the monotonic clock.

        Returns:
            The lines to write now, and whose end to look for.
        """
        line = Record(worker, report)
        if worker == self.asked:  # one of this node, whose own reports come before those in its place
            return [line]
        self._waiting.append(line)
        return self._go_on(now_s) if not self.asked else []

    def heard_of_end(self, worker: str, logged: int, now_s: float) -> list[Action]:
        """Hears that a worker of another node has ended, or that node has, and that so many steps are in its log."""
        if not self.asked or worker != self.asked:
            return []
        self._ended[worker], self.asked = logged, ""
        return self._go_on(now_s)

    def has(self, line: Record) -> bool:
        """Returns whether a log has a line: another node's log, or it tells again of the last step of this attempt."""
        fields = line.report.fields
        return line.is_elsewhere or (AGAIN in fields and fields.get("step") == self.in_log - 1)

    def note(self, report: Report) -> None:
        """Notes that a log has the line on a step.

        One that is told again may come after those that follow it, and is not the end of the log then.
        """
        step = report.fields.get("step")
        if isinstance(step, int) and not (AGAIN in report.fields and _log_has(self.in_log, report, step)):
            self.in_log = step + 1

    def note_end(self) -> None:
        """Notes that a worker of this node has finished, or ended."""
        self.logged = self.in_log

    def begin_attempt(self) -> None:
        """Forgets the steps of the former attempt, all of whose workers have ended."""
        self.in_log = self.logged = 0

    def on_time(self, now_s: float) -> list[Action]:
        """Waits no longer than `HOLD_S`: a step is rather told twice than never."""
        return self.flush() if now_s >= self._until_s else []

    def end_of(self, worker: str, now_s: float) -> list[Action]:
        """Hears that one of this node's workers has ended, all of whose reports were taken.

        Where it has reported some of the lines that wait, they are written: what this node then says of its log counts
        them, and nobody else may do so. Lines in the place of what it may have reported wait no more.
        """
        self._own_ended.append(worker)
        if any(line.worker == worker for line in self._waiting):
            return self.flush()
        return [AskEnd(""), *self.heard_of_end(worker, self.in_log, now_s)] if worker == self.asked else []

    def flush(self) -> list[Action]:
        """Has all lines written that wait."""
        if not self.asked:
            return []
        lines: list[Action] = [*self._waiting, AskEnd("")]
        self._waiting.clear()
        self._ended.clear()
        self.asked = ""
        return lines

    def _go_on(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        while self._waiting:
            line = self._waiting[0]
            tellers = _tellers(line.report)
            self._ended.update((one, self.in_log) for one in tellers if one in self._own_ended)
            unknown = next((one for one in tellers if one not in self._ended), "")
            if unknown:
                self.asked, self._until_s = unknown, now_s + HOLD_S
                return [*actions, AskEnd(unknown)]
            step = line.report.fields.get("step")
            is_elsewhere = isinstance(step, int) and any(
                _log_has(self._ended[one], line.report, step) for one in tellers
            )
            self._waiting.popleft()
            actions.append(replace(line, is_elsewhere=is_elsewhere))
        self._ended.clear()
        return actions


def _log_has(logged: int, report: Report, step: int) -> bool:
    """Returns whether a log that ends after so many steps has a step that is told again.

    One with more than the step that was under way is of steps before the job went back to a checkpoint.
    """
    through = report.fields.get(THROUGH)
    committed = max(through if isinstance(through, int) else 0, step + 1)
    return step < logged <= committed + 1


def _tellers(report: Report) -> list[str]:
    names = report.fields.get(AGAIN)
    if not isinstance(names, list) or len(names) > MOST_NAMES:
        return []
    return [one for one in names if isinstance(one, str) and 0 < len(one) <= MOST_CHARACTERS]
