"""The documents of a job: nodes, generations, the job's fixed settings, what is asked of it, and its result.

Each is a frozen value; `codec` gives it a JSON form that carries a version. Keys, under ``/elaunch/<job>/``:

    config                    created once by the first node        JobConfig
    nodes/<node>              leased; written by its own node only  NodeDoc
    leader                    leased; name of the leading node      text
    waiting                   leased; what the leader waits for     text
    profile                   leased; what the job has measured     elaunch.policy.profile.Profile
    status                    leased; how far the training is       TrainingStatus
    generation                compare-and-swap by the leader        Generation
    edit                      written with it                       rules.edit.GenerationEdit
    size                      leased; written by the leader         JobSize
    spares                    the same                              rules.spares.HeldSpares
    checks/<node>             leased; figures of its --node-check   elaunch.agent.watch.node_check.Figures
    requests/plan             leased; written by who asks for it    PlanRequest
    requests/size             the same                              JobSize
    requests/drain/<node>     the same; `node` is to leave          DrainRequest
    requests/deadlock/<node>  leased; written by the leader         Deadlock
    result                    written once, when the job is over    Result
    servers                   written by the leader                 cluster.servers.EtcdServers
    founding                  written by who founds the store       rules.founding.Founding
    absent                    leased; written by the leader         rules.founding.Absent
    moved                     written by the leader of another one  text: where the job's store is now
    left/<node>               leased; written by its own node       liveness address of an agent that has ended

Any other key is a stranger's. `intake` says what is made of those, and of documents that cannot be read.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from urllib.parse import quote, unquote

NAMES_SHOWN = 8  # in a message
JOBS_PREFIX = "/elaunch/"


def job_prefix(job: str) -> str:
    """Returns the beginning of the keys under which the documents of a job stand in the store."""
    return f"{JOBS_PREFIX}{quote(job, safe='')}/"


def job_of(key: str) -> str:
    """Returns the job whose document stands under a key that begins with `JOBS_PREFIX`."""
    return unquote(key.removeprefix(JOBS_PREFIX).partition("/")[0])


class GenerationStage(enum.StrEnum):
    """What the workers of a generation do."""

    ASSEMBLE = "assemble"  # nodes stop the workers of the former attempt and meet again
    START = "start"  # workers are started; none of them trains as a member yet
    TRAIN = "train"  # the workers listed train together


class WorkerState(enum.StrEnum):
    """What its node says of a worker. A worker that died is not listed at all."""

    STARTING = "starting"  # the process exists
    READY = "ready"  # it can be reached and has registered what it will hold
    MEMBER = "member"  # it holds the state of the job
    DONE = "done"  # it has finished all its steps


@dataclass(frozen=True, slots=True)
class Worker:
    """A place in a generation: one incarnation of a training process, in a failure domain if its node has one."""

    id: str
    node: str
    local_rank: int
    address: str = ""
    domain: str = ""


def worker_id(node: str, local_rank: int, incarnation: int) -> str:
    """Returns the identity of one incarnation of a worker; it is never used again."""
    return f"{node}/{local_rank}#{incarnation}"


def incarnation(worker: str) -> int:
    """Returns the last part of a worker's identity; -1 for a slot (`node/local_rank`) that has no worker yet."""
    number = worker.rpartition("#")[2]
    return int(number) if number != worker else -1


def slot_of(worker: str) -> str:
    """Returns the slot (`node/local_rank`) of a worker's identity."""
    return worker.partition("#")[0]


def node_of(worker: str) -> str:
    """Returns the node of a worker's identity."""
    return worker.partition("/")[0]


def by_node(workers: Iterable[str]) -> dict[str, list[str]]:
    """Groups workers by their nodes, both in the order in which they are given."""
    nodes: dict[str, list[str]] = {}
    for worker in workers:
        nodes.setdefault(node_of(worker), []).append(worker)
    return nodes


