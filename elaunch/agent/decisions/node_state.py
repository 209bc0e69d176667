"""What a node knows beside the state of its slots: settings, how it ends, what failed, what it hears of peers."""

from __future__ import annotations

from dataclasses import dataclass, field

from elaunch.agent.decisions.actions import Action, Ended, Exit, Log, Say
from elaunch.rendezvous.membership import (
    BrokenLink,
    Cut,
    Generation,
    GenerationStage,
    PeerFaults,
    Result,
    Stalled,
    names_text,
    node_of,
)

TOGETHER_S = 1.0  # deaths on a node that come within this time have one cause


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What the lifecycle needs to know of the command line. Times in seconds.

    `left_code` is the exit code of a node that has left a job which goes on; `spare_state` says whether spares hold the
    state.
    """

    node: str
    host: str
    slots: int
    min_nodes: int
    max_nodes: int
    max_restarts: int | None
    shutdown_s: float = 30.0
    role: str = "default"
    rank: int = 0
    domain: str = ""
    warm_start: bool = False
    register_s: float = 900.0
    left_code: int = 0
    spare_state: bool = False

    @property
    def is_alone(self) -> bool:
        """Returns whether the job has room for one worker only, which nobody can stand in for."""
        return self.slots * self.max_nodes == 1


@dataclass(slots=True)
class Ending:
    """How and why this node leaves the job, if it does.

    Attributes:
        draining: it leaves as soon as the others can go on without it.
        unheard: it drains, and there is no generation yet that was made without it. Until then it does not end: it may
            be the last of those that leave.
        reason: why it drains.
        stopping: why its workers are stopped; "" while they are not.
        exit_code: of the agent, once its workers have ended.
        kill_s: when workers that still run are killed.
        killed: whether they have been.
        alone: whether its workers go by generations that this node has made by itself, to save the state.
        signalled: whether the agent itself got a signal.
        sick: what of this node is about to fail; "" while nothing is.
        sick_told: whether the user was told that the job cannot spare the sick node.
    """

    draining: bool = False
    unheard: bool = False
    reason: str = ""
    stopping: str = ""
    exit_code: int = 1
    kill_s: float | None = None
    killed: bool = False
    alone: bool = False
    signalled: bool = False
    sick: str = ""
    sick_told: bool = False

    @property
    def under_way(self) -> bool:
        """Returns whether this node drains or stops: its workers are leaving and none is started any more."""
        return self.draining or bool(self.stopping)

    def drain(self, reason: str, exit_code: int, generation: Generation, node: str) -> None:
        """Begins to drain this node, which has heard of this generation."""
        self.draining, self.reason, self.exit_code = True, reason, exit_code
        self.hear(generation, node)

    def hear(self, generation: Generation, node: str) -> None:
        """Notes whether a generation was made without this node, which drains."""
        if generation.stage is GenerationStage.ASSEMBLE:
            self.unheard = self.draining and node not in generation.leaving
        else:
            self.unheard = self.draining and generation.stage is GenerationStage.START and node in generation.node_set

    def exit(self, result: Result | None, saved: int | None, left_code: int) -> Exit | None:
        """Returns how the agent ends now that no worker runs; None if it stays.

        Args:
            result: of the job, once there is one.
            saved: number of steps in the newest checkpoint.
            left_code: exit code of a node that has left a job which goes on.
        """
        in_order = Exit(left_code if result is None else 0)
        if self.stopping:
            return Exit(self.exit_code, self.stopping) if self.exit_code else in_order
        if self.unheard:
            return None
        if self.draining:
            return Exit(self.exit_code, f"stopped by {self.reason}; {_kept(saved)}") if self.exit_code else in_order
        if result is not None:
            return Exit(0 if result.succeeded else 1, "" if result.succeeded else result.message)
        return None


@dataclass(slots=True)
class Standby:
    """A node for which the job has no place, or may have none.

    Attributes:
        spares: the nodes that hold workers ready all the same, as the leader says.
        told: whether the user was told that this node is a spare.
    """

    spares: tuple[str, ...] = ()
    told: bool = False

    def has_place(self, settings: NodeSettings, generation: Generation) -> bool:
        """Returns whether workers that this node starts now can become members, at once or when another node goes."""
        in_job = settings.node in generation.nodes or len(generation.nodes) < settings.max_nodes
        return in_job or (settings.node in self.spares and generation.stage is GenerationStage.TRAIN)

    def hear(self, settings: NodeSettings, nodes: tuple[str, ...]) -> list[Action]:
        """Takes which nodes are held ready; says so where this one has come to be among them."""
        if nodes == self.spares:
            return []
        is_new, self.spares = settings.node in set(nodes) - set(self.spares), nodes
        self.told = self.told or is_new
        text = "this node is a spare: its workers start, register, and "
        text += "follow each step" if settings.spare_state else "wait"
        return [Log("spares", nodes), *([Say(f"{text} until a node of the job is lost or leaves")] if is_new else [])]

    def wait(self, settings: NodeSettings, once: bool = False) -> list[Say]:
        """Says that this node is a spare that starts no workers."""
        if self.told and once:
            return []
        self.told, most = True, settings.max_nodes
        return [Say(f"this node waits as a spare: the job has its {most} node{'' if most == 1 else 's'}")]


@dataclass(slots=True)
class Blame:
    """What failed on this node.

    Attributes:
        failed: why nothing of this node runs or will; "" while that is not so.
        abandoned: why the job cannot go on, as a worker says; "" while none does.
        cause: the last event that changed the job's members here, for people.
        cause_t: its Unix time in seconds.
        failures: by local rank, workers that failed and were not replaced.
        replaced: the same of the last ones that failed and were.
    """

    failed: str = ""
    abandoned: str = ""
    cause: str = ""
    cause_t: float = 0.0
    failures: dict[int, Ended] = field(default_factory=dict)
    replaced: dict[int, Ended] = field(default_factory=dict)
    _answered: bool = False

    def note(self, text: str, t: float) -> None:
        """Takes the first of deaths that come together as the cause: what follows from it must not hide it.

        Once a generation has answered that one, the next death is a cause of its own.
        """
        if self._answered or not 0 <= t - self.cause_t < TOGETHER_S:
            self.replace(text, t)

    def replace(self, text: str, t: float) -> None:
        """Takes an event as the cause, whatever came before it."""
        self.cause, self.cause_t, self._answered = text, t, False

    def replace_worker(self, local_rank: int) -> None:
        """Notes that the next worker of a slot starts."""
        former = self.failures.pop(local_rank, None)
        if former is not None:
            self.replaced[local_rank] = former

    def enter(self, generation: Generation) -> None:
        """Notes whether a new generation answers the cause that this node has given."""
        self._answered = self._answered or generation.cause == self.cause


@dataclass(slots=True)
class PeerReports:
    """What the workers of this node, and its probes, found out about peers.

    Attributes:
        unreachable: peers that cannot be reached, and workers of this node that ended before they could leave.
        reset_generation: the generation whose links are to be made anew.
        broken: links to live peers that failed in the present generation.
        cut: other nodes that cannot be reached.
        asked_in: the newest generation in which a worker took a node for silent, so that the others are asked.
        stalled: the members of this node, while all of them wait for longer than they may.
        committed: the newest generation after urgent ones in which a step committed, as the first member saw it.
    """

    unreachable: tuple[str, ...] = ()
    reset_generation: int = 0
    broken: tuple[BrokenLink, ...] = ()
    cut: tuple[Cut, ...] = ()
    asked_in: int = 0
    stalled: tuple[Stalled, ...] = ()
    committed: int = 0

    def faults(self) -> PeerFaults:
        """Returns what the node's report says of it."""
        return PeerFaults(self.unreachable, self.broken, self.reset_generation, self.cut, self.stalled)

    def enter(self, generation: Generation) -> None:
        """Drops what a new generation has settled."""
        self.stalled, self.broken = (), ()
        known = {*generation.ids, *generation.leaving}
        if generation.aborts_step_before == generation.number:
            known.difference_update(generation.ids)  # it names them all the same, and all try again to reach them
        elif not known.issuperset(self.unreachable):
            # Its author had not heard of it: the step that lacks such a peer is to end all the same.
            self.reset_generation = generation.number
        self.unreachable = tuple(worker for worker in self.unreachable if worker in known)

    def note_unreachable(self, worker: str) -> None:
        """Adds a peer that cannot be reached, unless it is known already."""
        self.unreachable = tuple(dict.fromkeys((*self.unreachable, worker)))

    def note_broken(self, worker: str, peer: str) -> None:
        """Adds the broken link between `worker`, of this node, and its live `peer`, unless it is known already."""
        self.broken = tuple(dict.fromkeys((*self.broken, BrokenLink(worker, peer))))

    def needs_links(self, generation: Generation, cut: tuple[Cut, ...], well: frozenset[str]) -> bool:
        """Returns whether links of a generation are to be made anew, as other nodes answer.

        Args:
            generation: the newest one.
            cut: those that cannot be reached.
            well: those that can, although a worker of this node took them for silent. It has left its step for that,
                and waits for a generation that ends it; there may have been one since.
        """
        # The leader may not have heard of the cut while it lasted; the links that it broke stay broken.
        back = {one.node for one in self.cut} - {one.node for one in cut}
        waits = bool(well) and self.asked_in >= generation.aborts_step_before
        return waits or any(node_of(link.peer) in back for link in self.broken)

    def note_cut(self, cut: tuple[Cut, ...]) -> list[Action]:
        """Replaces the nodes that cannot be reached, and says which are new and which are back."""
        now, before = {one.node: one.host for one in cut}, {one.node: one.host for one in self.cut}
        self.cut = cut
        new = [f"{node} ({host})" for node, host in now.items() if node not in before]
        back = [f"{node} ({host})" for node, host in before.items() if node not in now]
        actions: list[Action] = []
        if new:
            actions.append(Say(f"nothing comes from {names_text(new)} any more: the network from here to there is cut"))
        if back:
            actions.append(Say(f"{names_text(back)} can be reached again from here"))
        return actions


def going_on(generation: Generation) -> str:
    """Returns how many workers go on, in words."""
    working, idle = len(generation.working), len(generation.standby)
    going = "1 worker goes on" if working == 1 else f"{working} workers go on"
    return f"{going}, and {idle} of spares with {'it' if working == 1 else 'them'}" if idle else going


def _kept(saved: int | None) -> str:
    if saved is None:
        return "the state in memory is gone"
    return f"there is a checkpoint of {saved} steps, from which the job goes on when it is started again"
