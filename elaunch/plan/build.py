"""Constructors of the usual kinds of plan. Each returns a plan that has been validated."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise

from elaunch.plan.shares import share
from elaunch.plan.tiling import (
    MicroBatch,
    OptimizerLayout,
    Plan,
    PlanError,
    Tile,
    count_units,
    n_rows,
    size_findings,
    unit_samples,
)


@dataclass(frozen=True)
class Pipeline:
    """A run of units and the stages that they go through.

    Attributes:
        units: the logical micro-batches of this pipeline.
        stages: layers and tensor-parallel workers, from the first layer to the last.
    """

    units: range
    stages: tuple[tuple[range, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Stage:
    """Consecutive layers that several replicas hold.

    Attributes:
        layers: [lo, hi).
        replicas: tensor-parallel workers. The position is the replica's DP rank; an empty TP group is one whose workers
            are lost, as is each DP rank that only another stage has.
        shares: for each replica its weight in an uneven distribution of the rows; None for an even one.
    """

    layers: range
    replicas: tuple[tuple[str, ...], ...]
    shares: tuple[int, ...] | None = None


def data_parallel(
    global_batch_size: int, micro_batch_size: int, shares: Mapping[str, int], *, whole_shares: bool = False
) -> Plan:
    """Returns the plan of a model that is not cut: one stage, of which each worker does a contiguous run of units.

    Args:
        global_batch_size: samples of a step.
        micro_batch_size: samples of a unit.
        shares: how many units each worker does, in the order of the runs; a worker without any is idle.
        whole_shares: whether a worker does its run as a single micro-batch.

    Raises:
        PlanError: the shares are not those of one batch, or a size or a name cannot be used.
    """
    sizes = global_batch_size, micro_batch_size
    _check_sizes(1, *sizes)
    n_units = count_units(*sizes)
    if min(shares.values(), default=0) < 0 or sum(shares.values()) != n_units:
        raise PlanError(f"a step has {n_units} micro-batches of {micro_batch_size}, but the shares are {dict(shares)}")
    tiles = []
    for worker, (first, stop) in zip(shares, pairwise(accumulate(shares.values(), initial=0))):
        units = range(first, stop)
        if units and whole_shares:
            run = range(unit_samples(units[0], *sizes).start, unit_samples(units[-1], *sizes).stop)
            tiles.append(Tile(range(1), ((run,),), (worker,)))
        elif units:
            tiles.append(Tile(range(1), _whole_units(units, *sizes), (worker,)))
    idle = tuple(worker for worker, n in shares.items() if not n)
    return _validated(Plan(1, *sizes, tuple(tiles), idle=idle))


def symmetric(
    workers: Sequence[str],
    n_layers: int,
    global_batch_size: int,
    micro_batch_size: int,
    *,
    dp: int = 1,
    pp: int = 1,
    tp: int = 1,
    zero: OptimizerLayout = "interleaved",
) -> Plan:
    """Returns the plan of a job that has lost nobody: `dp` equal pipelines of `pp` stages of `tp` workers each.

    Worker (stage * dp + replica) * tp + tp_rank is where Megatron has it. Each replica does a contiguous run of units,
    ascending. Shares of units and of layers differ by at most one, the first ones are the larger.

    Raises:
        PlanError: the sizes do not fit each other.
    """
    _check_sizes(n_layers, global_batch_size, micro_batch_size)
    n_units = count_units(global_batch_size, micro_batch_size)
    if min(dp, pp, tp) < 1 or dp * pp * tp != len(workers):
        raise PlanError(
            f"dp {dp} * pp {pp} * tp {tp} is {dp * pp * tp}, but there are {len(workers)} workers: choose degrees of 1 "
            "or more whose product is the number of workers"
        )
    if pp > n_layers:
        raise PlanError(f"pp {pp} stages need a layer each, but there are {n_layers}: make pp {n_layers} or less")
    _check_dp_size(dp, "dp", n_units, micro_batch_size)
    names = [tuple(workers[first : first + tp]) for first in range(0, len(workers), tp)]
    cut = [Stage(share(n_layers, pp, stage), tuple(names[stage * dp : (stage + 1) * dp])) for stage in range(pp)]
    return stages(n_layers, global_batch_size, micro_batch_size, cut, zero=zero)


def pipelines(
    n_layers: int,
    global_batch_size: int,
    micro_batch_size: int,
    pipelines: Sequence[Pipeline],
    *,
    zero: OptimizerLayout = "interleaved",
    idle: Sequence[str] = (),
) -> Plan:
    """Returns a plan of pipelines that may differ in depth, in where they cut the layers and in their share of the
    batch.

    Micro-batches are whole units, ascending (Chameleon fig. 4; Oobleck's heterogeneous pipelines).

    Raises:
        PlanError: the pipelines do not do every layer of every unit once.
    """
    _check_sizes(n_layers, global_batch_size, micro_batch_size)
    tiles: list[Tile] = []
    for pipeline in pipelines:
        # The very same in all stages, which tells others that they need not compare them.
        units = _whole_units(pipeline.units, global_batch_size, micro_batch_size)
        tiles += (Tile(layers, units, workers) for layers, workers in pipeline.stages)
    return _validated(Plan(n_layers, global_batch_size, micro_batch_size, tuple(tiles), zero, tuple(idle)))


def stages(
    n_layers: int,
    global_batch_size: int,
    micro_batch_size: int,
    stages: Sequence[Stage],
    *,
    zero: OptimizerLayout = "interleaved",
    idle: Sequence[str] = (),
    whole: bool = False,
) -> Plan:
    """Returns a plan of stages that may differ in their number of replicas; all do the batch in the same turns.

    There are as many *DP ranks* as the widest stage has replicas. Each has a contiguous run of units; in turn t the
    t-th unit of each is done. A stage with a replica in every DP rank does whole units. In a stage with fewer, each
    replica does its own DP rank's unit and a part of the rows of those without one, such that the micro-batches of a
    turn are as equal as they can be (ElasWave 4.1); odd rows go to whoever has done the fewest. With `shares`, all rows
    of a turn are instead apportioned by weight: each goes to the replica that is furthest behind its share of the step
    so far (Sainte-Laguë). A replica without rows in a turn has no micro-batch for it; without any, it becomes idle.

    With `whole` no unit is cut: each that has no replica of its own, or with `shares` each, goes to the replica that is
    then furthest behind. So a replica may do several micro-batches in a turn.

    Raises:
        PlanError: the stages do not do every layer once, or the sizes do not fit each other.
    """
    _check_sizes(n_layers, global_batch_size, micro_batch_size)
    dp_size = max((len(stage.replicas) for stage in stages), default=0)
    n_units = count_units(global_batch_size, micro_batch_size)
    _check_dp_size(dp_size, "the widest stage's number of replicas", n_units, micro_batch_size)
    turns = tuple(_turns(global_batch_size, micro_batch_size, dp_size))
    tiles: list[Tile] = []
    without: list[str] = []
    # Stages with replicas in the same DP ranks cut the samples alike: their tiles have the very same micro-batches.
    cuts: dict[Hashable, list[tuple[MicroBatch, ...]]] = {}
    for stage in stages:
        kind = stage.shares, tuple(map(bool, stage.replicas))
        if kind not in cuts and whole:
            cuts[kind] = [tuple(filter(None, micro_batches)) for micro_batches in _whole_parts(turns, stage)]
        elif kind not in cuts:
            cut = _by_weight(turns, stage) if stage.shares is not None else _own_and_even_part(turns, stage)
            cuts[kind] = [tuple(filter(None, micro_batches)) for micro_batches in cut]
        for workers, micro_batches in zip(stage.replicas, cuts[kind]):
            if micro_batches:
                tiles.append(Tile(stage.layers, micro_batches, workers))
            else:
                without += workers
    return _validated(Plan(n_layers, global_batch_size, micro_batch_size, tuple(tiles), zero, (*without, *idle)))


_Turn = dict[int, range]
"""For each DP rank that has a unit in this turn, its samples."""


def _turns(global_batch_size: int, micro_batch_size: int, dp_size: int) -> Iterator[_Turn]:
    sizes = global_batch_size, micro_batch_size
    shares = [share(count_units(*sizes), dp_size, dp_rank) for dp_rank in range(dp_size)]
    for turn in range(len(shares[0])):
        yield {dp_rank: unit_samples(units[turn], *sizes) for dp_rank, units in enumerate(shares) if turn < len(units)}


def _own_and_even_part(turns: Sequence[_Turn], stage: Stage) -> list[list[MicroBatch]]:
    """Returns [replica][turn] -> micro-batch, which may have no rows."""
    present = [dp_rank for dp_rank, workers in enumerate(stage.replicas) if workers]
    if not present:
        raise PlanError(f"no workers are left for layers {stage.layers.start}:{stage.layers.stop}")
    found: list[list[MicroBatch]] = [[] for _ in stage.replicas]
    done = dict.fromkeys(present, 0)
    for turn in turns:
        lost = [samples for dp_rank, samples in turn.items() if dp_rank not in done]
        queue = [(len(turn.get(dp_rank, ())), done[dp_rank], dp_rank) for dp_rank in present]
        heapify(queue)
        sizes = dict.fromkeys(present, 0)
        for _ in range(sum(map(len, lost))):
            rows, before, dp_rank = queue[0]
            sizes[dp_rank] += 1
            heapreplace(queue, (rows + 1, before + 1, dp_rank))
        for dp_rank, part in zip(present, _cut(lost, sizes.values())):
            micro_batch = _joined([*([turn[dp_rank]] if dp_rank in turn else []), *part])
            found[dp_rank].append(micro_batch)
            done[dp_rank] += n_rows(micro_batch)
    return found


def _by_weight(turns: Sequence[_Turn], stage: Stage) -> list[list[MicroBatch]]:
    """Returns [replica][turn] -> micro-batch, which may have no rows."""
    weights, usable = stage.shares or (), _usable(stage)
    found: list[list[MicroBatch]] = [[] for _ in weights]
    queue = [(1 / weight, dp_rank, 0) for dp_rank, weight in usable.items()]
    heapify(queue)
    for turn in turns:
        sizes = [0] * len(weights)
        for _ in range(sum(map(len, turn.values()))):
            _, dp_rank, rows = queue[0]
            sizes[dp_rank] += 1
            heapreplace(queue, ((2 * rows + 3) / weights[dp_rank], dp_rank, rows + 1))
        for dp_rank, micro_batch in enumerate(_cut(list(turn.values()), sizes)):
            found[dp_rank].append(micro_batch)
    return found


def _usable(stage: Stage) -> dict[int, int]:
    """Returns the weights of the DP ranks that have rows."""
    weights = stage.shares or ()
    usable = {dp_rank: weight for dp_rank, weight in enumerate(weights) if weight > 0}
    if not usable or min(weights) < 0 or len(weights) != len(stage.replicas):
        raise PlanError(
            f"layers {stage.layers.start}:{stage.layers.stop} need a share of 0 or more for each of their "
            f"{len(stage.replicas)} replicas, and one above 0; got {weights}"
        )
    if lost := [dp_rank for dp_rank in usable if not stage.replicas[dp_rank]]:
        raise PlanError(f"a DP rank without workers must have share 0, got {weights[lost[0]]} for DP rank {lost[0]}")
    return usable


def _whole_parts(turns: Sequence[_Turn], stage: Stage) -> list[list[MicroBatch]]:
    """Returns the micro-batches of each replica, each of them a unit."""
    even = stage.shares is None
    weights = {dp_rank: 1 for dp_rank, workers in enumerate(stage.replicas) if workers} if even else _usable(stage)
    if not weights:
        raise PlanError(f"no workers are left for layers {stage.layers.start}:{stage.layers.stop}")
    found: list[list[MicroBatch]] = [[] for _ in stage.replicas]
    # What a replica keeps for itself counts from the beginning.
    done = {dp_rank: sum(len(turn.get(dp_rank, ())) for turn in turns) if even else 0 for dp_rank in weights}
    for turn in turns:
        for dp_rank, samples in turn.items():
            taker = dp_rank
            if not even or dp_rank not in weights:
                # As Sainte-Laguë takes it: the middle of the unit; of equal ones the replica whose unit it is.
                behind = {one: (2 * done[one] + len(samples)) / weight for one, weight in weights.items()}
                taker = min(weights, key=lambda one: (behind[one], one != dp_rank, one))
                done[taker] += len(samples)
            found[taker].append((samples,))
    return found


def _cut(runs: Sequence[range], sizes: Iterable[int]) -> Iterator[MicroBatch]:
    """Cuts the samples of the runs, in order, into consecutive parts of these sizes."""
    left = list(reversed(runs))
    for size in sizes:
        part: list[range] = []
        while size:
            run = left.pop()
            part.append(run[:size])
            if len(run) > size:
                left.append(run[size:])
            size -= len(part[-1])
        yield _joined(part)


def _joined(runs: Sequence[range]) -> MicroBatch:
    """Returns the same samples in the same order, with adjacent runs joined into one."""
    found: list[range] = []
    for run in runs:
        if found and found[-1].stop == run.start:
            found[-1] = range(found[-1].start, run.stop)
        else:
            found.append(run)
    return tuple(found)


def _whole_units(units: range, global_batch_size: int, micro_batch_size: int) -> tuple[MicroBatch, ...]:
    return tuple((unit_samples(unit, global_batch_size, micro_batch_size),) for unit in units)


def _check_sizes(n_layers: int, global_batch_size: int, micro_batch_size: int) -> None:
    if wrong := size_findings(n_layers, global_batch_size, micro_batch_size):
        raise PlanError("; ".join(wrong))


def _check_dp_size(dp_size: int, what: str, n_units: int, micro_batch_size: int) -> None:
    if not 1 <= dp_size <= n_units:
        raise PlanError(
            f"{what} is {dp_size}, but a step has {n_units} micro-batches of {micro_batch_size} for them: make it "
            f"1 to {n_units}, or micro_batch_size smaller"
        )


def _validated(plan: Plan) -> Plan:
    plan.validate()
    return plan
