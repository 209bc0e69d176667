"""Copies for others: what of the state is on one worker alone, another one keeps as well.

Each member has one guard, in another failure domain or on another node where there are several, and as a rule it guards
one (`elaunch.workers.member.keepers`). What it alone holds of a commit goes there while the next step computes, and the
commit counts when all guards have what they keep: whoever dies, no part of the last commit that counts is lost with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from elaunch import threads
from elaunch.errors import StepInterrupted
from elaunch.rendezvous.membership import node_of
from elaunch.workers import heartbeat
from elaunch.workers.comm.group import Group
from elaunch.workers.member.keepers import KeeperRing, Place, place_in
from elaunch.workers.reentry.copies import Part, StateCopy
from elaunch.workers.state.boxes import Box, n_elements
from elaunch.workers.state.codec import dtype_of
from elaunch.workers.state.paths.packing import parts_of, room_for

Key = TypeVar("Key")
Boxes = Mapping[int, Box]


def guards_of(members: Sequence[str], place: Place = node_of) -> list[int]:
    """Returns by rank who keeps copies for each member."""
    ring, ranks = KeeperRing(members, place), {member: rank for rank, member in enumerate(members)}
    return [ranks[next(iter(ring.keepers(member, 1)), member)] for member in members]


def alone(rank: int, held: Sequence[Mapping[Key, Box]], members: Sequence[str], place: Place = node_of) -> list[Key]:
    """Returns the tensors of which a member has a part that nobody else has, or nobody in another place.

    Args:
        rank: of the member.
        held: by rank, the parts, by whatever stands for a tensor.
        members: by rank.
        place: gives the place of a member.
    """
    several = len(set(map(place, members))) > 1
    others = [
        boxes
        for other, boxes in enumerate(held)
        if other != rank and not (several and place(members[other]) == place(members[rank]))
    ]
    return [
        place
        for place, box in held[rank].items()
        if n_elements(box) and all(boxes.get(place) != box for boxes in others)
    ]


class Shipment:
    """What members give their guards of one commit, on its way in a thread.

    Args:
        move: does it.
    """

    def __init__(self, move: Callable[[], None]) -> None:
        self._move = move
        self._over = threading.Event()
        self._error: BaseException | None = None
        threads.start("elaunch-guards", self._run, self._died)

    @property
    def arrived(self) -> bool:
        """Whether this worker's parts are with its guard, and those that it keeps are here."""
        return self._over.is_set() and self._error is None

    def wait(self) -> None:
        """Returns when it has arrived.

        Raises:
            StepInterrupted: a peer was lost, or the generation changed; what was taken is incomplete.
        """
        self.settle()
        if self._error is not None:
            raise self._error

    def settle(self) -> None:
        """Returns when it has arrived, or was interrupted."""
        if not self._over.is_set():
            with heartbeat.waiting():
                self._over.wait()

    def _run(self) -> None:
        heartbeat.in_background()
        try:
            self._move()
        except StepInterrupted as error:  # whoever waits for it is told
            self._error = error
        self._over.set()

    def _died(self, error: BaseException) -> None:
        self._error = error
        self._over.set()


PackedForms = tuple[tuple[int, Box, torch.dtype], ...]
"""Of each part, the place of its tensor in the manifest, its box, and its dtype."""


@dataclass(frozen=True)
class PartForms:
    """The forms of parts of a commit.

    Attributes:
        changing: of those that are others with each commit.
        constant: of the others.
    """

    changing: PackedForms
    constant: PackedForms

    @classmethod
    def of(cls, boxes: Boxes, specs: Sequence[Mapping[str, Any]], constant: Collection[int]) -> PartForms:
        """Returns the forms of the parts in some boxes, by place in a manifest that says so much of its tensors."""
        forms = [(place, box, dtype_of(specs[place]["dtype"])) for place, box in boxes.items()]
        return cls(
            tuple(form for form in forms if form[0] not in constant),
            tuple(form for form in forms if form[0] in constant),
        )


@dataclass(frozen=True)
class PackedParts:
    """Parts of a commit in one run of memory, in which they travel.

    Attributes:
        forms: of the parts.
        memory: of all of them.
        parts: where they lie in it.
    """

    forms: PackedForms
    memory: torch.Tensor
    parts: list[Part]

    @classmethod
    def of(cls, forms: PackedForms, spare: PackedParts | None) -> PackedParts:
        """Returns memory for some parts; that of others, where it fits."""
        if spare is not None and (spare.forms is forms or spare.forms == forms):
            return spare
        likes = [
            torch.empty([stop - start for start, stop in box], dtype=dtype, device="meta") for _, box, dtype in forms
        ]
        memory = room_for(likes, torch.device("cpu")) if likes else torch.empty(0, dtype=torch.uint8)
        tensors = parts_of(memory, likes)
        parts = [(place, box, tensor) for (place, box, _), tensor in zip(forms, tensors, strict=True)]
        return cls(forms, memory, parts)


