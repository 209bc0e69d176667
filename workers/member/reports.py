"""The lines of the event log on steps that have committed.

The first member writes them. Each member keeps the last one: around a failure it may have to write it in the place of a
first member that did not come to it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from elaunch.rendezvous.membership import Generation, node_of
from elaunch.wire import AGAIN, Report
from elaunch.workers.agent_client import Client
from elaunch.workers.comm.group import Group
from elaunch.workers.data.order import digest
from elaunch.workers.hooks import Verdict

LAST_STEP = "elaunch.last_step"
"""Among the facts of a vote: the report of the last step that the voter has committed."""

READY_STEP = "elaunch.ready_step"
"""Likewise: the report of the step that the voter has ready (`Vote.ready`)."""

TOLD = "elaunch.told"
"""Likewise: `StepReports.told`."""

Told = Sequence[Any]
"""The number of a step that was reported, and the node whose agent writes it; "" where a log is known to have it."""


def tells_again(verdict: Verdict, generation: Generation, worker: str, known: Told | None) -> bool:
    """Returns whether `worker` must report the last step that has committed: no member has, as they vote.

    The first member of that step may have died, or may not have passed its barrier, or its node was lost with the agent
    that was to write the line. It is the first that has passed it which reports it then, unless it knows better.

    Args:
        verdict: of the members.
        generation: that they enter.
        worker: this one.
        known: the last step of which it knows that it was reported (`StepReports.learn`).
    """

    def counts(one: Told | None) -> bool:
        return one is not None and one[0] == verdict.step - 1 and (not one[1] or one[1] in generation.nodes)

    told = counts(known) or any(counts(facts.get(TOLD)) for facts in verdict.facts)
    return verdict.step > 0 and not told and not verdict.fresh and generation.ids[verdict.passed] == worker


def step_report(
    group: Group, generation: int, step: int, loss: float | None, sample_ids: Iterable[int], seconds: float
) -> dict[str, Any]:
    """Returns the fields of the report of a step, with the arguments of `StepReports.tell` and its seconds."""
    ids = list(sample_ids)
    return {
        "generation": generation,
        "step": step,
        "loss": loss,
        "samples": len(ids),
        "digest": digest(ids),
        "members": group.size,
        "seconds": round(seconds, 6),
    }


class StepReports:
    """What one member reports of the steps.

    Attributes:
        last: the fields of the report of the last step that has committed, as JSON values; None: nobody here knows it.
        told: the last step of which this worker knows that it was reported; None: it knows of none.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._commit_s = time.monotonic()
        self.last: dict[str, Any] | None = None
        self.told: Told | None = None

    def facts(self) -> dict[str, Any]:
        """Returns what the other members must know, for a vote."""
        return {LAST_STEP: self.last, TOLD: self.told}

    def forget(self) -> None:
        """Forgets what was reported: the job goes back to a checkpoint, and has steps to do again."""
        self.last = self.told = None

    def learn(self, steps: int, logged: int, is_planned: bool, first: str = "") -> None:
        """Learns from an agreement which step was reported last.

        Args:
            steps: so many have committed.
            logged: so many are known to be in the log of a node (`Generation.logged`): maybe one more, which has
                committed only on workers that died, and is done again as it was.
            is_planned: nothing broke, so the first member reported the last step before it came to the agreement.
            first: the node of that member; empty if it leaves now, which its agent does when its log is written.
        """
        if is_planned and steps:
            self.told = (steps - 1, first)
        if logged and logged - 1 in (steps - 1, steps):
            self.told = (logged - 1, "")

    def begin(self) -> None:
        """The first step of this member begins: it is measured from now on."""
        self._commit_s = time.monotonic()

    def tell(self, group: Group, generation: int, step: int, loss: float | None, sample_ids: Iterable[int]) -> float:
        """Reports a step, where this worker is the first member.

        Args:
            group: of the members.
            generation: number of their generation.
            step: its number, from 0.
            loss: the mean over its samples.
            sample_ids: the samples that went into it, over all members.

        Returns:
            The seconds since the commit before.
        """
        now_s = time.monotonic()
        seconds, self._commit_s = now_s - self._commit_s, now_s
        self.last = step_report(group, generation, step, loss, sample_ids, seconds)
        if group.rank == 0 and (self.told is None or step != self.told[0]):
            self._client.send(Report("step", self.last))
            self.told = (step, node_of(self._client.worker))
        return seconds

    def tell_again(self, steps: int) -> None:
        """Reports the last of so many steps in the place of the first member, if this worker knows of it.

        The line is marked: the agent leaves it out if its log has that step (`elaunch.agent.output.journal`).
        """
        if self.last is not None and self.last["step"] == steps - 1:
            self._client.send(Report("step", {**self.last, AGAIN: True}))
            self.told = (steps - 1, node_of(self._client.worker))
