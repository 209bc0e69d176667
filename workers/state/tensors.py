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
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from elaunch.errors import StateError
from elaunch.workers.comm.group import Group
from elaunch.workers.state.boxes import Box, n_elements, subtract_all
from elaunch.workers.state.chunks import Chunk, holdings_of
from elaunch.workers.state.codec import dtype_of
from elaunch.workers.state.placement.layouts import AnyLayout, LocalPart, joined, layout_from_json
from elaunch.workers.state.reshard import Moved, reshard
from elaunch.workers.state.routes import Router
from elaunch.workers.state.space import Holdings, Item

if TYPE_CHECKING:
    from elaunch.workers.state.spaces import SpaceSource, SpaceState

_MOST_NAMES = 8


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
        self._layout: AnyLayout | None = None
        self._state: dict[str, list[Chunk]] = {}
        self._guarded: dict[str, list[Chunk]] = {}
        self._next: tuple[AnyLayout, dict[str, list[Chunk]]] | None = None
        self._offered: list[tuple[Item, Chunk]] = []  # those of the guarded ones that are copies for others
        self._newer: tuple[Any, ...] | None = None  # what is held beside copies of an older step
        # A checkpoint to read from in the next move, and what was read and is not installed.
        self._source: SpaceSource | None = None
        self._restored: SpaceState | None = None

    @property
    def items(self) -> Mapping[str, Item]:
        """Returns all tensors of the job by name, as far as this worker knows them."""
        return self._items

    @property
    def layout(self) -> AnyLayout | None:
        """Returns the layout of what is held; None if nothing is, or parts of several layouts."""
        return self._layout

    def hold(
        self,
        layout: AnyLayout,
        tensors: Mapping[str, Tensor],
        values: Mapping[str, Any] | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Says what this worker holds; it is not copied. Where a move was not installed, that is known better here.

        Args:
            layout: by which it lies.
            tensors: by name, DTensors or this worker's parts; all that the layout gives this worker.
            values: what else makes up the state, as JSON; the same on all.
            shapes: of the whole tensors of which other parts than all are given as plain tensors.

        Raises:
            StateError: a part has not the shape that the layout says, or the layout gives this worker none.
        """
        if self._next is not None or (self._layout is None and self._state):
            return
        bases = {name: base for name in tensors if (base := layout.whole_name(name)) in tensors}
        given = {name: tuple((shapes or {}).get(name, one.shape)) for name, one in tensors.items()}
        whole_shapes = {name: given[name if name in (shapes or {}) else bases.get(name, name)] for name in tensors}
        self._items = {name: Item(name, whole_shapes[name], (one.dtype,)) for name, one in tensors.items()}
        self._layout, self.values = layout, dict(values or {})
        self._state = {}
        parts = layout.parts(self._items)
        if self._worker not in parts:
            return
        for name, tensor in tensors.items():
            part = parts[self._worker].get(name)
            if part is None:
                raise StateError(f"{name} is held here, and its layout gives this worker no part of it")
            local = _local(tensor)
            if tuple(local.shape) != part.shape:
                raise StateError(
                    f"{name} is {list(local.shape)} here, and by its layout this worker has {_text(part)} "
                    f"of {list(whole_shapes[name])}"
                )
            if part.boxes:
                self._state[name] = _chunks(part, local)

    def move(self, group: Group, layout: AnyLayout | None) -> Moved:
        """Takes part in a move of all tensors to another layout, from wherever they are.

        All members of the group call it, also those that hold nothing before or after.

        Args:
            group: all who hold, or will hold, something.
            layout: to which they move, the same on all members; where layouts say which tensors they are for, members
                may give different ones, which are joined. None: what the other members give, for who has no place.

        Raises:
            StateError: no member has all of a tensor that the layout needs, or the layout has no place for one that
                is held; it names the tensors.
            StepInterrupted: a peer was lost, or the generation changed.
        """
        if self._source is not None:
            return self._read(group, layout, self._source)
        self._gather()
        before, guarded, layout = self._hear(group, layout)
        wanted = layout.parts(self._items)
        placed = {name for parts in wanted.values() for name in parts}
        if homeless := [name for name in self._items if name not in placed]:
            more = f" and {len(homeless) - _MOST_NAMES} more" if len(homeless) > _MOST_NAMES else ""
            raise StateError(
                f"the members hold {', '.join(homeless[:_MOST_NAMES])}{more}, and the layouts that they move to give "
                "nobody a part of it; name it in one of them"
            )
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

    def offer(self, kept: Sequence[tuple[Item, Chunk]]) -> None:
        """Has the next move take copies of what others have held, in host memory; in place of those offered before."""
        self._guarded = {
            name: left
            for name, chunks in self._guarded.items()
            if (left := [chunk for chunk in chunks if all(chunk is not one for _, one in self._offered)])
        }
        self._offered = []
        for item, chunk in kept:
            there = self._guarded.setdefault(item.name, [])
            for box in subtract_all([chunk.box], [one.box for one in there]):
                there.append(Chunk(box, chunk.part(box)))
                self._offered.append((item, there[-1]))

    def go_back(
        self, items: Mapping[str, Item], values: Mapping[str, Any], chunks: Sequence[tuple[Item, Chunk]]
    ) -> None:
        """Makes copies of an older step what is held; `hold` says nothing new then.

        What was held comes back by `stay`, unless a move of the copies has been installed.
        """
        self.stay()
        self._newer = self._items, self._layout, self.values, self._state, self._next, self._guarded
        self._items, self._layout, self.values = dict(items), None, dict(values)
        self._state, self._next, self._guarded, self._offered = {}, None, {}, []
        for item, chunk in chunks:
            # A copy stays one: what is held is changed in place.
            tensor = chunk.tensors[0].to(self._device, copy=True)
            self._state.setdefault(item.name, []).append(Chunk(chunk.box, (tensor,)))

    def stay(self) -> None:
        """Undoes `go_back`, if what was moved by then has not been installed."""
        if self._newer is not None:
            self._items, self._layout, self.values, self._state, self._next, self._guarded = self._newer
            self._newer, self._offered = None, []

    def install(self) -> None:
        """Makes what has moved what is held, and lets the old state go."""
        if self._next is None:
            raise StateError("nothing has moved; call move() before install()")
        self._layout, self._state = self._next
        self._next, self._guarded, self._offered, self._newer = None, {}, [], None
        if self._restored is not None:
            self._items, self.values = dict(self._restored.items), dict(self._restored.values)
            self._restored = None
        for name, part in self._layout.parts(self._items).get(self._worker, {}).items():
            if len(part.boxes) > 1 or (part.boxes and len(part.shape) != len(self._items[name].shape)):
                self._state[name] = _in_one(part, self._state[name])

    def names(self) -> tuple[str, ...]:
        """Returns the names of all tensors of the job, as far as this worker knows them."""
        return tuple(self._items)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a whole tensor."""
        return self._items[name].shape

    def local(self, name: str) -> Tensor:
        """Returns this worker's part of a tensor; it may have no elements. It is no copy."""
        layout = self._installed()
        held = self._state.get(name)
        part = self._part(layout, name)
        if held is None:
            return torch.empty(part.shape, dtype=self._items[name].dtypes[0], device=self._device)
        if len(part.shape) == len(self._items[name].shape) and len(held) == 1:
            return held[0].tensors[0]
        # The boxes of a range are views of it, one after the other.
        first = held[0].tensors[0]
        return first.as_strided(part.shape, (1,))

    def has(self, name: str) -> bool:
        """Returns whether the installed layout gives this worker a part of a tensor, if only one without elements."""
        return name in self._items and name in self._installed().parts(self._with_base(name)).get(self._worker, {})

    def chunks(self, name: str) -> tuple[tuple[Box, Tensor], ...]:
        """Returns this worker's part of a tensor as boxes of the whole; none if it has no elements."""
        return tuple((chunk.box, chunk.tensors[0]) for chunk in self._state.get(name, ()))

    def _installed(self) -> AnyLayout:
        if self._layout is None:
            raise StateError("no layout is installed")
        return self._layout

    def _part(self, layout: AnyLayout, name: str) -> LocalPart:
        part = layout.parts(self._with_base(name)).get(self._worker, {}).get(name)
        if part is None:
            raise StateError(f"the layout gives this worker no part of {name}")
        return part

    def _with_base(self, name: str) -> dict[str, Item]:
        return {one: self._items[one] for one in (name, name.partition("@")[0]) if one in self._items}

    def _read(self, group: Group, layout: AnyLayout | None, source: SpaceSource) -> Moved:
        """Takes part in a move from a checkpoint: each member reads what the layout gives it."""
        note = {
            "layout": layout.to_json() if layout is not None else None,
            "items": [[item.name, item.shape, str(item.dtypes[0])] for item in self._items.values()],
        }
        notes = group.all_gather_json(note)
        layout = joined([layout_from_json(one["layout"]) for one in notes if one["layout"] is not None])
        known = {name: item for one in notes for name, item in _items(one["items"]).items()}
        self._restored = source.read(layout, self._worker, self._device, tuple(known.values())).state
        self._next = (
            layout,
            {
                name: [Chunk(box, (tensor,)) for box, tensor in chunks]
                for name, chunks in self._restored.tensors.items()
            },
        )
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

    def _hear(
        self, group: Group, wanted: AnyLayout | None
    ) -> tuple[dict[str, Holdings], dict[str, Holdings], AnyLayout]:
        """Who holds what, and in host memory besides, and the layout that is wanted; takes over tensors and values."""
        layout = self._layout.to_json() if self._layout is not None else None
        items = _fields(self._items.values())
        texts = {
            "held": _packed({"layout": layout, "items": items, "values": self.values}) if self._state else "",
            "wanted": _packed(wanted.to_json()) if wanted is not None else "",
        }
        note: dict[str, Any] = {kind: zlib.crc32(text.encode()) if text else None for kind, text in texts.items()}
        if self._layout is None and self._state:
            note["boxes"] = holdings_of(self._state)
        if self._guarded:
            note["guarded"] = holdings_of(self._guarded)
            # Of tensors that nobody else may know.
            note["items"] = _fields({item.name: item for item, _ in self._offered}.values())
        notes = group.all_gather_json(note)
        # Of those who would say the same, one does.
        first = {kind: [one[kind] for one in notes].index(note[kind]) == group.rank for kind in texts}
        answers = group.all_gather_json({kind: text for kind, text in texts.items() if text and first[kind]})
        held = {notes[rank]["held"]: json.loads(one["held"]) for rank, one in enumerate(answers) if "held" in one}
        targets = [layout_from_json(json.loads(one["wanted"])) for one in answers if "wanted" in one]
        if not held:
            raise StateError("no member holds any tensor; hold() what the job begins with on one member at least")
        known = {key: _items(one["items"]) for key, one in held.items()}
        self._items = {}
        for there in (*known.values(), *(_items(one.get("items", ())) for one in notes)):
            for name, item in there.items():
                if self._items.setdefault(name, item) != item:
                    raise StateError(
                        f"members hold {name} as {item.dtypes[0]} {list(item.shape)} and as "
                        f"{self._items[name].dtypes[0]} {list(self._items[name].shape)}; one name is one tensor"
                    )
        self.values = next(iter(held.values()))["values"]
        # Each knows the tensors that it has a part of.
        lying = {key: layout_from_json(one["layout"]).parts(known[key]) for key, one in held.items() if one["layout"]}
        before: dict[str, Holdings] = {}
        guarded: dict[str, Holdings] = {}
        for member, one in zip(group.members, notes, strict=True):
            if one["held"] in lying:
                before[member] = _lists(lying[one["held"]].get(member, {}))
            elif "boxes" in one:
                before[member] = _boxes(one["boxes"])
            guarded[member] = _boxes(one.get("guarded", {}))
        return before, guarded, joined(targets)


def _fields(items: Iterable[Item]) -> list[Any]:
    return [[item.name, item.shape, str(item.dtypes[0]).removeprefix("torch.")] for item in items]


def _items(fields: Sequence[Any]) -> dict[str, Item]:
    return {name: Item(name, tuple(shape), (dtype_of(dtype),)) for name, shape, dtype in fields}


def _chunks(part: LocalPart, local: Tensor) -> list[Chunk]:
    """A member's tensor as boxes of the whole one, which are views of it."""
    if part.boxes[1:] or len(part.shape) != len(part.boxes[0]):
        sizes = [n_elements(box) for box in part.boxes]
        views = local.split(sizes)
        return [Chunk(box, (view.view(_shape(box)),)) for box, view in zip(part.boxes, views, strict=True)]
    return [Chunk(part.boxes[0], (local,))]


def _text(part: LocalPart) -> str:
    return " and ".join(str(list(box)) for box in part.boxes) or "nothing"


def _in_one(part: LocalPart, chunks: Sequence[Chunk]) -> list[Chunk]:
    """The boxes of a range, in memory one after the other."""
    by_box = {chunk.box: chunk.tensors[0] for chunk in chunks}
    return _chunks(part, torch.cat([by_box[box].reshape(-1) for box in part.boxes]))


def _packed(fields: Any) -> str:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"))


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _lists(parts: Mapping[str, LocalPart]) -> dict[str, tuple[Box, ...]]:
    return {name: part.boxes for name, part in parts.items() if part.boxes}


def _boxes(fields: Mapping[str, Any]) -> dict[str, tuple[Box, ...]]:
    return {name: tuple(tuple((lo, hi) for lo, hi in box) for box in boxes) for name, boxes in fields.items()}
