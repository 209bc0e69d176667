"""Copies of the tensors of a framework: of this worker's own in its host memory, and of what another worker alone has.

A copy is begun at each step boundary, and is made and sent while the step runs; no step commits before the copy of the
one before is complete. So whoever dies, the state is there as it was after the last step, or after the one before that.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from elaunch import threads
from elaunch.workers.comm.c10d.mail import Channel, Letter
from elaunch.workers.comm.group import Group, memory
from elaunch.workers.member.keepers import place_in
from elaunch.workers.reentry.copies import Copies, StateCopy
from elaunch.workers.reentry.guards import alone, guards_of
from elaunch.workers.state.boxes import Box
from elaunch.workers.state.chunks import Chunk
from elaunch.workers.state.codec import dtype_of
from elaunch.workers.state.paths.packing import pack, parts_of, room_for
from elaunch.workers.state.space import Item
from elaunch.workers.state.tensors import TensorSpace

HOST = torch.device("cpu")

NUMBER = (1 << 32) - 1
"""Among the groups of a worker, that of the messages with copies."""

Held = dict[str, tuple[Item, Box]]
"""What a member holds: chunks by a name of their own."""


@dataclass(frozen=True, order=True)
class CopyKey:
    """Which copy it is: members have made the same ones."""

    generation: int
    step: int


@dataclass(eq=False)
class SpaceCopy:
    """The state after a step, as far as this worker has it: its own chunks, and those that it keeps for another.

    Attributes:
        key: which one it is.
        held: this worker's chunks, in the order of `own.tensors` as far as no two share memory.
        own: their copy.
        kept: chunks that another worker alone has.
        letters: messages under way.
        sent: all messages have been begun.
        error: what has kept them from that.
    """

    key: CopyKey
    held: Held
    own: StateCopy
    kept: list[tuple[Item, Chunk]] = field(default_factory=list)
    letters: list[Letter] = field(default_factory=list)
    sent: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    @property
    def complete(self) -> bool:
        """Whether all of it is here, and this worker's own chunks are where they are kept."""
        over = self.sent.is_set() and all(letter.is_over and letter.error is None for letter in self.letters)
        return over and self.error is None

    def tensors(self) -> dict[str, Tensor]:
        """Returns the copies of this worker's chunks, by their names."""
        pairs = self.own.manifest["objects"]["space"]["v"]
        return {name: self.own.tensors[described["i"]] for name, described in pairs}


