"""Whether the replicas of a layer hold the same: those in tensor-parallel groups of one width, place by place.

Where they do not, those that differ can be repaired. Trained parameters get the values of their masters, of which there
is one each; frozen parameters and buffers those that most replicas have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from elaunch.replica_check import NAME
from elaunch.workers import replicas
from elaunch.workers.layers.parts import Place, WorkerPart
from elaunch.workers.replicas import ReplicasDiffer, digests_of_tensors, whole


class Odd(NamedTuple):
    """Members that hold a place differently: `others` are to get what `source` has. Both are ranks."""

    source: int
    others: tuple[int, ...]


def check_replicas(part: WorkerPart, step: int, alike: int | None, repair: bool) -> str | None:
    """Compares parameters, frozen ones too, and buffers. All members of the group call it.

    Masters and moments have one owner each, so there is nothing to compare.

    Args:
        part: of this worker.
        step: number of steps that have committed.
        alike: so many had when the replicas last were the same; None: they were never compared.
        repair: whether those that differ get the state of others.

    Returns:
        What differed, and is the same again; None: nothing.

    Raises:
        ReplicasDiffer: names the first tensor that differs, and on whom; it is not to be repaired.
        StepInterrupted: a peer was lost, or the generation changed.
    """
    members, group = part.group.members, part.group
    local = {place: digests_of_tensors(layer.tensors()) for place, layer in part.places.items()}
    odd = odd_places(group.all_gather_json({place: whole(digests) for place, digests in local.items()}))
    if not odd:
        return None
    place = next(iter(odd))
    what = f"the replicas of layer {place.split()[0]}"
    differ = replicas.text(members, group.all_gather_json(local.get(place)), step, alike, what)
    if not repair:
        raise ReplicasDiffer(
            f"{differ}. Something changed it on some workers only. {NAME}=N,repair copies the state of most workers to "
            "the others instead of ending the job"
        )
    part.share()
    _copy_untrained(part, odd)
    return differ


def odd_places(told: Sequence[Mapping[Place, int]]) -> dict[Place, Odd]:
    """Returns the places whose holders have told different digests, in their order.

    Args:
        told: digests by place, of each member. Of several that equally many have, the one counts that the first of
            their members has.
    """
    found = {}
    for place in sorted({place for digests in told for place in digests}, key=_in_order):
        held = [{"": digests[place]} if place in digests else None for digests in told]
        if len({digests[""] for digests in held if digests is not None}) > 1:
            most, others, _ = replicas.odd_ones(held)
            found[place] = Odd(most[0], others)
    return found


def _in_order(place: Place) -> tuple[int, str]:
    layer, _, rank = place.partition(" ")
    return int(layer), rank


@torch.no_grad()
def _copy_untrained(part: WorkerPart, odd: Mapping[Place, Odd]) -> None:
    """Gives those that differ the frozen parameters and buffers; nothing is changed until all have come."""
    group, layers = part.group, part.places
    sends: list[tuple[int, Tensor]] = []
    receives: list[tuple[int, Tensor]] = []
    lacking: list[Tensor] = []
    for place, (source, others) in odd.items():
        if group.rank != source and group.rank not in others:
            continue
        layers[place].own_memory()
        for value in layers[place].untrained().values():
            if group.rank == source:
                sends += [(other, value.contiguous()) for other in others]
            else:
                lacking.append(value)
                receives.append((source, torch.empty(value.shape, dtype=value.dtype)))
    group.link_up({group.members[member] for member, _ in (*sends, *receives)})
    group.exchange(sends, receives)
    for value, (_, came) in zip(lacking, receives, strict=True):
        value.copy_(came)
