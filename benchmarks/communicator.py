"""Communicators of a hybrid-parallel job after the loss of a rank: rebuilt, rebuilt in part, edited in place.

    python benchmarks/communicator.py --quick
    python benchmarks/communicator.py --json communicator.json

After figure 12b of ElasWave. A job of 8 to 64 ranks has `dp` replicas of `pp` stages (no tensor parallelism); both
degrees grow (`GRIDS`). Each rank works with the others of its stage, which reduce gradients, and with its neighbours in
the chain of its replica, which exchange activations. One rank is killed (SIGKILL) and the others put their
communicators right, in one of four ways:

- *full*: `destroy_process_group`, `init_process_group` (Gloo) of the survivors under a fresh prefix of the same store,
  a barrier of all, `new_group` for each stage and each chain.
- *partial*: the survivors of the lost rank's stage and those of its chain make a `ProcessGroupGloo` instead of the one
  that they shared with it; nobody else does anything. There is no group of all, of which the lost rank would have been
  a member as well: that would be most of a full rebuild.
- *edit*: what `Recovery._enter` and `HybridJob.transfer` of elaunch do. `interrupt`, `retain`, `introduce` and
  `connect` of the transport, a `Group` of all survivors and an exchange of votes in it, which is a barrier; then the
  links that the next plan lacks.
- *edit, groups alone*: the same links edited and used by the ranks that take part in *partial*, without the group of
  all. It is the counterpart of *partial*; no job runs it.

Each way ends with first messages. With Gloo each rebuilt stage passes a barrier and neighbours in each rebuilt chain
exchange a message; with links each pair that works together under the next plan does. That plan cuts the lost rank's
rows over the others of its stage (ElasWave 4.1), so the edit also makes links between these and the ranks before and
after the lost one. The rebuilds leave them out: their groups have the old members, less one.

Timed is, from a moment that all ranks wait for, until the last rank is through. By that moment all know which rank is
gone, the kernel has cleared it away, and they have the next plan. So detection, agreement on the membership, planning
and state are not in the figures. Waking up is: the ranks share the cores. No operation is under way. A process group
that is destroyed keeps its process waiting (Gloo lets a polling thread come round for each connection), so it is
destroyed after the first messages and there are two figures: until the first messages, and with the end of the old
groups, which a script has to destroy first.

One process per rank, forked from one that has imported torch; the store is in a process of its own, to which everybody
stays connected. All communicators of the whole job are made and used before each loss, and the first loss does not
count. All ways are measured after the same loss, in turn, each with connections of its own; then a new process takes
the place of the lost one.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import multiprocessing
import os
import random
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from benchmarks.jobs import JobFailed, TimeLimit, limit_time
from benchmarks.report import Report, add_arguments, spread
from elaunch.plan import Plan, Stage, stages
from elaunch.workers.comm.group import Group, neighbours
from elaunch.workers.comm.transport import Transport
from elaunch.workers.layers.messages import peers

HOST = "127.0.0.1"
ROWS = 8
"""Of a micro-batch: enough for each of the others of a stage to get some of a lost rank's."""

LEAD_S = 0.2
"""From the order to begin to the moment at which all begin: the ways before have come to rest by then."""

PATIENCE_S = 120.0
VOTE = {"step": 1000, "entered": False, "holds": True}

FIRST_MESSAGES, OLD_GROUPS = "first messages", "end of the old groups"
"""The phases that end with what is timed."""

FORK = multiprocessing.get_context("fork")


@dataclasses.dataclass(frozen=True)
class Grid:
    """Degrees of a plan; rank `stage * dp + replica`."""

    dp: int
    pp: int

    @property
    def ranks(self) -> int:
        return self.dp * self.pp


GRIDS = (Grid(4, 2), Grid(4, 4), Grid(8, 4), Grid(8, 8))


