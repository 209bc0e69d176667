"""Whether the replicas of a layer hold the same: those in tensor-parallel groups of one width, place by place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elaunch.workers.layers.parts import WorkerPart
from elaunch.workers.replicas import ReplicasDiffer, digests_of_tensors, whole

Place = str
"""`3 0/2`: layer 3, the first of two workers of a tensor-parallel group."""


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
    local = {
        f"{key[0]} {layer.tp_rank.rank}/{layer.tp_rank.size}": digests_of_tensors(layer.tensors())
        for key, layer in part.layers.items()
    }
    members, group = part.group.members, part.group
    told = group.all_gather_json({place: whole(digests) for place, digests in local.items()})
    place = odd_place(told)
    if place is None:
        return
    holders = {
        member: found for member, found in zip(members, group.all_gather_json(local.get(place)), strict=True) if found
    }
    name = next(name for name in next(iter(holders.values())) if len({found[name] for found in holders.values()}) > 1)
    values = [found[name] for found in holders.values()]
    usual = max(values, key=values.count)
    odd = [member for member, found in holders.items() if found[name] != usual]
    others = [member for member in holders if member not in odd]
    since = "they have not been compared before" if alike is None else f"after {alike} they were the same"
    raise ReplicasDiffer(
        f"the replicas of layer {place.split()[0]} differ after {step} steps ({since}): `{name}` is not the same on "
        f"{', '.join(odd)} as on {', '.join(others)}. Something changed it on some workers only"
    )


def odd_place(told: Sequence[Mapping[Place, int]]) -> Place | None:
    """Returns the first place whose holders have told different digests; None: there is none."""
    known: dict[Place, int] = {}
    for digests in told:
        for place, digest in digests.items():
            if known.setdefault(place, digest) != digest:
                return place
    return None
