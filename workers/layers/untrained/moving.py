"""Tensors of layers on their way to those who lack them, while all pause: frozen parameters and buffers, or all.

What is trained follows from the masters where these move too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from elaunch.workers.comm.group import Group
from elaunch.workers.layers.change.migration_plan import MigrationPlan
from elaunch.workers.layers.executor import LayerKey
from elaunch.workers.layers.model import Layer
from elaunch.workers.layers.untrained.places import once, places_of_layers, shared
from elaunch.workers.state.boxes import Box, intersect
from elaunch.workers.state.chunks import Chunk, copy_box
from elaunch.workers.state.reshard import reshard

if TYPE_CHECKING:
    from elaunch.workers.layers.parts import WorkerPart


def move(
    group: Group,
    migration_plan: MigrationPlan,
    part: WorkerPart | None,
    layers: Mapping[LayerKey, Layer],
    copies: dict[str, list[Chunk]],
    trained: bool = False,
) -> int:
    """Fills the layers that this worker lacks. All members of the group call it; nothing old is changed.

    Args:
        group: of all members.
        migration_plan: who has what, and who lacks what.
        part: what this worker has, if it has any.
        layers: its layers under the next plan; those that it lacks have no values yet.
        copies: what it has in host memory.
        trained: whether what is trained moves as well.

    Returns:
        The bytes that came.

    Raises:
        StateLost: no member has some of it.
        StepInterrupted: a link broke, or the membership changes.
    """
    router = migration_plan.tensor_router(trained)
    if not router.needed:
        return 0
    worker = group.members[group.rank]
    lacking = {key: layers[key] for key in sorted(migration_plan.lacking[worker])}
    places = places_of_layers(migration_plan.new.layout, worker, lacking, trained=trained)

    def allocate(path: str, box: Box) -> tuple[Tensor, ...]:
        return next(place.part(box) for place in places[path] if intersect(place.box, box) == box)

    have = {} if part is None else once(places_of_layers(part.layout, worker, part.layers, trained=trained))
    came, moved = reshard(group, router, have, allocate, snapshots=copies)
    for copied in shared(places, came).values():
        for source, to, box in copied:
            copy_box([source], [to], box)
    return moved.received_bytes
