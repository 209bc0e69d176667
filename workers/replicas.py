"""Whether members that should hold the same state do: digests of it, which they compare at a step boundary.

A digest costs one pass over the memory, and a comparison one reduction of two numbers. Only where digests differ, the
members exchange them tensor by tensor, and the error names the first one that is not the same.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from elaunch.errors import StateError
from elaunch.workers.barrier import UNSAID, span_of
from elaunch.workers.comm.group import Group
from elaunch.workers.state.codec import describe

_SPAN = struct.Struct("<2Q")
_WORD = (1 << 64) - 1
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_CHECKED = (
    nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.optim.lr_scheduler.ReduceLROnPlateau,
    torch.amp.GradScaler,
)
_MOST_NAMED = 8

Digests = Mapping[str, int]
"""By name of a tensor, or of the object whose numbers are meant, 64 bits."""


class ReplicasDiffer(StateError):
    """Members that should hold the same state do not."""


def digests_of_tensors(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Returns a digest of each tensor: the sum of its bits, taken as whole numbers, modulo 2**64.

    It does not tell a tensor from one with the same numbers in another order, which no step of an optimizer makes. The
    sums of all tensors of a device come to the host together.
    """
    by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        by_device.setdefault(tensor.device, []).append((name, _sum_of_bits(tensor)))
    found: dict[str, int] = {}
    for named in by_device.values():
        values = torch.stack([value for _, value in named]).tolist()
        found.update((name, value & _WORD) for (name, _), value in zip(named, values, strict=True))
    return {name: found[name] for name in tensors}


def digests_of_objects(objects: Mapping[str, Any]) -> dict[str, int]:
    """Returns digests of what modules, optimizers, schedulers and gradient scalers hold; of other objects, nothing.

    Raises:
        StateError: a `state_dict` has a value that cannot be described.
    """
    checked = {name: thing for name, thing in objects.items() if isinstance(thing, _CHECKED)}
    manifest, tensors = describe(checked)
    named = {spec["path"]: tensor for spec, tensor in zip(manifest["tensors"], tensors, strict=True)}
    numbers = {name: _hash(value) for name, value in manifest["objects"].items()}
    return {**digests_of_tensors(named), **numbers}


def whole(digests: Digests) -> int:
    """Returns one digest of all of them."""
    return _hash(list(digests.items()))


def agree(group: Group, digest: int | None) -> bool:
    """Returns whether the digests of all members are the same. All members of the group call it, alike.

    Args:
        group: the members.
        digest: of this one; None: it holds nothing that could be compared.

    Raises:
        StepInterrupted: a peer was lost, or the generation changed.
    """
    local = UNSAID if digest is None else (digest, digest)
    least, most = _SPAN.unpack(group.reduce_bytes(_SPAN.pack(*local), _joined))
    return bool(least >= most)


def odd_ones(told: Sequence[Digests | None]) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    """Returns who has what most have, who has not, and the first name that is not the same everywhere.

    Args:
        told: digests by member; None: it has nothing. They are not all the same. Of several states that equally many
            have, the one counts that the first of their members has.
    """
    held = {member: tuple(digests.items()) for member, digests in enumerate(told) if digests is not None}
    usual, _ = Counter(held.values()).most_common(1)[0]
    most = tuple(member for member, items in held.items() if items == usual)
    others = tuple(member for member, items in held.items() if items != usual)
    names = dict.fromkeys(name for items in (usual, *(held[member] for member in others)) for name, _ in items)
    found = [dict(items) for items in held.values()]
    first = next(name for name in names if len({digests.get(name) for digests in found}) > 1)
    return most, others, first


def text(
    workers: Sequence[str],
    told: Sequence[Digests | None],
    step: int,
    alike: int | None,
    what: str = "the workers' replicas",
) -> str:
    """Returns what differs, on whom, and in which steps it has come, for people.

    Args:
        workers: the members.
        told: their digests.
        step: number of steps that have committed.
        alike: so many had when the members last were the same; None: they were never compared.
        what: differs.
    """
    most, others, first = odd_ones(told)
    names = ", ".join(workers[member] for member in others[:_MOST_NAMED])
    if len(others) > _MOST_NAMED:
        names += f" and {len(others) - _MOST_NAMED} more"
    held = [digests for digests in told if digests is not None]
    n_names = sum(len({digests.get(name) for digests in held}) > 1 for name in held[0])
    more = f", as do {n_names - 1} more of {len(held[0])} parts of the state" if n_names > 1 else ""
    since = "they have not been compared before" if alike is None else f"after {alike} they were the same"
    return (
        f"{what} differ after {step} steps ({since}): `{first}` is not the same on {names} as on "
        f"{', '.join(workers[member] for member in most[:_MOST_NAMED])}{more}"
    )


def _joined(packed: Sequence[bytes]) -> bytes:
    return _SPAN.pack(*span_of(_SPAN.unpack(one) for one in packed))


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """The sum of the elements' bits as a 64-bit number, on the tensor's device."""
    flat = tensor.detach()
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj())
    flat = flat.contiguous().view(-1)
    # Eight bytes at a time where their number allows it; the memory of one member may begin elsewhere than another's.
    size = 8 if flat.nbytes % 8 == 0 else flat.element_size()
    if flat.data_ptr() % size:
        flat = flat.clone()
    return flat.view(_INTEGERS[size]).sum(dtype=torch.int64)


def _hash(value: Any) -> int:
    return int.from_bytes(hashlib.blake2b(json.dumps(value).encode(), digest_size=8).digest(), "little")
