"""The lines of the event log on steps that have committed.

The first member writes them. Each member keeps the last one: around a failure it may have to write it in the place of a
first member that did not come to it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from elaunch.wire import Report
from elaunch.workers import data
from elaunch.workers.agent_client import Client
from elaunch.workers.comm.group import Group


class StepReports:
    """What one member reports of the steps.

    Attributes:
        last: the fields of the report of the last step that has committed, as JSON values; None: nobody here knows it.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._commit_s = time.monotonic()
        self.last: dict[str, Any] | None = None

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
        ids = list(sample_ids)
        self.last = {
            "generation": generation,
            "step": step,
            "loss": loss,
            "samples": len(ids),
            "digest": data.digest(ids),
            "members": group.size,
            "seconds": round(seconds, 6),
        }
        if group.rank == 0:
            self._client.send(Report("step", self.last))
        return seconds

    def tell_again(self, steps: int) -> None:
        """Reports the last of so many steps in the place of the first member, if this worker knows of it."""
        if self.last is not None and self.last["step"] == steps - 1:
            self._client.send(Report("step", self.last))
