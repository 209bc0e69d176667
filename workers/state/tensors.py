"""The tensors of a runtime of one's own: named, placed on a mesh of members, and moved from one layout to another.

    space = TensorSpace(worker)
    space.hold(Layout.of(mesh, members, tensors), tensors)      # what is here, read off DTensors
    space.move(group, Layout.of(other_mesh, members, wanted))   # all members of the group alike
    space.install()                                             # what has moved is now what is held
    space.local("blocks.0.up.weight")                           # this worker's part

A tensor `name@key` belongs to the tensor `name`: unless its layout says otherwise, it lies as that one does if it has
its shape (what an optimizer keeps for each element), and is whole on every member if not (a counter of steps).
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from elaunch.errors import StateError
from elaunch.workers.comm.group import Group
from elaunch.workers.state.boxes import Box, n_elements, subtract_all
from elaunch.workers.state.chunks import Chunk, holdings_of
from elaunch.workers.state.codec import dtype_of
from elaunch.workers.state.reshard import Moved, reshard
from elaunch.workers.state.routes import Router
from elaunch.workers.state.space import Holdings, Item, box_of_placements

if TYPE_CHECKING:
    from elaunch.workers.state.spaces import SpaceSource, SpaceState

Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class Layout:
    """Which member holds which part of each tensor.

    Attributes:
        mesh: number of places along each axis.
        members: at the places, row by row; other members of the job hold nothing.
        placements: by tensor, one for each axis. A tensor without is whole on every member of the layout.
    """

    mesh: tuple[int, ...]
    members: tuple[str, ...]
    placements: Mapping[str, Placements] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if math.prod(self.mesh) != len(self.members) or len(set(self.members)) != len(self.members):
            raise StateError(f"a mesh of {self.mesh} needs one member for each place, got {self.members}")
        for name, placements in self.placements.items():
            if len(placements) != len(self.mesh):
                raise StateError(
                    f"{name} is placed as {placements}, and the mesh {self.mesh} has {len(self.mesh)} axes"
                )

    @classmethod
    def of(cls, mesh: DeviceMesh, members: Sequence[str], tensors: Mapping[str, Tensor]) -> Layout:
        """Returns the layout of DTensors on a mesh, or on some of its axes; they may be on the meta device.

        Args:
            mesh: of ranks in the job.
            members: of the job, by rank.
            tensors: by name; those that are no DTensors are whole on every member.

        Raises:
            StateError: a DTensor is on another mesh, or has no chunk.
        """
        placements = {name: _on_axes(name, one, mesh) for name, one in tensors.items() if isinstance(one, DTensor)}
        return cls(tuple(mesh.shape), tuple(members[rank] for rank in mesh.mesh.flatten().tolist()), placements)

    def holdings(self, items: Mapping[str, Item]) -> dict[str, dict[str, Box]]:
        """Returns what each member of the layout has of some tensors; boxes may be empty.

        Raises:
            StateError: a placement that gives no box: a partial sum, or one that is not known.
        """
        places = list(product(*map(range, self.mesh)))
        alike: dict[tuple[tuple[int, ...], Placements], list[Box]] = {}
        found: dict[str, dict[str, Box]] = {member: {} for member in self.members}
        for name, item in items.items():
            form = item.shape, self._placements(name, items)
            if form not in alike:
                alike[form] = [box_of_placements(item.shape, self.mesh, form[1], place) for place in places]
            for member, box in zip(self.members, alike[form], strict=True):
                found[member][name] = box
        return found

    def _placements(self, name: str, items: Mapping[str, Item]) -> Placements:
        base = items.get(name.partition("@")[0])
        if name not in self.placements and base is not None and base.shape == items[name].shape:
            name = base.name
        return self.placements.get(name, (Replicate(),) * len(self.mesh))

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON, for other members."""
        placements = {name: [_text(name, one) for one in many] for name, many in sorted(self.placements.items())}
        return {"mesh": self.mesh, "members": self.members, "placements": placements}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Layout:
        """Returns what `to_json` wrote."""
        placements = {name: tuple(map(_placement, many)) for name, many in fields["placements"].items()}
        return cls(tuple(fields["mesh"]), tuple(fields["members"]), placements)


