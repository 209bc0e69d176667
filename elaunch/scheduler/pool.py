"""The devices that are free while a schedule is made, and where on them a job would be put. Mutable, without effects.

On one node a job takes all devices, if it takes whole nodes, or else a multiple of its unit, as long as there are nodes
that are large enough for one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain

from elaunch.scheduler.model import Allocation, ClusterNode, JobState, devices_of


class Pool:
    """Free devices of the usable nodes, by name, in the order in which the nodes were given."""

    def __init__(self, nodes: Iterable[ClusterNode], tflops: Mapping[str, float]) -> None:
        """Makes a pool in which everything is free.

        Args:
            nodes: of the cluster.
            tflops: how fast devices of a kind are, relative to each other; 1 if it is not named.
        """
        self.nodes = {node.name: node for node in nodes}
        self.free = {node.name: node.devices for node in self.nodes.values() if node.usable and node.devices > 0}
        self._tflops = tflops
        self._weights = {name: tflops.get(node.kind, 1.0) for name, node in self.nodes.items()}
        self._order = {name: place for place, name in enumerate(self.free)}
        self._names = list(self.free)
        # By rack, the places of the nodes that are not full.
        self._open: dict[str, list[int]] = {}
        self.reset(dict(self.free))
        self._kinds = sorted({self.nodes[name].kind for name in self.free}, key=lambda kind: (-self.speed(kind), kind))
        self._sizes: dict[str, int] = {}
        for name in self.free:
            node = self.nodes[name]
            self._sizes[node.kind] = max(self._sizes.get(node.kind, 0), node.devices)

    def speed(self, kind: str) -> float:
        """Returns how fast a device of a kind is, relative to the others."""
        return self._tflops.get(kind, 1.0)

    def power(self, allocation: Allocation) -> float:
        """Returns ||R||: devices, each weighted by the speed of its kind (Suika 2.2)."""
        return sum(devices * self._weights.get(name, 1.0) for name, devices in allocation.items())

    def total_power(self) -> float:
        """Returns the power of all usable nodes."""
        return self.power({name: self.nodes[name].devices for name in self.free})

    def reset(self, free: dict[str, int]) -> None:
        """Makes so many devices free, by node."""
        self.free = free
        self._open = {self.nodes[name].rack: [] for name in free}
        for place, name in enumerate(self._names):
            if free[name] > 0:
                self._open[self.nodes[name].rack].append(place)

    def take(self, allocation: Allocation) -> None:
        """Makes devices unavailable; they have to be free."""
        assert self.fits(allocation), f"{allocation} is not free"
        self.withdraw(allocation)

    def withdraw(self, allocation: Allocation) -> None:
        """Makes devices unavailable, even if a node has not so many: some have broken."""
        for name, devices in allocation.items():
            if name in self.free:
                self._change(name, -devices)

    def give(self, allocation: Allocation) -> None:
        """Makes devices available again; those of nodes that cannot be used are gone."""
        for name, devices in allocation.items():
            if name in self.free:
                self._change(name, devices)

    def _change(self, name: str, devices: int) -> None:
        before = self.free[name]
        now = self.free[name] = before + devices
        if (before > 0) != (now > 0):
            here, place = self._open[self.nodes[name].rack], self._order[name]
            if now > 0:
                insort(here, place)
            else:
                del here[bisect_left(here, place)]

    def fits(self, allocation: Allocation) -> bool:
        """Returns whether all these devices are free."""
        return all(self.free.get(name, 0) >= devices for name, devices in allocation.items())

    def allows(self, job: JobState, name: str) -> bool:
        """Returns whether a job may be on a node at all."""
        return name in self.free and (not job.kinds or self.nodes[name].kind in job.kinds)

    def free_for(self, job: JobState) -> int:
        """Returns how many free devices there are of kinds that a job can run on."""
        return sum(free for name, free in self.free.items() if self.allows(job, name))

    def one_kind(self, job: JobState) -> bool:
        """Returns whether all devices that a job can run on are of one kind."""
        return len([kind for kind in self._kinds if not job.kinds or kind in job.kinds]) <= 1

    def unit_on_node(self, job: JobState) -> int:
        """Returns of how many devices on one node a job grows: its unit, if any node has so many."""
        if job.unit <= 1:
            return 1
        largest = max((size for kind, size in self._sizes.items() if not job.kinds or kind in job.kinds), default=0)
        return job.unit if largest >= job.unit else 1

    def available(self, job: JobState, name: str, unit: int) -> int:
        """Returns how many devices of a node a job could take, `unit` at a time."""
        free = self.free[name]
        if job.whole_nodes:
            return free if free == self.nodes[name].devices else 0
        return free - free % unit

    # -- a place for the basic demand ------------------------------------------------------------------------------

    def place(self, job: JobState, within: Collection[str] | None = None) -> dict[str, int] | None:
        """Returns a place for a job's basic demand; None if there is none, whatever is chosen.

        Devices of one kind, on one node, in one rack, and where the least is left over, in this order.

        Args:
            job: that is to be placed.
            within: the nodes that may be used; None: all.
        """
        unit = self.unit_on_node(job) if job.basic % job.unit == 0 else 1
        options: dict[str, int] = {}
        for name in self._free_nodes(self._open) if within is None else within:
            if name in self.free and self.free[name] > 0 and self.allows(job, name):
                n = self.available(job, name, unit)
                if n:
                    options[name] = n
        if sum(options.values()) < job.basic:
            return None
        by_kind: dict[str, dict[str, int]] = {}
        for name, n in options.items():
            by_kind.setdefault(self.nodes[name].kind, {})[name] = n
        for kind in job.kinds or self._kinds:
            if kind in by_kind:
                found = self._place_on(by_kind[kind], job)
                if found is not None:
                    return found
        return self._place_on(options, job) if len(by_kind) > 1 else None

    def _place_on(self, options: Mapping[str, int], job: JobState) -> dict[str, int] | None:
        if sum(options.values()) < job.basic:
            return None
        enough = [n for n in options.values() if n >= job.basic]
        if enough and (not job.whole_nodes or min(enough) == job.basic):
            least = min(enough)
            return {next(name for name, n in options.items() if n == least): job.basic}
        racks: dict[str, dict[str, int]] = {}
        for name, n in options.items():
            racks.setdefault(self.nodes[name].rack, {})[name] = n
        for some in sorted(racks.values(), key=lambda some: sum(some.values())) if len(racks) > 1 else ():
            found = self._within(some, job)
            if found is not None:
                return found
        return self._within(options, job)

    @staticmethod
    def _within(options: Mapping[str, int], job: JobState) -> dict[str, int] | None:
        if sum(options.values()) < job.basic:
            return None
        if job.whole_nodes:
            return _summing(job.basic, options)
        found: dict[str, int] = {}
        left = job.basic
        by_size = sorted(options.items(), key=lambda option: -option[1])
        for place, (name, n) in enumerate(by_size):
            if n >= left:
                # The last of those that are large enough leaves the least over; of equal ones the first.
                enough = [one for one in by_size[place:] if one[1] >= left]
                found[next(name for name, n in enough if n == enough[-1][1])] = left
                return found
            found[name] = n
            left -= n
        return None

    def complete(self, job: JobState, kept: Allocation, within: Collection[str]) -> dict[str, int] | None:
        """Returns a part of a basic demand with what it lacks beside it, nearest first; None if that is not there."""
        found, left = dict(kept), job.basic - devices_of(kept)
        unit = self.unit_on_node(job) if job.basic % job.unit == 0 else 1
        for name, n in self.nearest(job, kept, True):
            if name not in within or (job.whole_nodes and n > left):
                continue
            n = min(n, left) if job.whole_nodes else min(n, left) - min(n, left) % unit
            if n:
                found[name] = found.get(name, 0) + n
                left -= n
            if not left:
                return found
        return found if not left else None

    # -- what a job would grow by --------------------------------------------------------------------------------------

    def nearest(self, job: JobState, held: Mapping[str, int], own_kinds: bool) -> Iterator[tuple[str, int]]:
        """Yields nodes with devices that a job could take, nearest first: those where it is, those of the same racks,
        all others (Suika 3.2.1, the affinity order).

        Args:
            job: that is to grow.
            held: what it has.
            own_kinds: whether only devices of the kinds that it has are wanted.
        """
        unit = self.unit_on_node(job)
        kinds = {self.nodes[name].kind for name in held if name in self.nodes}
        racks = dict.fromkeys(self.nodes[name].rack for name in held if name in self.nodes)
        rest = (rack for rack in self._open if rack not in racks)
        near = (name for name in held if self.free.get(name, 0) > 0)
        for name in chain(near, (name for name in self._free_nodes(chain(racks, rest)) if name not in held)):
            if self.allows(job, name) and (not own_kinds or self.nodes[name].kind in kinds):
                n = self.available(job, name, unit)
                if n:
                    yield name, n

    def _free_nodes(self, racks: Iterable[str]) -> Iterator[str]:
        return (self._names[place] for rack in racks for place in self._open.get(rack, ()))


def _summing(need: int, options: Mapping[str, int]) -> dict[str, int] | None:
    """Returns whole nodes that have exactly so many devices together, as few as possible of the larger ones first."""
    by_size: dict[int, list[str]] = {}
    for name, n in options.items():
        by_size.setdefault(n, []).append(name)
    counts = _counts(need, sorted(((size, len(names)) for size, names in by_size.items()), reverse=True))
    if counts is None:
        return None
    return {name: size for size, n in counts.items() for name in by_size[size][:n]}


def _counts(need: int, sizes: Sequence[tuple[int, int]]) -> dict[int, int] | None:
    if need == 0:
        return {}
    if not sizes:
        return None
    (size, most), *rest = sizes
    for n in range(min(most, need // size), -1, -1):
        found = _counts(need - n * size, rest)
        if found is not None:
            return {size: n, **found} if n else found
    return None


def where(allocation: Allocation) -> str:
    """Returns text that names the nodes of an allocation, the first few of many."""
    names = [f"{name}: {devices}" for name, devices in allocation.items()]
    return ", ".join(names if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more nodes"])


def devices_text(n: int) -> str:
    """Returns "1 device" or "4 devices"."""
    return f"{n} device" if n == 1 else f"{n} devices"


def held_on(allocation: Allocation, names: Collection[str]) -> int:
    """Returns how many devices of an allocation are on some nodes."""
    return devices_of({name: n for name, n in allocation.items() if name in names})
