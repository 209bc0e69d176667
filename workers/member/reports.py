"""The lines of the event log on steps that have committed.

The first member reports them to its agent, which says what it has written. The other members hear of that in the next
barrier, and keep the reports until then: where the first member did not come to report the last step, or where its
agent was lost with reports that it had not written, one of them reports these steps in its place.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Sequence
from typing import Any

from elaunch.rendezvous.membership import Generation, node_of
from elaunch.wire import AGAIN, MOST_NAMES, THROUGH, Logged, Report
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

KEPT = "elaunch.kept"
"""Likewise: `StepReports.logged`, and the first step whose report the voter keeps."""

GONE = "elaunch.gone"
"""Likewise: members that were lost since the last step and may have reported it, as far as the voter knows."""

TELLERS = "elaunch.tellers"
"""Likewise: the first member of the generation that the voter leaves, and who was to report the last step in its place.

They may have reported the last step or the one after.
"""

AGREED = "elaunch.agreed"
"""Likewise: number of the generation of the last agreement that the voter has come to; 0: it has come to none."""

END_S = 10.0
"""How long whoever has reported the last step waits for its agent to have written it, at the end and before it leaves.

More than a line waits there that another node's log may have.
"""

_COUNT = struct.Struct(">Q")  # in this order the greater number is the greater text

MOST_KEPT = 4096
"""Reports that a member keeps at most, where an agent is that far behind."""

Told = Sequence[Any]
"""The number of a step that was reported, and the worker that did; "" where a log is known to have it."""

Tellers = tuple[str, ...]
"""Who has reported a step, as in `Told`, and who may have before, and is no member any more."""


def is_planned(generation: Generation, agreed: int) -> bool:
    """Returns whether nothing has broken between an agreement of a worker and this generation, which it enters.

    Args:
        generation: that it enters.
        agreed: number of the generation of its last agreement; 0: there is none.
    """
    return 0 < generation.aborts_step_before <= agreed


def last_told(verdict: Verdict, generation: Generation, known: Told | None) -> Told | None:
    """Returns who has reported the last step that has committed; None: nobody who counts, as the members vote.

    The report of one that is no member any more counts only where a log is known to have it: its agent may be lost as
    well, and its node have another one by now.

    Args:
        verdict: of the members.
        generation: that they enter.
        known: the last step of which this worker knows that it was reported (`StepReports.learn`).
    """
    last = verdict.step - 1
    for step, teller in _all_told(verdict, known):
        if step == last and (not teller or teller in generation.ids):
            return step, teller
        if step == last + 1 and not teller:  # it has committed only on workers that died; logs have the one before, too
            return last, ""
    return None


def _all_told(verdict: Verdict, known: Told | None) -> list[Told]:
    return [one for one in (known, *(facts.get(TOLD) for facts in verdict.facts)) if one is not None]


def _named(verdict: Verdict, fact: str) -> set[str]:
    return {one for facts in verdict.facts for one in facts.get(fact, ())}


def _gone(generation: Generation, *names: Iterable[str]) -> list[str]:
    """Returns those that are no members of a generation, the likeliest first, as many as a report may name."""
    named = dict.fromkeys(one for some in names for one in sorted(some))
    return [one for one in named if one and one not in generation.ids][:MOST_NAMES]


def _tellers(verdict: Verdict, generation: Generation) -> set[str]:
    """Returns who may have reported the last step or the one after, as members say, newcomers among them or not.

    Where nothing broke since the last agreement of a voter, the first member has reported what it committed, but maybe
    not what it inherited.
    """
    tellers = set[str]()
    for facts in verdict.facts:
        tellers.update(facts.get(TELLERS, ())[is_planned(generation, facts.get(AGREED, 0)) :])
    return tellers


def tells_again(verdict: Verdict, generation: Generation, worker: str, known: Told | None) -> bool:
    """Returns whether `worker` must report the last step that has committed: no member has, as they vote.

    The first member of that step may have died, or may not have passed its barrier, or its node was lost with the agent
    that was to write the line. It is the first that has passed it which reports it then, unless it knows better.
    """
    told = last_told(verdict, generation, known) is not None
    return verdict.step > 0 and not told and not verdict.fresh and generation.ids[verdict.passed] == worker


def lost_steps(verdict: Verdict, generation: Generation) -> tuple[str, range]:
    """Returns which worker reports again, before the last step, those that a lost agent may not have written.

    Returns:
        The member that keeps most of them, and the steps that it keeps and no log is known to have; of these, it
        reports those that were told by one that is no member any more.
    """
    kept = {worker: facts[KEPT] for worker, facts in zip(generation.ids, verdict.facts, strict=True) if KEPT in facts}
    firsts = {worker: first for worker, (_, first) in kept.items() if first is not None}
    if verdict.fresh or not firsts:
        return "", range(0)
    logged = max(one for one, _ in kept.values())
    passed = generation.ids[verdict.passed]
    first, _, worker = min((max(first, logged), worker != passed, worker) for worker, first in firsts.items())
    return worker, range(first, verdict.step - 1)


def step_report(
    group: Group,
    generation: int,
    step: int,
    loss: float | None,
    sample_ids: Iterable[int],
    seconds: float,
    copied: int | None = None,
) -> dict[str, Any]:
    """Returns the fields of the report of a step: `copied` is that of `StepReports`, the rest are as for its `tell`."""
    ids = list(sample_ids)
    lag = {} if copied is None else {"copy_lag": step + 1 - copied}
    return {
        "generation": generation,
        "step": step,
        "loss": loss,
        "samples": len(ids),
        "digest": digest(ids),
        "members": group.size,
        "seconds": round(seconds, 6),
        **lag,
    }


class StepReports:
    """What one member reports of the steps.

    Attributes:
        last: the fields of the report of the last step that has committed, as JSON values; None: nobody here knows it.
        told: the last step of which this worker knows that it was reported; None: it knows of none.
        logged: so many steps, from the first on, are known to stand in a log.
        copied: of so many steps each member whose state has copies has whole ones, as told at the last barrier; None:
            nobody has any.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._commit_s = time.monotonic()
        self._elsewhere: frozenset[str] = frozenset()  # members of other nodes
        self._heir = ""  # who was to report the last step in the place of the first member
        self._gone: list[str] = []  # members that were lost since the last step, and may have reported it
        self._kept: dict[int, tuple[Tellers, dict[str, Any]]] = {}  # of steps in a row, with the fields
        self._known = self._stale = 0  # the most that a generation may say of logs now; of steps that are done again
        self.last: dict[str, Any] | None = None
        self.told: Told | None = None
        self.logged = 0
        self.copied: int | None = None

    def facts(self, first: str = "", agreed: int = 0) -> dict[str, Any]:
        """Returns what the other members must know, for a vote.

        Args:
            first: the first member of the generation that this one leaves; empty: it leaves none.
            agreed: number of the generation of the last agreement that this one has come to; 0: none.
        """
        return {
            LAST_STEP: self.last,
            TOLD: self.told,
            KEPT: [self.logged, next(iter(self._kept), None)],
            GONE: self._gone,
            TELLERS: [first, self._heir],
            AGREED: agreed,
        }

    def forget(self) -> None:
        """Forgets what was reported: the job goes back to a checkpoint, and has steps to do again."""
        self.last = self.told = None
        self._gone, self._heir = [], ""
        self._kept.clear()
        self.logged = 0
        self._stale = max(self._stale, self._known)

    def hear(self, logged: int) -> None:
        """Hears that so many steps stand in a log: their reports are kept no longer."""
        self.logged = max(self.logged, logged)
        while self._kept and (next(iter(self._kept)) < self.logged or len(self._kept) > MOST_KEPT):
            del self._kept[next(iter(self._kept))]

    def heard(self) -> int:
        """Returns how many steps stand in a log, as far as this member knows, with what its agent has said since.

        Of a step before, which a member of another node has reported in the place of the first, that agent says so.
        """
        said: Logged | None = self._client.logged
        if said is not None and said.step in self._kept and self._kept[said.step][1]["generation"] == said.generation:
            told_there = (step for step, (tellers, _) in self._kept.items() if tellers[0] in self._elsewhere)
            self.hear(min(said.step + 1, next(told_there, said.step + 1)))
        return self.logged

    def inherit(self, verdict: Verdict) -> None:
        """Takes over the report of the last step that has committed, also as a newcomer: the others may be lost."""
        last = verdict.facts[verdict.passed].get(READY_STEP if verdict.passed in verdict.committing else LAST_STEP)
        if last is not None and last["step"] == verdict.step - 1:
            self.last = last

    def learn(self, steps: int, logged: int, is_planned: bool, first: str = "") -> None:
        """Learns from an agreement which step was reported last.

        Args:
            steps: so many have committed.
            logged: so many are known to be in the log of a node (`Streak.logged`): maybe one more, which has
                committed only on workers that died, and is done again as it was; or one less, where the members have
                made the last one count in this agreement. Otherwise, and as long as it is no more than it could be
                then, it is of steps before the job went back to a checkpoint.
            is_planned: nothing broke, so the first member reported the last step before it came to the agreement, but
                where another one was to do so since an agreement that this one has come to, and maybe not all have.
            first: that member, which may leave now.
        """
        self._known = max(logged, steps + 1)
        if logged <= self._stale:
            logged = 0
        if is_planned and steps and not self._heir:
            self.told = (steps - 1, "" if self.logged >= steps else first)
        if logged and logged - 1 in (steps - 1, steps):
            self.told = (logged - 1, "")
        if logged and steps - 2 <= logged - 1 <= steps:
            self.hear(min(logged, steps))

    def agree(self, verdict: Verdict, generation: Generation) -> None:
        """Reports again what others may not have reported, or not to an agent that has written it.

        Each such line is marked: an agent leaves it out if that step is the last that its log has, or if the log of a
        first member has it of whom nobody knows yet whether it has reported (`elaunch.agent.decisions.step_lines`).

        Args:
            verdict: of the members.
            generation: that they enter.
        """
        mine, steps, known = self._client.worker, verdict.step, self.told
        self._elsewhere = frozenset(one for one in generation.ids if node_of(one) != node_of(mine))
        worker, lost = lost_steps(verdict, generation)
        self._gone = _gone(generation, _tellers(verdict, generation), _named(verdict, GONE), verdict.unsettled)
        for step in lost:
            tellers, fields = self._kept.get(step, (("",), {}))
            if tellers[0] and tellers[0] not in generation.ids:
                self._kept[step] = ((worker, *tellers), fields)
                if worker == mine:
                    gone = _gone(generation, tellers[:1], tellers[1:])
                    self._client.send(Report("step", {**fields, AGAIN: gone, THROUGH: steps}))
        self._heir = generation.ids[verdict.passed]
        if tells_again(verdict, generation, mine, known):
            told_by = {teller for _, teller in _all_told(verdict, known)}
            self.tell_again(steps, _gone(generation, told_by, self._gone))
        reported = last_told(verdict, generation, known)
        if reported is not None and (known is None or known[0] < steps) and steps and not verdict.fresh:
            self.told = reported  # also for when its teller, and all others who know, have left
        told = reported or (steps - 1, generation.ids[verdict.passed])
        if self.last is not None and self.last["step"] == steps - 1 and not verdict.fresh:
            self._keep((told[1], *self._gone), self.last)

    def settle(self, group: Group) -> None:
        """Waits for all members, who then know whether the log has the last step, unless an agent takes over END_S.

        It is the member that has reported the step which its agent tells of it.

        Raises:
            StepInterrupted: not all have come.
        """
        last = self.last
        if last is not None and self.told is not None and tuple(self.told) == (last["step"], self._client.worker):
            self._client.wait_logged(last["generation"], last["step"], END_S)
        for _ in range(2):  # a step that another agent has may come before those of the first member's
            self.hear(_COUNT.unpack(group.reduce_bytes(_COUNT.pack(self.heard()), max))[0])

    def end(self, group: Group) -> None:
        """All steps have committed: waits for all members, and reports what the first member's agent has not written.

        Another node's first member does that.

        Raises:
            StepInterrupted: not all have come.
        """
        self.settle(group)
        first = node_of(group.members[0])
        heir = next((member for member in group.members if node_of(member) != first), "")
        if heir == self._client.worker:
            steps = next(reversed(self._kept), -1) + 1
            for tellers, fields in self._kept.values():
                if node_of(tellers[0]) == first:
                    told = {AGAIN: list(tellers[:MOST_NAMES]), THROUGH: steps}
                    self._client.send(Report("step", {**fields, **told}))

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
        self.last = step_report(group, generation, step, loss, sample_ids, seconds, self.copied)
        is_told = self.told is not None and step == self.told[0]
        teller = self.told[1] if self.told is not None and is_told else group.members[0]
        self._keep((teller, *self._gone), self.last)
        if group.rank == 0 and not is_told:
            again = {AGAIN: self._gone} if self._gone else {}  # they may have committed it, and nobody else
            self._client.send(Report("step", {**self.last, **again}))
            self.told = (step, self._client.worker)
        self._gone, self._heir = [], ""
        return seconds

    def tell_again(self, steps: int, gone: Sequence[str] = ()) -> None:
        """Reports the last of so many steps in the place of the first member, if this worker knows of it.

        Args:
            steps: so many have committed.
            gone: workers that may have reported it.
        """
        if self.last is not None and self.last["step"] == steps - 1:
            self._client.send(Report("step", {**self.last, AGAIN: list(gone)}))
            self.told = (steps - 1, self._client.worker)

    def _keep(self, tellers: Tellers, report: dict[str, Any]) -> None:
        """Keeps the report of the newest step."""
        step = report["step"]
        if next(reversed(self._kept), step) not in (step - 1, step):  # it was not here for the one before
            self._kept.clear()
        self._kept[step] = (tellers, report)
        self.hear(step + 1 if not tellers[0] else 0)
