"""Tensors over native groups, from device to device."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from elaunch.errors import CollectiveFailed
from elaunch.workers import heartbeat
from elaunch.workers.comm.native import ended
from elaunch.workers.comm.native.bulk import Bulk
from elaunch.workers.comm.native.opening import GroupKey
from elaunch.workers.layers.carry.routes import Bundle, NativeRoutes, rows_key, tp_key

Place = tuple[str, int]
"""A peer, and the part that goes to it or comes from it."""


@dataclass(eq=False)
class _Exchange:
    """A bundle of this operation: the places of this worker's messages, and their tensors as they become known."""

    bundle: Bundle
    sends: list[Place]
    receives: list[Place]
    given: dict[Place, Tensor] = field(default_factory=dict)
    posted: dict[Place, Tensor] = field(default_factory=dict)
    works: Sequence[dist.Work] | None = None
    kept: list[Tensor] = field(default_factory=list)
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def is_ready(self) -> bool:
        return len(self.given) == len(self.sends) and len(self.posted) == len(self.receives)


class NativeCarrier:
    """Carries tensors in the native groups of a plan.

    Each group has one order, the same at both ends: rows come as their sender makes them, so they are received in that
    order whatever the order in which they are needed; bundles leave in the order of `NativeRoutes`, each when it is
    complete.

    Args:
        routes: of this worker.
        bundles: of the operation: those of a step, or of new parameters.
        bulks: the groups that are in use.
        device: of all tensors.
        generation: of the groups, for messages.
        exact: whether sums have a fixed order.
        failed: called with the generation when a native group failed.
    """

    def __init__(
        self,
        routes: NativeRoutes,
        bundles: Sequence[Bundle],
        bulks: Mapping[GroupKey, Bulk],
        device: torch.device,
        generation: int,
        exact: bool,
        failed: Callable[[int], None],
    ) -> None:
        self._routes, self._bulks, self._device, self._exact = routes, bulks, device, exact
        self._generation, self._failed = generation, failed
        worker = routes.worker
        self._queues: dict[GroupKey, deque[_Exchange]] = {}
        self._sends: dict[Place, _Exchange] = {}
        self._receives: dict[Place, _Exchange] = {}
        for bundle in bundles:
            sends = [(to, part) for sender, to, part in bundle.messages if sender == worker]
            receives = [(sender, part) for sender, to, part in bundle.messages if to == worker]
            one = _Exchange(bundle, sends, receives)
            self._queues.setdefault(bundle.key, deque()).append(one)
            self._sends |= dict.fromkeys(sends, one)
            self._receives |= dict.fromkeys(receives, one)
        self._posted: dict[Place, Tensor] = {}
        self._begun: dict[str, int] = {}
        self._coming: dict[Place, dist.Work] = {}
        # Whatever has begun and may still use a tensor; those of a device are freed by their streams.
        self._under_way: deque[tuple[dist.Work, Tensor | None]] = deque()

    def post(self, peer: str, part: int, tensor: Tensor) -> None:
        """Begins to receive a part, as soon as all that comes before it in its group is received."""
        one = self._receives.get((peer, part))
        if one is not None:
            one.posted[peer, part] = tensor
            self._advance(one.bundle.key)
            return
        self._posted[peer, part] = tensor
        parts, bulk = self._routes.incoming[peer], self._bulks[rows_key(peer, self._routes.worker)]
        at = self._begun.get(peer, 0)
        while at < len(parts) and (next_one := self._posted.pop((peer, parts[at]), None)) is not None:
            with self._failing():
                work = bulk.receive(next_one, 0)
            self._coming[peer, parts[at]] = work
            self._under_way.append((work, next_one))
            at += 1
        self._begun[peer] = at

    def before(self, peer: str, part: int) -> Sequence[int]:
        """Returns the parts that must be posted for this one to be received."""
        if (peer, part) in self._receives or (peer, part) in self._coming:
            return ()
        parts = self._routes.incoming[peer]
        earlier = parts[self._begun.get(peer, 0) : parts.index(part)]
        return [one for one in earlier if (peer, one) not in self._posted]

    def send(self, peer: str, part: int, tensor: Tensor) -> None:
        """Begins to send a part; one of a bundle leaves when that is complete."""
        one = self._sends.get((peer, part))
        if one is not None:
            one.given[peer, part] = tensor
            self._advance(one.bundle.key)
            return
        while self._under_way and self._under_way[0][0].is_completed():
            self._under_way.popleft()
        with self._failing():
            work = self._bulks[rows_key(self._routes.worker, peer)].send(tensor, 1)
        self._under_way.append((work, tensor))

    def wait(self, peer: str, part: int) -> None:
        """Has what follows come after the arrival of a part."""
        one = self._receives.get((peer, part))
        if one is None:
            self._wait([self._coming.pop((peer, part))], [peer])
            return
        assert one.works is not None, f"part {part} from {peer} is awaited before its bundle is complete"
        self._wait(one.works, one.bundle.key.members)
        for tensor, came in one.copies:
            tensor.copy_(came)
        one.works, one.copies = (), []

    def arrived(self, peer: str, part: int) -> bool:
        """Returns whether the operation that brings a part is over."""
        one = self._receives.get((peer, part))
        if one is None:
            work = self._coming.get((peer, part))
            return work is not None and work.is_completed()
        return one.works is not None and all(work.is_completed() for work in one.works)

    def exchange(
        self, workers: Sequence[str], part: int, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]
    ) -> None:
        """Exchanges flat tensors with the other members of a tensor-parallel group."""
        own = [other == self._routes.worker for other in workers]
        out = [one[:0] if is_own else one for one, is_own in zip(outgoing, own, strict=True)]
        into = [one[:0] if is_own else one for one, is_own in zip(incoming, own, strict=True)]
        with self._failing():
            works = self._bulks[tp_key(workers)].exchange(out, into)
        self._wait(works, workers)

    def all_reduce(self, workers: Sequence[str], tensor: Tensor) -> Tensor | None:
        """Sums over a tensor-parallel group, unless sums have a fixed order."""
        if self._exact:
            return None
        total = tensor.clone()
        with self._failing():
            work = self._bulks[tp_key(workers)].all_reduce(total)
        if self._device.type != "cpu":
            self._under_way.append((work, total))  # so that `drop` comes after it if it is given up
        self._wait([work], workers)
        if self._device.type != "cpu":
            self._under_way.pop()
        return total

    def finish(self) -> None:
        """Waits for all, on a device to the end of what it does, and asks the groups then whether it counts.

        A stream that is freed by an abort goes on with garbage.
        """
        left = next((one for queue in self._queues.values() for one in queue), None)
        assert left is None, f"{left} was never complete"
        self._wait([work for work, _ in self._under_way], ())
        self._under_way.clear()
        with self._failing():
            if self._device.type != "cpu":
                others = {peer for key in self._bulks for peer in key.members} - {self._routes.worker}
                with heartbeat.waiting(others, self._generation):
                    ended.reach(self._device, ended.here(self._device), self._errored, failed=self._poison)
            if wrong := self._errored():
                raise RuntimeError(wrong)
        self._sends.clear()
        self._receives.clear()

    def drop(self) -> None:
        """Has what follows come after all that is under way, which the poisoned groups have freed."""
        ended.drop([work for work, _ in self._under_way], on_host=self._device.type == "cpu")
        self._under_way.clear()

    def _advance(self, key: GroupKey) -> None:
        """Begins the bundles of a group that are complete, in their order."""
        queue, bulk = self._queues[key], self._bulks[key]
        while queue and queue[0].is_ready:
            one = queue.popleft()
            outgoing = [_joined([one.given[at] for at in one.sends if at[0] == peer]) for peer in key.members]
            incoming = [self._room(one, peer) for peer in key.members]
            like = next(iter((*one.given.values(), *one.posted.values())))
            nothing = like.new_empty(0)
            out = [nothing if tensor is None else tensor for tensor in outgoing]
            into = [nothing if tensor is None else tensor for tensor in incoming]
            with self._failing():
                one.works = bulk.exchange(out, into)
            one.kept = [*out, *into]
            self._under_way += [(work, None) for work in one.works]

    def _room(self, one: _Exchange, peer: str) -> Tensor | None:
        """Memory for all that comes from a peer: where it belongs if it is one message, else to be copied from."""
        tensors = [one.posted[at] for at in one.receives if at[0] == peer]
        if len(tensors) < 2:
            return tensors[0].view(-1) if tensors else None
        whole = tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))
        came = whole.split([tensor.numel() for tensor in tensors])
        one.copies += [(tensor, part.view(tensor.shape)) for tensor, part in zip(tensors, came, strict=True)]
        return whole

    def _wait(self, works: Sequence[dist.Work], peers: Sequence[str]) -> None:
        """Waits for some works, and names these peers meanwhile."""
        others = [peer for peer in peers if peer != self._routes.worker]
        with heartbeat.waiting(others, self._generation), self._failing():
            for work in works:
                work.wait()

    def _poison(self) -> None:
        """A group's error does not free the device of what was issued in it, or in the others after it."""
        for bulk in self._bulks.values():
            bulk.poison()

    def _errored(self) -> str | None:
        return next((wrong for bulk in self._bulks.values() if (wrong := bulk.errored())), None)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # of torch's groups
            self._failed(self._generation)
            raise CollectiveFailed(self._generation, str(error)) from error


def _joined(tensors: Sequence[Tensor]) -> Tensor | None:
    if len(tensors) < 2:
        return tensors[0].view(-1) if tensors else None
    return torch.cat([tensor.view(-1) for tensor in tensors])