@dataclass(frozen=True)
class KeptParts:
    """Parts of a commit that one worker keeps for others.

    Attributes:
        changing: by ward, those that are others with each commit.
        constant: the others, which travel once in an entry.
        step: number of steps that have committed with it.
    """

    changing: list[PackedParts]
    constant: list[PackedParts]
    step: int

    @property
    def parts(self) -> list[Part]:
        """Returns all of them."""
        return [part for packed in (*self.changing, *self.constant) for part in packed.parts]


class Guards:
    """What one worker keeps for others, its wards, in one entry."""

    def __init__(self) -> None:
        self._newest: KeptParts | None = None
        self._former: KeptParts | None = None
        self._leaving: PackedParts | None = None
        self._has_constants = False  # the guard has those of this entry
        self._own: Boxes = {}
        self._guard, self._wards = 0, list[int]()
        self._given: dict[int, Box] = {}
        self._taken: list[dict[int, Box]] = []
        self._told = False
        self._forms: tuple[object, PartForms, list[PartForms]] | None = None  # of which copies, and the forms

    @property
    def newest(self) -> list[Part]:
        """Returns the parts of the last commit that was begun."""
        return self._newest.parts if self._newest is not None else []

    def of_step(self, step: int) -> list[Part]:
        """Returns the parts of commits with so many steps: of one, or of two that were cut for different members."""
        kept = [one for one in (self._newest, self._former) if one is not None and one.step == step]
        return [part for one in kept for part in one.parts]

    def knows(self, boxes: Boxes) -> bool:
        """Returns whether the members have told each other of these parts of this worker's."""
        return self._told and boxes == self._own

    def tell(self, group: Group, boxes: Boxes) -> None:
        """Tells all members which parts this one has, of the tensors that it has not wholly. All members call it.

        Raises:
            StepInterrupted: a peer was lost, or the generation changed.
        """
        notes = group.all_gather_json([[place, box] for place, box in boxes.items()])
        held = [{place: tuple((lo, hi) for lo, hi in box) for place, box in note} for note in notes]
        where = place_in(group.members, group.domains)
        guards = guards_of(group.members, where)
        self._guard = guards[group.rank]
        self._wards = [rank for rank, guard in enumerate(guards) if guard == group.rank != rank]
        self._given, *self._taken = (
            {place: held[rank][place] for place in alone(rank, held, group.members, where)}
            for rank in (group.rank, *self._wards)
        )
        self._own, self._told, self._has_constants = dict(boxes), True, False  # places may be others
        self._forms = None

    def ship(self, group: Group, copy: StateCopy, copied: Callable[[], None]) -> Shipment:
        """Begins to give this worker's guard what it alone holds of a copy, and to take what it keeps itself.

        All members call it, after `tell`; the group must not be used before the shipment has arrived.

        Args:
            group: of the members.
            copy: of this worker.
            copied: returns when the copy is complete, or raises what keeps it from arriving.
        """
        spare, self._former, self._newest = self._former, self._newest, None
        if group.size == 1:
            return Shipment(copied)
        given, taken = self._forms_of(copy)
        # The shipment before has arrived, or was interrupted: its memory is free.
        self._leaving = PackedParts.of(given.changing, self._leaving)
        leaving, wards = [self._leaving], self._wards
        free = [*(spare.changing if spare is not None else ()), *([None] * len(wards))]
        changing = [PackedParts.of(forms.changing, memory) for forms, memory in zip(taken, free, strict=False)]
        coming = list(zip(wards, changing, strict=True))
        if self._has_constants and self._former is not None:
            self._newest = KeptParts(changing, self._former.constant, copy.step)
        else:
            constant = [PackedParts.of(forms.constant, None) for forms in taken]
            self._newest = KeptParts(changing, constant, copy.step)
            leaving.append(PackedParts.of(given.constant, None))
            coming += zip(wards, constant, strict=True)
        self._has_constants = True

        def move() -> None:
            copied()
            leave = [one for one in leaving if one.parts]
            views = [tensor for one in leave for _, _, tensor in one.parts]
            if views:
                torch._foreach_copy_(views, [copy.tensors[place] for one in leave for place, _, _ in one.parts])
            group.exchange(
                [(self._guard, one.memory) for one in leave], [(ward, one.memory) for ward, one in coming if one.parts]
            )

        return Shipment(move)

    def _forms_of(self, copy: StateCopy) -> tuple[PartForms, list[PartForms]]:
        """Returns the forms of what leaves, and of what comes by ward; those of the copy before, if it was the same."""
        if self._forms is None or copy.form is None or self._forms[0] is not copy.form:
            specs = copy.manifest["tensors"]
            given, *taken = (PartForms.of(boxes, specs, copy.constant) for boxes in (self._given, *self._taken))
            self._forms = copy.form, given, taken
        return self._forms[1:]

    def forget_newest(self) -> None:
        """Lets the parts of the last commit go: it does not count."""
        self._newest, self._former = self._former, None

    def forget(self) -> None:
        """Lets all parts go."""
        self._newest = self._former = self._leaving = None
        self._has_constants = False

    def enter(self) -> None:
        """Forgets which parts the members have: there are others from now on, or they are cut anew."""
        self._own, self._given, self._taken, self._told = {}, {}, [], False
        self._has_constants, self._forms = False, None
