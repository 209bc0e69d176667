"""How a job goes on by what the cluster and the job itself have said: the state machine of its agents. Pure.

    starting -> queued -> running -> joined -> leaving -> stopping -> killed      an agent
    waiting -> running -> ending -> waiting, done, failed, cancelled              a job

An agent that has ended is no longer in the document. Each wait is bounded: an agent that does not leave at a step
boundary gets SIGTERM, then the cluster's kill.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from elaunch.scheduler.clusters.cluster import AgentReport, ClusterStage
from elaunch.scheduler.service.documents import (
    FINAL,
    AgentDoc,
    AgentStage,
    JobProgress,
    JobSpec,
    JobStage,
    agent_name,
    count_text,
)
from elaunch.scheduler.service.reports import JobReport


@dataclass(frozen=True, slots=True)
class WaitLimits:
    """How long the scheduler waits, in seconds.

    Attributes:
        queue_s: for the cluster to start an agent, before it is withdrawn.
        stop_s: for an agent after SIGTERM.
        plain_s: for an agent's workers to call elaunch, before the job counts as one that never does.
        lost_s: for the cluster to show an agent that is to be withdrawn, before it counts as never started.
        pause_s: before the next try; doubled with each one in a row.
        move_s: for new nodes of a job that moves to join, before its old ones are asked to leave.
        most_pause_s: the longest pause.
        arrivals: agents in a row that may end before they join.
    """

    queue_s: float = 60.0
    stop_s: float = 45.0
    plain_s: float = 60.0
    lost_s: float = 30.0
    pause_s: float = 5.0
    move_s: float = 120.0
    most_pause_s: float = 600.0
    arrivals: int = 3

    def pause(self, failures: int) -> float:
        """Returns the seconds before another try after so many failures in a row."""
        return min(self.most_pause_s, self.pause_s * 2.0 ** min(failures, 20))


@dataclass(frozen=True, slots=True)
class Note:
    """A line for people, and an event: `text` begins behind the name of the job."""

    job: str
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Observed:
    """What is known of one job at one moment.

    Attributes:
        agents: what the cluster says, by the names of the agents.
        report: what the job says.
        cancelled: who wants it to end; empty: nobody.
        now_t: Unix time.
        refused: why the cluster has not taken agents, by their names.
    """

    agents: Mapping[str, AgentReport]
    report: JobReport
    cancelled: str
    now_t: float
    refused: Mapping[str, str] = field(default_factory=dict)


def advance(
    spec: JobSpec, progress: JobProgress, seen: Observed, limits: WaitLimits
) -> tuple[JobProgress, tuple[Note, ...]]:
    """Returns how far the job is now, and what people should know of it."""
    if progress.stage in FINAL:
        return progress, ()
    return _Advance(spec, progress, seen, limits).result()


def moved(agent: AgentDoc, stage: AgentStage, now_t: float) -> AgentDoc:
    """Returns an agent in another stage, which begins now."""
    return replace(agent, stage=stage, since_t=now_t)


def asked_to_leave(agent: AgentDoc, now_t: float) -> AgentDoc:
    """Returns the agent on its way out: one that takes part leaves at a step boundary, another one at once."""
    if agent.going:
        return agent
    stages = {AgentStage.JOINED: AgentStage.LEAVING, AgentStage.RUNNING: AgentStage.STOPPING}
    return moved(agent, stages.get(agent.stage, AgentStage.KILLED), now_t)


def end(progress: JobProgress, outcome: JobStage, message: str, now_t: float) -> JobProgress:
    """Returns the job with all agents on their way out, after which it is what `outcome` says."""
    agents = tuple(asked_to_leave(agent, now_t) for agent in progress.agents)
    return replace(progress, stage=JobStage.ENDING, outcome=outcome, message=message, agents=agents)


class _Advance:
    """One call of `advance`."""

    def __init__(self, spec: JobSpec, progress: JobProgress, seen: Observed, limits: WaitLimits) -> None:
        self._spec = spec
        self._progress = progress
        self._seen = seen
        self._limits = limits
        self._notes: list[Note] = []

    def result(self) -> tuple[JobProgress, tuple[Note, ...]]:
        self._take_steps()
        ended = self._take_agents()
        self._take_end(ended)
        self._thaw()
        return self._progress, tuple(self._notes)

    def _note(self, kind: str, text: str) -> None:
        self._notes.append(Note(self._spec.name, kind, text))

    def _set(self, **changes: object) -> None:
        self._progress = replace(self._progress, **changes)  # type: ignore[arg-type]

    def _end(self, outcome: JobStage, message: str) -> None:
        self._progress = end(self._progress, outcome, message, self._seen.now_t)

    # -- steps ----------------------------------------------------------------------------------------------------

    def _take_steps(self) -> None:
        step, progress = self._seen.report.step, self._progress
        if step < 0 or progress.stage is not JobStage.RUNNING:
            return
        if not progress.first_step_t:
            self._set(first_step_t=self._seen.now_t)
        if step > progress.step:
            self._set(step=step)

    # -- agents ---------------------------------------------------------------------------------------------------

    def _take_agents(self) -> list[tuple[AgentDoc, AgentReport | None]]:
        """Moves each agent on; returns those that have ended."""
        kept, ended = [], []
        for agent in self._progress.agents:
            report = self._seen.agents.get(self._name(agent))
            if self._has_ended(agent, report):
                ended.append((agent, report))
            else:
                kept.append(self._next(agent, report))
        self._set(agents=tuple(kept))
        for agent, report in ended:
            if not agent.going and self._progress.stage is JobStage.RUNNING and not self._seen.report.ended:
                self._take_loss(agent, report)
        return ended

    def _has_ended(self, agent: AgentDoc, report: AgentReport | None) -> bool:
        if report is not None:
            return report.stage is ClusterStage.ENDED
        if agent.stage is AgentStage.KILLED:  # it may never have been submitted, or its submission comes late
            return self._seen.now_t >= agent.since_t + self._limits.lost_s
        return agent.stage is not AgentStage.STARTING

    def _next(self, agent: AgentDoc, report: AgentReport | None) -> AgentDoc:
        now_t, limits = self._seen.now_t, self._limits
        if agent.stage is AgentStage.STARTING and report is not None:
            agent = moved(agent, AgentStage.QUEUED, now_t)
        if agent.stage is AgentStage.QUEUED and report is not None and report.stage is ClusterStage.RUNNING:
            agent = moved(agent, AgentStage.RUNNING, now_t)
        waited_s = now_t - agent.since_t
        plain = self._seen.report.plain and agent.member in self._seen.report.here and waited_s >= limits.plain_s
        if agent.stage is AgentStage.RUNNING and (plain or agent.member in self._seen.report.working):
            agent = moved(agent, AgentStage.JOINED, now_t)
            self._set(arrivals=0)
            self._note("joined", f"has {count_text(agent.devices)} on {agent.node}")
        waited_s = now_t - agent.since_t
        # One that was not refused has not been asked for yet: the daemon was away.
        asked = agent.stage is AgentStage.QUEUED or (
            agent.stage is AgentStage.STARTING and self._name(agent) in self._seen.refused
        )
        if asked and waited_s >= limits.queue_s:
            why = self._seen.refused.get(self._name(agent), "") if report is None else report.why
            text = f"the cluster has not started an agent on {agent.node} within {limits.queue_s:g} s"
            self._hold_back(f"{text}: {why}" if why else text)
            agent = moved(agent, AgentStage.KILLED, now_t)
        elif agent.stage is AgentStage.RUNNING and waited_s >= self._spec.start_s:
            self._hold_back(f"its agent on {agent.node} has not joined within {self._spec.start_s:g} s")
            agent = moved(agent, AgentStage.STOPPING, now_t)
        elif agent.stage is AgentStage.LEAVING and waited_s >= self._spec.leave_s:
            text = f"its agent on {agent.node} has not left within {self._spec.leave_s:g} s"
            self._note("stuck", f"{text}: it gets SIGTERM, and the job grows no more")
            self._set(frozen="does not shrink", not_before_t=0.0)
            agent = moved(agent, AgentStage.STOPPING, now_t)
        elif agent.stage is AgentStage.STOPPING and waited_s >= limits.stop_s:
            self._note("stuck", f"its agent on {agent.node} is still there {limits.stop_s:g} s after SIGTERM: killed")
            agent = moved(agent, AgentStage.KILLED, now_t)
        return agent

    def _name(self, agent: AgentDoc) -> str:
        return agent_name(self._spec.name, self._progress.attempt, agent.number)

    def _hold_back(self, text: str) -> None:
        """Notes a growth or a start that did not work: the next one comes after a pause."""
        arrivals = self._progress.arrivals + 1
        pause_s = self._limits.pause(arrivals)
        self._note("held_back", f"{text}; the next try is in {pause_s:g} s")
        self._set(arrivals=arrivals, frozen=self._progress.frozen or text, not_before_t=self._seen.now_t + pause_s)

    def _take_loss(self, agent: AgentDoc, report: AgentReport | None) -> None:
        """Notes an agent that has ended although nobody asked it to."""
        if report is not None and report.succeeded:  # the cluster wanted it to leave, or the job is over
            self._note("left", f"its agent on {agent.node} has left, with {report.why}")
            return
        how = "and the cluster knows nothing of it" if report is None else f"with {report.why}"
        if agent.stage is AgentStage.JOINED:
            self._note("lost", f"lost its agent on {agent.node}, which ended {how}")
        else:
            self._hold_back(f"its agent on {agent.node} ended before it joined, {how}")

    def _thaw(self) -> None:
        if self._progress.not_before_t and self._seen.now_t >= self._progress.not_before_t:
            is_over = self._progress.arrivals < self._limits.arrivals
            self._set(not_before_t=0.0, frozen="" if is_over else self._progress.frozen)

    # -- the job --------------------------------------------------------------------------------------------------

    def _take_end(self, ended: list[tuple[AgentDoc, AgentReport | None]]) -> None:
        progress, seen = self._progress, self._seen
        if seen.cancelled and not (progress.stage is JobStage.ENDING and progress.outcome in FINAL):
            self._note("cancelled", f"is cancelled by {seen.cancelled}")
            self._end(JobStage.CANCELLED, f"cancelled by {seen.cancelled}")
        elif progress.stage is JobStage.RUNNING:
            self._take_result(ended)
        elif seen.report.succeeded and progress.outcome is JobStage.WAITING:
            self._set(outcome=JobStage.DONE, message=seen.report.message)  # it was done before it had stopped
        if self._progress.stage is JobStage.ENDING and not self._progress.agents:
            self._finish()

    def _take_result(self, ended: list[tuple[AgentDoc, AgentReport | None]]) -> None:
        progress, report = self._progress, self._seen.report
        if report.ended and report.succeeded:
            self._end(JobStage.DONE, report.message)
        elif report.ended:
            self._fail(report.message)
        elif not progress.agents and ended and all(one is not None and one.succeeded for _, one in ended):
            self._end(JobStage.DONE, "its agents have ended with exit code 0")
        elif not progress.agents and ended and (progress.first_step_t or self._had_joined(ended)):
            self._fail("all of its agents have ended")
        elif progress.arrivals >= self._limits.arrivals and not self._has_basic():
            why = f"; {progress.frozen}" if progress.frozen else ""
            self._fail(f"{progress.arrivals} agents in a row did not join{why}")
        elif (
            not (progress.first_step_t or report.plain) and self._seen.now_t >= progress.started_t + self._spec.start_s
        ):
            self._fail(
                f"no step has committed within {self._spec.start_s:g} s on {count_text(self._spec.basic)}, "
                "its basic demand"
            )

    def _had_joined(self, ended: list[tuple[AgentDoc, AgentReport | None]]) -> bool:
        return any(agent.stage is AgentStage.JOINED for agent, _ in ended)

    def _has_basic(self) -> bool:
        joined = [agent.devices for agent in self._progress.agents if agent.stage is AgentStage.JOINED]
        return sum(joined) >= self._spec.basic

    def _fail(self, message: str) -> None:
        """Ends this attempt; without progress only so many in a row are made."""
        progress = self._progress
        failures = 1 if progress.step > progress.begun_step else progress.failures + 1
        if failures >= self._spec.attempts:
            many = f" {failures} times in a row without progress" if failures > 1 else ""
            self._note("failed", f"has failed{many}: {message}")
            self._end(JobStage.FAILED, message)
        else:
            self._note("attempt_failed", f"attempt {progress.attempt} has failed: {message}; it is tried again")
            self._end(JobStage.WAITING, message)
        self._set(failures=failures)

    def _finish(self) -> None:
        """Notes that the last agent has ended."""
        progress = self._progress
        if progress.outcome is JobStage.WAITING:
            pause_s = self._limits.pause(progress.failures - 1) if progress.failures else 0.0
            self._progress = JobProgress(
                message=progress.message,
                attempt=progress.attempt + 1,
                step=progress.step,
                begun_step=progress.step,
                failures=progress.failures,
                not_before_t=self._seen.now_t + pause_s,
                changes=progress.changes,
            )
            return
        self._set(stage=progress.outcome, frozen="", not_before_t=0.0, ended_t=self._seen.now_t)
        if progress.outcome is JobStage.DONE:
            self._note("done", "is done")
