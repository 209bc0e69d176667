"""Copies of frozen parameters and buffers in other workers' host memory, where too few workers hold them.

A copy of what does not change is sent once, in batches, and stays of use when the plan changes. So in the first step
under a plan, each holder of copies says which it has, and their checksums; what is right is not sent again.

    first step   holder ──what it has──> source
    each step    source ──what has changed, and the next batch of what lacks──> holder
    commit       holder: lets go of what has changed, takes in what came

Scripts may change buffers between two steps. That is seen by the tensors' version counters and, since `.data` has none,
by a sample of their elements.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from elaunch.rendezvous.membership import node_of
from elaunch.workers.comm.group import memory
from elaunch.workers.comm.traffic import Traffic
from elaunch.workers.layers.executor import LayerKey
from elaunch.workers.layers.messages import Kind, tag
from elaunch.workers.layers.model import Layer
from elaunch.workers.layers.snapshots import BATCH_BYTES
from elaunch.workers.layers.untrained.duties import CopiedBox, duties
from elaunch.workers.layers.untrained.places import places_of_layers
from elaunch.workers.member.keepers import Place
from elaunch.workers.state.boxes import Box, n_elements, slabs
from elaunch.workers.state.chunks import Chunk, covering
from elaunch.workers.state.codec import dtype_of
from elaunch.workers.state.layout import LayerSpec, StateLayout
from elaunch.workers.state.space import Holdings, untrained_items

SAMPLED = 256
"""Elements of each tensor that are compared in each step."""

_LENGTH = struct.Struct("<Q")
_HAS, _HEAD, _BODY = 0, 2, 4


class HostCopies:
    """What this worker has in host memory of others' frozen parameters and buffers, whatever the plan."""

    def __init__(self) -> None:
        self._copies: dict[CopiedBox, tuple[Tensor, str]] = {}

    def put(self, box: CopiedBox, tensor: Tensor) -> None:
        """Takes a copy in."""
        self._copies[box] = tensor, _checksum(tensor)

    def forget(self, boxes: Iterable[CopiedBox]) -> None:
        """Lets go of some."""
        for box in boxes:
            self._copies.pop(box, None)

    def keep(self, boxes: Collection[CopiedBox]) -> None:
        """Lets go of all others."""
        self._copies = {box: copy for box, copy in self._copies.items() if box in boxes}

    def checksums(self) -> dict[CopiedBox, str]:
        """Returns what is here, and the checksum of each."""
        return {box: code for box, (_, code) in self._copies.items()}

    def chunks(self) -> dict[str, list[Chunk]]:
        """Returns what is here, by item."""
        found: dict[str, list[Chunk]] = {}
        for (path, box), (tensor, _) in self._copies.items():
            found.setdefault(path, []).append(Chunk(box, (tensor,)))
        return found

    def holdings(self) -> Holdings:
        """Returns the boxes, by item."""
        return {path: tuple(chunk.box for chunk in chunks) for path, chunks in self.chunks().items()}


