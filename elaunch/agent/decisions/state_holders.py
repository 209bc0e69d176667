"""Which members hold the state of the job, as far as a node knows from the generations and its own workers."""

from __future__ import annotations

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
        self.ids = tuple(worker for worker in generation.ids if worker in self.ids)

    def note_joined(self, number: int) -> None:
        """Notes that a worker of this node has entered a generation."""
        members = self._to_enter.get(number)
        if members is not None:
            self._to_enter = {other: ids for other, ids in self._to_enter.items() if other > number}
            self.ids = tuple(worker for worker in self._newest if worker in members and worker not in self._ended)

    def note_end(self, worker: str) -> None:
        """Notes that a worker of this node has ended, or is being killed."""
        self._ended.add(worker)
        self.ids = tuple(one for one in self.ids if one != worker)
