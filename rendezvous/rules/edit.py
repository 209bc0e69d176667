"""How one generation follows from another: what all nodes are told of a change, in the stead of the whole list. Pure.

A generation of n workers is O(n) bytes, and n nodes that read it O(n²). So the leader writes beside it, in the same
transaction, what has changed. Whoever knows the generation before makes the new one from that; whoever does not, or
finds that the outcome is another one than the leader's, reads the whole generation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace

from elaunch.rendezvous.membership import Generation, RequestedPlan, Worker

_DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True)
class GenerationEdit:
    """What makes a generation of the one before.

    Attributes:
        former: number of the generation before, or its own, of which less is to be kept; 0: none is said, and the
            generation has to be read as a whole.
        after: the generation, without its workers, and without what is the same as before.
        without: ranks that the workers had in the former generation that are not in this one.
        joined: workers that come after the others.
        same_roles: whether its roles are those of the former.
        same_plan: whether the plan that was asked for is that of the former.
        digest: of the identities of its workers.
    """

    former: int
    after: Generation
    without: tuple[int, ...] = ()
    joined: tuple[Worker, ...] = ()
    same_roles: bool = False
    same_plan: bool = False
    digest: str = ""


def edit_between(former: Generation | None, after: Generation) -> GenerationEdit:
    """Returns what makes one generation of another, which is known to whoever is to be told."""
    whole = GenerationEdit(0, Generation(after.number, after.stage))
    if former is None or former.number > after.number:
        return whole
    kept = tuple(worker for worker in former.workers if worker.id in after.ranks)
    if after.workers[: len(kept)] != kept:
        return whole  # another order, or another address
    same_roles, same_plan = former.roles == after.roles, former.requested_plan == after.requested_plan
    return GenerationEdit(
        former.number,
        replace(
            after,
            workers=(),
            roles=() if same_roles else after.roles,
            requested_plan=RequestedPlan() if same_plan else after.requested_plan,
        ),
        tuple(rank for rank, worker in enumerate(former.ids) if worker not in after.ranks),
        after.workers[len(kept) :],
        same_roles,
        same_plan,
        _digest(after.ids),
    )


def follow(former: Generation | None, edit: GenerationEdit) -> Generation | None:
    """Returns the generation that an edit makes of another; None: it is not made for that one, and has to be read."""
    if former is None or edit.former != former.number:
        return None
    gone = frozenset(edit.without)
    kept = tuple(worker for rank, worker in enumerate(former.workers) if rank not in gone)
    after = replace(
        edit.after,
        workers=(*kept, *edit.joined),
        roles=former.roles if edit.same_roles else edit.after.roles,
        requested_plan=former.requested_plan if edit.same_plan else edit.after.requested_plan,
    )
    return after if _digest(after.ids) == edit.digest else None


def _digest(ids: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(ids).encode(), digest_size=_DIGEST_BYTES).hexdigest()