@dataclasses.dataclass(frozen=True)
class World:
    """A generation: who is in it, and who works with whom.

    Attributes:
        generation: its number.
        names: of the worker in each place of the grid, the lost one included.
        lost: the place of the lost one.
    """

    generation: int
    grid: Grid
    names: tuple[str, ...]
    lost: int | None = None

    @property
    def members(self) -> tuple[str, ...]:
        return self._there(range(self.grid.ranks))

    def stage(self, number: int) -> tuple[str, ...]:
        return self._there(range(number * self.grid.dp, (number + 1) * self.grid.dp))

    def chain(self, replica: int) -> tuple[str, ...]:
        return self._there(range(replica, self.grid.ranks, self.grid.dp))

    def groups(self) -> list[tuple[str, ...]]:
        """All stages, then all chains."""
        return [*map(self.stage, range(self.grid.pp)), *map(self.chain, range(self.grid.dp))]

    def groups_of(self, worker: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Its stage and its chain."""
        stage, replica = divmod(self.names.index(worker), self.grid.dp)
        return self.stage(stage), self.chain(replica)

    def hurt(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What is left of the stage and of the chain of the lost one."""
        assert self.lost is not None
        return self.groups_of(self.names[self.lost])

    def plan(self) -> Plan:
        dp, pp = self.grid.dp, self.grid.pp
        there = [() if place == self.lost else (name,) for place, name in enumerate(self.names)]
        cut = [Stage(range(stage, stage + 1), tuple(there[stage * dp : (stage + 1) * dp])) for stage in range(pp)]
        return stages(pp, 2 * dp * ROWS, ROWS, cut)

    def _there(self, places: range) -> tuple[str, ...]:
        return tuple(self.names[place] for place in places if place != self.lost)


class Orders(NamedTuple):
    """What the parent tells a rank: to assemble a whole world, to get ready for a loss, or to recover at a moment."""

    world: World
    addresses: dict[str, dict[str, str]]
    """Of each way, by worker; only for those that listen themselves."""

    way: str = ""
    begin_s: float = 0.0
    """Of time.monotonic, which all processes of a machine share."""


@dataclasses.dataclass(frozen=True)
class Recovery:
    """Of one rank.

    Attributes:
        marks_s: seconds from the common beginning until each phase was over, in their order.
        cpu_s: processor time of the process from then until the same moments, all threads.
        opened: connections made; the ends of a connection count as halves.
        closed: connections given up, likewise; those to the lost rank have one end only.
    """

    marks_s: dict[str, float]
    cpu_s: dict[str, float]
    opened: float
    closed: float


Connected = tuple[object, str]
"""One end of a connection: what it belongs to, and the worker at the other end."""


class Way(Protocol):
    """One way to recover, in one rank. `recover` marks the ends of its phases, the last of them included."""

    address: str

    def assemble(self, world: World, addresses: dict[str, str]) -> None: ...

    def recover(self, world: World, addresses: dict[str, str], mark: Callable[[str], None]) -> None: ...

    def connections(self) -> frozenset[Connected]: ...


class FullRebuild:
    """torch.distributed as scripts use it: the default group and `new_group`."""

    address = ""

    def __init__(self, me: str, store: dist.Store) -> None:
        self._me, self._store = me, store
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}
        self._made: dict[tuple[str, ...], int] = {}

    def assemble(self, world: World, addresses: dict[str, str]) -> None:
        self.recover(world, addresses, lambda phase: None)

    def recover(self, world: World, addresses: dict[str, str], mark: Callable[[str], None]) -> None:
        # Whoever holds them puts off their end.
        old, self._groups = self._groups, {}
        if dist.is_initialized():
            dist.destroy_process_group()
        members = world.members
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"full/{world.generation}", self._store),
            rank=members.index(self._me),
            world_size=len(members),
            timeout=timedelta(seconds=PATIENCE_S),
        )
        dist.barrier()
        mark("group of all")
        self._groups[members] = cast(dist.ProcessGroup, dist.group.WORLD)
        for group in world.groups():
            made = dist.new_group([members.index(one) for one in group])
            if self._me in group:
                self._groups[group] = made
        mark("groups")
        stage, chain = world.groups_of(self._me)
        first_messages(self._groups[stage], self._groups[chain])
        mark(FIRST_MESSAGES)
        old.clear()
        mark(OLD_GROUPS)
        self._made = dict.fromkeys(self._groups, world.generation)

    def connections(self) -> frozenset[Connected]:
        return gloo_connections(self._me, self._made)