class _Described:
    """Chunks as an object with a state."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)

    def state_dict(self) -> dict[str, Tensor]:
        return self._tensors


class SpaceCopies:
    """The copies of one worker. All of it belongs to the training thread."""

    def __init__(self) -> None:
        self._copies = Copies()
        self._made: list[SpaceCopy] = []  # the last one, and the one before
        self._members: tuple[int, Any] | None = None  # generation and layout of the last copy
        self._known: int | None = None  # of whose notes these are
        self._notes: list[Held] = []

    def begin(self, group: Group, space: TensorSpace, step: int) -> None:
        """Begins to copy the present state. All members of the group call it, between two steps.

        After a change of members or layout it returns when the copy is complete: nobody else has one yet.

        Raises:
            StateError: a tensor has no plain memory.
            StepInterrupted: a peer was lost, or the generation changed.
        """
        self._drop_incomplete()
        chunks = {
            f"{name}#{number}": (space.items[name], box, tensor)
            for name in space.items
            for number, (box, tensor) in enumerate(space.chunks(name))
        }
        held: Held = {name: (item, box) for name, (item, box, _) in chunks.items()}
        # What nothing is kept for is no parameter that an optimizer steps: a forward pass may change it.
        stepped = {name.partition("@")[0] for name in space.items if "@" in name}
        later = {f"space.{name}" for name in chunks if name.rpartition("#")[0].partition("@")[0] in stepped}
        described = _Described({name: tensor for name, (_, _, tensor) in chunks.items()})
        own = self._copies.begin(step, {"space": described}, dict(space.values), later)
        made = SpaceCopy(CopyKey(group.generation, step), held, own)
        self._made = [*self._made[-1:], made]
        self._exchange(group, made)
        now = group.generation, space.layout
        if now != self._members:
            self.finish()
            self._members = now

    @property
    def newest(self) -> int | None:
        """Returns of how many steps the newest complete copy is; None: there is none."""
        return next((one.key.step for one in reversed(self._made) if one.complete), None)

    def finish(self) -> None:
        """Returns when the last copy is complete here, and where this worker's part is kept.

        Raises:
            StepInterrupted: a peer was lost, or the generation changed.
            StateError: something has changed that was being copied.
        """
        self._copies.finish()
        if self._made:
            last = self._made[-1]
            last.sent.wait()
            if last.error is not None:
                raise last.error
            for letter in last.letters:
                letter.wait()

    def pause(self) -> None:
        """Returns when no tensor is being copied; messages under way end with their generation."""
        self._copies.finish()

    def offer(self, group: Group, space: TensorSpace, step: int) -> CopyKey | None:
        """Has the next move take what is kept for others, if it is of the present step. All members call it.

        Returns:
            The newest copy that all members have, to which they can go back; None: there is none.
        """
        keys = [[one.key.generation, one.key.step] for one in self._made if one.complete and one.key.step <= step]
        told = [note for note in group.all_gather_json(keys if self._made else None) if note is not None]
        common = [CopyKey(*key) for key in (told[0] if told else ()) if all(key in note for note in told)]
        newest = max(common, default=None)
        last = self._find(newest)
        space.offer(last.kept if last is not None and last.key.step == step else ())
        return newest

    def go_back(self, space: TensorSpace, key: CopyKey) -> None:
        """Makes a copy what the space holds, until its next move is installed or `space.stay` is called."""
        made = self._find(key)
        if made is None:
            space.go_back({}, {}, ())
            return
        tensors = made.tensors()
        own = [(item, Chunk(box, (tensors[name],))) for name, (item, box) in made.held.items()]
        space.go_back({item.name: item for item, _ in own}, made.own.values, own)
        space.offer(made.kept)

    def resumed(self, step: int) -> None:
        """Forgets the copies of steps that do not count."""
        while self._made and self._made[-1].key.step > step:
            self._forget_last()

    def _find(self, key: CopyKey | None) -> SpaceCopy | None:
        return next((one for one in reversed(self._made) if one.key == key and one.complete), None)

    def _drop_incomplete(self) -> None:
        self._copies.finish()
        if self._made and not self._made[-1].complete:
            self._forget_last()

    def _forget_last(self) -> None:
        self._made.pop()
        self._copies.forget_newest()

    def _exchange(self, group: Group, made: SpaceCopy) -> None:
        """Begins to send what this worker alone has to who keeps it, and to receive what it keeps itself."""
        notes = self._hear(group, made.held)
        if group.size == 1:
            made.sent.set()
            return
        boxes: list[dict[Any, Box]] = [{name: box for name, (_, box) in held.items()} for held in notes]
        where = place_in(group.members, group.domains)
        guards = guards_of(group.members, where)
        channel = Channel(group.generation, NUMBER, 0)
        for ward in [rank for rank, guard in enumerate(guards) if guard == group.rank]:
            taken = [notes[ward][str(name)] for name in alone(ward, boxes, group.members, where)]
            if not taken:
                continue
            likes = [_like(item, box) for item, box in taken]
            buffer = room_for(likes, HOST)
            places = parts_of(buffer, likes)
            made.kept += [(item, Chunk(box, (place,))) for (item, box), place in zip(taken, places, strict=True)]
            made.letters.append(group.transport.mail.receive(group.members[ward], channel, memory(buffer), buffer))
        own = [str(name) for name in alone(group.rank, boxes, group.members, where)]
        if not own:
            made.sent.set()
            return
        copying, tensors = self._copies.under_way, made.tensors()

        def send() -> None:
            if copying is not None:
                copying.wait()
            views = [tensors[name] for name in own]
            body = room_for(views, HOST)
            pack(body, views)
            to = group.members[guards[group.rank]]
            made.letters.append(group.transport.mail.send(to, channel, memory(body), body))
            made.sent.set()

        def failed(error: BaseException) -> None:
            made.error = error
            made.sent.set()

        threads.start("elaunch-copies-send", send, failed)

    def _hear(self, group: Group, held: Held) -> list[Held]:
        """What each member holds; it is told once, until it changes."""
        text = json.dumps(
            [[name, item.name, item.shape, str(item.dtypes[0]), box] for name, (item, box) in held.items()]
        )
        code = zlib.crc32(text.encode())
        answers = group.all_gather_json([code, self._known])
        codes = [code for code, _ in answers]
        now = zlib.crc32(json.dumps(codes).encode())
        if any(known != now for _, known in answers):
            self._known = None
            texts = group.all_gather_bytes(text.encode())
            self._notes = [
                {
                    name: (
                        Item(of, tuple(shape), (dtype_of(dtype),)),
                        tuple((start, stop) for start, stop in box),
                    )
                    for name, of, shape, dtype, box in json.loads(one)
                }
                for one in texts
            ]
            self._known = now
        return self._notes


def _like(item: Item, box: Box) -> Tensor:
    """Returns a tensor of a chunk's type and shape, without memory."""
    return torch.empty([stop - start for start, stop in box], dtype=item.dtypes[0], device="meta")
