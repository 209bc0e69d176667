"""The state of registered objects as a part of a checkpoint, and back.

All members hold the same state, so each writes some of its tensors; what is no tensor comes from the first one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from elaunch.errors import StateError
from elaunch.workers.state.boxes import whole
from elaunch.workers.state.checkpoint import Part, Pieces, Saved
from elaunch.workers.state.codec import Manifest, describe, restore
from elaunch.workers.state.transfer import allocate, total_bytes

KIND = "objects"


def part_of(objects: Mapping[str, Any], settings: Mapping[str, Any], rank: int, size: int) -> Part:
    """What member `rank` of `size` adds to a checkpoint; the tensors are the live ones."""
    manifest, tensors = describe(objects)
    total, end = max(1, total_bytes(tensors)), 0
    mine = {}
    for name, tensor in zip(_names(manifest), tensors, strict=True):
        # The member in whose share of the bytes it begins.
        if end * size // total == rank and tensor.numel():
            mine[name] = _pieces(tensor)
        end += tensor.nbytes
    return Part(KIND, settings, mine, {"manifest": manifest} if rank == 0 else {})


@dataclass(frozen=True)
class State:
    """The state of objects as it was read."""

    manifest: Manifest
    tensors: Sequence[Tensor]


def read(saved: Saved) -> tuple[State, int]:
    """Read the state of all objects from a checkpoint; return it and its bytes.

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
    return State(manifest, tensors), read_bytes


def fill(objects: Mapping[str, Any], saved: Saved, state: State) -> None:
    """Give the objects the state that was read from a checkpoint.

    Raises:
        StateError: it is of other objects.
    """
    try:
        restore(objects, state.manifest, state.tensors, whose="the checkpoint")
    except StateError as error:
        raise StateError(f"the checkpoint {saved.path} is of another job: {error}") from error


def _pieces(tensor: Tensor) -> Pieces:
    return Pieces(tensor.shape, [(whole(tensor.shape), tensor)])


def _names(manifest: Manifest) -> Sequence[str]:
    """A name of its own for each tensor: its path, with a number where two have the same."""
    seen: dict[str, int] = {}
    names = []
    for spec in manifest["tensors"]:
        path = spec["path"]
        seen[path] = seen.get(path, 0) + 1
        names.append(path if seen[path] == 1 else f"{path}~{seen[path]}")
    return names