class PartialRebuild:
    """Process groups that their members make by themselves."""

    address = ""

    def __init__(self, me: str, store: dist.Store) -> None:
        self._me, self._store = me, store
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}
        self._made: dict[tuple[str, ...], int] = {}

    def assemble(self, world: World, addresses: dict[str, str]) -> None:
        self._groups.clear()
        self._made.clear()
        for group in world.groups_of(self._me):
            self._make(world, group)
        first_messages(*self._groups.values())

    def recover(self, world: World, addresses: dict[str, str], mark: Callable[[str], None]) -> None:
        lost = world.names[cast(int, world.lost)]
        old = {group: self._groups.pop(group) for group in list(self._groups) if lost in group}
        stage, chain = world.hurt()
        for group in (stage, chain):
            if self._me in group:
                self._make(world, group)
        mark("groups")
        first_messages(self._groups.get(stage), self._groups.get(chain))
        mark(FIRST_MESSAGES)
        for group in old:
            del self._made[group]
        old.clear()
        mark(OLD_GROUPS)

    def connections(self) -> frozenset[Connected]:
        return gloo_connections(self._me, self._made)

    def _make(self, world: World, group: tuple[str, ...]) -> None:
        store = dist.PrefixStore(f"partial/{world.generation}/{group[0]}/{group[-1]}", self._store)
        made = dist.ProcessGroupGloo(store, group.index(self._me), len(group), timedelta(seconds=PATIENCE_S))
        # Its stub lacks the operations, which are those of ProcessGroup.
        self._groups[group] = cast(dist.ProcessGroup, made)
        self._made[group] = world.generation


def first_messages(stage: dist.ProcessGroup | None, chain: dist.ProcessGroup | None) -> None:
    """A barrier of the stage, and a message each way between neighbours in the chain."""
    if stage is not None:
        stage.barrier().wait()
    if chain is not None:
        near = [rank for rank in (chain.rank() - 1, chain.rank() + 1) if 0 <= rank < chain.size()]
        work = [chain.recv([torch.zeros(1)], rank, 0) for rank in near]
        work += [chain.send([torch.zeros(1)], rank, 0) for rank in near]
        for one in work:
            one.wait()


def gloo_connections(me: str, made: dict[tuple[str, ...], int]) -> frozenset[Connected]:
    """Gloo connects each member of a group with each other one when the group is made, in the generation given."""
    return frozenset((item, other) for item in made.items() for other in item[0] if other != me)


class Edit:
    """The links of elaunch; `alone`: without the group of all."""

    def __init__(self, me: str, alone: bool) -> None:
        self._me, self._alone = me, alone
        self._transport = Transport(me, "communicator", HOST)
        self.address = self._transport.address
        self._partners: frozenset[str] = frozenset()

    def expect(self, world: World) -> None:
        """Find out whom this rank works with in `world`; part of planning, so it is not timed."""
        self._partners = peers(world.plan(), self._me)
        if self._alone and world.lost is not None:
            hurt = frozenset(one for group in world.hurt() for one in group)
            self._partners = self._partners & hurt if self._me in hurt else frozenset()

    def assemble(self, world: World, addresses: dict[str, str]) -> None:
        self.expect(world)
        # Links that former losses have left behind would make the next one cheaper.
        self._transport.retain({*neighbours(world.members, self._me), *self._partners})
        self._enter(world, addresses, lambda phase: None, alone=False)

    def recover(self, world: World, addresses: dict[str, str], mark: Callable[[str], None]) -> None:
        self._enter(world, addresses, mark, alone=self._alone)

    def connections(self) -> frozenset[Connected]:
        return frozenset(("link", peer) for peer in self._transport.peers)

    def _enter(self, world: World, addresses: dict[str, str], mark: Callable[[str], None], *, alone: bool) -> None:
        transport, generation, members = self._transport, world.generation, world.members
        transport.interrupt(generation)
        transport.retain(members)
        transport.introduce({one: addresses[one] for one in members})
        if alone:
            self._connect(world, addresses, self._partners)
            mark("links of the plan")
            sends = [(peer, 0, memoryview(b"")) for peer in self._partners]
            transport.exchange(generation, 0, sends, [(peer, 0, bytearray()) for peer in self._partners])
            mark(FIRST_MESSAGES)
            return
        self._connect(world, addresses, neighbours(members, self._me))
        mark("links of the group of all")
        group = Group(transport, generation, members)
        group.all_gather_bytes(json.dumps(VOTE).encode())
        mark("votes")
        self._connect(world, addresses, self._partners)
        mark("links of the plan")
        places = [members.index(peer) for peer in self._partners]
        group.exchange([(place, memoryview(b"")) for place in places], [(place, bytearray()) for place in places])
        mark(FIRST_MESSAGES)

    def _connect(self, world: World, addresses: dict[str, str], others: Sequence[str] | frozenset[str]) -> None:
        wanted = {one: addresses[one] for one in world.members if one in others or one == self._me}
        self._transport.connect(wanted, generation=world.generation, timeout_s=PATIENCE_S)