class ChangeWatch:
    """Notices which of some tensors have changed since it was asked before."""

    def __init__(self) -> None:
        self._versions: dict[str, tuple[int, int]] = {}
        self._samples: dict[str, Tensor] = {}

    def changed(self, tensors: Mapping[str, Tensor]) -> set[str]:
        """Returns the names of those that have; at first, all."""
        found = set()
        for name, tensor in tensors.items():
            flat = tensor.detach().reshape(-1)
            sample = flat[:: max(1, flat.numel() // SAMPLED)].contiguous().view(torch.uint8).cpu()
            version = tensor.data_ptr(), tensor._version
            known = self._samples.get(name)
            if known is None or self._versions[name] != version or not torch.equal(known, sample):
                found.add(name)
            self._versions[name], self._samples[name] = version, sample.clone()
        return found


@dataclass(eq=False)
class _ToHolder:
    """What a source knows of one holder: `right` are the copies that it has, `wrong` those that it must let go of."""

    boxes: tuple[CopiedBox, ...]
    right: set[CopiedBox] = field(default_factory=set)
    wrong: set[CopiedBox] = field(default_factory=set)
    batch: tuple[CopiedBox, ...] = ()
    has: Tensor = field(default_factory=lambda: torch.empty(_LENGTH.size, dtype=torch.uint8))


@dataclass(eq=False)
class _FromSource:
    """What comes from one source in a step."""

    boxes: tuple[CopiedBox, ...]
    length: Tensor = field(default_factory=lambda: torch.empty(_LENGTH.size, dtype=torch.uint8))
    wrong: tuple[CopiedBox, ...] = ()
    came: dict[CopiedBox, Tensor] = field(default_factory=dict)


class UntrainedCopies:
    """What a worker sends and receives under a plan so that each value is in enough places.

    Args:
        layout: of the plan.
        specs: of all layers.
        workers: of the plan.
        worker: this one.
        layers: its layers.
        copies: of each value, beside the first.
        store: what it keeps of others.
        place: of each worker.
    """

    def __init__(
        self,
        layout: StateLayout,
        specs: Sequence[LayerSpec],
        workers: Sequence[str],
        worker: str,
        layers: Mapping[LayerKey, Layer],
        copies: int,
        store: HostCopies,
        place: Place = node_of,
    ) -> None:
        self._layout, self._worker, self._store = layout, worker, store
        found = duties(layout.holders, specs, workers, copies, place)
        items = untrained_items(specs)

        def cut(boxes: Sequence[CopiedBox]) -> tuple[CopiedBox, ...]:
            sizes = {path: items[path].element_bytes for path, _ in boxes}
            return tuple((path, part) for path, box in boxes for part in _batches(box, sizes[path]))

        self._to = {to: _ToHolder(cut(boxes)) for (source, to), boxes in found.items() if source == worker}
        self._from = {source: _FromSource(cut(boxes)) for (source, to), boxes in found.items() if to == worker}
        sent = {int(path.split(".")[1]) for one in self._to.values() for path, _ in one.boxes}
        self._layers = {key: layer for key, layer in layers.items() if key[0] in sent}
        self._watch = ChangeWatch()
        self._begun = False

    # -- in a step ------------------------------------------------------------------------------------------------

    def begin(self, traffic: Traffic) -> None:
        """Tells the sources what is here, in the first step under the plan, and has what they send received."""
        for to, holder in self._to.items():
            if not self._begun:
                traffic.post(to, tag(Kind.UNTRAINED, _HAS), memory(holder.has))
        for source, one in self._from.items():
            traffic.post(source, tag(Kind.UNTRAINED, _HEAD), memory(one.length))
            if not self._begun:
                wanted = set(one.boxes)
                has = [[*box, code] for box, code in self._store.checksums().items() if box in wanted]
                _send_json(traffic, source, _HAS, has)

    def ship(self, traffic: Traffic) -> None:
        """Sends what has changed and what lacks, as it is in this step."""
        if not self._to:
            return
        places = places_of_layers(self._layout, self._worker, self._layers, trained=False)
        tensors = {path: chunks[0].tensors[0] for path, chunks in places.items()}
        changed = self._watch.changed(tensors)
        for to, holder in self._to.items():
            if self._begun:
                holder.wrong |= {box for box in holder.right if box[0] in changed}
                holder.right -= holder.wrong
            else:
                self._compare(holder, _receive_json(traffic, to, _HAS, holder.has), places)
            holder.batch = _batch([box for box in holder.boxes if box not in holder.right], places)
            parts = [_view(places, box).cpu().contiguous() for box in holder.batch]
            told = [[*box, str(part.dtype)] for box, part in zip(holder.batch, parts, strict=True)]
            _send_json(traffic, to, _HEAD, {"wrong": sorted(holder.wrong), "parts": told} if told else None)
            for number, part in enumerate(parts, _BODY):
                traffic.send(to, tag(Kind.UNTRAINED, number), memory(part), part)

    def arrive(self, traffic: Traffic) -> None:
        """Waits until all that comes in this step is here: after that it may commit."""
        for source, one in self._from.items():
            told = _receive_json(traffic, source, _HEAD, one.length)
            one.wrong, one.came = (), {}
            if told is None:
                continue
            one.wrong = tuple(map(_copied_box, told["wrong"]))
            for number, (path, box, dtype) in enumerate(told["parts"], _BODY):
                found = _copied_box((path, box))
                shape = [stop - start for start, stop in found[1]]
                one.came[found] = torch.empty(shape, dtype=dtype_of(dtype))
                traffic.post(source, tag(Kind.UNTRAINED, number), memory(one.came[found]))
            for number in range(_BODY, _BODY + len(one.came)):
                traffic.wait(source, tag(Kind.UNTRAINED, number))

    def commit(self) -> None:
        """Takes in what came, now that the step has committed."""
        if not self._begun:
            self._store.keep({box for one in self._from.values() for box in one.boxes})
        for one in self._from.values():
            self._store.forget(one.wrong)
            for box, tensor in one.came.items():
                self._store.put(box, tensor)
            one.wrong, one.came = (), {}
        for holder in self._to.values():
            holder.right |= set(holder.batch)
            holder.wrong, holder.batch = set(), ()
        self._begun = True

    def drop(self) -> None:
        """Drops what came of a step that is done again."""
        for one in self._from.values():
            one.wrong, one.came = (), {}
        for holder in self._to.values():
            holder.batch = ()

    @property
    def complete(self) -> bool:
        """Returns whether all of this worker's values that need copies have them."""
        return all(holder.right >= set(holder.boxes) for holder in self._to.values())

    # ---------------------------------------------------------------------------------------------------------------

    def _compare(self, holder: _ToHolder, has: Any, places: Mapping[str, Sequence[Chunk]]) -> None:
        """Finds out which of the holder's copies are what is here."""
        ours = set(holder.boxes)
        known = {found: code for path, box, code in has for found in (_copied_box((path, box)),) if found in ours}
        holder.right = {box for box, code in known.items() if _checksum(_view(places, box)) == code}
        holder.wrong = known.keys() - holder.right


def _batches(box: Box, element_bytes: int) -> list[Box]:
    return slabs(box, -(-n_elements(box) * element_bytes // BATCH_BYTES))


def _batch(boxes: Sequence[CopiedBox], places: Mapping[str, Sequence[Chunk]]) -> tuple[CopiedBox, ...]:
    """So many of the boxes as go into one step; a single one always does."""
    found: list[CopiedBox] = []
    size = 0
    for path, box in boxes:
        size += n_elements(box) * places[path][0].tensors[0].element_size()
        if found and size > BATCH_BYTES:
            break
        found.append((path, box))
    return tuple(found)


def _view(places: Mapping[str, Sequence[Chunk]], box: CopiedBox) -> Tensor:
    return next(chunk.view(box[1], 0) for chunk, common in covering(places[box[0]], box[1]) if common == box[1])


def _copied_box(fields: Sequence[Any]) -> CopiedBox:
    return fields[0], tuple(map(tuple, fields[1]))


def _checksum(tensor: Tensor) -> str:
    from elaunch.workers.state.checksums import checksum  # jobs without such copies do not load it

    return checksum(bytes(memory(tensor.cpu().contiguous())))


def _send_json(traffic: Traffic, peer: str, number: int, value: Any) -> None:
    """None takes one message, anything else two."""
    text = b"" if value is None else json.dumps(value).encode()
    for which, data in enumerate((_LENGTH.pack(len(text)), text)):
        if data:
            body = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            traffic.send(peer, tag(Kind.UNTRAINED, number + which), memory(body), body)


def _receive_json(traffic: Traffic, peer: str, number: int, length: Tensor) -> Any:
    traffic.wait(peer, tag(Kind.UNTRAINED, number))
    (n_bytes,) = _LENGTH.unpack(bytes(memory(length)))
    if not n_bytes:
        return None
    text = torch.empty(n_bytes, dtype=torch.uint8)
    traffic.post(peer, tag(Kind.UNTRAINED, number + 1), memory(text))
    traffic.wait(peer, tag(Kind.UNTRAINED, number + 1))
    return json.loads(bytes(memory(text)))
