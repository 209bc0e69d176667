"""Streams of batches, dealt out among changing members: each update has the same batches, and nothing is read twice."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elaunch.integrations.streams import Places, StreamLayout, Streams, degrees

IGNORED = -100


class Loader:
    """Counts; its state is where it is."""

    def __init__(self, stream: int) -> None:
        self.stream, self.position = stream, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.position += 1
            yield {"input": torch.tensor([self.stream])}, torch.tensor([self.stream, self.position - 1])

    def state_dict(self) -> dict[str, Any]:
        return {f"dp_rank_{self.stream}": str(self.position).encode(), "world_size": [7]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["world_size"] == [7]
        self.position = int(state[f"dp_rank_{self.stream}"])


class Gathering:
    """What members give one another, each in a thread of its own."""

    def __init__(self, size: int) -> None:
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=30)

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        told = list(self._values)
        self._barrier.wait()
        return told


def train(layout: StreamLayout, size: int, places: list[Places], done: int, until: int) -> list[list[tuple[int, int]]]:
    """One generation: members go on from a number of updates, to another; returns the labels of each update."""
    gathering = Gathering(size)
    labels: list[list[list[tuple[int, int]]]] = [[] for _ in range(size)]

    def member(rank: int) -> None:
        def gather(value: Any) -> list[Any]:
            return gathering.gather(rank, value)

        streams = Streams(layout, rank, size, Loader, IGNORED)
        for stream, (at, snapshot) in places[rank].find(done, streams.read, rank, gather).items():
            streams.load_snapshot(stream, snapshot)
            streams.skip(stream, done - at)
        places[rank].share(done, streams.snapshots(), gather)
        batches = iter(streams)
        for step in range(done + 1, until + 1):
            update = [next(batches)[1] for _ in range(streams.rounds)]
            labels[rank].append([(int(one[0]), int(one[1])) for one in update if int(one[0]) != IGNORED])
            places[rank].keep(step, streams.snapshots())
            if step % 3 == 0:
                places[rank].share(step, streams.snapshots(), gather)

    threads = [threading.Thread(target=member, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [sorted(label for one in labels for label in one[step]) for step in range(until - done)]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 8), st.booleans()), min_size=1, max_size=5),
)
def test_each_update_has_the_same_batches_whoever_reads_them(
    n_streams: int, accumulation: int, generations: list[tuple[int, int, bool]]
) -> None:
    layout = StreamLayout(n_streams, accumulation, 1)
    places: list[Places] = []
    done, found = 0, []
    for size, updates, loses_one in generations:
        # Some stay, in their order; others are new and know nothing. One at least has been there before.
        places = places[:size] + [Places() for _ in range(size - len(places))]
        found += train(layout, size, places, done, done + updates)
        done += updates
        if loses_one:  # the last update was not committed, and the first of them is gone
            done -= 1
            found.pop()
        places = places[1:] if len(places) > 1 else places
    expected = [
        sorted((stream, step * accumulation + number) for stream in range(n_streams) for number in range(accumulation))
        for step in range(done)
    ]
    assert found == expected


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 12))
def test_batches_are_dealt_out_evenly_and_once(n_streams: int, accumulation: int, size: int) -> None:
    layout = StreamLayout(n_streams, accumulation, 1)
    own = [layout.own(rank, size) for rank in range(size)]
    assert [number for one in own for number in one] == list(range(layout.n_batches))
    assert max(map(len, own)) == layout.rounds(size)
    for rank, numbers in enumerate(own):
        assert {number // accumulation for number in numbers} <= set(layout.read(rank, size))
    assert [layout.read(rank, n_streams) for rank in range(n_streams)] == [range(n, n + 1) for n in range(n_streams)]


def test_replicas_go_before_a_member_has_more_of_the_model() -> None:
    assert degrees(2, 2, 4) == (2, 2)
    assert degrees(2, 2, 3) == (1, 3)
    assert degrees(2, 2, 2) == (1, 2)
    assert degrees(2, 2, 1) == (1, 1)
    assert degrees(4, 2, 6) == (3, 2)
    assert degrees(4, 2, 8) == (4, 2)
    assert degrees(1, 8, 7) == (1, 7)