# ---- processes


def run_rank(orders: Connection, others: Sequence[Connection], me: str, store_port: int) -> None:
    """The process of one rank: does what it is told until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in others:
        other.close()
    try:
        torch.set_num_threads(1)
        store = dist.TCPStore(HOST, store_port, is_master=False, timeout=timedelta(seconds=PATIENCE_S))
        edits = {"edit": Edit(me, alone=False), "edit, groups alone": Edit(me, alone=True)}
        ways: dict[str, Way] = {"full": FullRebuild(me, store), "partial": PartialRebuild(me, store), **edits}
        orders.send({name: way.address for name, way in ways.items()})
        while True:
            order: Orders = orders.recv()
            answer: Recovery | None = None
            if order.way:
                answer = recover(ways[order.way], order)
            elif order.world.lost is None:
                for name, way in ways.items():
                    way.assemble(order.world, order.addresses[name])
            else:
                for edit in edits.values():
                    edit.expect(order.world)
            orders.send(answer)
    except EOFError:
        pass
    except BaseException:
        with contextlib.suppress(OSError):
            orders.send(traceback.format_exc())
    finally:
        # What is open is broken on purpose: nothing is left to be closed in order.
        os._exit(0)


def recover(way: Way, order: Orders) -> Recovery:
    addresses = order.addresses[order.way]
    before = way.connections()
    marks_s: dict[str, float] = {}
    cpu_s: dict[str, float] = {}

    def mark(phase: str) -> None:
        marks_s[phase] = time.monotonic() - order.begin_s
        cpu_s[phase] = time.process_time() - begin_cpu_s

    time.sleep(max(0.0, order.begin_s - time.monotonic()))
    begin_cpu_s = time.process_time()
    mark("awake")
    way.recover(order.world, addresses, mark)
    after = way.connections()
    lost = order.world.names[order.world.lost or 0]
    return Recovery(marks_s, cpu_s, halves(after - before, lost), halves(before - after, lost))


def halves(ends: frozenset[Connected], lost: str) -> float:
    """Connections of which these are the ends; nobody counts the ends at the lost rank."""
    return sum(1.0 if peer == lost else 0.5 for _, peer in ends)


def run_store(port: Connection) -> None:
    """The process of the store; like an agent's, it outlives the ranks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    port.send(store.port)
    with contextlib.suppress(EOFError):
        port.recv()
    os._exit(0)


