"""The state of registered objects: moved to members that lack it, and as a part of a checkpoint and back.

All members hold the same state whole. As a space it is one item for each shape, of all tensors that have it: routes are
then few, and small tensors are cut and passed on like large ones. What is no tensor comes from the first member.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from elaunch.errors import StateError
from elaunch.workers.comm.group import Group
from elaunch.workers.hooks import Verdict
from elaunch.workers.state.boxes import whole
from elaunch.workers.state.chunks import Chunk, holdings_of
from elaunch.workers.state.codec import Manifest, describe, dtype_of, restore
from elaunch.workers.state.reshard import reshard
from elaunch.workers.state.routes import Router
from elaunch.workers.state.space import Item

if TYPE_CHECKING:
    from elaunch.workers.state.checkpoint import (  # imported by jobs that have checkpoints only
        CheckpointShard,
        ChunkedTensor,
        SavedCheckpoint,
    )

KIND = "objects"


def move_objects(group: Group, verdict: Verdict, objects: Mapping[str, Any], step: int) -> tuple[int, int]:
    """Takes part in a move of the state of all objects from the members that hold it to those that need it.

    All members of the group call it, each as what the verdict says it is.

    Returns:
        The bytes of tensors that this member received, and the step at which the state stands.

    Raises:
        StateError: the state does not fit this worker's objects, arrived damaged, or is not the same on all sources.
        StepInterrupted: a peer was lost, or the generation changed; registered objects of a receiver may be spoilt.
    """
    sends = group.rank in verdict.sources
    manifest, tensors = describe(objects) if sends else ({}, [])
    local = {"step": step, "tensors": zlib.crc32(repr(_forms(manifest)).encode())} if sends else None
    told = group.all_gather_json(local)
    heads = [told[source] for source in verdict.sources]
    if any(head != heads[0] for head in heads):
        raise StateError(f"the members that hold the state differ in it: {heads}; this is a bug in elaunch")
    if group.rank == verdict.sources[0]:
        text = memoryview(json.dumps(manifest).encode())
        group.exchange([(to, text) for to in verdict.receivers], [])
    elif not sends:
        incoming = bytearray()
        group.receive(incoming, verdict.sources[0])
        manifest = json.loads(incoming)
        tensors = allocate(manifest, into=objects)
    items, chunks = _space(manifest, tensors)
    held = holdings_of(chunks)
    router = Router(
        items,
        {group.members[source]: held for source in verdict.sources},
        {group.members[receiver]: held for receiver in verdict.receivers},
    )
    places = {name: one.tensors for name, (one,) in chunks.items()}
    reshard(group, router, chunks if sends else {}, lambda name, _: places[name], checksum=True)
    if sends:
        return 0, step
    restore(objects, manifest, tensors)
    return sum(tensor.nbytes for tensor in tensors), heads[0]["step"]


def allocate(manifest: Manifest, into: Mapping[str, Any] | None = None) -> list[Tensor]:
    """Returns tensors to receive the state that `manifest` describes; their content is arbitrary.

    Args:
        manifest: of the state.
        into: objects that will be restored from the result; then tensors of an accelerator are received on that of
            this worker. The modules among them lend their own memory where it has the right form, so that parameters
            are received into place; they are spoilt if the move fails. None: all are in host memory.
    """
    accelerator = accelerator_type() if into is not None else "cpu"
    modules = {name: thing for name, thing in (into or {}).items() if isinstance(thing, nn.Module)}
    described, tensors = describe(modules)
    own = {spec["path"]: tensor for spec, tensor in zip(described["tensors"], tensors, strict=True)}
    result = []
    for spec in manifest["tensors"]:
        shape, dtype, strides = spec["shape"], dtype_of(spec["dtype"]), spec.get("strides")
        device = accelerator if spec.get("device") == accelerator else "cpu"
        new = torch.empty(shape, dtype=dtype, device=device)
        if strides is not None:
            new = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        lent = own.pop(spec["path"], None)
        result.append(lent if lent is not None and _form(lent) == _form(new) else new)
    return result


def accelerator_type() -> str:
    """Returns the type of this worker's accelerator, such as "cuda"; "cpu" if it has none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None else "cpu"


