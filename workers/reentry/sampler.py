"""Deals the samples of each step to the members there are, whoever they are.

Which samples a step uses is the business of whoever subclasses `StepSampler`: an order of its own, that of accelerate's
sampler, or that of Lightning's. Everything after that is here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from elaunch.plan.shares import share


@dataclass(frozen=True, slots=True)
class MemberBatch:
    """One batch of one member.

    Attributes:
        ids: its samples.
        weight: how much the mean over them counts: the mean of all batches of a step, each times its weight, is the
            mean over the samples of the step.
        step_ids: the samples of the step, over all members.
    """

    ids: tuple[int, ...]
    weight: float
    step_ids: tuple[int, ...]


def deal_samples(
    step_ids: Sequence[int], rank: int, size: int, n_batches: int = 1, *, interleaved: bool = False
) -> list[MemberBatch]:
    """Returns the batches of a member in a step.

    Each member takes part in each step: one for whom there is no sample has one of another member's, at weight 0.

    Args:
        step_ids: the samples of the step, at least one.
        rank: of the member.
        size: number of members.
        n_batches: of each member; no more than it has samples, unless it has none.
        interleaved: whether a member has every size-th sample; else it has neighbours.
    """
    whole = tuple(step_ids)
    places = range(len(whole))[rank::size] if interleaved else share(len(whole), size, rank)
    if not places:
        return [MemberBatch((whole[rank % len(whole)],), 0.0, whole)] * n_batches
    batches = []
    for number in range(n_batches):
        part = share(len(places), n_batches, number)
        ids = tuple(whole[places[index]] for index in part)
        batches.append(MemberBatch(ids, len(ids) * size * n_batches / len(whole), whole))
    return batches


class StepSampler(ABC):
    """A batch sampler of a DataLoader: the batches of one member, step by step.

    Args:
        rank: of the member.
        size: number of members.
        interleaved: whether a member has every size-th sample of a step; else it has neighbours.
    """

    def __init__(self, rank: int, size: int, *, interleaved: bool = False) -> None:
        self.rank, self.size = rank, size
        self._interleaved = interleaved
        self._drawn: dict[int, list[MemberBatch]] = {}

    @abstractmethod
    def steps(self) -> Iterator[tuple[int, Sequence[int]]]:
        """Yields a number for each step, which grows, and its samples over all members, which are at least one."""

    def count_batches(self, n_samples: int) -> int:
        """Returns how many batches each member has in a step of so many samples."""
        return 1

    def __iter__(self) -> Iterator[list[int]]:
        self._drawn.clear()
        for number, ids in self.steps():
            n_batches = self.count_batches(len(ids))
            batches = deal_samples(ids, self.rank, self.size, n_batches, interleaved=self._interleaved)
            self._drawn[number] = batches
            for batch in batches:
                yield list(batch.ids)

    def drawn(self, number: int) -> list[MemberBatch]:
        """Returns the batches of a step that the loader has begun to draw, and forgets those of the steps before."""
        for older in [one for one in self._drawn if one < number]:
            del self._drawn[older]
        return self._drawn.get(number, [])

    def beside(self, contents: Iterable[Any]) -> Iterator[tuple[int, MemberBatch, Any]]:
        """Yields what a loader of these batches loads, with the number of the step and the batch that it is of.

        Each member has one batch in a step.
        """
        for content in contents:
            number = next(iter(self._drawn))
            (batch,) = self._drawn.pop(number)
            yield number, batch, content
