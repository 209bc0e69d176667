"""The batches of torchtitan's data-parallel ranks, dealt out among however many members there are.

Each rank that the job had at its start has a stream of batches of its own, which nobody but its loader can tell. So
the streams stay as they are, and an update uses the same batches of each, whoever reads them. Members keep the place in
a stream after each update. Now and then they tell the others, so that the stream of one that dies can be read on.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from elaunch.errors import UsageError

SNAPSHOTS = 4
"""Of a stream that are kept: a commit may not count, nor may the one before."""

SHARE_EVERY = 16
"""Updates from one time that members tell each other where their streams are to the next; more if there are more
streams: as many."""

Batch = tuple[dict[str, Any], torch.Tensor]


@dataclass(frozen=True)
class StreamLayout:
    """What a job keeps from its start.

    Attributes:
        streams: data-parallel ranks.
        accumulation: batches of each of them in an update.
        shards: members that share one copy of the model, of those ranks.
    """

    streams: int
    accumulation: int
    shards: int

    @property
    def n_batches(self) -> int:
        """Returns the number of batches of an update."""
        return self.streams * self.accumulation

    def rounds(self, size: int) -> int:
        """Returns how many batches each of so many data-parallel ranks goes through in an update."""
        return -(-self.n_batches // size)

    def own(self, rank: int, size: int) -> range:
        """Returns which batches of an update a data-parallel rank has, counted stream by stream."""
        return range(rank * self.n_batches // size, (rank + 1) * self.n_batches // size)

    def read(self, rank: int, size: int) -> range:
        """Returns the streams that a data-parallel rank reads. One without a batch needs one for its shape."""
        own = self.own(rank, size)
        first = min(own.start, self.n_batches - 1) // self.accumulation
        return range(first, max(first, (own.stop - 1) // self.accumulation) + 1)


def degrees(replicas: int, shards_at_start: int, size: int) -> tuple[int, int]:
    """Returns how many copies of a model so many data-parallel ranks have, and how many of them share one.

    Args:
        replicas: as configured; fewer where the ranks cannot be divided by it.
        shards_at_start: with fewer than these a rank would have more of the model.
        size: data-parallel ranks.
    """
    fitting = [n for n in range(replicas, 1, -1) if size % n == 0 and size // n >= shards_at_start]
    n_replicas = fitting[0] if fitting else 1
    return n_replicas, size // n_replicas


class Streams:
    """The loaders of the streams that one data-parallel rank reads; to torchtitan it is one loader.

    Its state has that of each stream under the name that torchtitan gives it, so checkpoints are those of as many ranks
    as there are streams.

    Args:
        layout: of the job.
        rank, size: this data-parallel rank, of how many.
        build: makes the loader of a stream.
        ignored: the label that does not count.
    """

    def __init__(self, layout: StreamLayout, rank: int, size: int, build: Callable[[int], Any], ignored: int) -> None:
        self.layout, self.ignored = layout, ignored
        self.own, self.rounds = layout.own(rank, size), layout.rounds(size)
        self.read = layout.read(rank, size)
        self.loaders = {stream: build(stream) for stream in self.read}
        self._iterators: dict[int, Iterator[Batch]] = {}

    def __iter__(self) -> Iterator[Batch]:
        """Yields the batches of this rank in one update after the other; each update has as many on all ranks."""
        while True:
            update = self._draw()
            if update is None:
                return
            own = [batch for number, batch in update if number in self.own]
            yield from own
            inputs, labels = update[0][1]
            for _ in range(self.rounds - len(own)):
                yield dict(inputs), torch.full_like(labels, self.ignored)

    def skip(self, stream: int, updates: int) -> None:
        """Reads on in a stream, and drops what the updates have used."""
        for _ in range(updates * self.layout.accumulation):
            next(self._iterator(stream), None)

    def _draw(self) -> list[tuple[int, Batch]] | None:
        update = []
        for stream in self.loaders:
            for number in range(self.layout.accumulation):
                batch = next(self._iterator(stream), None)
                if batch is None:
                    return None
                update.append((stream * self.layout.accumulation + number, batch))
        return update

    def _iterator(self, stream: int) -> Iterator[Batch]:
        if stream not in self._iterators:
            self._iterators[stream] = iter(self.loaders[stream])
        return self._iterators[stream]

    def snapshots(self) -> dict[int, str]:
        """Returns where each of the streams is."""
        return {stream: _packed(loader.state_dict()) for stream, loader in self.loaders.items()}

    def load_snapshot(self, stream: int, snapshot: str) -> None:
        """Goes to where a stream was."""
        self.loaders[stream].load_state_dict(_unpacked(snapshot))

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of all streams that are read here, as in a checkpoint of torchtitan's."""
        return {key: value for loader in self.loaders.values() for key, value in loader.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint."""
        for loader in self.loaders.values():
            loader.load_state_dict(dict(state))


class Places:
    """Where streams were after which update: what this process knows, from one entry to the next."""

    def __init__(self) -> None:
        self._known: dict[int, dict[int, str]] = {}

    def forget(self) -> None:
        """Forgets all of them."""
        self._known.clear()

    def keep(self, step: int, snapshots: Mapping[int, str]) -> None:
        """Keeps where streams are after so many updates."""
        for stream, snapshot in snapshots.items():
            known = self._known.setdefault(stream, {})
            known[step] = snapshot
            for old in sorted(known)[:-SNAPSHOTS]:
                del known[old]

    def share(self, step: int, snapshots: Mapping[int, str], gather: Callable[[Any], list[Any]]) -> None:
        """Has all members know where all streams are after so many updates."""
        for told in gather(snapshots):
            self.keep(step, {int(stream): snapshot for stream, snapshot in told.items()})

    def find(self, step: int, read: range, rank: int, gather: Callable[[Any], list[Any]]) -> dict[int, tuple[int, str]]:
        """Returns, for streams, the latest place that any member knows, and after which update that was.

        Those are missing that nobody knows: all streams are, before the first update.

        Args:
            step: updates that have committed.
            read: the streams.
            rank: of this member, among those that `gather` returns the values of.
            gather: returns what each member gives, as JSON.
        """
        self._known = {
            stream: {at: it for at, it in known.items() if at <= step} for stream, known in self._known.items()
        }
        latest = {stream: max(known) for stream, known in self._known.items() if known}
        notes = gather({"latest": [*latest.items()], "read": [read.start, read.stop]})
        lent = [stream for stream, lender in _lenders(notes).items() if lender == rank]
        for told in gather([[stream, latest[stream], self._known[stream][latest[stream]]] for stream in lent]):
            for stream, at, snapshot in told:
                self.keep(at, {stream: snapshot})
        found = {stream: self._known.get(stream, {}) for stream in read}
        return {stream: (max(known), known[max(known)]) for stream, known in found.items() if known}


def _lenders(notes: list[Any]) -> dict[int, int]:
    """Returns who tells where a stream is, for each that is read by a member which does not know that, or less far."""
    latest = [dict(note["latest"]) for note in notes]
    best: dict[int, int] = {}
    for rank, known in enumerate(latest):
        for stream, at in known.items():
            if stream not in best or at > latest[best[stream]][stream]:
                best[stream] = rank
    return {
        stream: lender
        for stream, lender in best.items()
        if any(
            stream in range(*note["read"]) and known.get(stream) != latest[lender][stream]
            for note, known in zip(notes, latest)
        )
    }


def _packed(state: Mapping[str, Any]) -> str:
    """Returns the state of a loader as JSON."""
    coded = {
        key: {"bytes": base64.b64encode(one).decode()} if isinstance(one, bytes) else {"value": one}
        for key, one in state.items()
    }
    try:
        return json.dumps(coded)
    except TypeError as error:
        raise UsageError(f"the data loader's state_dict() holds neither bytes nor JSON: {error}") from error


def _unpacked(text: str) -> dict[str, Any]:
    coded: dict[str, dict[str, Any]] = json.loads(text)
    return {key: base64.b64decode(one["bytes"]) if "bytes" in one else one["value"] for key, one in coded.items()}
