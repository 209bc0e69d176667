"""Simulated links: the real `Transport` over connections that take time, keep their order, and break."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, Literal, Protocol

from elaunch.errors import GenerationChanged, LinkLost
from elaunch.workers.comm.connection import LOOK_S
from elaunch.workers.comm.link import BEFORE_ALL, Destination, Entering, Floors
from elaunch.workers.comm.transport import Transport
from elaunch.workers.comm.wire import Ack
from tests.simulation.control_world import SILENT_S
from tests.simulation.processes import Process

REDIAL_S = 0.1


class Surroundings(Protocol):
    """What links need of the world."""

    now_s: float
    rng: Any

    def at(self, delay_s: float, act: Callable[[], None]) -> None: ...

    def delay_s(self, way: str) -> float: ...

    def notice_s(self) -> float:
        """Seconds until the kernel tells of a connection that has ended."""

    def refuses(self, one: str, other: str) -> bool:
        """Whether no connection can be made between two live workers, since one of them refuses it."""

    def fails(self, one: str, other: str) -> bool:
        """Whether each link between two live workers breaks as soon as it is made."""

    def silent_since_s(self, one: str, other: str) -> float:
        """Since when nothing passes between the machines of two workers; infinity: they reach each other."""


@dataclass(slots=True)
class Frame:
    """A part of an operation, on its way or in the kernel of the receiver."""

    arrival_s: float
    generation: int
    op: int
    part: int
    body: bytes


@dataclass(eq=False)
class End:
    """One end of a connection, with what `Transport` uses of a `Link`.

    Attributes:
        ending: nothing that is sent from now on comes here.
        lost: the kernel knows that the connection has ended; what had come before can still be read.
        broken: why this worker does not use it any more.
    """

    owner: SimulatedTransport
    peer: str
    other: End = field(init=False)
    frames: deque[Frame] = field(default_factory=deque)
    wanted: dict[int, Destination] = field(default_factory=dict)
    position: tuple[int, int] = (0, 0)
    ending: bool = False
    lost: bool = False
    broken: str | None = None
    last_s: float = 0.0
    shown: int = 0

    def hung_up(self) -> bool:
        return self.lost or self.broken is not None

    def rate(self) -> None:
        return None

    carried = rate

    def check(self) -> None:
        owner = self.owner
        if owner.world.now_s - owner.world.silent_since_s(owner.worker, self.peer) >= SILENT_S:
            raise self.fail("silent")

    def fail(self, why: str) -> LinkLost:
        if self.broken is None:
            self.broken = why
            self.other.hang_up(self.owner.world.notice_s())
        return LinkLost(self.peer, self.broken)

    def close(self) -> None:
        self.fail("closed by this worker")

    def hang_up(self, notice_s: float) -> None:
        """The other end has ended: this one is told after what is still to come."""
        self.ending = True
        world = self.owner.world
        after_s = max((frame.arrival_s for frame in self.frames if frame.arrival_s < inf), default=0.0) - world.now_s
        world.at(max(notice_s, after_s), self.lose)

    def lose(self) -> None:
        self.lost = True
        self.owner.look()

    def cut_short(self, notice_s: float) -> None:
        """The other process was killed: some of what it had sent last does not come any more."""
        on_the_way = [frame for frame in self.frames if frame.arrival_s > self.owner.world.now_s]
        for _ in range(self.owner.world.rng.randint(0, len(on_the_way))):
            self.frames.pop()
        self.owner.look()
        self.hang_up(notice_s)

    def post_send(self, generation: int, op: int, part: int, body: memoryview) -> None:
        if self.broken is not None:
            raise LinkLost(self.peer, self.broken)
        if self.lost:
            raise self.fail("closed by the peer")
        other, world = self.other, self.owner.world
        if other.broken is None and not other.ending:
            arrival_s = max(other.last_s, world.now_s + world.delay_s(self.owner.worker))
            if world.silent_since_s(self.owner.worker, self.peer) < inf:
                arrival_s = inf
            other.last_s = arrival_s
            frame = Frame(arrival_s, generation, op, part, bytes(body))
            other.frames.append(frame)
            other.owner.comes(other, frame)

    def post_receive(self, generation: int, op: int, part: int, destination: Destination) -> None:
        if self.broken is not None:
            raise LinkLost(self.peer, self.broken)
        self.position = (generation, op)
        self.wanted[part] = destination

    def tell_entered(self, generation: int, left: Callable[[], None]) -> None:
        self.post_send(generation, BEFORE_ALL, 0, memoryview(b""))
        left()

    def finish(self) -> None:
        self.wanted.clear()

    def pull(self, now_s: float) -> None:
        """Takes what has come for the operation, as `Link` does."""
        generation, op = self.position
        while self.wanted:
            if not self.frames or self.frames[0].arrival_s > now_s:
                if self.lost:
                    raise self.fail("closed by the peer")
                if now_s - self.owner.world.silent_since_s(self.owner.worker, self.peer) >= SILENT_S:
                    raise self.fail("silent")
                return
            frame = self.frames[0]
            if frame.generation > generation:
                raise GenerationChanged(frame.generation)
            if (frame.generation, frame.op) > (generation, op):
                return
            self.frames.popleft()
            if frame.generation == generation and frame.op != BEFORE_ALL:
                where = f"operation {frame.op} part {frame.part} of generation {generation}"
                assert frame.op == op, f"{self.owner.worker} got {where} from {self.peer}, it is in operation {op}"
                destination = self.wanted.pop(frame.part)
                if isinstance(destination, bytearray):
                    destination += frame.body
                else:
                    destination[:] = frame.body

    def is_left_behind(self) -> bool:
        """Whether something of a newer generation is on its way: what is awaited of this one never comes."""
        return bool(self.frames) and self.frames[-1].generation > self.position[0]

    def due_s(self) -> float:
        """When all that is wanted will have come, or what shows that it never does; infinity: nobody knows yet."""
        generation, op = self.position
        left, at_s = set(self.wanted), 0.0
        for frame in self.frames:
            if not left:
                break
            at_s = frame.arrival_s
            if frame.generation > generation:
                return at_s
            if (frame.generation, frame.op) == (generation, op):
                left.discard(frame.part)
        if not left:
            return at_s
        return self.owner.world.silent_since_s(self.owner.worker, self.peer) + SILENT_S if not self.lost else 0.0


class _Changed:
    """Stands in for the condition on which a transport waits for connections."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def wait(self, timeout_s: float) -> None:
        self._process.wait(self, timeout_s)

    def notify_all(self) -> None:
        self._process.wake(self)


