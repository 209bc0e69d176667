"""How fast a job is under the best plan for what it might get, by its profile and its default plan (Suika algorithm 1).

An allocation is brought into a form that depends only on how many devices of which kind it has on how many nodes of how
many racks, so that a question that differs only in names is answered once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, get_args

from elaunch.errors import UsageError
from elaunch.plan.build import symmetric
from elaunch.plan.tiling import Plan, PlanError
from elaunch.policy.candidates.expand import expanded
from elaunch.policy.candidates.resize import resized
from elaunch.policy.candidates.structure import NotPossible
from elaunch.policy.estimate import estimate_step
from elaunch.policy.profile import LinkProfile, Profile, WorkerProfile
from elaunch.policy.transition import estimate_transition
from elaunch.rendezvous.membership import by_node, node_of
from elaunch.scheduler.model import Allocation, Node
from elaunch.scheduler.speeds import ChangeCost, MoveCost, TableSpeed

PlanFamily = Literal["asymmetric", "symmetric", "data-parallel"]
PLAN_FAMILIES: tuple[str, ...] = get_args(PlanFamily)


@dataclass(frozen=True)
class DefaultPlan:
    """The plan with which a job runs on its basic demand.

    Attributes:
        pp: stages of a pipeline.
        dp: pipelines.
        tp: workers of a tensor-parallel group, all on one node.
        global_batch_size: samples of a step.
        micro_batch_size: samples of a micro-batch.
    """

    pp: int
    dp: int
    tp: int
    global_batch_size: int
    micro_batch_size: int

    @property
    def basic(self) -> int:
        """The devices that it takes."""
        return self.pp * self.dp * self.tp


@dataclass(frozen=True)
class Distances:
    """The links of a cluster by distance; None: as the next larger distance, and in the end as the profile says.

    Attributes:
        node: between devices of a node.
        rack: between nodes of a rack.
        cluster: between racks.
    """

    node: LinkProfile | None = None
    rack: LinkProfile | None = None
    cluster: LinkProfile | None = None


def kind_speeds(profiles: Mapping[str, Profile], tflops: Mapping[str, float]) -> dict[str, float]:
    """Returns how fast devices of each kind compute, relative to those of the first profile.

    Of kinds with a profile as they were measured; of others by their TFLOPS, relative to those of the first that has
    been measured (Suika A.4).

    Args:
        profiles: of one model, by the kind of device on which they were measured, at least one.
        tflops: by kind.
    """
    reference = next(iter(profiles.values()))
    whole = range(len(reference.layers))
    measured = {kind: reference.turn_s(whole, 1) / profile.turn_s(whole, 1) for kind, profile in profiles.items()}
    known = next((kind for kind in profiles if kind in tflops), None)
    if known is None:
        return measured
    return {kind: measured[known] * speed / tflops[known] for kind, speed in tflops.items()} | measured


class PlanSpeed:
    """The `Speed` of a job, or of all jobs of one model: what it finds out is kept for the others."""

    def __init__(
        self,
        profile: Profile,
        default: DefaultPlan,
        nodes: Iterable[Node] = (),
        *,
        family: PlanFamily = "asymmetric",
        kinds: Mapping[str, float] | None = None,
        distances: Distances | None = None,
        widths: Sequence[int] = (),
        cost: ChangeCost | None = None,
    ) -> None:
        """Makes the speed of a model.

        Args:
            profile: of the model.
            default: its plan on its basic demand.
            nodes: of the cluster; a node that is not among them is of no kind and in no rack.
            family: of plans: "asymmetric": the default plan, to which newcomers are added wherever they are of most
                use; "symmetric": equal parts in each dimension, of all degrees (Rubick); "data-parallel": more
                pipelines like those of the default plan (Sia).
            kinds: the speed of devices by kind, relative to those of the profile; see `kind_speeds`.
            distances: links by distance.
            widths: of tensor-parallel groups, beside that of the default plan.
            cost: of a change; None: what the bytes take that move between the plans before and after.

        Raises:
            UsageError: there is no such family.
        """
        if family not in PLAN_FAMILIES:
            raise UsageError(f"plans are {', '.join(PLAN_FAMILIES)}; got {family!r}")
        self.profile, self.default, self.family = profile, default, family
        self._kinds, self._distances, self._widths = kinds or {}, distances, tuple(widths)
        # Only plans that keep a skeleton say what moves.
        self._cost = self.move_cost() if cost is None and family != "asymmetric" else cost
        self._nodes: dict[str, Node] = {}
        self._rates: dict[_Shape, float] = {}
        self._changes: dict[_Shape, float] = {}
        self.know(nodes)

    def know(self, nodes: Iterable[Node]) -> None:
        """Makes nodes known, if there are new ones, or others under the same names."""
        self._nodes |= {node.name: node for node in nodes}

    def rate(self, allocation: Allocation) -> float:
        """Returns samples per second under the best plan for an allocation; 0 if there is none."""
        shape = self._shape(allocation)
        if shape not in self._rates:
            cluster = _ShapedCluster(shape, self.profile, self._kinds, self._distances)
            plan = self._best(cluster, cluster.members(0))
            step_s = 0.0 if plan is None else estimate_step(plan, cluster.profile).step_s
            self._rates[shape] = self.default.global_batch_size / step_s if step_s else 0.0
        return self._rates[shape]

    def plan(self, allocation: Allocation) -> Plan | None:
        """Returns the best plan for an allocation, for workers of nodes with names like r0n1; None if there is none."""
        cluster = _ShapedCluster(self._shape(allocation), self.profile, self._kinds, self._distances)
        return self._best(cluster, cluster.members(0))

    def table(self, per_node: int, most: int) -> TableSpeed:
        """Returns the rates from the basic demand on, on as few nodes as possible; for where asking for each allocation
        takes too long: a plan for a hundred devices takes some tenths of a second.

        Every size that is a quarter larger than the one before is looked at. A change costs what moves.

        Args:
            per_node: devices of a node.
            most: devices that are of interest.
        """
        tp, size = self.default.tp, self.default.basic
        rates: dict[int, float] = {}
        while size <= most:
            full, rest = divmod(size, per_node)
            rates[size] = self.rate({f"{place}": per_node for place in range(full)} | ({"rest": rest} if rest else {}))
            size = most if size < most < size * 5 / 4 + tp else max(size + tp, -(-size * 5 // (4 * tp)) * tp)
        return TableSpeed(rates, self._cost or self.move_cost())

    def change_s(self, before: Allocation, after: Allocation) -> float:
        """Returns the seconds of training that a change costs."""
        if self._cost is not None:
            return self._cost.seconds(before, after)
        if not before or not after or dict(before) == dict(after):
            return 0.0
        shape = self._shape(before, after)
        if shape not in self._changes:
            self._changes[shape] = self._change_s(_ShapedCluster(shape, self.profile, self._kinds, self._distances))
        return self._changes[shape]

    def _shape(self, *allocations: Allocation) -> _Shape:
        """Returns how many devices of which kind are on each node in each of some allocations, by rack."""
        racks: dict[str, list[_OnNode]] = {}
        for name in dict.fromkeys(chain.from_iterable(allocations)):
            node = self._nodes.get(name)
            kind, rack = (node.kind, node.rack) if node is not None else ("", "")
            counts = tuple(allocation.get(name, 0) for allocation in allocations)
            racks.setdefault(rack if self._distances is not None else "", []).append((counts, kind))
        return tuple(sorted((tuple(sorted(nodes, reverse=True)) for nodes in racks.values()), reverse=True))

    def _best(self, cluster: _ShapedCluster, members: Sequence[str]) -> Plan | None:
        """Returns the fastest of the plans that fit in memory."""
        best: tuple[float, Plan] | None = None
        for plan in self._plans(cluster, members):
            step = estimate_step(plan, cluster.profile)
            if not step.over(cluster.profile) and (best is None or step.step_s < best[0]):
                best = step.step_s, plan
        return None if best is None else best[1]

    def _plans(self, cluster: _ShapedCluster, members: Sequence[str]) -> Iterator[Plan]:
        given = self.default
        if self.family == "asymmetric":
            base = self._laid_out(cluster, members, given.pp, given.dp, given.tp)
            if base is not None:
                yield base
                with suppress(NotPossible):
                    yield expanded(base, members, cluster.profile, widths=self._widths)
            return
        n_units = -(-given.global_batch_size // given.micro_batch_size)
        for tp in sorted({given.tp, *self._widths} if self.family == "symmetric" else {given.tp}):
            groups = len(_tp_groups(members, tp))
            for pp in range(1, min(groups, len(self.profile.layers)) + 1) if self.family == "symmetric" else [given.pp]:
                most = min(groups // pp, n_units)
                # Parts are equal in each dimension, as far as the batch allows that.
                dp = (
                    most if self.family != "symmetric" else max((n for n in _divisors(n_units) if n <= most), default=0)
                )
                plan = self._laid_out(cluster, members, pp, dp, tp) if dp else None
                if plan is not None:
                    yield plan

    def _laid_out(self, cluster: _ShapedCluster, members: Sequence[str], pp: int, dp: int, tp: int) -> Plan | None:
        """Returns equal pipelines on the first of the members; where there are too few, for those that are there."""
        groups = _tp_groups(members, tp)[: pp * dp]
        missing = [tuple(f"missing{number}/{rank}" for rank in range(tp)) for number in range(pp * dp - len(groups))]
        workers = [worker for group in (*groups, *missing) for worker in group]
        given = self.default
        try:
            plan = symmetric(
                workers,
                len(self.profile.layers),
                given.global_batch_size,
                given.micro_batch_size,
                dp=dp,
                pp=pp,
                tp=tp,
            )
            if missing and self.family != "asymmetric":
                return None
            if missing or cluster.profile.workers:
                plan = resized(plan, workers[: len(groups) * tp], cluster.profile)
        except PlanError:
            return None
        return replace(plan, idle=())

    def _change_s(self, cluster: _ShapedCluster) -> float:
        """Returns the seconds from the best plan before to the one that keeps as much of it as it can."""
        after = cluster.members(1)
        here = set(after)
        old = self._best(cluster, cluster.members(0))
        survivors = [] if old is None else [worker for worker in old.workers if worker in here]
        if old is None or not survivors:
            return self.move_cost().seconds({"before": 1}, {"after": len(after)})
        try:
            new = old if len(survivors) == len(old.workers) else resized(old, survivors, cluster.profile)
            with suppress(NotPossible):
                new = expanded(replace(new, idle=()), after, cluster.profile, widths=self._widths)
        except NotPossible:
            return self.move_cost().seconds({"before": 1}, {"after": len(after)})
        beside_s = estimate_step(new, cluster.profile).step_s / 2
        return estimate_transition(old, new, cluster.profile, (), beside_s).total_s

    def move_cost(self) -> MoveCost:
        """Returns what a change costs if each newcomer gets an even part of the state."""
        state_bytes = sum(layer.parameter_bytes + layer.optimizer_bytes for layer in self.profile.layers)
        return MoveCost(self.profile.change_s, state_bytes, self.profile.bandwidth_bytes_per_s)


_OnNode = tuple[tuple[int, ...], str]
"""Devices of a node in each allocation, and their kind."""

_Shape = tuple[tuple[_OnNode, ...], ...]
"""The nodes of each rack."""


class _ShapedCluster:
    """Nodes and workers of a shape, under names of their own, and the profile with their speeds and links."""

    def __init__(
        self, shape: _Shape, profile: Profile, kinds: Mapping[str, float], distances: Distances | None
    ) -> None:
        self._counts: dict[str, tuple[int, ...]] = {}
        workers = dict(profile.workers)
        for rack, nodes in enumerate(shape):
            for place, (counts, kind) in enumerate(nodes):
                name = f"r{rack}n{place}"
                self._counts[name] = counts
                speed = kinds.get(kind, 1.0)
                if speed != 1.0:
                    workers |= {f"{name}/{rank}": WorkerProfile(speed) for rank in range(max(counts))}
        self.profile = profile
        if workers or distances is not None:
            links = profile.links if distances is None else _Links(distances)
            self.profile = replace(profile, workers=workers, links=links)

    def members(self, number: int) -> list[str]:
        """Returns the workers of one of the allocations, node by node."""
        return [f"{name}/{rank}" for name, counts in self._counts.items() for rank in range(counts[number])]


class _Links(Mapping[tuple[str, str], LinkProfile]):
    """The link between each two workers of a `_ShapedCluster`, by their distance; lists none."""

    def __init__(self, distances: Distances) -> None:
        rack = distances.rack or distances.cluster
        self._links = (distances.node or rack, rack, distances.cluster)

    def __getitem__(self, ends: tuple[str, str]) -> LinkProfile:
        source, target = map(node_of, ends)
        near = 0 if source == target else 1 if source.partition("n")[0] == target.partition("n")[0] else 2
        link = self._links[near]
        if link is None:
            raise KeyError(ends)
        return link

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(())

    def __len__(self) -> int:
        return 1


def _tp_groups(members: Sequence[str], tp: int) -> list[tuple[str, ...]]:
    """Returns the members in groups of one node; those that are left over are in none."""
    found = []
    for some in by_node(members).values():
        found += [tuple(some[first : first + tp]) for first in range(0, len(some) - tp + 1, tp)]
    return found


def _divisors(n: int) -> list[int]:
    return [one for one in range(1, n + 1) if n % one == 0]
