"""Collectives among the workers of one generation, written over links.

Two algorithms behind one choice, made by the number of members:

- *direct*: every pair has a link. Everyone sends chunk j to its owner j, the owner combines the contributions in member
  order and sends the result to all. Two rounds, and everybody waits for everybody, so a death is noticed at once.
- *ring*: each worker talks to its two neighbours only, 2(n-1) steps. Chunk j starts at member j+1, goes round and
  ends at its owner j: it is combined in the order j+1, j+2, ..., j (modulo n). Small payloads and barriers do not go
  round but up a tree of the members and down again: most of them send and receive one message, where doubling distances
  (Bruck et al., 1997) take log2(n) of each, and most changes of members leave most branches as they are.

Either way the order is fixed and each element is combined in one place, so the result does not depend on timing and is
bitwise the same on all members.
"""

from __future__ import annotations

import contextlib
import json
import struct
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from elaunch.workers.comm.link import Destination
from elaunch.workers.comm.paths import Paths
from elaunch.workers.comm.stream import Messages
from elaunch.workers.comm.traffic import Traffic
from elaunch.workers.comm.transport import Receive, Send, Transport

DIRECT_MEMBERS = 16
"""Up to this many members use `direct`: its n-1 links each are still few, its two rounds beat 2(n-1) ring steps."""

SMALL_BYTES = 32 << 10
"""Up to this size (per tensor) latency dominates: one round in which everyone gets everything saves the second."""

BROADCAST_CHUNK_BYTES = 1 << 20
"""What a ring member passes on while it receives the next."""

BRANCHES = 8
"""Of each member in the tree: two levels for up to 73 members, three for 585."""

_RECORD = struct.Struct("<II")
"""Before a payload where several travel together: the member it is from, and its length."""

Reduction = Literal["sum", "product", "max", "min"]
Buffer = Tensor | memoryview | bytearray

_COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}


def neighbours(members: Sequence[str], me: str) -> tuple[str, ...]:
    """Returns the members to which `me` needs a link for the collectives of a group, in member order."""
    if len(members) <= DIRECT_MEMBERS:
        return tuple(member for member in members if member != me)
    here, size = members.index(me), len(members)
    near = {(here - 1) % size, (here + 1) % size, *_children(here, size)}
    if here:
        near.add(_parent(here))
    return tuple(member for index, member in enumerate(members) if index in near)


def _parent(member: int) -> int:
    return (member - 1) // BRANCHES


def _children(member: int, members: int) -> range:
    first = member * BRANCHES + 1
    return range(min(first, members), min(first + BRANCHES, members))


def is_summed_whole(tensor: Tensor, members: int) -> bool:
    """Returns whether every member adds all of a tensor itself; else each adds its part, and passes that on."""
    return members <= DIRECT_MEMBERS and tensor.nbytes <= SMALL_BYTES


def order_of_sum(owner: int, members: int) -> list[int]:
    """Returns the members in the order in which their summands for the part of one of them are added."""
    if members <= DIRECT_MEMBERS:
        return list(range(members))
    return [(owner + 1 + step) % members for step in range(members)]  # round the ring, the owner's last


