"""Whether the replicas of a layer hold the same: those in tensor-parallel groups of one width, place by place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elaunch.workers.layers.parts import Place, WorkerPart
from elaunch.workers.replicas import ReplicasDiffer, digests_of_tensors, text, whole


def check_replicas(part: WorkerPart, step: int, alike: int | None) -> None:
    """Compares parameters, frozen ones too, and buffers. All members of the group call it.

    Masters and moments have one owner each, so there is nothing to compare.

    Args:
        part: of this worker.
        step: number of steps that have committed.
        alike: so many had when the replicas last were the same; None: they were never compared.

    Raises:
        ReplicasDiffer: names the first tensor that differs, and on whom.
        StepInterrupted: a peer was lost, or the generation changed.
    """
    members, group = part.group.members, part.group
    local = {place: digests_of_tensors(layer.tensors()) for place, layer in part.places.items()}
    place = odd_place(group.all_gather_json({place: whole(digests) for place, digests in local.items()}))
    if place is not None:
        what = f"the replicas of layer {place.split()[0]}"
        differ = text(members, group.all_gather_json(local.get(place)), step, alike, what)
        raise ReplicasDiffer(f"{differ}. Something changed it on some workers only")


def odd_place(told: Sequence[Mapping[Place, int]]) -> Place | None:
    """Returns the first place whose holders have told different digests; None: there is none."""
    known: dict[Place, int] = {}
    for digests in told:
        for place, digest in digests.items():
            if known.setdefault(place, digest) != digest:
                return place
    return None
