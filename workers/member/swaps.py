"""When the members of a generation go over from links to their native group: before its first step, or in a barrier."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elaunch.wire import Report
from elaunch.workers import heartbeat
from elaunch.workers.agent_client import Client
from elaunch.workers.barrier import Span, StepRecord, span_of
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.native.groups import NativeGroups
from elaunch.workers.hooks import Verdict
from elaunch.workers.member.swap_choice import WARM_UP_STEPS, StepTimes, SwapChoice, SwapReport, choose

SWAP = "elaunch.swap"
"""Among the facts of a vote: the voter's `SwapReport`, if it knows all of it."""

_SPAN = struct.Struct("<2Q")


class Swaps:
    """One member's part in it. All of it belongs to the training thread.

    Args:
        client: the channel to this worker's agent.
        native: the native groups of this member.

    Attributes:
        first_step: for the event of the change: what carried the first step of the generation, and the estimate; empty:
            none could be made, and links did.
    """

    def __init__(self, client: Client, native: NativeGroups) -> None:
        self._client, self._native = client, native
        self._times = StepTimes()
        self._choice: SwapChoice | None = None
        self._step: tuple[float, bool] | None = None  # when the one in flight began, and whether natively
        self.first_step: Mapping[str, Any] = {}

    def facts(self) -> dict[str, Any]:
        """Returns what goes with this member's vote."""
        times, openings = self._times.figures(), self._native.openings
        return {SWAP: SwapReport(openings, *times).to_json()} if times is not None and openings else {}

    def agreed(self, verdict: Verdict) -> None:
        """Chooses, as all members do, what carries the first step from now on."""
        told = [facts.get(SWAP) for facts in verdict.facts]
        reports = [SwapReport.of(one) if one is not None else None for one in told]
        self._choice, self.first_step = choose(reports, len(reports)), {}
        self._times.hear(reports)

    def entered(self, verdict: Verdict) -> None:
        """A generation begins."""
        if verdict.fresh or verdict.receivers:
            self._times.leave_out(WARM_UP_STEPS)

    def begin(self, group: Group, step: Callable[[], int]) -> None:
        """A step begins; all members call it alike. Before the first one they wait for their group, if they chose to.

        Args:
            group: of the members.
            step: returns its number, from 0.

        Raises:
            StepInterrupted: while they waited a member was lost, or the membership changed.
        """
        choice, self._choice = self._choice, None
        if choice is not None:
            begin_s = time.monotonic()
            if choice.waits:
                self._await(group, step, choice.longest_s)
            waited_s = time.monotonic() - begin_s if choice.waits else 0.0
            over = "native" if self._native.are_used else "links"
            self.first_step = {"over": over, "waited_s": round(waited_s, 6), **choice.fields()}
        self._step = time.monotonic(), self._native.are_used

    def committed(self, group: Group, record: StepRecord) -> None:
        """The step has committed: the members use the group from the next one on, if all said that it is open.

        Args:
            group: of the members.
            record: of all of them together.
        """
        if self._step is not None:
            begin_s, natively = self._step
            self._times.add(group.size, natively, time.monotonic() - begin_s)
            self._step = None
        self._swap(group, record.native, lambda: record.step[0] + 1)

    def _await(self, group: Group, step: Callable[[], int], longest_s: float) -> None:
        """Waits until the group is open here, or is not to be; then the members tell each other whether all have it."""
        others = group.others
        with heartbeat.waiting(others, group.generation):
            self._native.await_open(longest_s, lambda: group.transport.check(others, group.generation))
        ready = self._native.ready()
        least, most = _SPAN.unpack(group.reduce_bytes(_SPAN.pack(ready, ready), _combined))
        self._swap(group, (least, most), step)

    def _swap(self, group: Group, ready: Span, step: Callable[[], int]) -> None:
        """Uses the group from `step` on if all members have it; the first one tells the event log."""
        if self._native.passed(ready) and group.rank == 0:
            opened = {"backend": self._native.backend, "opened_s": round(self._native.opened_s, 6)}
            self._client.send(Report("collectives", {"generation": group.generation, "step": step(), **opened}))


def _combined(packed: Sequence[bytes]) -> bytes:
    return _SPAN.pack(*span_of((least, most) for least, most in map(_SPAN.unpack, packed)))
