"""How a worker begins a change: in the step that comes, or by moving the optimizer's state while all pause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from elaunch.plan.tiling import Plan
from elaunch.workers.comm.group import Group
from elaunch.workers.layers.change.assembly import Assembly
from elaunch.workers.layers.change.held_state import Hosted
from elaunch.workers.layers.change.migration import Migration
from elaunch.workers.layers.change.migration_plan import MigrationPlan
from elaunch.workers.layers.executor import LayerKey
from elaunch.workers.layers.model import Layer
from elaunch.workers.layers.parts import Builder, WorkerPart
from elaunch.workers.layers.shards import Shards
from elaunch.workers.layers.untrained.places import once
from elaunch.workers.state.chunks import Chunk
from elaunch.workers.state.layout import ParameterPiece
from elaunch.workers.state.reshard import reshard


def migration_to(
    between: Plan,
    migration_plan: MigrationPlan,
    layers: Mapping[LayerKey, Layer],
    group: Group,
    part: WorkerPart | None,
    builder: Builder,
) -> Migration:
    """Returns what this worker does in the step of the change.

    Args:
        between: the plan of that step.
        migration_plan: who has what, and who needs what; all have their parts of one plan.
        layers: this worker's under the next plan.
        group: of the members.
        part: what this worker has, if it has any.
        builder: of its parts.
    """
    worker, old = group.members[group.rank], migration_plan.old
    assert old is not None
    local, sums, had = (None, {}, {}) if part is None else (part.zero.shards, part.sums, part.layers)
    return Migration(
        between,
        group,
        old,
        migration_plan.new,
        (had, layers),
        migration_plan.lacking,
        builder.specs,
        migration_plan.items,
        local,
        sums,
        builder.device,
        partial(builder.executor, worker),
    )


def moved_shards(
    group: Group,
    migration_plan: MigrationPlan,
    pieces: Sequence[ParameterPiece],
    local: Shards | None,
    state: dict[str, list[Chunk]],
    hosted: Hosted,
    builder: Builder,
    max_extra_bytes: int | None,
    keeping: bool,
) -> tuple[Shards, int, Hosted]:
    """Moves the optimizer's state; returns that of the new pieces, the bytes that came, and what to have in host memory
    until the next step commits.

    Args:
        group: of the members.
        migration_plan: who has what, and who needs what.
        pieces: of this worker under the next plan.
        local: what it owns now, if that is by piece; under a bound it is let go.
        state: the same by item and box.
        hosted: what it has in host memory of others.
        builder: of its parts.
        max_extra_bytes: bound of the memory beside the old state.
        keeping: whether what it owned stays in host memory, too, if that is not bounded: whoever gets it may be the
            one that had the copy, and be lost before there is another one.
    """
    router, forms, schedule = migration_plan.router(), migration_plan.forms, migration_plan.schedule
    assembly = Assembly(pieces, local, router.items, builder.device)
    if max_extra_bytes is not None and local is not None:
        # From here on the chunks alone hold it, so that what is let go is free.
        local.release()
    new, moved = reshard(
        group, router, state, assembly.allocate, snapshots=hosted.chunks, max_extra_bytes=max_extra_bytes
    )
    shards = builder.shards(pieces, assembly.tensors(new), forms, schedule)
    if keeping and max_extra_bytes is None:
        there = {name: list(hosted.chunks.get(name, ())) for name in {*hosted.chunks, *state}}
        for name, chunks in state.items():
            there[name] += [Chunk(chunk.box, tuple(one.cpu() for one in chunk.tensors)) for chunk in chunks]
        hosted = hosted._replace(chunks=once(there))
    return shards, moved.received_bytes, hosted