def split_address(address: str) -> tuple[str, int]:
    """Splits the address of a worker, `host:port` or `[v6]:port`; raises `ValueError` when it is neither."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdigit()):
        raise ValueError(f"{address!r} is not an address: expected host:port")
    return host.strip("[]"), int(port)


def names_text(names: Sequence[str]) -> str:
    """Joins names for a message; of many, names the first and says how many more there are."""
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{', '.join(names[:NAMES_SHOWN])}{more}"


@dataclass(frozen=True, slots=True)
class NodeWorker:
    """A live worker as its own node reports it."""

    id: str
    local_rank: int
    state: WorkerState
    address: str = ""


@dataclass(frozen=True, slots=True)
class JobConfig:
    """What all nodes of a job must agree on, and the secret its workers know each other by.

    `training` has the flags or variables that scripts of elaunch are told, `spares` the nodes beyond `max_nodes`.
    """

    min_nodes: int
    max_nodes: int
    max_restarts: int | None
    token: str = ""
    training: tuple[tuple[str, str], ...] = ()
    spares: int = 0


@dataclass(frozen=True, slots=True)
class Cut:
    """A node that cannot be reached, at the address `host`: another node of that name elsewhere is not meant."""

    node: str
    host: str


@dataclass(frozen=True, slots=True)
class Stalled:
    """A member that waits for peers, like all members of its node, for longer than it may.

    `doing` says what it is about in `step`. It waits in `operation` of `generation` for `peers` and `others` more.
    """

    worker: str
    step: int
    doing: str
    generation: int
    operation: int
    peers: tuple[str, ...] = ()
    others: int = 0


@dataclass(frozen=True, slots=True)
class BrokenLink:
    """The link between a worker and its live peer failed, as that worker reports."""

    worker: str
    peer: str


@dataclass(frozen=True, slots=True)
class Streak:
    """Urgent generations in a row without a committed step in between.

    Attributes:
        urgent: how many there were, whatever the cause.
        resets: how many of them lost nobody: they came because links between live workers failed.
        members: how many workers the largest of them had, or the generation before.
        broken: these links, each report once.
        replaced: the workers that were replaced because of them.
        logged: number of steps up to the last one in a node's event log when one of its workers last ended.
    """

    urgent: int = 0
    resets: int = 0
    members: int = 0
    broken: tuple[BrokenLink, ...] = ()
    replaced: tuple[str, ...] = ()
    logged: int = 0


@dataclass(frozen=True, slots=True)
class WorkerSummary:
    """What is true of all workers of a node together.

    Attributes:
        elastic: one of them uses elaunch.
        took_part: one of this agent's has been a member in the present attempt.
        takes_plans: they can go over to any plan (`elaunch.hybrid()`).
        finished: each has ended well, and there was at least one.
        failed: why none runs or will; empty while that is not so.
        abandoned: why the job cannot go on, as one of them says; empty while none does.
        error: how the last worker of each slot failed, where all raised the same exception at the same line before they
            saw a step commit; empty otherwise.
        early_death: how the first worker died that did so before any of the node had registered; empty: none did.
    """

    elastic: bool = False
    took_part: bool = False
    takes_plans: bool = False
    finished: bool = False
    failed: str = ""
    abandoned: str = ""
    error: str = ""
    early_death: str = ""


@dataclass(frozen=True, slots=True)
class NodeProgress:
    """How far a node has followed the job.

    Attributes:
        attempt: the newest one of which all former workers have ended here.
        generation: the newest that it has heard of.
        plan_request: id of the request by whose plan all its members go; empty before the first.
        committed: the newest generation in which a step has committed; only the first member's node tells it, and only
            during a streak of generations without one.
        saved: number of steps in the newest checkpoint that it knows of; None: it knows of none.
        logged: number of steps up to the last one in its event log, as it was when a worker last finished or ended.
    """

    attempt: int = 0
    generation: int = 0
    plan_request: str = ""
    committed: int = 0
    saved: int | None = None
    logged: int = 0


@dataclass(frozen=True, slots=True)
class PeerFaults:
    """What is wrong between a node and others, as its workers and its probes have found.

    Attributes:
        unreachable: workers of other nodes that cannot be reached, and own ones that ended before they could leave.
        broken: links to live peers that failed its members in the present generation.
        reset_generation: whose links are to be made anew; 0: none's.
        cut: nodes which it cannot reach although they may be well.
        stalled: its members, as long as all of them wait for longer than they may.
    """

    unreachable: tuple[str, ...] = ()
    broken: tuple[BrokenLink, ...] = ()
    reset_generation: int = 0
    cut: tuple[Cut, ...] = ()
    stalled: tuple[Stalled, ...] = ()


@dataclass(frozen=True, slots=True)
class Departure:
    """Who of a node is to leave the job.

    Attributes:
        draining: all of it.
        evicted: workers that are to leave although the node stays.
        joined: the newest generation that all its members have entered; told only where some of them are to leave.
        sick: why it is to leave as soon as the job can do without it; "" where it need not.
    """

    draining: bool = False
    evicted: tuple[str, ...] = ()
    joined: int = 0
    sick: str = ""


@dataclass(frozen=True, slots=True)
class NodeDoc:
    """One node's report.

    Attributes:
        node: its name.
        host: the address at which workers of other nodes reach it.
        slots: how many workers it runs.
        workers: those that live.
        role, rank: as the user has given them (--role, --node-rank); where no rank is given, all have 0.
        port: offered to the workers for their own rendezvous.
        liveness_address: host:port at which the agent listens as long as it lives.
        domain: the failure domain that the user has named (--failure-domain); empty: none.
        store_address: host:port at which an etcd of this node would listen for other servers; empty: it serves none.
        serves: whether it serves the store now.
        cause: the last event that changed the job's members here, for people.
        cause_t: its Unix time in seconds; 0: unknown.
        summary, progress: of its workers; how far it has followed the job.
        peers, departure: what is wrong between it and others; who of it is to leave.
        order: the store's revision at which it joined; it is not written.
    """

    node: str
    host: str
    slots: int
    workers: tuple[NodeWorker, ...] = ()
    role: str = "default"
    rank: int = 0
    port: int = 0
    liveness_address: str = ""
    domain: str = ""
    store_address: str = ""
    serves: bool = False
    cause: str = ""
    cause_t: float = 0.0
    summary: WorkerSummary = WorkerSummary()
    progress: NodeProgress = NodeProgress()
    peers: PeerFaults = PeerFaults()
    departure: Departure = Departure()
    order: int = field(default=0, compare=False)

    @property
    def draining(self) -> bool:
        """Returns whether all its workers are to leave."""
        return self.departure.draining


@dataclass(frozen=True, slots=True)
class Master:
    """Where the workers of an attempt meet for a rendezvous of their own: MASTER_ADDR and MASTER_PORT."""

    addr: str = ""
    port: int = 0


@dataclass(frozen=True, slots=True)
class Restarts:
    """How often, and from where, all workers of a job were started again.

    Attributes:
        count: how often it was because of a failure.
        saved: number of steps in the checkpoint from which the present attempt began; None: it began without one.
        resumes: how often the job has gone back to that checkpoint.
    """

    count: int = 0
    saved: int | None = None
    resumes: int = 0


@dataclass(frozen=True, slots=True)
class RequestedPlan:
    """The plan that was asked for last in an attempt: its text, and the id of the request; both empty before one."""

    text: str = ""
    request: str = ""


@dataclass(frozen=True)
class Generation:
    """An agreed, numbered, ordered list of workers. A rank is a position in it.

    Attributes:
        number: one more than that of the generation before.
        stage: what its workers do.
        workers: by rank.
        attempt, restarts: how often all were started again; how often because of failures, and from which checkpoint.
        cause: why it was made, for people.
        cause_t: Unix time of that in seconds; 0: unknown.
        aborts_step_before: the newest generation, up to this one, at which a member was lost or a link had to be made
            anew: a worker whose own generation is older interrupts its step; otherwise it changes over between two.
        begun: some worker has held state before: without a holder of state, the job cannot go on.
        hold: the members are to keep their state and wait: the job has fewer nodes than its minimum.
        leaving: workers that were told to leave and are still there; while nodes meet again, nodes that may end now.
        master: where its workers meet.
        roles: those of its nodes, by name, where they are not all the same.
        requested_plan: a member that has not acted on this request yet does so when it changes over.
        seats: its nodes, those that serve the store first, and their liveness addresses; empty: no store may follow.
        former_seats: those of the last generation of which all nodes had heard when this one was made.
        streak: the urgent generations up to this one between which no step is known to have committed.
        refused: ready workers that peers found dead, as long as their nodes may not have heard of it.
        standby: workers of spares, at the end of `workers`, whose samples do not count (`rules.spares`).
        finished: a member has finished. All others had come to the end of the job by then, and need only end.
    """

    number: int
    stage: GenerationStage
    workers: tuple[Worker, ...] = ()
    attempt: int = 0
    restarts: Restarts = Restarts()
    cause: str = ""
    cause_t: float = 0.0
    aborts_step_before: int = 0
    begun: bool = False
    hold: bool = False
    leaving: tuple[str, ...] = ()
    master: Master = Master()
    roles: tuple[tuple[str, str], ...] = ()
    requested_plan: RequestedPlan = RequestedPlan()
    seats: tuple[tuple[str, str], ...] = ()
    former_seats: tuple[tuple[str, str], ...] = ()
    streak: Streak = Streak()
    refused: tuple[str, ...] = ()
    standby: tuple[str, ...] = ()
    finished: bool = False

    @property
    def plan(self) -> str:
        """Returns the text of the plan that was asked for last in this attempt; empty before one was."""
        return self.requested_plan.text

    @property
    def plan_request(self) -> str:
        """Returns the id of the request for that plan; empty before one."""
        return self.requested_plan.request

    @cached_property
    def ids(self) -> tuple[str, ...]:
        """Returns the identities of its workers, by rank."""
        return tuple(worker.id for worker in self.workers)

    @cached_property
    def working(self) -> tuple[str, ...]:
        """Returns those whose samples count, by rank: all but the workers of spares."""
        return tuple(worker for worker in self.ids if worker not in self.standby) if self.standby else self.ids

    @cached_property
    def ranks(self) -> Mapping[str, int]:
        """Returns the ranks of its workers, by identity, in their order."""
        return {worker: rank for rank, worker in enumerate(self.ids)}

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """Returns the names of the nodes that hold its workers, in order of first appearance."""
        return tuple(self.of_nodes)

    @cached_property
    def node_set(self) -> frozenset[str]:
        """Returns them to look one up."""
        return frozenset(self.nodes)

    @cached_property
    def of_nodes(self) -> Mapping[str, Sequence[str]]:
        """Returns the identities of its workers by node, in order of first appearance."""
        return by_node(self.ids)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Somebody asks the members of one generation, `generation`, at Unix time `t` to go on by another plan.

    `plan` is its text, in which the workers are these members; so it counts for no other generation.
    """

    id: str
    generation: int
    plan: str
    t: float


@dataclass(frozen=True, slots=True)
class JobSize:
    """How many nodes the job has from now on, whatever --nnodes said; `id` is that of the request, made at Unix `t`."""

    id: str
    min_nodes: int
    max_nodes: int
    t: float


@dataclass(frozen=True, slots=True)
class DrainRequest:
    """A node is to leave the job at a step boundary; `reason` is for people, `t` the Unix time of the request."""

    reason: str
    t: float


@dataclass(frozen=True, slots=True)
class Deadlock:
    """All `members` of the job wait for each other, as `waits` says; `worker`, of the node asked, is to go."""

    worker: str
    members: int
    waits: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """How the job ended."""

    succeeded: bool
    message: str = ""
