"""What the leader's rule works on: the settings of a job, what the leader knows, and what it decides. Pure values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from elaunch.rendezvous.membership import Generation, NodeDoc, PlanRequest, Result, Worker, WorkerState


@dataclass(frozen=True, slots=True)
class MembershipSettings:
    """Numbers of nodes and time limits of a job.

    Attributes:
        spares: how many nodes more than `max_nodes` hold workers ready.
        spare_state: whether these are members that hold the state, and whose samples do not count.
        max_restarts: whole restarts after a failure that memory cannot mend; None stands for none.
        last_call_s: how long a job with enough nodes, but not all, waits for more before it starts.
        join_s: how long it waits with fewer nodes than `min_nodes` before it fails.
        window_s: deaths that come within this time make one generation.
        attach_s: how long a script may take to import elaunch before it counts as one that never will.
        ready_s: how long workers that are ready wait for others that still start, before the first step.
        lease_s: the lease of a node; after an outage of the store, absence is believed only after this time.
        saves: whether the job has a folder for checkpoints.
        reach_s: how long the leader waits for what a node says that others cannot reach, before it leaves one out.
        founds: whether nodes that lose the store may found another one: then who is left behind must be no majority.
    """

    min_nodes: int = 1
    max_nodes: int = 1
    spares: int = 0
    spare_state: bool = False
    max_restarts: int | None = None
    last_call_s: float = 2.0
    join_s: float = 600.0
    window_s: float = 0.005
    attach_s: float = 10.0
    ready_s: float = 30.0
    lease_s: float = 5.0
    reach_s: float = 3.0
    saves: bool = False
    founds: bool = False

    @property
    def most_nodes(self) -> int:
        """Returns how many nodes may have members: those of the job, and spares that hold the state."""
        return self.max_nodes + (self.spares if self.spare_state else 0)


@dataclass(frozen=True, slots=True)
class View:
    """What the leader knows. Times in it are readings of its own monotonic clock, in seconds.

    Attributes:
        nodes: reports of the nodes whose lease is valid.
        led_s: since when it leads.
        changed_s: when it last saw a node's report change, appear or go.
        generation_s: when it first saw the present generation.
        begun: whether it ever saw a worker that holds state.
        pending_s: since when the rule has waited for the window to close, if it does.
        outage_end_s: when the store last came back after an outage, or went on after it stood still, if it ever did.
        request: for another plan, as long as it stands in the store.
        ended: liveness addresses of agents that are known to have ended.
        gone: nodes that had ended, or been silent for long, when this store was founded: their absence is in no doubt.
        floor: the least number of a generation that is made in this store.
    """

    nodes: tuple[NodeDoc, ...] = ()
    generation: Generation | None = None
    result: Result | None = None
    led_s: float = 0.0
    changed_s: float = 0.0
    generation_s: float = 0.0
    begun: bool = False
    pending_s: float | None = None
    outage_end_s: float | None = None
    request: PlanRequest | None = None
    ended: frozenset[str] = frozenset()
    gone: frozenset[str] = frozenset()
    floor: int = 0


@dataclass(frozen=True, slots=True)
class LeaderDecision:
    """What the leader's rule says.

    Attributes:
        reason: why, for people.
        generation: to be written; None: the present one stays.
        result: to be written; None: the job goes on.
        wake_s: when to ask again at the latest, by the leader's clock; None: only a change calls for it.
        pending: whether it waits for more changes to come, within a window that is open.
        all_leave: why all nodes are to drain; "": they are not.
        asks: nodes of which it has to be known whether their agents have ended.
    """

    reason: str
    generation: Generation | None = None
    result: Result | None = None
    wake_s: float | None = None
    pending: bool = False
    all_leave: str = ""
    asks: tuple[str, ...] = ()


def next_generation(view: View) -> int:
    """Returns the number after all known ones. Nodes remember the newest they saw, in case the store loses its data."""
    known = [doc.progress.generation for doc in view.nodes]
    if view.generation is not None:
        known.append(view.generation.number)
    return max(view.floor, max(known, default=0) + 1)


def absence_in_doubt(view: View, now_s: float, settings: MembershipSettings, node: str = "") -> bool:
    """Returns whether nodes that are missing may be alive: after an outage their leases are not all renewed yet."""
    in_time = view.outage_end_s is not None and now_s < view.outage_end_s + settings.lease_s
    return in_time and node not in view.gone


def ready_workers(doc: NodeDoc, attempt: int) -> tuple[Worker, ...]:
    """Returns the workers of a node that can join in an attempt, in the order of their slots."""
    if doc.progress.attempt < attempt:
        return ()  # it has still to hear that all start again
    return tuple(
        Worker(worker.id, doc.node, worker.local_rank, worker.address, doc.domain)
        for worker in sorted(doc.workers, key=lambda worker: worker.local_rank)
        if worker.state is WorkerState.READY
    )


def first_failure(nodes: Iterable[NodeDoc]) -> str:
    """Returns the failure that came first and so, clocks of machines permitting, made the others fail; "": none."""
    failed = ((doc.cause_t, doc.summary.failed) for doc in nodes if doc.summary.failed)
    return min(failed, default=(0.0, ""))[1]


def newest_checkpoint(nodes: Iterable[NodeDoc]) -> int | None:
    """Returns the number of steps in the newest checkpoint that any node knows of; None: there is none."""
    return max((doc.progress.saved for doc in nodes if doc.progress.saved is not None), default=None)