def part_of(objects: Mapping[str, Any], settings: Mapping[str, Any], rank: int, size: int) -> CheckpointShard:
    """Returns what member `rank` of `size` adds to a checkpoint: its share of the tensors, which are the live ones."""
    from elaunch.workers.state.checkpoint import CheckpointShard

    manifest, tensors = describe(objects)
    total, end = max(1, sum(tensor.nbytes for tensor in tensors)), 0
    written = {}
    for name, tensor in zip(_names(manifest), tensors, strict=True):
        # The member in whose share of the bytes it begins.
        if end * size // total == rank and tensor.numel():
            written[name] = _pieces(tensor)
        end += tensor.nbytes
    return CheckpointShard(KIND, settings, written, {"manifest": manifest} if rank == 0 else {})


@dataclass(frozen=True)
class ObjectState:
    """The state of objects as it was read."""

    manifest: Manifest
    tensors: Sequence[Tensor]


def read(saved: SavedCheckpoint) -> tuple[ObjectState, int]:
    """Reads the state of all objects from a checkpoint; returns it and its bytes.

    Raises:
        CheckpointDamaged: it is not what was written.
        StateError: it is of another job.
    """
    saved.check(KIND, {})
    manifest: Manifest = saved.facts[0]["manifest"]
    tensors = allocate(manifest)
    read_bytes = saved.read(
        {name: _pieces(tensor) for name, tensor in zip(_names(manifest), tensors, strict=True) if tensor.numel()}
    )
    return ObjectState(manifest, tensors), read_bytes


def fill(objects: Mapping[str, Any], saved: SavedCheckpoint, state: ObjectState) -> None:
    """Gives the objects the state that was read from a checkpoint.

    Raises:
        StateError: it is of other objects.
    """
    try:
        restore(objects, state.manifest, state.tensors, whose="the checkpoint")
    except StateError as error:
        raise StateError(f"the checkpoint {saved.path} is of another job: {error}") from error


def _space(manifest: Manifest, tensors: Sequence[Tensor]) -> tuple[dict[str, Item], dict[str, list[Chunk]]]:
    """An item for each shape, with the dtypes of all tensors that have it, and the chunk of all of these tensors."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for index, (shape, _) in enumerate(_forms(manifest)):
        if 0 not in shape:
            alike.setdefault(shape, []).append(index)
    items, chunks = {}, {}
    for shape, indices in alike.items():
        name = f"tensors of shape {list(shape)}"
        items[name] = Item(name, shape, tuple(tensors[index].dtype for index in indices))
        chunks[name] = [Chunk(whole(shape), tuple(tensors[index] for index in indices))]
    return items, chunks


def _forms(manifest: Manifest) -> list[tuple[tuple[int, ...], str]]:
    """Shape and dtype of all tensors: what the sources and receivers of a move must agree on."""
    return [(tuple(spec["shape"]), spec["dtype"]) for spec in manifest.get("tensors", ())]


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.device.type, tensor.dtype, tensor.shape


def _pieces(tensor: Tensor) -> ChunkedTensor:
    from elaunch.workers.state.checkpoint import ChunkedTensor

    return ChunkedTensor(tensor.shape, [(whole(tensor.shape), tensor)])


def _names(manifest: Manifest) -> Sequence[str]:
    """A name of its own for each tensor: its path, with a number where two have the same."""
    seen: dict[str, int] = {}
    names = []
    for spec in manifest["tensors"]:
        path = spec["path"]
        seen[path] = seen.get(path, 0) + 1
        names.append(path if seen[path] == 1 else f"{path}~{seen[path]}")
    return names
