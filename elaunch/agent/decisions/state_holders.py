"""Which members hold the state of the job, as far as a node knows from the generations and its own workers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from elaunch.rendezvous.membership import Generation, GenerationStage


@dataclass(slots=True)
class StateHolders:
    """The members that hold the state.

    Nobody goes on in a generation before all its members have what they need. So when one of this node has entered it,
    all members hold the state; until then, those do that did before.

    Attributes:
        ids: these members, by rank.
    """

    ids: tuple[str, ...] = ()
    _to_enter: dict[int, tuple[str, ...]] = field(default_factory=dict)  # members, by generation
    _newest: tuple[str, ...] = ()
    _ended: set[str] = field(default_factory=set)

    def enter(self, generation: Generation) -> None:
        """Notes the members of a new generation; with a new attempt nobody holds anything."""
        if generation.stage is not GenerationStage.TRAIN:
            self.ids, self._newest = (), ()
            self._to_enter.clear()
            return
        self._newest = self._to_enter[generation.number] = generation.ids
        self._ended.intersection_update(generation.ids)
        self.ids = _those_of(generation.ids, self.ids)

    def note_joined(self, number: int) -> None:
        """Notes that a worker of this node has entered a generation."""
        members = self._to_enter.get(number)
        if members is not None:
            self._to_enter = {other: ids for other, ids in self._to_enter.items() if other > number}
            self.ids = _those_of(self._newest, set(members) - self._ended)

    def note_end(self, worker: str) -> None:
        """Notes that a worker of this node has ended, or is being killed."""
        self._ended.add(worker)
        self.ids = tuple(one for one in self.ids if one != worker)


def _those_of(ids: tuple[str, ...], wanted: Collection[str]) -> tuple[str, ...]:
    """Returns those that are wanted, in their order."""
    found = frozenset(wanted)
    return tuple(worker for worker in ids if worker in found)
