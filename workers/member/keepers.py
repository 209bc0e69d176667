"""Which workers keep copies of whose state: others than the ones that are lost together with it. Pure.

A *place* is what may be lost at once. Where the workers are in several failure domains (`--failure-domain`), places are
those; else they are the nodes. Each worker's copy is in another place:

    no place has more than half of the workers    each keeps one copy, of one worker
    one place has more                            its copies are shared out evenly over all others, theirs over it
    there is one place                            the next worker keeps it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from elaunch.rendezvous.membership import node_of

Place = Callable[[str], str]
"""Gives the place of a worker."""


def place_in(workers: Sequence[str], domains: Mapping[str, str]) -> Place:
    """Returns what gives the places of workers.

    Args:
        workers: all of them.
        domains: the failure domains of those that have one; for each other one its node is its domain.
    """

    def domain(worker: str) -> str:
        return domains.get(worker) or node_of(worker)

    return domain if len(set(map(domain, workers))) > 1 else node_of


class KeeperRing:
    """The workers in an order in which those of a place stand together, the last one before the first.

    Args:
        workers: in the order of the plan or of the generation.
        place: of each of them.
    """

    def __init__(self, workers: Sequence[str], place: Place = node_of) -> None:
        self._place = place
        groups: dict[str, dict[str, list[str]]] = {}
        for worker in workers:
            groups.setdefault(place(worker), {}).setdefault(node_of(worker), []).append(worker)
        blocks = [[worker for node in nodes.values() for worker in node] for nodes in groups.values()]
        self._ring = [worker for block in blocks for worker in block]
        self._at = {worker: at for at, worker in enumerate(self._ring)}
        self._largest = max(blocks, key=len, default=[])
        inside = set(self._largest)
        self._outside = [worker for worker in self._ring if worker not in inside]
        self._rank_outside = {worker: rank for rank, worker in enumerate(self._outside)}

    def keepers(self, worker: str, copies: int) -> tuple[str, ...]:
        """Returns who keeps the copies of a worker: in as many other places as there are, and on as many nodes."""
        kept: list[str] = []
        for key in (self._place, node_of, str):
            seen = {key(worker), *map(key, kept)}
            for one in self._order(worker) if len(kept) < copies else ():
                if key(one) not in seen:
                    kept.append(one)
                    seen.add(key(one))
                    if len(kept) == copies:
                        break
        return tuple(kept)

    def _order(self, worker: str) -> Iterator[str]:
        """Yields all others, some of them twice, in the order in which they are asked."""
        size, step, at = len(self._ring), len(self._largest), self._at[worker]
        if step * 2 <= size:
            yield from (self._ring[(at + by) % size] for by in range(step, size, step))
        elif worker not in self._rank_outside:
            begin = self._largest.index(worker) % max(1, len(self._outside))
            yield from self._outside[begin:]
            yield from self._outside[:begin]
        else:
            yield self._largest[self._rank_outside[worker] % step]
        yield from (self._ring[(at + by) % size] for by in range(1, size))
