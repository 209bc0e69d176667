"""Hooks of a member that holds no state beyond the number of its step."""

from __future__ import annotations

from typing import Any

from elaunch.hooks import Generation, Group, Verdict, Vote


class Stateless:
    """What such members vote, and what they do at a change.

    Attributes:
        member: set by whoever derives from this.
        step: the next one.
        holds: whether this member has been told which that is.
    """

    member: Any

    def __init__(self) -> None:
        self.step, self.holds = 0, False

    def vote(self) -> Vote:
        return Vote(self.step, self.member.entered, self.holds)

    def pause(self) -> None:
        pass

    def agreed(self, generation: Generation, verdict: Verdict) -> None:
        if self.holds and self.step < verdict.step:
            self.step += 1

    def plan(self, generation: Generation, group: Group, verdict: Verdict) -> dict[str, object]:
        return {}

    def transfer(self, group: Group, verdict: Verdict) -> int:
        return 0

    def resume(self, generation: Generation, group: Group, verdict: Verdict) -> None:
        self.step, self.holds = verdict.step, True
