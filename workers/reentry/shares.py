"""Which part of each tensor of a copy a worker needs, and the way there from those who have it.

A copy lies as the members of its time had cut the state. Whoever enters the function again has models and optimizers
for the members of now, whose DTensors say what is needed; an optimizer that has not stepped yet keeps nothing, so what
it will keep of a parameter lies as that does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elaunch.errors import StateError
from elaunch.workers.comm.group import Group
from elaunch.workers.reentry.copies import Part
from elaunch.workers.reentry.encoding import box_of, is_dtensor
from elaunch.workers.state.boxes import Box, n_elements, whole
from elaunch.workers.state.chunks import Chunk, ChunkedState
from elaunch.workers.state.codec import Manifest, dtype_of
from elaunch.workers.state.reshard import reshard
from elaunch.workers.state.routes import Router
from elaunch.workers.state.space import Item


@dataclass(frozen=True)
class TensorShare:
    """What a worker needs of a tensor.

    Attributes:
        box: of the whole tensor; it may be empty.
        wrap: makes of it what its object takes.
    """

    box: Box
    wrap: Callable[[Tensor], Tensor]


def shares(objects: Mapping[str, Any], manifest: Manifest) -> list[TensorShare]:
    """Returns what this worker needs of each tensor of a manifest, for the objects that it has now."""
    placed: dict[str, Any] = {}
    for name, thing in objects.items():
        if isinstance(thing, torch.optim.Optimizer):
            parameters = [one for group in thing.param_groups for one in group["params"]]
            placed |= {f"{name}.state.{place}": one for place, one in enumerate(parameters) if is_dtensor(one)}
        else:
            placed |= _dtensors(thing.state_dict(), name)
    found = []
    for spec in manifest["tensors"]:
        path, shape = spec["path"], tuple(spec["shape"])
        # What an optimizer keeps of parameter i is `optimizer.state.i.key`.
        like = placed.get(path, placed.get(path.rpartition(".")[0]))
        if like is not None and tuple(like.shape) == shape:
            found.append(TensorShare(box_of(like), _wrapped_like(like)))
        else:
            found.append(TensorShare(whole(shape), lambda tensor: tensor))
    return found


def move_copies(
    group: Group, held: Sequence[Part], manifest: Manifest, needed: Sequence[TensorShare]
) -> tuple[list[Tensor], int]:
    """Takes part in a move of what members hold of a state to where it is needed. All members of the group call it.

    Args:
        group: all who hold or need something.
        held: what this worker has, of the same step: its own copy, and those that it keeps for others.
        manifest: of the state.
        needed: by this worker, of each tensor.

    Returns:
        This worker's shares, in host memory, and the bytes of them that came from others.

    Raises:
        StateLost: nobody has a part of a tensor that is needed; it names the tensors.
        StepInterrupted: a peer was lost, or the generation changed.
    """
    specs = manifest["tensors"]
    items = {
        str(place): Item(f"{place} {spec['path']}", tuple(spec["shape"]), (dtype_of(spec["dtype"]),))
        for place, spec in enumerate(specs)
    }
    named = {item.name: item for item in items.values()}
    state: dict[str, list[Chunk]] = {}
    for place, box, tensor in held:
        name = items[str(place)].name
        if n_elements(box) and all(chunk.box != box for chunk in state.get(name, ())):
            state.setdefault(name, []).append(Chunk(box, (tensor,)))
    notes = group.all_gather_json(
        {
            "held": {name: [chunk.box for chunk in chunks] for name, chunks in state.items()},
            "needed": {
                items[str(place)].name: share.box for place, share in enumerate(needed) if n_elements(share.box)
            },
        }
    )
    if all(box in note["held"].get(name, ()) for note in notes for name, box in note["needed"].items()):
        found: ChunkedState = state
        received_bytes = 0  # as of replicas: nobody needs what it does not have
    else:
        found, received_bytes = _moved(group, named, state, notes)
    kept = {tensor.untyped_storage().data_ptr() for _, _, tensor in held}
    tensors = []
    for place, share in enumerate(needed):
        item = items[str(place)]
        if n_elements(share.box):
            ((tensor,),) = (chunk.tensors for chunk in found[item.name] if chunk.box == share.box)
            # What stays where it is would become a part of the objects, and the copy is needed as it is.
            tensors.append(tensor.clone() if tensor.untyped_storage().data_ptr() in kept else tensor)
        else:
            tensors.append(torch.empty([stop - start for start, stop in share.box], dtype=item.dtypes[0]))
    return tensors, received_bytes


def _moved(
    group: Group, items: Mapping[str, Item], state: dict[str, list[Chunk]], notes: Sequence[Mapping[str, Any]]
) -> tuple[ChunkedState, int]:
    """Takes part in the move; returns this worker's chunks, and the bytes of them that came from others."""
    before, after = {}, {}
    for member, note in zip(group.members, notes, strict=True):
        before[member] = {name: tuple(map(_box, boxes)) for name, boxes in note["held"].items()}
        after[member] = {name: (_box(box),) for name, box in note["needed"].items()}

    def allocate(name: str, box: Box) -> tuple[Tensor]:
        return (torch.empty([stop - start for start, stop in box], dtype=items[name].dtypes[0]),)

    found, moved = reshard(group, Router(items, before, after), state, allocate)
    return found, moved.received_bytes


def load_shares(thing: Any, state: Any) -> None:
    """Gives an object its state; a module's parameters that are parts are copied where they lie.

    `load_state_dict` would have DTensor work out anew for each shape how to copy in a mesh that it does not know yet.
    """
    module, rest = torch.nn.Module, state
    if isinstance(thing, module) and (type(thing).state_dict, type(thing).load_state_dict) == (
        module.state_dict,
        module.load_state_dict,
    ):
        live, rest = set(map(id, thing.parameters())), copy.copy(state)  # with its metadata
        with torch.no_grad():
            for name, own in thing.state_dict(keep_vars=True).items():
                if id(own) in live and is_dtensor(own) and is_dtensor(state[name]):
                    own.to_local().copy_(rest.pop(name).to_local())
    if rest is state or len(rest) == len(state):
        thing.load_state_dict(state)
    else:
        thing.load_state_dict(rest, strict=False)  # `restore` has compared the names


def check_alike(manifests: Sequence[int]) -> None:
    """Sees to it that the members that hold the state describe it alike.

    Raises:
        StateError: they do not, as with pipeline stages.
    """
    if len(set(manifests)) > 1:
        raise StateError(
            "the members have bound objects of different names or shapes, as pipeline stages have; bind the same on "
            "all members, or attach the framework by hooks (docs/hooks.md)"
        )


def _dtensors(value: Any, path: str) -> dict[str, Any]:
    if is_dtensor(value):
        return {path: value}
    found: dict[str, Any] = {}
    if isinstance(value, Mapping):
        for key, item in value.items():
            found |= _dtensors(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            found |= _dtensors(item, f"{path}.{place}")
    return found


def _wrapped_like(like: Any) -> Callable[[Tensor], Tensor]:
    def wrap(local: Tensor) -> Tensor:
        kind, spec, moved = type(like), getattr(like, "_spec", None), local.to(like.device)
        made: Tensor
        if spec is not None and spec.tensor_meta is not None and spec.tensor_meta.dtype == local.dtype:
            # What from_local comes to, without its graph, which takes longer than all else here.
            made = kind(moved, spec, requires_grad=False)
        else:
            made = kind.from_local(
                moved, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
            )
        return made

    return wrap


def _box(fields: Any) -> Box:
    return tuple((start, stop) for start, stop in fields)
