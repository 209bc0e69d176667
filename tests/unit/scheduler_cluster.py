"""A cluster and the jobs on it in one process, with a clock that a test moves, for tests of the scheduler's daemon.

Agents join some time after their start, steps commit while enough have joined, agents that are asked leave between two.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from elaunch.scheduler.clusters.cluster import AgentReport, AgentRequest, ClusterStage, ClusterUnavailable
from elaunch.scheduler.model import ClusterNode
from elaunch.scheduler.service.documents import read_agent_name
from elaunch.scheduler.service.reports import JobReport

JOIN_S = 3.0
LEAVE_S = 2.0


@dataclass
class FakeAgent:
    """An agent: `stage` as the cluster shows it; `leaves_s` is when it will have left."""

    request: AgentRequest
    began_s: float
    stage: ClusterStage = ClusterStage.RUNNING
    why: str = ""
    succeeded: bool = False
    leaves_s: float = float("inf")

    @property
    def job(self) -> str:
        job, attempt, _ = read_agent_name(self.request.name) or ("", 0, 0)
        return f"{job}.{attempt}"

    @property
    def member(self) -> str:
        return next(one for one in self.request.arguments if one.startswith("--node-name=")).partition("=")[2]

    @property
    def least(self) -> int:
        return int(self.request.arguments[0].partition("=")[2].partition(":")[0])


@dataclass
class World:
    """Nodes, agents and jobs. A job has `steps_of` steps and keeps what it has committed, as with a checkpoint.

    Attributes:
        now_s: the clock of everything.
        devices: of nodes by name.
        drained: nodes that must not be used.
        agents: by name; those that have ended stay until they are forgotten.
        committed: steps of jobs by name, without the attempt.
        results: of attempts that are over: whether they have succeeded.
        sizes: the least nodes of an attempt, where the scheduler has asked for another number.
        stuck: members that do not leave when they are asked.
        dies_on_arrival: nodes on which agents end before they join.
        silent: jobs that commit no step.
        refused: jobs of which the cluster takes no agent.
        queued: nodes on which the cluster starts nothing.
        submissions: how often each name was asked for.
    """

    devices: dict[str, int]
    steps_of: dict[str, int] = field(default_factory=dict)
    now_s: float = 1000.0
    drained: set[str] = field(default_factory=set)
    agents: dict[str, FakeAgent] = field(default_factory=dict)
    committed: dict[str, int] = field(default_factory=dict)
    results: dict[str, bool] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    stuck: set[str] = field(default_factory=set)
    dies_on_arrival: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    queued: set[str] = field(default_factory=set)
    submissions: dict[str, int] = field(default_factory=dict)
    held: int = 0

    # -- the cluster ----------------------------------------------------------------------------------------------

    def nodes(self) -> list[ClusterNode]:
        return [ClusterNode(name, devices, usable=name not in self.drained) for name, devices in self.devices.items()]

    def reports(self) -> list[AgentReport]:
        return [
            AgentReport(name, agent.stage, agent.why, agent.succeeded) for name, agent in sorted(self.agents.items())
        ]

    def start(self, request: AgentRequest) -> None:
        if request.name.partition(".")[0] in self.refused:
            raise ClusterUnavailable("sbatch ended with 1: invalid partition")
        self.submissions[request.name] = self.submissions.get(request.name, 0) + 1
        old = self.agents.get(request.name)
        assert old is None or old.stage is not ClusterStage.ENDED, f"{request.name} is started again"
        if old is not None:  # as Slurm's --dependency=singleton: a double waits, and is cancelled
            return
        stage = ClusterStage.QUEUED if request.node in self.queued else ClusterStage.RUNNING
        self.agents[request.name] = FakeAgent(request, self.now_s, stage, "Resources")
        used = sum(agent.request.devices for agent in self.living() if agent.request.node == request.node)
        assert used <= self.devices[request.node], f"{request.node} has {used} devices in use"

    def stop(self, name: str, kill: bool) -> None:
        agent = self.agents.get(name)
        if agent is not None and agent.stage is not ClusterStage.ENDED and (kill or agent.member not in self.stuck):
            self._end(agent, "CANCELLED", False)

    def forget(self, name: str) -> None:
        assert self.agents[name].stage is ClusterStage.ENDED
        del self.agents[name]

    def living(self) -> list[FakeAgent]:
        return [agent for agent in self.agents.values() if agent.stage is not ClusterStage.ENDED]

    def lose_node(self, name: str) -> None:
        self.drained.add(name)
        for agent in self.living():
            if agent.request.node == name:
                self._end(agent, "NODE_FAIL", False)

    def _end(self, agent: FakeAgent, why: str, succeeded: bool) -> None:
        agent.stage, agent.why, agent.succeeded = ClusterStage.ENDED, why, succeeded

    # -- the jobs -------------------------------------------------------------------------------------------------

    def members(self, job: str) -> list[FakeAgent]:
        return [
            agent
            for agent in self.living()
            if agent.job == job and agent.stage is ClusterStage.RUNNING and self.now_s >= agent.began_s + JOIN_S
        ]

    def report(self, job: str) -> JobReport:
        name = job.rpartition(".")[0]
        members = self.members(job)
        here = frozenset(agent.member for agent in members)
        least = self.sizes.get(job, members[0].least if members else 1)
        trains = len(members) >= least
        ended = self.results.get(job)
        return JobReport(
            here=here,
            working=here if trains else frozenset(),
            draining=frozenset(agent.member for agent in members if agent.leaves_s < float("inf")),
            step=self.committed.get(name, 0) - 1 if members and name not in self.silent else -1,
            nnodes=(least, 99) if members else None,
            ended=ended is not None,
            succeeded=bool(ended),
            message="all workers have finished" if ended else "it has failed",
        )

    def leave(self, job: str, nodes: Collection[str]) -> None:
        for agent in self.members(job):
            if agent.member in nodes and agent.member not in self.stuck and agent.leaves_s == float("inf"):
                agent.leaves_s = self.now_s + LEAVE_S

    def pass_time(self, seconds: float) -> None:
        """Moves the clock by whole seconds; in each one, every job that can commits a step."""
        for _ in range(round(seconds)):
            self.now_s += 1.0
            for agent in self.living():
                if agent.request.node in self.dies_on_arrival and self.now_s > agent.began_s:
                    self._end(agent, "FAILED", False)
            for job in {agent.job for agent in self.living()}:
                self._train(job)

    def _train(self, job: str) -> None:
        name = job.rpartition(".")[0]
        members = self.members(job)
        if job not in self.results and members and name not in self.silent:
            if len(members) >= self.sizes.get(job, members[0].least):
                self.committed[name] = self.committed.get(name, 0) + 1
            else:
                self.held += 1
            if self.committed.get(name, 0) >= self.steps_of[name]:
                self.results[job] = True
        leaving = [agent for agent in members if self.now_s >= agent.leaves_s]
        if members and len(leaving) == len(members) and job not in self.results:
            self.results[job] = False
        for agent in leaving:
            self._end(agent, "COMPLETED" if self.results.get(job, True) else "FAILED", self.results.get(job, True))
        if self.results.get(job):
            for agent in self.living():
                if agent.job == job:
                    self._end(agent, "COMPLETED", True)


class Killed(BaseException):
    """The daemon is killed here."""


class Calls:
    """Counts the daemon's calls to the world outside, and kills it at one of them: before it, or right after."""

    def __init__(self) -> None:
        self.left = -1
        self.after = False

    def kill_at(self, call: int, rng: random.Random) -> None:
        self.left, self.after = call, rng.random() < 0.5

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left == 0 and not self.after:
                raise Killed
            result = function(*arguments, **options)
            if self.left == 0:
                raise Killed
            return result

        return call


class Watched:
    """An object whose calls of these names go through `Calls`."""

    def __init__(self, inner: object, calls: Calls, names: Collection[str]) -> None:
        self._inner = inner
        for name in names:
            setattr(self, name, calls.around(getattr(inner, name)))

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


@dataclass
class FakeCluster:
    """The world as a `Cluster`."""

    world: World

    def look(self) -> tuple[list[ClusterNode], list[AgentReport]]:
        return self.world.nodes(), self.world.reports()

    def start(self, request: AgentRequest) -> None:
        self.world.start(request)

    def stop(self, name: str, kill: bool) -> None:
        self.world.stop(name, kill)

    def forget(self, name: str) -> None:
        self.world.forget(name)


@dataclass
class FakeReports:
    """The world as `JobReports`."""

    world: World

    def look(self, jobs: Collection[str]) -> dict[str, JobReport]:
        return {job: self.world.report(job) for job in jobs}

    def ask_to_leave(self, job: str, nodes: Collection[str], timeout_s: float) -> None:
        self.world.leave(job, nodes)

    def ask_size(self, job: str, least: int, most: int) -> None:
        self.world.sizes[job] = least
