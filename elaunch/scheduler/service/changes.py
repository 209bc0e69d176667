"""From what jobs have to what they are to have: which agents leave, which ones start, what is asked of whom. Pure.

`change` gives the documents that are to be written; `actions` what is to be done about documents that are written.
All of it may be done any number of times: a daemon that is killed in between leaves nothing that the next one would do
twice or forget.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from elaunch.scheduler.clusters.cluster import ClusterStage
from elaunch.scheduler.model import ClusterNode
from elaunch.scheduler.service.advance import Note, Observed, WaitLimits, asked_to_leave, end
from elaunch.scheduler.service.documents import (
    FINAL,
    AgentDoc,
    AgentStage,
    JobProgress,
    JobSpec,
    JobStage,
    PlacementDoc,
    agent_name,
    count_text,
    devices_text,
    read_agent_name,
)


@dataclass(frozen=True, slots=True)
class JobNow:
    """A job, how far it is, and what it is to have."""

    spec: JobSpec
    progress: JobProgress
    placement: PlacementDoc


def change(
    jobs: Iterable[JobNow], nodes: Iterable[ClusterNode], now_t: float, limits: WaitLimits
) -> tuple[dict[str, JobProgress], tuple[Note, ...]]:
    """Returns the jobs whose documents change, and what people should know.

    No device is given to two: what an agent has is free when the cluster says that the agent has ended.

    Args:
        jobs: all of them, those that come first first; those that are ending hold devices, too.
        nodes: of the cluster.
        now_t: Unix time.
        limits: of waiting.
    """
    jobs = list(jobs)
    free = {node.name: node.devices if node.usable else 0 for node in nodes}
    for job in jobs:
        for agent in job.progress.agents:
            free[agent.node] = free.get(agent.node, 0) - agent.devices
    changed, notes = {}, []
    for job in jobs:
        after, told = _changed(job, free, now_t, limits)
        notes += told
        if after != job.progress:
            changed[job.spec.name] = after
    return changed, tuple(notes)


def _changed(job: JobNow, free: dict[str, int], now_t: float, limits: WaitLimits) -> tuple[JobProgress, list[Note]]:
    spec, progress, wanted = job.spec, job.progress, dict(job.placement.allocation)
    counts = job.placement.attempt == progress.attempt
    if progress.stage is JobStage.WAITING and counts and wanted:
        return _started(job, free, now_t)
    if progress.stage is not JobStage.RUNNING or not counts:
        return progress, []
    if not wanted:
        reason = job.placement.reason or "its devices go to others"
        return end(progress, JobStage.WAITING, reason, now_t), [Note(spec.name, "stopped", f"stops: {reason}")]
    if job.placement.changed_t == now_t:
        progress = replace(progress, changes=progress.changes + 1)
    leaving, missing = difference(progress.staying, wanted)
    arriving = any(agent.stage is not AgentStage.JOINED for agent in progress.staying if agent not in leaving)
    asked_t = (progress.asked_t or now_t) if leaving or missing or arriving else 0.0
    added = []
    if now_t >= progress.not_before_t:
        for node, devices in missing.items():
            if free.get(node, 0) >= devices:
                free[node] -= devices
                added.append((node, devices))
    notes = [Note(spec.name, "grows", f"gets {count_text(devices)} on {node}") for node, devices in added]
    # A job that moves gets its new nodes first, so that it need not wait for them.
    waits = (arriving or added) and now_t < asked_t + limits.move_s
    stays = any(agent.stage is AgentStage.JOINED for agent in progress.staying if agent not in leaving)
    agents = list(progress.agents)
    if leaving and stays and not waits:
        agents = [asked_to_leave(agent, now_t) if agent in leaving else agent for agent in agents]
        gone = devices_text({agent.node: agent.devices for agent in leaving})
        notes.append(Note(spec.name, "shrinks", f"gives back {gone}"))
    progress = replace(progress, agents=tuple(agents), asked_t=asked_t)
    return _with_agents(progress, added, now_t), notes


def _started(job: JobNow, free: dict[str, int], now_t: float) -> tuple[JobProgress, list[Note]]:
    """Starts a job when its whole basic demand is free."""
    base = dict(job.placement.base)
    if now_t < job.progress.not_before_t or any(free.get(node, 0) < devices for node, devices in base.items()):
        return job.progress, []
    for node, devices in base.items():
        free[node] -= devices
    progress = replace(
        job.progress,
        stage=JobStage.RUNNING,
        message="",
        least_nodes=len(base),
        started_t=now_t,
        first_step_t=0.0,
        arrivals=0,
        frozen="",
        not_before_t=0.0,
        asked_t=now_t,
        changes=job.progress.changes + (job.progress.attempt > job.spec.first_attempt),
    )
    progress = _with_agents(progress, list(base.items()), now_t)
    return progress, [Note(job.spec.name, "starts", f"starts with {devices_text(base)}, attempt {progress.attempt}")]


def _with_agents(progress: JobProgress, added: list[tuple[str, int]], now_t: float) -> JobProgress:
    number = progress.next_number
    agents = [
        AgentDoc(number + index, node, devices, AgentStage.STARTING, now_t)
        for index, (node, devices) in enumerate(added)
    ]
    return replace(progress, agents=(*progress.agents, *agents), next_number=number + len(added))


def difference(agents: Iterable[AgentDoc], wanted: Mapping[str, int]) -> tuple[set[AgentDoc], dict[str, int]]:
    """Returns the agents that are too many, and the devices that are missing, by node.

    An agent keeps its devices until it ends, so as many stay as fit into what is wanted of their node, those that take
    part and have more devices first.
    """
    left = dict(wanted)
    leaving = set()
    for agent in sorted(agents, key=lambda one: (one.stage is not AgentStage.JOINED, -one.devices, one.number)):
        if left.get(agent.node, 0) >= agent.devices:
            left[agent.node] -= agent.devices
        else:
            leaving.add(agent)
    return leaving, {node: devices for node, devices in left.items() if devices}


# -- what is done about it --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartAgent:
    """Start the agent of this number."""

    job: str
    agent: AgentDoc


@dataclass(frozen=True, slots=True)
class AskToLeave:
    """Ask these nodes of a job to leave at a step boundary."""

    job: str
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StopAgent:
    """Have the cluster end an agent, by SIGTERM or for good."""

    name: str
    kill: bool


@dataclass(frozen=True, slots=True)
class AskSize:
    """Have a job go on with no fewer than `least` nodes."""

    job: str
    least: int


@dataclass(frozen=True, slots=True)
class ForgetAgent:
    """Forget an agent that has ended, and of which no document tells any more."""

    name: str


Action = StartAgent | AskToLeave | StopAgent | AskSize | ForgetAgent


def actions(job: JobNow, seen: Observed) -> list[Action]:
    """Returns what is to be done about one job whose document is written; those who leave come first."""
    spec, progress, report = job.spec, job.progress, seen.report
    if progress.stage in FINAL:
        return []
    found: list[Action] = []
    wanted = job.placement.allocation if job.placement.attempt == progress.attempt else {}
    goal = len(progress.staying) or len(wanted)
    if progress.stage is JobStage.RUNNING and report.nnodes is not None and report.nnodes[0] > max(1, goal):
        found.append(AskSize(spec.name, max(1, goal)))
    leavers = tuple(
        agent.member
        for agent in progress.agents
        if agent.stage is AgentStage.LEAVING and agent.member in report.here - report.draining
    )
    if leavers and not report.ended:
        found.append(AskToLeave(spec.name, leavers))
    for agent in progress.agents:
        name = agent_name(spec.name, progress.attempt, agent.number)
        if agent.stage is AgentStage.KILLED and name in seen.agents:
            found.append(StopAgent(name, kill=True))
        elif agent.stage is AgentStage.STOPPING and agent.since_t == seen.now_t:
            found.append(StopAgent(name, kill=False))  # once: a second SIGTERM would kill its workers
        elif agent.stage is AgentStage.STARTING and name not in seen.agents:
            found.append(StartAgent(spec.name, agent))
    return found


def strays(jobs: Iterable[JobNow], seen: Observed) -> list[Action]:
    """Returns what is done about agents of which no document tells: those that have ended are forgotten."""
    known = {
        agent_name(job.spec.name, job.progress.attempt, agent.number) for job in jobs for agent in job.progress.agents
    }
    found: list[Action] = []
    for name, report in seen.agents.items():
        if name in known or read_agent_name(name) is None:
            continue
        found.append(ForgetAgent(name) if report.stage is ClusterStage.ENDED else StopAgent(name, kill=True))
    return found
