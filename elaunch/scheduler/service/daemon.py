"""The scheduler's daemon: looks, decides, writes, acts, again and again. All decisions are pure functions.

    look      nodes and agents of the cluster, reports of the jobs, new jobs and cancellations
    advance   each job goes on by what was seen                          `advance`
    decide    the policy says what each job is to have                   `decide`
    change    agents that are to start or to leave                       `changes.change`
    write     the documents that have changed, by compare-and-swap
    act       what the written documents ask for                         `changes.actions`

A daemon that is killed anywhere in this leaves documents from which the next one goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from elaunch.errors import ElaunchError
from elaunch.rendezvous.codec import to_json
from elaunch.rendezvous.store import LeaseGone, Store
from elaunch.scheduler.clusters.cluster import AgentRequest, Cluster, ClusterUnavailable
from elaunch.scheduler.model import ClusterNode, SchedulingPolicy, Speed
from elaunch.scheduler.service.advance import Note, Observed, WaitLimits, advance
from elaunch.scheduler.service.changes import (
    Action,
    AskSize,
    AskToLeave,
    ForgetAgent,
    JobNow,
    StartAgent,
    StopAgent,
    actions,
    change,
    strays,
)
from elaunch.scheduler.service.decide import in_order, next_schedule, same
from elaunch.scheduler.service.documents import (
    FINAL,
    PREFIX,
    JobSpec,
    PlacementDoc,
    agent_name,
    by_name,
)
from elaunch.scheduler.service.reports import JobReport, JobReports
from elaunch.scheduler.service.stored import Stored, read_all

LEASE_S = 20.0  # a look at the cluster, of two commands or requests, takes less
MOST_REFUSED = 5  # actions in a turn, before the rest waits for the next one
KEPT_S = 7 * 24 * 3600.0  # jobs that have ended


class LeadLost(ElaunchError):
    """Another daemon leads, or may by now: this one must do nothing any more."""


class Speeds(Protocol):
    """Says how fast jobs are on what they might get."""

    def of(
        self, jobs: Iterable[tuple[JobSpec, JobReport]], nodes: Sequence[ClusterNode], now_t: float
    ) -> dict[str, Speed]:
        """Returns the speeds of those jobs of which something is known."""


@dataclass(frozen=True, slots=True)
class DaemonSettings:
    """What a daemon is given.

    Attributes:
        name: of the scheduler; several daemons of one name take turns.
        identity: of this daemon.
        endpoint: of the etcd, as agents are told.
        limits: of waiting.
    """

    name: str
    identity: str
    endpoint: str
    limits: WaitLimits = field(default_factory=WaitLimits)


class Daemon:
    """One daemon. `turn` is to be called again and again; between two calls nothing happens.

    Args:
        settings: what it is given.
        store: etcd.
        cluster: where agents run.
        reports: of running jobs.
        policy: decides.
        speeds: of jobs.
        tell: takes a kind, the job's name or "", and a text, for each thing that happens.
        clock: Unix time.
    """

    def __init__(
        self,
        settings: DaemonSettings,
        store: Store,
        cluster: Cluster,
        reports: JobReports,
        policy: SchedulingPolicy,
        speeds: Speeds,
        tell: Callable[[str, str, str], Any],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._store = store
        self._cluster = cluster
        self._reports = reports
        self._policy = policy
        self._speeds = speeds
        self._tell = tell
        self._clock = clock
        self._prefix = f"{PREFIX}{settings.name}/"
        self._lease: int | None = None
        self._renewed_s = 0.0
        self._damaged: set[str] = set()
        self._refused: dict[str, str] = {}
        self.jobs: list[JobNow] = []
        self.nodes: list[ClusterNode] = []

    # -- leading --------------------------------------------------------------------------------------------------

    def lead(self) -> bool:
        """Returns whether this daemon leads now; renews what it leads by, or tries to lead.

        Raises:
            StoreUnavailable: etcd does not answer.
        """
        if self._lease is not None:
            if self._leads_still():
                return True
            self._tell("follows", "", f"daemon {self._settings.identity} does not lead any more")
        begin_s = time.monotonic()
        lease = self._store.grant(LEASE_S)
        try:
            if self._store.create(f"{self._prefix}leader", self._settings.identity.encode(), lease):
                self._lease, self._renewed_s = lease, begin_s
                self._tell("leads", "", f"daemon {self._settings.identity} leads")
                return True
        except LeaseGone:
            return False
        self._store.revoke(lease)
        return False

    def _leads_still(self) -> bool:
        """Renews the lease by which this daemon leads; returns whether it is still there."""
        begin_s = time.monotonic()
        if self._lease is not None and self._store.keep_alive(self._lease):
            entry = self._store.get(f"{self._prefix}leader")
            if entry is not None and entry.value == self._settings.identity.encode():
                self._renewed_s = begin_s
                return True
        self._lease = None
        return False

    def resign(self) -> None:
        """Lets another daemon lead at once."""
        if self._lease is not None:
            self._store.revoke(self._lease)
            self._lease = None

    def _check_lead(self) -> None:
        """Renews the lease if a third of its time is over.

        Raises:
            LeadLost: it has run out.
        """
        if time.monotonic() > self._renewed_s + LEASE_S / 3 and not self._leads_still():
            raise LeadLost("this daemon was away for so long that another one may lead")

    # -- one turn -------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Looks, decides, writes and acts once.

        Raises:
            LeadLost: another daemon leads.
            ClusterUnavailable, StoreUnavailable: nothing is lost; call again.
        """
        now_t, limits = self._clock(), self._settings.limits
        stored, jobs = self._read()
        self.nodes, found = self._cluster.look()
        agents = {report.name: report for report in found}
        ids = {job.spec.name: rdzv_id(job) for job in jobs if job.progress.agents}
        reports = self._reports.look(ids.values())

        def seen(job: JobNow) -> Observed:
            report = reports.get(ids.get(job.spec.name, ""), JobReport())
            return Observed(agents, report, stored.cancelled.get(job.spec.name, ""), now_t, self._refused)

        notes: list[Note] = []
        advanced = []
        for job in jobs:
            progress, told = advance(job.spec, job.progress, seen(job), limits)
            notes += told
            advanced.append(replace(job, progress=progress))
        speeds = self._speeds.of([(job.spec, seen(job).report) for job in advanced], self.nodes, now_t)
        decided, answer = next_schedule(self._policy, advanced, self.nodes, speeds, now_t, limits)
        placements = by_name(decided.placements)
        placed = [replace(job, placement=placements.get(job.spec.name, PlacementDoc("", -1))) for job in advanced]
        changed, told = change(placed, self.nodes, now_t, limits)
        notes += told
        after = [replace(job, progress=changed.get(job.spec.name, job.progress)) for job in placed]

        if not same(decided, stored.schedule):
            self._write("schedule", decided, stored)
            for reason in answer.reasons:
                before = by_name(stored.schedule.placements).get(reason.job)
                if before is None or (before.action, before.reason) != (reason.action, reason.text):
                    notes.append(Note(reason.job, "decided", f"{reason.action}: {reason.text}"))
        for old, new in zip(jobs, after, strict=True):
            if new.progress != old.progress:
                self._write(f"progress/{new.spec.name}", new.progress, stored)
        for note in notes:
            self._tell(note.kind, note.job, note.text)
        self.jobs = after
        first: list[Action] = []
        later = strays(after, Observed(agents, JobReport(), "", now_t))
        for job in after:
            for action in actions(job, seen(job)):
                (later if isinstance(action, StartAgent) else first).append(action)
        by_job = {job.spec.name: job for job in after}
        refused: dict[str, str] = {}
        for action in [*first, *later]:
            self._check_lead()
            try:
                self._act(action, by_job)
            except ClusterUnavailable as error:  # perhaps of this one only, such as for a wrong option
                refused[_agent_of(action, by_job)] = str(error)
                if len(refused) == MOST_REFUSED:
                    break
        self._tell_refused(refused)
        self._purge(after, now_t)

    def _tell_refused(self, refused: dict[str, str]) -> None:
        """Tells what the cluster refused, unless it was refused before."""
        for name, text in refused.items():
            if self._refused.get(name) != text:
                self._tell("refused", name.partition(".")[0], f"is refused an agent, which is tried again: {text}")
        self._refused = refused

    def _act(self, action: Action, jobs: dict[str, JobNow]) -> None:
        match action:
            case StartAgent(name, agent):
                self._cluster.start(request_of(jobs[name], agent.number, self._settings.endpoint))
            case AskToLeave(name, members):
                self._reports.ask_to_leave(rdzv_id(jobs[name]), members, jobs[name].spec.leave_s)
            case AskSize(name, least):
                self._reports.ask_size(rdzv_id(jobs[name]), least, max(least, jobs[name].spec.most))
            case StopAgent(name, kill):
                self._cluster.stop(name, kill)
            case ForgetAgent(name):
                self._cluster.forget(name)

    # -- documents ------------------------------------------------------------------------------------------------

    def _read(self) -> tuple[Stored, list[JobNow]]:
        stored = read_all(self._store, self._settings.name)
        for key, why in stored.unreadable.items():
            if key not in self._damaged:
                self._damaged.add(key)
                self._tell("damaged", "", f"{key} is passed over: {why}")
        placements = by_name(stored.schedule.placements)
        jobs = [
            JobNow(spec, stored.progress_of(spec), placements.get(spec.name, PlacementDoc(spec.name, -1)))
            for spec in stored.jobs
        ]
        return stored, in_order(jobs)

    def _write(self, name: str, document: object, stored: Stored) -> None:
        self._check_lead()
        if not self._store.replace(self._prefix + name, to_json(document), stored.revisions.get(name, 0)):
            raise LeadLost(f"{self._prefix}{name} was written by somebody else")

    def _purge(self, jobs: Iterable[JobNow], now_t: float) -> None:
        """Deletes what is left of jobs that ended long ago."""
        for job in jobs:
            if job.progress.stage in FINAL and now_t > job.progress.ended_t + KEPT_S:
                for what in ("cancel", "jobs", "progress"):
                    self._store.delete(f"{self._prefix}{what}/{job.spec.name}")


def rdzv_id(job: JobNow) -> str:
    """Returns the name of a job's present attempt among the jobs of the etcd."""
    return f"{job.spec.name}.{job.progress.attempt}"


def _agent_of(action: Action, jobs: dict[str, JobNow]) -> str:
    """Returns the name of the agent that an action is about."""
    match action:
        case StartAgent(name, agent):
            return agent_name(name, jobs[name].progress.attempt, agent.number)
        case StopAgent(name) | ForgetAgent(name):
            return name
    return action.job


def request_of(job: JobNow, number: int, endpoint: str) -> AgentRequest:
    """Returns what the cluster is asked for, of an agent of this number."""
    spec, progress = job.spec, job.progress
    agent = next(one for one in progress.agents if one.number == number)
    flags = (
        f"--nnodes={progress.least_nodes}:{max(progress.least_nodes, spec.most)}",
        f"--nproc-per-node={agent.devices}",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={rdzv_id(job)}",
        f"--node-name={agent.member}",
    )
    name = agent_name(spec.name, progress.attempt, number)
    return AgentRequest(name, agent.node, agent.devices, (*flags, *spec.command), spec.folder, spec.options)