class _Dialler:
    """Stands in for the listener: makes the connections that its transport asks for."""

    def __init__(self, transport: SimulatedTransport, network: Network) -> None:
        self._transport, self._network = transport, network
        self._dialling: set[str] = set()

    def dial(self, peer: str, address: str, timeout_s: float) -> None:
        if peer not in self._dialling:
            self._dialling.add(peer)
            world = self._transport.world
            self._later(world.delay_s(peer), partial(self._try, peer, address, world.now_s + timeout_s))

    def _later(self, delay_s: float, act: Callable[[], None]) -> None:
        transport = self._transport
        transport.world.at(delay_s, lambda: transport.process.when_running(act))

    def _try(self, peer: str, address: str, deadline_s: float) -> None:
        transport, world = self._transport, self._transport.world
        target = self._network.transports.get(address)
        quiet = world.silent_since_s(transport.worker, peer) < inf
        stopped = target is not None and target.process.alive and target.process.stopped_until_s > world.now_s
        if transport._closed:
            return
        if quiet or stopped:
            if world.now_s < deadline_s:
                self._later(REDIAL_S, partial(self._try, peer, address, deadline_s))
                return
            self._dialling.discard(peer)
            transport._failed(peer, "timed out")
            return
        self._dialling.discard(peer)
        if (
            target is None
            or not target.process.alive
            or target._closed
            or target.worker != peer
            or world.refuses(transport.worker, peer)
        ):
            transport._failed(peer, "connection refused")
        elif not transport._has(peer):
            ack = Ack(peer, target._floors.own, target._floors.settled)
            try:
                transport._floors.heed(ack, transport._floors.heard)
            except GenerationChanged:
                transport._failed(peer, None)
                return
            here, there = (
                End(owner, other, shown=transport._floors.heard)
                for owner, other in ((transport, peer), (target, transport.worker))
            )
            here.other, there.other = there, here
            target._add(there)  # type: ignore[arg-type]
            transport._add(here)  # type: ignore[arg-type]
            if world.fails(transport.worker, peer):
                for end in (here, there):
                    world.at(world.delay_s(end.peer), end.lose)


