"""The hook protocol: what a training runtime implements so that it can be recovered, re-planned and moved.

The runtime of a worker (`elaunch.workers.runtime`) calls the hooks, in the order of `elaunch.workers.recovery`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from elaunch.rendezvous.membership import Generation
from elaunch.workers.comm.group import Group


@dataclass(frozen=True, slots=True)
class Vote:
    """What a worker brings into an agreement.

    Attributes:
        step: number of steps it has committed.
        entered: it has complete gradients of one more step and waited at that step's barrier.
        holds: it holds the state of the job.
        facts: whatever else its runtime tells the others, as JSON.
        saved: number of steps in the newest checkpoint that it sees; None: it sees none.
        every: steps from one checkpoint to the next; 0: there are none.
        transferred: the activation for which it has got all state, while it waits for the others; "": none.
        activated: the last one that it has gone on from; "": none.
        ready: so many steps would count with what this worker has ready; 0: none beyond `step`.
        unsettled: those, gone by now, of whose agreement it did not see the end: they may have come to one.
        freed_s: seconds from the news until it, or another whose vote it saw, waited for no peer; None: unknown.
    """

    step: int = 0
    entered: bool = False
    holds: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    saved: int | None = None
    every: int = 0
    transferred: str = ""
    activated: str = ""
    ready: int = 0
    unsettled: tuple[str, ...] = ()
    freed_s: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What follows from the votes; the same for everybody.

    Attributes:
        step: number of committed steps from now on.
        committing: members that still have to apply the step they hold gradients of.
        sources: members that hold the state.
        receivers: members that need it.
        fresh: nobody holds state; the first member's initial values count, or the checkpoint, if there is one.
        facts: of all members, in their order.
        saved: number of steps in the checkpoint to which all go back where the state is not in memory; the one that
            the first member sees.
        leaving: members that go at the next step boundary: the plan gives them nothing to do, and what only they have
            moves to the others now.
        unsettled: workers that are gone, and may have settled the step in an agreement that not all came to.
    """

    step: int
    committing: tuple[int, ...]
    sources: tuple[int, ...]
    receivers: tuple[int, ...]
    fresh: bool = False
    facts: tuple[dict[str, Any], ...] = ()
    saved: int | None = None
    leaving: tuple[str, ...] = ()
    unsettled: tuple[str, ...] = ()

    @property
    def passed(self) -> int:
        """The first member that had committed all steps before the agreement; if none had, the first that does now."""
        return next((member for member in self.sources if member not in self.committing), self.sources[0])


class Hooks(Protocol):
    """What a training runtime offers, so that it can be recovered, re-planned and moved. All run in its own thread."""

    def vote(self) -> Vote:
        """Says how far it is."""

    def pause(self) -> None:
        """Stops all communication of the generation left behind; nothing of it runs when this returns."""

    def agreed(self, generation: Generation, verdict: Verdict) -> None:
        """Takes note of the agreement; the sequence may be interrupted after it, and then there is another one."""

    def plan(self, generation: Generation, group: Group, verdict: Verdict) -> dict[str, Any]:
        """Chooses how the members go on, all alike; returns the fields of the `decision` event, if there is one.

        Those in `verdict.leaving` are members still, and are to have nothing after this.

        What is not the same on all members, one of them may tell the others over the group.
        """

    def transfer(self, group: Group, verdict: Verdict) -> int:
        """Moves the state to where the plan wants it; returns the bytes that this member received.

        Until `resume` it may be interrupted and begun again, with other members: what this member has must stay whole.
        """

    def resume(self, generation: Generation, group: Group, verdict: Verdict) -> None:
        """Goes on with the next step after `verdict.step` as a member of this generation.

        Where this member was interrupted after its transfer, and another one has resumed, it comes after the `pause`
        and `vote` of the next sequence.
        """
