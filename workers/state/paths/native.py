"""State over a native group, from device to device.

The messages of a stage go in rounds: the k-th of each pair of members in one exchange. So all go through the same order
of exchanges, and nobody waits for one that waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from elaunch.errors import CollectiveFailed
from elaunch.workers import heartbeat
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.native import ended
from elaunch.workers.comm.native.bulk import Bulk
from elaunch.workers.comm.paths import Parcel, Parcels
from elaunch.workers.state.paths.codes import CODE_BYTES, code_of
from elaunch.workers.state.paths.links import damaged
from elaunch.workers.state.paths.packing import flat_of, pack, room_for, unpack

MESSAGE_BYTES = 32 << 20
"""A device's connection takes some megabytes to come to its rate."""


@dataclass(eq=False)
class _Round:
    """One exchange under way: its works, what has to be copied when they are done, and the memory beside the state."""

    works: Sequence[dist.Work]
    came: list[tuple[int, Parcel, Tensor]] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    scratch_bytes: int = 0


class NativePath:
    """A native group of all members.

    Args:
        bulk: the native group.
        group: of the same members, in the same order.
        device: where the native group takes tensors from.
        bounded: whether memory is short: then one round is under way at a time, else two.
        failed: called with the generation when the native group failed.
    """

    name = "native"
    message_bytes = MESSAGE_BYTES
    poll_s = ended.POLL_S

    def __init__(
        self, bulk: Bulk, group: Group, device: torch.device, bounded: bool, failed: Callable[[int], None]
    ) -> None:
        self._bulk, self._group, self._device, self._failed = bulk, group, device, failed
        self._at_a_time = 1 if bounded else 2
        self._others = group.others
        self._under_way: deque[_Round] = deque()
        self._nothing = torch.empty(0, dtype=torch.uint8, device=device)

    def move(self, outgoing: Parcels, incoming: Parcels, checksum: bool, hold: Callable[[int], None]) -> None:
        """Moves messages; on a device, whatever it is given next comes after them."""
        sends, receives = dict(outgoing), dict(incoming)
        told: dict[int, list[Tensor]] = {rank: [] for rank in outgoing}
        found: dict[int, list[tuple[str, Tensor]]] = {rank: [] for rank in incoming}
        with self._interruptible():
            while sends or receives:
                one = self._begin(_next_of(sends), _next_of(receives), told if checksum else None, hold)
                if one is None:
                    break
                self._under_way.append(one)
                if len(self._under_way) >= self._at_a_time:
                    self._end_first(found if checksum else None, hold)
            while self._under_way:
                self._end_first(found if checksum else None, hold)
            if checksum:
                self._compare(told, found)

    def finish(self) -> None:
        """Waits for the device, and asks the group then: one that was freed by an abort goes on with garbage."""
        with self._interruptible():
            if self._device.type != "cpu":
                done = ended.here(self._device)
                errored, fail = self._bulk.errored, self._bulk.poison
                ended.reach(self._device, done, errored, look=self._look, failed=fail, poll_s=self.poll_s)
            if wrong := self._bulk.errored():
                raise RuntimeError(wrong)

    def close(self) -> None:
        """Does nothing: the native group stays until the state has moved on all members."""

    def _begin(
        self,
        sends: dict[int, Parcel],
        receives: dict[int, Parcel],
        told: dict[int, list[Tensor]] | None,
        hold: Callable[[int], None],
    ) -> _Round | None:
        """Begins the next round; None: there is nothing left."""
        if not sends and not receives:
            return None
        one = _Round(())
        out, into = [self._nothing] * self._group.size, [self._nothing] * self._group.size
        for rank, parcel in receives.items():
            place = flat_of(parcel.views, self._device)
            into[rank] = place if place is not None else self._room(parcel.views, one)
            one.came.append((rank, parcel, into[rank]))
        for rank, parcel in sends.items():
            flat = flat_of(parcel.views, self._device)
            if flat is None:
                flat = self._room(parcel.views, one)
                pack(flat, parcel.views)
            out[rank] = flat
            if told is not None:
                told[rank].append(code_of(flat))
        one.kept = [*out, *into]
        hold(one.scratch_bytes)
        one.works = self._bulk.exchange(out, into)
        return one

    def _end_first(self, found: dict[int, list[tuple[str, Tensor]]] | None, hold: Callable[[int], None]) -> None:
        """Has what has come in the first round put where it belongs."""
        one = self._under_way[0]
        for work in one.works:
            self._wait(work)
        self._under_way.popleft()
        for rank, parcel, flat in one.came:
            if found is not None:
                found[rank].append((parcel.name, code_of(flat)))
            if flat_of(parcel.views, self._device) is None:
                unpack(flat, parcel.views)
        hold(-one.scratch_bytes)

    def _compare(self, told: dict[int, list[Tensor]], found: dict[int, list[tuple[str, Tensor]]]) -> None:
        """Exchanges the checksums of all messages of the stage, and compares them."""
        out, into = [self._nothing] * self._group.size, [self._nothing] * self._group.size
        for rank, codes in told.items():
            out[rank] = torch.cat(codes).to(self._device)
        for rank, named in found.items():
            into[rank] = torch.empty(CODE_BYTES * len(named), dtype=torch.uint8, device=self._device)
        if not told and not found:
            return
        works = self._bulk.exchange(out, into)
        self._under_way.append(_Round(works, kept=[*out, *into]))
        for work in works:
            self._wait(work)
        self._under_way.clear()
        for rank, named in found.items():
            same = (torch.stack([code for _, code in named]) == into[rank].view(-1, CODE_BYTES)).all(1)
            # To read a result of a group that failed would be to find damage in garbage.
            self.finish()
            for (name, _), is_same in zip(named, same.tolist(), strict=True):
                if not is_same:
                    raise damaged(name, self._group.members[rank])

    def _room(self, views: Sequence[Tensor], one: _Round) -> Tensor:
        flat = room_for(views, self._device)
        one.scratch_bytes += flat.nbytes
        return flat

    def _wait(self, work: dist.Work) -> None:
        if self._device.type == "cpu":
            ended.wait(work, self._look)
        else:
            work.wait()  # by its stream

    def _look(self) -> None:
        self._group.transport.check(self._others)

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Whatever goes wrong, nothing writes into the tensors after it: then the native group is over."""
        with heartbeat.waiting(self._others, self._group.generation):
            try:
                yield
            except BaseException as error:
                self._bulk.poison()
                ended.drop([work for one in self._under_way for work in one.works], self._device.type == "cpu")
                self._under_way.clear()
                if not isinstance(error, RuntimeError):
                    raise
                self._failed(self._group.generation)
                raise CollectiveFailed(self._group.generation, str(error)) from error


def _next_of(parcels: dict[int, Iterator[Parcel]]) -> dict[int, Parcel]:
    """The next message of each peer; those that have no more are taken out."""
    found = {}
    for rank in list(parcels):
        parcel = next(parcels[rank], None)
        if parcel is None:
            del parcels[rank]
        else:
            found[rank] = parcel
    return found