class Crew:
    """The processes of one grid; leaving the context ends them."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._generation = 0
        self._started = 0
        self._names = [""] * grid.ranks
        self._processes: list[ForkProcess | None] = [None] * grid.ranks
        self._pipes: dict[int, Connection] = {}
        self._addresses: dict[str, dict[str, str]] = {}
        self._store_pipe, far = FORK.Pipe()
        self._store = FORK.Process(target=run_store, args=(far,), daemon=True)
        self._store.start()
        far.close()
        self._store_port: int = self._store_pipe.recv()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        running = [one for one in (*self._processes, self._store) if one is not None]
        for process in running:
            process.kill()
        for process in running:
            process.join()
        for pipe in (*self._pipes.values(), self._store_pipe):
            pipe.close()

    def assemble(self) -> None:
        """Start whoever is missing, and make all communicators of a whole job."""
        new = [place for place, process in enumerate(self._processes) if process is None]
        for place in new:
            self._start(place)
        for place, found in self._answers(new).items():
            for way, address in found.items():
                self._addresses.setdefault(way, {})[self._names[place]] = address
        self._tell(World(self._next_generation(), self.grid, tuple(self._names)))

    def lose(self, place: int) -> World:
        """Kill one; returns when the kernel has taken it apart and the others know what to do next."""
        process = self._processes[place]
        assert process is not None
        process.kill()
        process.join()
        self._processes[place] = None
        self._pipes.pop(place).close()
        world = World(self._next_generation(), self.grid, tuple(self._names), place)
        self._tell(world)
        return world

    def recover(self, world: World, way: str) -> list[Recovery]:
        return list(self._tell(world, way, time.monotonic() + LEAD_S).values())

    def _next_generation(self) -> int:
        self._generation += 1
        return self._generation

    def _start(self, place: int) -> None:
        near, far = FORK.Pipe()
        me = f"n{place // 8}/{place % 8}#{self._started}"
        self._started += 1
        # A rank that kept the pipes of others open would not let them see the end of the parent.
        others = [near, self._store_pipe, *self._pipes.values()]
        process = FORK.Process(target=run_rank, args=(far, others, me, self._store_port), daemon=True)
        process.start()
        far.close()
        self._names[place], self._processes[place], self._pipes[place] = me, process, near

    def _tell(self, world: World, way: str = "", begin_s: float = 0.0) -> dict[int, Any]:
        for pipe in self._pipes.values():
            pipe.send(Orders(world, self._addresses, way, begin_s))
        return self._answers(self._pipes)

    def _answers(self, places: Sequence[int] | dict[int, Connection]) -> dict[int, Any]:
        awaited = {self._pipes[place]: place for place in places}
        answers: dict[int, Any] = {}
        end_s = time.monotonic() + PATIENCE_S
        while awaited:
            ready = wait(list(awaited), max(0.0, end_s - time.monotonic()))
            if not ready:
                raise JobFailed(f"ranks {sorted(awaited.values())} of {self.grid.ranks} are silent")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                place = awaited.pop(pipe)
                try:
                    answers[place] = pipe.recv()
                except EOFError:
                    raise JobFailed(f"rank {place} of {self.grid.ranks} ended by itself") from None
                if isinstance(answers[place], str):
                    raise JobFailed(f"rank {place} of {self.grid.ranks} failed:\n{answers[place]}")
        return answers


# ---- figures

WAYS = ("full", "partial", "edit", "edit, groups alone")


@dataclasses.dataclass
class Measured:
    """Of one way with one number of ranks, for each loss: seconds of the slowest rank, and the cost of all."""

    marks_s: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    cpu_s: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    worst_cpu_s: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    cores: list[float] = dataclasses.field(default_factory=list)
    opened: list[float] = dataclasses.field(default_factory=list)
    closed: list[float] = dataclasses.field(default_factory=list)

    def add(self, ranks: list[Recovery]) -> None:
        for phase in ranks[0].marks_s:
            self.marks_s.setdefault(phase, []).append(max(rank.marks_s[phase] for rank in ranks))
            self.cpu_s.setdefault(phase, []).append(statistics.mean(rank.cpu_s[phase] for rank in ranks))
            self.worst_cpu_s.setdefault(phase, []).append(max(rank.cpu_s[phase] for rank in ranks))
        self.cores.append(sum(rank.cpu_s[FIRST_MESSAGES] for rank in ranks) / self.first_s[-1])
        self.opened.append(sum(rank.opened for rank in ranks))
        self.closed.append(sum(rank.closed for rank in ranks))

    @property
    def first_s(self) -> list[float]:
        """Until the first messages."""
        return self.marks_s[FIRST_MESSAGES]

    @property
    def all_s(self) -> list[float]:
        """With the end of the old groups, if there are any."""
        return self.marks_s.get(OLD_GROUPS, self.first_s)


def ratio(some: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(some) / statistics.median(others)


def in_ms(seconds: Sequence[float]) -> str:
    found = spread(1e3 * one for one in seconds)
    return f"{found.median:.4g} ({found.least:.4g}-{found.worst:.4g})"


def measure(grid: Grid, losses: int, pick: random.Random) -> dict[str, Measured]:
    """The first loss, before which no process has recovered from one, is left out."""
    measured = {way: Measured() for way in WAYS}
    with Crew(grid) as crew:
        for loss in range(losses + 1):
            crew.assemble()
            world = crew.lose(pick.randrange(grid.ranks))
            turn = loss % len(WAYS)
            for way in (*WAYS[turn:], *WAYS[:turn]):
                ranks = crew.recover(world, way)
                if loss:
                    measured[way].add(ranks)
            took = ", ".join(f"{way} {1e3 * one.first_s[-1]:.1f}" for way, one in measured.items() if one.marks_s)
            print(f"{grid.ranks} ranks, loss {loss}: {took or 'warm-up'}", file=sys.stderr, flush=True)
    return measured


def fill(report: Report, figures: dict[Grid, dict[str, Measured]]) -> None:
    """The tables: the ways beside each other, with and without the end of old groups; what each takes; the phases."""
    for grid, measured in figures.items():
        full, partial, edit, _ = (measured[way] for way in WAYS)
        report.row(
            {
                "with the end of old groups": f"{grid.ranks} ranks",
                "dp x pp": f"{grid.dp} x {grid.pp}",
                "losses": len(edit.first_s),
                "full, ms": in_ms(full.all_s),
                "partial, ms": in_ms(partial.all_s),
                "edit, ms": in_ms(edit.all_s),
                "full/edit": ratio(full.all_s, edit.all_s),
                "partial/edit": ratio(partial.all_s, edit.all_s),
            }
        )
    for grid, measured in figures.items():
        full, partial, edit, alone = (measured[way] for way in WAYS)
        report.row(
            {
                "until the first messages": f"{grid.ranks} ranks",
                "full, ms": in_ms(full.first_s),
                "partial, ms": in_ms(partial.first_s),
                "edit, ms": in_ms(edit.first_s),
                "full/edit": ratio(full.first_s, edit.first_s),
                "partial/edit": ratio(partial.first_s, edit.first_s),
                "edit of the groups alone, ms": in_ms(alone.first_s),
                "partial/alone": ratio(partial.first_s, alone.first_s),
            }
        )
    for grid, measured in figures.items():
        groups = {"full": 1 + grid.pp + grid.dp, "partial": 2, "edit": 1, "edit, groups alone": 0}
        for way, one in measured.items():
            report.row(
                {
                    "what it takes": way,
                    "ranks": grid.ranks,
                    "groups_made": groups[way],
                    "connections_made": statistics.median(one.opened),
                    "connections_closed": statistics.median(one.closed),
                    "cpu_ms_of_a_rank": 1e3 * statistics.median(one.cpu_s[FIRST_MESSAGES]),
                    "cpu_ms_of_the_busiest": 1e3 * statistics.median(one.worst_cpu_s[FIRST_MESSAGES]),
                    "cores_busy": statistics.median(one.cores),
                }
            )
    for grid, measured in figures.items():
        for way, one in measured.items():
            for phase, seconds in one.marks_s.items():
                found = spread(1e3 * second for second in seconds)
                report.row(
                    {
                        "until the last rank is through with": phase,
                        "way": way,
                        "ranks": grid.ranks,
                        "median_ms": found.median,
                        "least_ms": found.least,
                        "worst_ms": found.worst,
                        "cpu_ms_of_a_rank": 1e3 * statistics.median(one.cpu_s[phase]),
                    }
                )


def aim(report: Report, figures: dict[Grid, dict[str, Measured]]) -> None:
    """Asked is that the edit is flat in the number of ranks, and ElasWave's greatest factors, which are at 64."""
    small, large = min(figures, key=lambda grid: grid.ranks), max(figures, key=lambda grid: grid.ranks)
    before, (full, partial, edit, alone) = figures[small]["edit"], (figures[large][way] for way in WAYS)
    sizes, there = f"{large.ranks} ranks / {small.ranks} ranks", f"{large.ranks} ranks"
    report.target(f"edit, {sizes}", ratio(edit.first_s, before.first_s), "x", at_most=2.0)
    # From the moment at which all know who is gone until each rank's first messages are through.
    cpu_s = [statistics.median(one["edit"].cpu_s[FIRST_MESSAGES]) for one in figures.values()]
    name = "the same, processor time of a rank, the most / the least of all sizes"
    report.target(name, max(cpu_s) / min(cpu_s), "x", at_most=2.0)
    least = min(ratio(one["partial"].first_s, one["edit"].first_s) for one in figures.values())
    report.target("partial / edit, first messages, the least of all sizes", least, "x", at_least=1.0)
    report.target(f"full / edit, {there}", ratio(full.all_s, edit.all_s), "x", at_least=80.0)
    report.target(f"full / edit, first messages, {there}", ratio(full.first_s, edit.first_s), "x", at_least=80.0)
    report.target(f"partial / edit, {there}", ratio(partial.all_s, edit.all_s), "x", at_least=3.6)
    report.target(f"partial / edit, first messages, {there}", ratio(partial.first_s, edit.first_s), "x", at_least=3.6)
    of_groups = ratio(partial.first_s, alone.first_s)
    report.target(f"partial / edit of the groups alone, first messages, {there}", of_groups, "x", at_least=3.6)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--ranks", type=int, nargs="+", choices=[grid.ranks for grid in GRIDS], help="only so many")
    parser.add_argument("--losses", type=int, help="that count, of each number of ranks (default 12, quick 4)")
    parser.add_argument("--seed", type=int, default=1, help="of the choice of the ranks that are lost")
    parser.add_argument("--limit-s", type=int, default=1800, help="the most that the whole benchmark may take")
    args = parser.parse_args()
    wanted = args.ranks or [grid.ranks for grid in (GRIDS[:2] if args.quick else GRIDS)]
    losses = args.losses or (4 if args.quick else 12)
    report = Report(
        "communicator: the loss of one rank",
        notes=[
            "real processes, killed with SIGKILL, and real connections over loopback; nothing is emulated",
            "from a common moment until the last rank is through; median (least-worst) over the losses, each of a rank "
            "drawn at random, all ways after each loss, in turn",
            "the end of old groups: a script destroys them before it makes new ones; here that comes last, so that "
            "each figure stands for itself",
            "edit includes the agreement of all survivors; partial concerns the lost rank's stage and chain alone, as "
            "does the edit of the groups alone",
            "all ranks share the cores of this machine: where cores_busy is near their number, the time is processor "
            "time of all ranks one after the other; cpu_ms_of_a_rank is the mean of what each of them needs",
        ],
    )
    # Before anything is forked. Gloo would look up the host's name for the address, in all ranks at once.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    gc.collect()
    gc.freeze()
    limit_time(args.limit_s)
    figures: dict[Grid, dict[str, Measured]] = {}
    failed = False
    for grid in GRIDS:
        if grid.ranks not in wanted:
            continue
        try:
            figures[grid] = measure(grid, losses, random.Random(args.seed))
        except JobFailed as error:
            failed = True
            report.notes.append(f"FAILED: {grid.ranks} ranks: {error}")
        except TimeLimit as error:
            failed = True
            report.notes.append(str(error))
            break
    signal.alarm(0)
    if figures:
        fill(report, figures)
        aim(report, figures)
    report.print()
    report.write(args.json)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