class SimulatedTransport(Transport):
    """The transport of a simulated process: the real one but for connections and time."""

    def __init__(self, world: Surroundings, network: Network, process: Process, worker: str) -> None:
        self.world, self.process, self.worker = world, process, worker
        self._links, self._replaced, self._failures, self._known = {}, [], {}, {}
        self._floors = Floors()
        self._entering = Entering()
        self._watchers: list[Callable[[int], None]] = []
        self._closing = self._closed = False
        self._changed = _Changed(process)  # type: ignore[assignment]
        self._running = threading.Lock()
        self._listener = _Dialler(self, network)  # type: ignore[assignment]
        self.address = f"{worker}:1"
        self._missing: set[End] = set()  # of which nobody knows yet when all that is wanted will have come
        self._due_s = 0.0  # when it will have come from the others
        network.transports[self.address] = self

    def look(self) -> None:
        """Something has happened to a link that may concern the operation that runs."""
        self.process.wake(self)

    def comes(self, end: End, frame: Frame) -> None:
        """A frame is on its way: sees to it that the operation which waits for it goes on when it comes."""
        if end not in self._missing:
            return
        if frame.generation > end.position[0]:
            self.process.wake(self, frame.arrival_s - self.world.now_s)
        elif (frame.generation, frame.op) == end.position and (due_s := end.due_s()) < inf:
            self._missing.discard(end)
            self._due_s = max(self._due_s, due_s)
            if not self._missing:
                self.process.wake(self, max(0.0, self._due_s - self.world.now_s))

    def _rouse(self) -> None:
        self.process.wake(self)

    def _rest(self) -> None:
        pass

    def _drive(self, links: Collection[Any], generation: int, deadline_s: float | None) -> None:
        while True:
            self._check(generation)
            if generation == self._entering.generation:
                for link in [*self._entering.untold]:
                    with contextlib.suppress(LinkLost):
                        self._entering.tell_over([link])
            for end in links:
                end.pull(self.world.now_s)
            waiting = [end for end in links if end.wanted]
            if not waiting:
                return
            self.process.wait(self, self._patience_s(waiting))
            self._missing = set()

    def _patience_s(self, waiting: Collection[End]) -> float | None:
        """Seconds until there is something to look at, as far as is known now."""
        self._missing, self._due_s, soonest_s = set(), 0.0, inf
        for end in waiting:
            due_s = end.due_s()
            if due_s == inf:
                self._missing.add(end)
            else:
                self._due_s = max(self._due_s, due_s)
            if end.lost or end.is_left_behind():
                soonest_s = min(soonest_s, due_s)
        due_s = min(soonest_s, inf if self._missing else self._due_s)
        return None if due_s == inf else max(0.0, due_s - self.world.now_s)

    def probe(
        self, address: str, timeout_s: float, peer: str | None = None, is_over: Callable[[], bool] = lambda: False
    ) -> Literal["alive", "refused", "busy", "silent"]:
        """Asks after a moment whether a worker is there, as the real one does."""
        world, target = self.world, self._listener._network.transports.get(address)  # type: ignore[attr-defined]
        assert peer is not None
        if world.silent_since_s(self.worker, peer) < inf:
            end_s = world.now_s + timeout_s
            while world.now_s < end_s and not is_over():
                self.process.sleep(LOOK_S)
            return "busy" if is_over() else "silent"
        self.process.sleep(world.delay_s(self.worker))
        if target is None or not target.process.alive or target._closed or world.refuses(self.worker, peer):
            return "refused"
        if target.process.stopped_until_s > world.now_s:
            self.process.sleep(timeout_s)
            return "busy" if target.process.stopped_until_s > world.now_s else "alive"
        return "alive"

    def close(self) -> None:
        """Closes the links, in order."""
        if not self._closed:
            self.retain(())
            self._closing = self._closed = True

    def break_down(self) -> None:
        """The process is killed: its peers are told by their kernels."""
        self._closed = True
        for end in (*self._links.values(), *self._replaced):
            if end.broken is None:
                end.broken = "killed"
                end.other.cut_short(self.world.notice_s())  # type: ignore[attr-defined]


class Network:
    """All transports, by their addresses."""

    def __init__(self) -> None:
        self.transports: dict[str, SimulatedTransport] = {}

    def ends(self, one: str, other: str) -> list[End]:
        """Both ends of the connection between two workers, if there is one."""
        found = []
        for here, there in ((one, other), (other, one)):
            transport = self.transports.get(f"{here}:1")
            end = transport._links.get(there) if transport is not None else None
            if end is not None and end.broken is None:
                found.append(end)
        return found  # type: ignore[return-value]

    def look(self) -> None:
        """Has everybody look at the links that they wait for."""
        for transport in self.transports.values():
            transport.look()

    def send_again(self, now_s: float, delay_s: Callable[[str], float]) -> None:
        """What was held up by a silence that is over comes now."""
        for transport in self.transports.values():
            for end in transport._links.values():
                held = [frame for frame in end.frames if frame.arrival_s == inf]  # type: ignore[attr-defined]
                if held and transport.world.silent_since_s(transport.worker, end.peer) == inf:
                    arrival_s = now_s + delay_s(end.peer)
                    for frame in held:
                        frame.arrival_s = arrival_s
                    end.last_s = arrival_s  # type: ignore[attr-defined]
            transport.look()