class TensorSpace:
    """What this worker holds of the tensors of a job.

    Until `install`, what has moved lies beside the old state, or, under a bound, some of both is here; whatever
    interrupts a move, the next one begins with all that is there.

    Attributes:
        values: what is no tensor, as JSON has it; the same on all members.
    """

    def __init__(
        self,
        worker: str,
        device: torch.device | str = "cpu",
        *,
        max_extra_bytes: int | None = None,
        checksum: bool = False,
    ) -> None:
        """Makes a space in which nothing is held yet.

        Args:
            worker: this one.
            device: of new tensors.
            max_extra_bytes: bound of the memory that a move takes beside the state; see `reshard`. None: the old state
                is kept until `install`.
            checksum: whether each message of a move is checked to have come as it was sent.
        """
        self.values: dict[str, Any] = {}
        self._worker, self._device = worker, torch.device(device)
        self._max_extra_bytes, self._checksum = max_extra_bytes, checksum
        self._items: dict[str, Item] = {}
        self._layout: Layout | None = None
        self._state: dict[str, list[Chunk]] = {}
        self._guarded: dict[str, list[Chunk]] = {}
        self._next: tuple[Layout, dict[str, list[Chunk]]] | None = None
        # A checkpoint to read from in the next move, and what was read and is not installed.
        self._source: SpaceSource | None = None
        self._restored: SpaceState | None = None

    @property
    def items(self) -> Mapping[str, Item]:
        """Returns all tensors of the job by name, as far as this worker knows them."""
        return self._items

    @property
    def layout(self) -> Layout | None:
        """Returns the layout of what is held; None if nothing is, or parts of several layouts."""
        return self._layout

    def hold(
        self,
        layout: Layout,
        tensors: Mapping[str, Tensor],
        values: Mapping[str, Any] | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Says what this worker holds; it is not copied. Where a move was not installed, that is known better here.

        Args:
            layout: by which it lies.
            tensors: by name, DTensors or this worker's parts; the same names on all members of the layout.
            values: what else makes up the state, as JSON; the same on all.
            shapes: of the whole tensors of which other parts than all are given as plain tensors.

        Raises:
            StateError: a part has not the shape that the layout says.
        """
        if self._next is not None or (self._layout is None and self._state):
            return
        whole_shapes = {name: tuple((shapes or {}).get(name, one.shape)) for name, one in tensors.items()}
        self._items = {name: Item(name, whole_shapes[name], (one.dtype,)) for name, one in tensors.items()}
        self._layout, self.values = layout, dict(values or {})
        self._state = {}
        boxes = layout.holdings(self._items).get(self._worker, {})
        for name, box in boxes.items():
            local = _local(tensors[name])
            if tuple(local.shape) != _shape(box):
                raise StateError(
                    f"{name} is {list(local.shape)} here, and by its layout this worker has {list(box)} "
                    f"of {list(whole_shapes[name])}"
                )
            if n_elements(box):
                self._state[name] = [Chunk(box, (local,))]

    def move(self, group: Group, layout: Layout | None) -> Moved:
        """Takes part in a move of all tensors to another layout, from wherever they are.

        All members of the group call it, also those that hold nothing before or after.

        Args:
            group: all who hold, or will hold, something.
            layout: to which they move; None: the one that the other members give, for who has no place in it.

        Raises:
            StateError: no member has all of a tensor that the layout needs; it names the tensors.
            StepInterrupted: a peer was lost, or the generation changed.
        """
        if self._source is not None:
            return self._read(group, layout, self._source)
        self._gather()
        before, guarded, layout = self._hear(group, layout)
        wanted = layout.holdings(self._items)
        after = {member: _lists(wanted.get(member, {})) for member in group.members}
        if self._max_extra_bytes is not None:
            self._layout = None
        new, moved = reshard(
            group,
            Router(self._items, before, after, guarded),
            self._state,
            lambda name, box: (torch.empty(_shape(box), dtype=self._items[name].dtypes[0], device=self._device),),
            snapshots=self._guarded,
            max_extra_bytes=self._max_extra_bytes,
            checksum=self._checksum,
        )
        self._next = layout, new
        return moved

    @contextmanager
    def reading_from(self, source: SpaceSource) -> Iterator[None]:
        """Has `move` read a checkpoint meanwhile, whatever members hold."""
        self._source = source
        try:
            yield
        finally:
            self._source = None

    def install(self) -> None:
        """Makes what has moved what is held, and lets the old state go."""
        if self._next is None:
            raise StateError("nothing has moved; call move() before install()")
        self._layout, self._state = self._next
        self._next, self._guarded = None, {}
        if self._restored is not None:
            self._items, self.values = dict(self._restored.items), dict(self._restored.values)
            self._restored = None

    def names(self) -> tuple[str, ...]:
        """Returns the names of all tensors of the job, as far as this worker knows them."""
        return tuple(self._items)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a whole tensor."""
        return self._items[name].shape

    def local(self, name: str) -> Tensor:
        """Returns this worker's part of a tensor; it may have no elements. It is no copy."""
        if self._layout is None:
            raise StateError("no layout is installed")
        held = self._state.get(name)
        if held is not None:
            return held[0].tensors[0]
        box = self._layout.holdings({n: self._items[n] for n in {name, name.partition("@")[0]} & self._items.keys()})
        return torch.empty(_shape(box[self._worker][name]), dtype=self._items[name].dtypes[0], device=self._device)

    def _read(self, group: Group, layout: Layout | None, source: SpaceSource) -> Moved:
        """Takes part in a move from a checkpoint: each member reads what the layout gives it."""
        note = {
            "layout": layout.to_json() if layout is not None else None,
            "items": [[item.name, item.shape, str(item.dtypes[0])] for item in self._items.values()],
        }
        notes = group.all_gather_json(note)
        layout = _only_one([Layout.from_json(one["layout"]) for one in notes if one["layout"] is not None])
        known = {
            name: Item(name, tuple(shape), (dtype_of(dtype),)) for one in notes for name, shape, dtype in one["items"]
        }
        self._restored = source.read(layout, self._worker, self._device, tuple(known.values())).state
        self._next = layout, {name: [Chunk(box, (tensor,))] for name, (box, tensor) in self._restored.tensors.items()}
        return Moved()

    def _gather(self) -> None:
        """What moved and was not installed counts beside what was here before."""
        if self._restored is not None:  # it is of another step than what the members hold
            self._restored = self._next = None
        if self._next is None:
            return
        _, new = self._next
        merged = {name: list(chunks) for name, chunks in new.items()}
        for name, chunks in self._state.items() if new is not self._state else ():
            there = [chunk.box for chunk in new.get(name, ())]
            for old in chunks:
                rest = subtract_all([old.box], there)
                merged.setdefault(name, []).extend(Chunk(box, old.part(box)) for box in rest)
        self._state, self._layout, self._next = merged, None, None

    def _hear(self, group: Group, wanted: Layout | None) -> tuple[dict[str, Holdings], dict[str, Holdings], Layout]:
        """Who holds what, and in host memory besides, and the layout that is wanted; takes over tensors and values."""
        layout = self._layout.to_json() if self._layout is not None else None
        items = [[item.name, item.shape, str(item.dtypes[0]).removeprefix("torch.")] for item in self._items.values()]
        texts = {
            "held": _packed({"layout": layout, "items": items, "values": self.values}) if self._state else "",
            "wanted": _packed(wanted.to_json()) if wanted is not None else "",
        }
        note: dict[str, Any] = {kind: zlib.crc32(text.encode()) if text else None for kind, text in texts.items()}
        if self._layout is None and self._state:
            note |= {"boxes": holdings_of(self._state), "guarded": holdings_of(self._guarded)}
        notes = group.all_gather_json(note)
        # Of those who would say the same, one does.
        first = {kind: [one[kind] for one in notes].index(note[kind]) == group.rank for kind in texts}
        answers = group.all_gather_json({kind: text for kind, text in texts.items() if text and first[kind]})
        held = {notes[rank]["held"]: json.loads(one["held"]) for rank, one in enumerate(answers) if "held" in one}
        targets = [Layout.from_json(json.loads(one["wanted"])) for one in answers if "wanted" in one]
        if not held:
            raise StateError("no member holds any tensor; hold() what the job begins with on one member at least")
        self._items = {
            name: Item(name, tuple(shape), (dtype_of(dtype),))
            for one in held.values()
            for name, shape, dtype in one["items"]
        }
        self.values = next(iter(held.values()))["values"]
        lying = {
            key: Layout.from_json(one["layout"]).holdings(self._items) for key, one in held.items() if one["layout"]
        }
        before: dict[str, Holdings] = {}
        guarded: dict[str, Holdings] = {}
        for member, one in zip(group.members, notes, strict=True):
            if one["held"] in lying:
                before[member] = _lists(lying[one["held"]].get(member, {}))
            elif "boxes" in one:
                before[member], guarded[member] = _boxes(one["boxes"]), _boxes(one["guarded"])
        return before, guarded, _only_one(targets)


def _only_one(targets: Sequence[Layout]) -> Layout:
    different = [one for number, one in enumerate(targets) if one not in targets[:number]]
    if len(different) != 1:
        raise StateError(f"the members move to {len(different)} different layouts; they must give the same one")
    return different[0]


def _packed(fields: Any) -> str:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"))


def _on_axes(name: str, tensor: DTensor, mesh: DeviceMesh) -> Placements:
    """The placements of a DTensor along all axes of a mesh."""
    own = tensor.device_mesh
    if own == mesh:
        return tuple(tensor.placements)
    axes, ours = own.mesh_dim_names or (), mesh.mesh_dim_names or ()
    if not axes or not set(axes) <= set(ours):
        raise StateError(f"{name} is on {own}, whose axes are none of {mesh}; make the one a slice of the other")
    by_axis = dict(zip(axes, tensor.placements, strict=True))
    return tuple(by_axis.get(axis, Replicate()) for axis in ours)


def _text(name: str, placement: Placement) -> str:
    if isinstance(placement, Replicate):
        return "R"
    if not hasattr(placement, "dim"):
        raise StateError(f"{name} is placed as {placement}, which has no chunk; redistribute it before it is held")
    factor = getattr(placement, "split_factor", 1)
    return f"S{placement.dim}" + (f"/{factor}" if factor > 1 else "")


def _placement(text: str) -> Placement:
    if text == "R":
        return Replicate()
    dim, _, factor = text[1:].partition("/")
    return _StridedShard(int(dim), split_factor=int(factor)) if factor else Shard(int(dim))


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _lists(boxes: Mapping[str, Box]) -> dict[str, tuple[Box, ...]]:
    return {name: (box,) for name, box in boxes.items() if n_elements(box)}


def _boxes(fields: Mapping[str, Any]) -> dict[str, tuple[Box, ...]]:
    return {name: tuple(tuple((lo, hi) for lo, hi in box) for box in boxes) for name, boxes in fields.items()}