def even_counts(elements: int, members: int) -> list[int]:
    """Returns how many of `elements` each member owns when they are cut as evenly as possible."""
    return [(index + 1) * elements // members - index * elements // members for index in range(members)]


class ScratchRows:
    """Scratch tensors in host memory, which is kept from call to call."""

    def __init__(self) -> None:
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def __call__(self, number: int, like: Tensor) -> list[Tensor]:
        """Returns so many tensors of the size and type of a 1-D one; those of the call before are over."""
        n_bytes = number * like.nbytes
        if self._scratch.numel() < n_bytes:
            self._scratch = torch.empty(n_bytes, dtype=torch.uint8)
        flat = self._scratch[:n_bytes].view(like.dtype)
        return list(flat.view(number, like.numel()).unbind(0))


class Group:
    """The ordered `members` of generation `generation`; every member calls the collectives in the same order.

    A member is named by its position. All methods block, and raise `LinkLost` or `GenerationChanged`; then the contents
    of the tensors passed are unspecified, and the group is of no more use: make one for the next generation.

    Groups of one generation that have two members in common, and take turns, need different `number`s.

    Attributes:
        domains: failure domains of members, as far as they have one.
        paths: what state may move over besides links; None: nothing.
    """

    def __init__(
        self,
        transport: Transport,
        generation: int,
        members: Sequence[str],
        number: int = 0,
        domains: Mapping[str, str] | None = None,
    ) -> None:
        self.transport = transport
        self.generation = generation
        self.members = tuple(members)
        self.domains = domains or {}
        self.size = len(self.members)
        self.rank = self.members.index(transport.worker)
        self._direct = self.size <= DIRECT_MEMBERS
        self.number = number
        self.paths: Paths | None = None
        self._first_op = number << 32
        self._others = [member for member in range(self.size) if member != self.rank]
        self._collectives = 0
        self._sent = [0] * self.size
        self._received = [0] * self.size
        self._rows = ScratchRows()

    def neighbours(self) -> tuple[str, ...]:
        """Returns the members to which the collectives have links from the start."""
        return neighbours(self.members, self.transport.worker)

    @property
    def others(self) -> list[str]:
        """Returns all members but this one."""
        return [self.members[rank] for rank in self._others]

    @property
    def branches(self) -> tuple[str | None, tuple[str, ...]]:
        """Returns who is above this member in the tree of all members, None: nobody, and who is below."""
        above = self.members[_parent(self.rank)] if self.rank else None
        return above, tuple(self.members[child] for child in _children(self.rank, self.size))

    def all_reduce(self, tensor: Tensor, scale: float | None = None, reduction: Reduction = "sum") -> None:
        """Replaces the 1-D contiguous `tensor` by the sum over all members, multiplied once by `scale`."""
        _check(tensor, scale)
        if tensor.device.type != "cpu":
            host = tensor.cpu()
            self.all_reduce(host, scale, reduction)
            tensor.copy_(host)
            return
        if is_summed_whole(tensor, self.size):
            self._reduce_whole(tensor.detach(), scale, reduction)
            return
        self.reduce_scatter(tensor, scale=scale, reduction=reduction)
        self.all_gather(tensor)

    def reduce_scatter(
        self,
        tensor: Tensor,
        counts: Sequence[int] | None = None,
        scale: float | None = None,
        reduction: Reduction = "sum",
    ) -> Tensor:
        """Reduces the part of `tensor` that this member owns, in place, and returns a view of it.

        `counts` are the elements that each member owns, in member order; by default `even_counts`. The other parts of
        `tensor` are unspecified afterwards.
        """
        _check(tensor, scale)
        counts = self._counts(tensor, counts)
        if tensor.device.type != "cpu":
            own: Tensor = tensor.split(list(counts))[self.rank]
            own.copy_(self.reduce_scatter(tensor.cpu(), counts, scale, reduction))
            return own
        chunks: list[Tensor] = list(tensor.detach().split(list(counts)))
        own = chunks[self.rank]
        if self.size > 1:
            views = _cut(tensor, counts)
            if self._direct:
                parts = self._rows(self.size - 1, own)
                self._collective(
                    [(peer, 0, views[peer]) for peer in self._others],
                    [(peer, 0, memory(part)) for peer, part in zip(self._others, parts, strict=True)],
                )
                parts.insert(self.rank, own)
                fold(parts, own, reduction)
            else:
                self._ring_reduce(chunks, views, reduction)
        if scale is not None:
            own.mul_(scale)
        return own

    def all_gather(self, tensor: Tensor, counts: Sequence[int] | None = None) -> None:
        """Fills `tensor` with the parts that the members own; `counts` as for `reduce_scatter`."""
        _check(tensor)
        counts = self._counts(tensor, counts)
        if tensor.device.type != "cpu":
            host = tensor.cpu()
            self.all_gather(host, counts)
            tensor.copy_(host)
            return
        if self.size == 1:
            return
        views = _cut(tensor, counts)
        if self._direct:
            own = views[self.rank]
            self._collective(
                [(peer, 0, own) for peer in self._others], [(peer, 0, views[peer]) for peer in self._others]
            )
            return
        op = self._next_op()
        for step in range(self.size - 1):
            outgoing, incoming = (self.rank - step) % self.size, (self.rank - step - 1) % self.size
            self._pass_on(op, step, views[outgoing], views[incoming])

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Returns every member's payload, in member order. For small ones; their lengths may differ."""
        if not self._direct:
            record = _RECORD.pack(self.rank, len(payload)) + payload
            return _payloads(memoryview(self._reduce_by_tree(record, b"".join)))
        gathered = [bytearray() for _ in self.members]
        gathered[self.rank] += payload
        view = memoryview(payload)
        self._collective(
            [(peer, 0, view) for peer in self._others], [(peer, 0, gathered[peer]) for peer in self._others]
        )
        return [bytes(one) for one in gathered]

    def all_gather_json(self, value: Any) -> list[Any]:
        """Returns every member's value, in member order, as JSON gives it back: tuples as lists, keys as texts."""
        return [json.loads(one) for one in self.all_gather_bytes(json.dumps(value).encode())]

    def gather_on_entry(self, value: Any) -> list[Any]:
        """Does what `all_gather_json` does, as the first of a generation: who still waits for this worker in an older
        one hears of that, and comes as well.

        Where all have links to all, what is gathered tells them.
        """
        with contextlib.nullcontext() if self._direct else self.transport.entering(self.generation):
            return self.all_gather_json(value)

    def reduce_bytes(self, payload: bytes, combine: Callable[[Sequence[bytes]], bytes]) -> bytes:
        """Returns what `combine` makes of the payloads of all members; the same on each.

        Args:
            payload: of this member; a small one.
            combine: makes one payload of several. It is associative and commutative, since in a large group members
                combine what is below them in a tree.
        """
        if self._direct:
            return combine(self.all_gather_bytes(payload))
        return self._reduce_by_tree(payload, combine)

    def _reduce_by_tree(self, payload: bytes, combine: Callable[[Sequence[bytes]], bytes]) -> bytes:
        """Goes up (part 0), each member with what it combines of all below it; the whole goes down again (part 1)."""
        op, children = self._next_op(), [self.members[child] for child in _children(self.rank, self.size)]
        below = [bytearray() for _ in children]
        self.transport.exchange(self.generation, op, [], [(child, 0, part) for child, part in zip(children, below)])
        found = combine([payload, *map(bytes, below)])
        if self.rank:
            parent, whole = self.members[_parent(self.rank)], bytearray()
            self.transport.exchange(self.generation, op, [(parent, 0, memoryview(found))], [(parent, 1, whole)])
            found = bytes(whole)
        self.transport.exchange(self.generation, op, [(child, 1, memoryview(found)) for child in children], [])
        return found

    def barrier(self) -> None:
        """Returns when every member has called it."""
        self.all_gather_bytes(b"")

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Replaces `tensor` by the one of member `root`."""
        _check(tensor)
        if tensor.device.type != "cpu":
            host = tensor.cpu()
            self.broadcast(host, root)
            tensor.copy_(host)
            return
        view = memory(tensor)
        if not self._direct:
            self._ring_broadcast(view, root)
        elif len(view) <= SMALL_BYTES or self.size == 2:
            if self.rank == root:
                self._collective([(peer, 0, view) for peer in self._others], [])
            else:
                self._collective([], [(root, 0, view)])
        else:
            # Scattering first makes the root send its tensor once or twice, not n-1 times.
            views = _cut(tensor, even_counts(tensor.numel(), self.size))
            if self.rank == root:
                self._collective([(peer, 0, views[peer]) for peer in self._others], [])
            else:
                self._collective([], [(root, 0, views[self.rank])])
            self.all_gather(tensor)

    def send(self, buffer: Buffer, to: int) -> None:
        """Sends to one member, which calls `receive` (or `exchange`) for it."""
        self.exchange([(to, buffer)], [])

    def receive(self, buffer: Buffer, from_: int) -> None:
        """Fills `buffer` with what one member sends; a bytearray grows by what comes instead."""
        self.exchange([], [(from_, buffer)])

    def exchange(self, sends: Sequence[tuple[int, Buffer]], receives: Sequence[tuple[int, Buffer]]) -> None:
        """Sends and receives at the same time, each pair (member, contiguous buffer).

        Only those who have something to send or receive take part. From one member to another, buffers are matched in
        the order in which they are sent and received between the same two collectives.
        """
        outgoing: list[Send] = []
        incoming: list[Receive] = []
        staged: list[tuple[Tensor, Tensor]] = []
        for peer, buffer in sends:
            view = memoryview(buffer).cast("B") if not isinstance(buffer, Tensor) else memory(buffer.cpu().view(-1))
            outgoing.append((self.members[peer], self._sent[peer], view))
            self._sent[peer] += 1
        for peer, buffer in receives:
            destination: Destination
            if isinstance(buffer, Tensor):
                host = buffer.cpu()
                if host is not buffer:
                    staged.append((buffer, host))
                destination = memory(host.view(-1))
            else:
                destination = buffer if isinstance(buffer, bytearray) else buffer.cast("B")
            incoming.append((self.members[peer], self._received[peer], destination))
            self._received[peer] += 1
        # Odd numbers lie between the collectives before and after.
        self.transport.exchange(self.generation, self._first_op + 2 * self._collectives + 1, outgoing, incoming)
        for device, host in staged:
            device.copy_(host)

    def stream(self, outgoing: Mapping[int, Messages], incoming: Mapping[int, Messages]) -> None:
        """Moves long sequences of messages between members, each made and taken in when its turn comes.

        Every member calls it, also those that exchange nothing. Both ends agree on the sizes of the messages.
        """
        members = self.members
        self.transport.stream(
            self.generation,
            self._next_op(),
            {members[peer]: messages for peer, messages in outgoing.items()},
            {members[peer]: messages for peer, messages in incoming.items()},
        )

    def link_up(self, members: Collection[str]) -> None:
        """Makes the links that an open operation will need to some members (by identity), who call it as well."""
        self.transport.link_up(set(members) - {self.transport.worker}, self.generation)

    def open(self) -> Traffic:
        """Returns an operation to which messages are added over time, between any members with a link (named by
        identity).

        All members open it, in the same order as the collectives, also those that exchange nothing. Until it is closed
        the transport's other operations wait, those of this thread as well. Of several groups with the same members in
        one generation, only one may do this.
        """
        # It listens to peers that may already be in an operation of another group, which must not have its number.
        kin = zlib.crc32("\0".join(self.members).encode())
        return self.transport.open(self.generation, kin << 32 | self._next_op(), self.members)

    def _reduce_whole(self, tensor: Tensor, scale: float | None, reduction: Reduction) -> None:
        if self.size > 1:
            view = memory(tensor)
            parts = self._rows(self.size - 1, tensor)
            self._collective(
                [(peer, 0, view) for peer in self._others],
                [(peer, 0, memory(part)) for peer, part in zip(self._others, parts, strict=True)],
            )
            parts.insert(self.rank, tensor)
            fold(parts, tensor, reduction)
        if scale is not None:
            tensor.mul_(scale)

    def _ring_reduce(self, chunks: list[Tensor], views: list[memoryview], reduction: Reduction) -> None:
        op = self._next_op()
        for step in range(self.size - 1):
            outgoing, incoming = (self.rank - step - 1) % self.size, (self.rank - step - 2) % self.size
            (partial,) = self._rows(1, chunks[incoming])
            self._pass_on(op, step, views[outgoing], memory(partial))
            _COMBINE[reduction](partial, chunks[incoming], out=chunks[incoming])

    def _ring_broadcast(self, view: memoryview, root: int) -> None:
        op = self._next_op()
        distance = (self.rank - root) % self.size
        chunks = [view[lo : lo + BROADCAST_CHUNK_BYTES] for lo in range(0, len(view), BROADCAST_CHUNK_BYTES)]
        left, right = self.members[self.rank - 1], self.members[(self.rank + 1) % self.size]
        for turn in range(len(chunks) + 1):
            sends = [(right, turn - 1, chunks[turn - 1])] if turn > 0 and distance < self.size - 1 else []
            receives = [(left, turn, chunks[turn])] if turn < len(chunks) and distance > 0 else []
            self.transport.exchange(self.generation, op, sends, receives)

    def _pass_on(self, op: int, part: int, outgoing: memoryview, incoming: Destination) -> None:
        left, right = self.members[self.rank - 1], self.members[(self.rank + 1) % self.size]
        self.transport.exchange(self.generation, op, [(right, part, outgoing)], [(left, part, incoming)])

    def _collective(
        self, sends: Sequence[tuple[int, int, memoryview]], receives: Sequence[tuple[int, int, Destination]]
    ) -> None:
        members = self.members
        self.transport.exchange(
            self.generation,
            self._next_op(),
            [(members[peer], part, body) for peer, part, body in sends],
            [(members[peer], part, destination) for peer, part, destination in receives],
        )

    def _next_op(self) -> int:
        self._collectives += 1
        return self._first_op + 2 * self._collectives

    def _counts(self, tensor: Tensor, counts: Sequence[int] | None) -> Sequence[int]:
        if counts is None:
            return even_counts(tensor.numel(), self.size)
        if len(counts) != self.size or sum(counts) != tensor.numel():
            raise ValueError(f"counts {list(counts)} do not cut {tensor.numel()} elements among {self.size} members")
        return counts


def _payloads(records: memoryview) -> list[bytes]:
    """In member order."""
    payloads: dict[int, bytes] = {}
    at = 0
    while at < len(records):
        member, length = _RECORD.unpack_from(records, at)
        at += _RECORD.size + length
        payloads[member] = bytes(records[at - length : at])
    return [payloads[member] for member in sorted(payloads)]


def _check(tensor: Tensor, scale: float | None = None) -> None:
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(f"expected a 1-D contiguous tensor, got {tuple(tensor.shape)} strides {tensor.stride()}")
    if scale is not None and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"a {tensor.dtype} tensor cannot be scaled by {scale}")


def memory(tensor: Tensor) -> memoryview:
    """Returns the bytes of a contiguous tensor in host memory; through uint8, because numpy knows no bfloat16."""
    array: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _cut(tensor: Tensor, counts: Sequence[int]) -> list[memoryview]:
    view, size = memory(tensor), tensor.element_size()
    ends = [end * size for end in accumulate(counts)]
    return [view[lo:hi] for lo, hi in zip([0, *ends], ends, strict=False)]


def fold(parts: Sequence[Tensor], out: Tensor, reduction: Reduction = "sum") -> None:
    """Combines the parts in their order. `out` is one of them; the others are scratch."""
    combine = _COMBINE[reduction]
    total = parts[0]
    for part in parts[1:-1]:
        total = combine(total, part, out=total)
    combine(total, parts[-1], out=out)
