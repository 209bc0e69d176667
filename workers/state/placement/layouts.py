"""Layouts: which member holds which part of each tensor.

Layout((2, 2), members, {"w": (Replicate(), Shard(0))})     # a mesh, and a placement for each of its axes
Layout(..., names=("w",), flat=(FlatBuffer(...),))          # of these tensors only, some in ranges of a flat buffer
LayoutUnion((stage0, stage1))                               # of pipeline stages; dense layers and experts
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from elaunch.errors import StateError
from elaunch.workers.state.boxes import Box, n_elements, of_interval, shift
from elaunch.workers.state.space import Item, box_of_placements

Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class LocalPart:
    """What one member has of a tensor.

    Attributes:
        shape: of the member's tensor: that of its chunk, or one-dimensional where that is a range.
        boxes: of the whole tensor, disjoint, in their order in the member's tensor; none where it has no elements.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


Parts = dict[str, dict[str, LocalPart]]
"""By member and tensor; a tensor of which a member has nothing, not even an empty chunk, is left out."""


@dataclass(frozen=True)
class FlatBuffer:
    """Tensors one after the other in a flat buffer, which is cut into equal ranges along an axis of the mesh.

    So Megatron's distributed optimizer and other ZeRO-1 optimizers share out their state, wherever tensors begin and
    end. A buffer of several buckets is several of these.

    Attributes:
        axis: of the mesh. Along it the tensors are replicated; the other axes may cut them before.
        elements: of the buffer, padding included; a multiple of the size of the axis.
        starts: by name of a tensor, the place of the first element of its part, row-major.
        keys: which of what is kept for these tensors lies so: `name@key`. The empty key is the tensor itself.
    """

    axis: int
    elements: int
    starts: Mapping[str, int]
    keys: tuple[str, ...]

    def __contains__(self, name: str) -> bool:
        base, _, key = name.partition("@")
        return base in self.starts and key in self.keys

    def part(self, name: str, box: Box, place: int, places: int) -> LocalPart:
        """Returns what the member at a place of the axis has of a tensor.

        Args:
            name: of the tensor.
            box: of it, what the other axes leave to the members of this axis.
            place: of the member.
            places: along the axis.
        """
        start = self.starts[name.partition("@")[0]]
        size = self.elements // places
        shape = [stop - first for first, stop in box]
        first, stop = (min(max(0, bound - start), n_elements(box)) for bound in (place * size, (place + 1) * size))
        boxes = tuple(shift(one, [low for low, _ in box]) for one in of_interval(shape, first, stop))
        return LocalPart((stop - first,), boxes)

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON, for other members."""
        return {"axis": self.axis, "elements": self.elements, "starts": dict(self.starts), "keys": self.keys}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> FlatBuffer:
        """Returns what `to_json` wrote."""
        return cls(fields["axis"], fields["elements"], fields["starts"], tuple(fields["keys"]))


@dataclass(frozen=True)
class Layout:
    """Which member holds which part of each tensor, on one mesh.

    Attributes:
        mesh: number of places along each axis.
        members: at the places, row by row; other members of the job hold nothing.
        placements: by tensor, one for each axis. A tensor without is whole on every member of the layout.
        names: of the tensors that are on this mesh, with all that is kept for them; None: all of the job.
        flat: buffers in which some of them lie.
    """

    mesh: tuple[int, ...]
    members: tuple[str, ...]
    placements: Mapping[str, Placements] = field(default_factory=dict)
    names: tuple[str, ...] | None = None
    flat: tuple[FlatBuffer, ...] = ()

    def __post_init__(self) -> None:
        if math.prod(self.mesh) != len(self.members) or len(set(self.members)) != len(self.members):
            raise StateError(f"a mesh of {self.mesh} needs one member for each place, got {self.members}")
        for name, placements in self.placements.items():
            if len(placements) != len(self.mesh):
                raise StateError(
                    f"{name} is placed as {placements}, and the mesh {self.mesh} has {len(self.mesh)} axes"
                )
        for buffer in self.flat:
            if not 0 <= buffer.axis < len(self.mesh) or buffer.elements % self.mesh[buffer.axis]:
                raise StateError(
                    f"a flat buffer of {buffer.elements} elements along axis {buffer.axis} cannot be cut into equal "
                    f"ranges on the mesh {self.mesh}; pad it"
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

    def only(self, names: Iterable[str]) -> Layout:
        """Returns this layout for some tensors alone: others are elsewhere, as on other pipeline stages."""
        return replace(self, names=tuple(sorted({name.partition("@")[0] for name in names})))

    def parts(self, items: Mapping[str, Item]) -> Parts:
        """Returns what each member of the layout has of some tensors; empty chunks included.

        Raises:
            StateError: a placement that gives no box: a partial sum, or one that is not known.
        """
        places = list(product(*map(range, self.mesh)))
        alike: dict[tuple[Any, ...], list[LocalPart]] = {}
        found: Parts = {member: {} for member in self.members}
        names = None if self.names is None else set(self.names)
        for name, item in items.items():
            if names is not None and name not in names and name.partition("@")[0] not in names:
                continue
            buffer = next((one for one in self.flat if name in one), None)
            # Tensors of a buffer are alike in nothing.
            form = item.shape, self._placements(name, items), name if buffer is not None else None
            if form not in alike:
                alike[form] = [self._part(name, item, form[1], buffer, place) for place in places]
            for member, part in zip(self.members, alike[form], strict=True):
                found[member][name] = part
        return found

    def _part(
        self, name: str, item: Item, placements: Placements, buffer: FlatBuffer | None, place: tuple[int, ...]
    ) -> LocalPart:
        box = box_of_placements(item.shape, self.mesh, placements, place)
        if buffer is None:
            return LocalPart(tuple(stop - start for start, stop in box), (box,) if n_elements(box) else ())
        if not placements[buffer.axis].is_replicate():
            raise StateError(
                f"{name} lies in a flat buffer along axis {buffer.axis} of the mesh {self.mesh}, and is placed there "
                f"as {placements[buffer.axis]}; a buffer takes what is replicated along its axis"
            )
        return buffer.part(name, box, place[buffer.axis], self.mesh[buffer.axis])

    def _placements(self, name: str, items: Mapping[str, Item]) -> Placements:
        base = items.get(name.partition("@")[0])
        if name not in self.placements and base is not None and base.shape == items[name].shape:
            name = base.name
        return self.placements.get(name, (Replicate(),) * len(self.mesh))

    def whole_name(self, name: str) -> str:
        """Returns the tensor whose shape this one has as a whole: its own name, or the base's in a flat buffer."""
        return name.partition("@")[0] if any(name in one for one in self.flat) else name

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON, for other members."""
        placements = {name: [_text(name, one) for one in many] for name, many in sorted(self.placements.items())}
        fields: dict[str, Any] = {"mesh": self.mesh, "members": self.members, "placements": placements}
        if self.names is not None:
            fields["names"] = self.names
        if self.flat:
            fields["flat"] = [one.to_json() for one in self.flat]
        return fields

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Layout:
        """Returns what `to_json` wrote."""
        placements = {name: tuple(map(_placement, many)) for name, many in fields["placements"].items()}
        names = tuple(fields["names"]) if "names" in fields else None
        flat = tuple(map(FlatBuffer.from_json, fields.get("flat", ())))
        return cls(tuple(fields["mesh"]), tuple(fields["members"]), placements, names, flat)


@dataclass(frozen=True)
class LayoutUnion:
    """Several layouts at once, each with `names`: pipeline stages on meshes of their own, experts on another mesh.

    A tensor may be in several of them, on different members: a tied embedding on the first and on the last stage.
    """

    layouts: tuple[Layout, ...]

    def __post_init__(self) -> None:
        if any(one.names is None for one in self.layouts):
            raise StateError("of several layouts at once each says which tensors lie in it: layout.only(names)")

    @classmethod
    def of(cls, meshes: Sequence[DeviceMesh], members: Sequence[str], tensors: Mapping[str, Tensor]) -> LayoutUnion:
        """Returns the layout of the tensors that this member knows, each on the mesh on which it is.

        Other members may know others: `TensorSpace.move` joins the layouts that they give.

        Args:
            meshes: of ranks in the job, on which this member has a place.
            members: of the job, by rank.
            tensors: by name, DTensors on one of the meshes or on axes of one; all others are whole on the members of
                the first mesh.

        Raises:
            StateError: a DTensor is on none of the meshes, or has no chunk.
        """
        by_mesh: list[dict[str, Tensor]] = [{} for _ in meshes]
        for name, tensor in tensors.items():
            # What is kept for a tensor is where that is.
            base = tensors.get(name.partition("@")[0])
            own = next((one.device_mesh for one in (tensor, base) if isinstance(one, DTensor)), meshes[0])
            place = next((i for i, one in enumerate(meshes) if own == one or _is_slice(own, one)), None)
            if place is None:
                raise StateError(f"{name} is on {own}, which is none of {list(meshes)} and no slice of one")
            by_mesh[place][name] = tensor
        return cls(
            tuple(
                Layout.of(mesh, members, known).only(known)
                for mesh, known in zip(meshes, by_mesh, strict=True)
                if known
            )
        )

    @property
    def members(self) -> tuple[str, ...]:
        """Returns all that hold something."""
        return tuple(dict.fromkeys(member for one in self.layouts for member in one.members))

    def parts(self, items: Mapping[str, Item]) -> Parts:
        """Returns what each member of the layouts has of some tensors; empty chunks included.

        Raises:
            StateError: a placement gives no box, or a member has a tensor in two ways.
        """
        found: Parts = {member: {} for member in self.members}
        for one in self.layouts:
            for member, parts in one.parts(items).items():
                for name, part in parts.items():
                    if found[member].setdefault(name, part) != part:
                        raise StateError(f"two layouts give {member} different parts of {name}; name it in one of them")
        return found

    def whole_name(self, name: str) -> str:
        """Returns the tensor whose shape this one has as a whole: its own name, or the base's in a flat buffer."""
        return next((other for one in self.layouts if (other := one.whole_name(name)) != name), name)

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON, for other members."""
        return {"layouts": [one.to_json() for one in self.layouts]}


AnyLayout = Layout | LayoutUnion


def layout_from_json(fields: Mapping[str, Any]) -> AnyLayout:
    """Returns what `to_json` of either kind of layout wrote."""
    if "layouts" in fields:
        return LayoutUnion(tuple(map(Layout.from_json, fields["layouts"])))
    return Layout.from_json(fields)


def joined(given: Sequence[AnyLayout]) -> AnyLayout:
    """Returns the layout that members give together: the one that all give, or the union of those for some tensors.

    Raises:
        StateError: they give different ones for all tensors.
    """
    different = [one for place, one in enumerate(given) if one not in given[:place]]
    if len(different) == 1:
        return different[0]
    layouts = [layout for one in different for layout in (one.layouts if isinstance(one, LayoutUnion) else (one,))]
    if not layouts or any(one.names is None for one in layouts):
        raise StateError(f"the members move to {len(different)} different layouts; they must give the same one")
    return LayoutUnion(tuple(one for place, one in enumerate(layouts) if one not in layouts[:place]))


def _on_axes(name: str, tensor: DTensor, mesh: DeviceMesh) -> Placements:
    """The placements of a DTensor along all axes of a mesh."""
    own = tensor.device_mesh
    if own == mesh:
        return tuple(tensor.placements)
    if not _is_slice(own, mesh):
        raise StateError(f"{name} is on {own}, whose axes are none of {mesh}; make the one a slice of the other")
    by_axis = dict(zip(own.mesh_dim_names or (), tensor.placements, strict=True))
    return tuple(by_axis.get(axis, Replicate()) for axis in mesh.mesh_dim_names or ())


def _is_slice(own: DeviceMesh, mesh: DeviceMesh) -> bool:
    axes = own.mesh_dim_names or ()
    return bool(axes) and set(axes) <= set(mesh.mesh_dim_names or ())


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
