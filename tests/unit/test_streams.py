"""Streams: how they are dealt out, who reads which shard, and what becomes of their samples when members change."""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, count, pairwise
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from datasets import Dataset as HubDataset
from datasets.distributed import split_dataset_by_node
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from elaunch import Stream
from elaunch.errors import GenerationChanged, StateError
from elaunch.workers.data.dealing import DealtStep, SampleRun, StreamNews, StreamPosition, deal
from elaunch.workers.data.reading import ShardReaders, Wanted
from elaunch.workers.data.source import DataSource, Loading
from elaunch.workers.data.stream import StreamShards, shards_of
from elaunch.workers.data.streaming import MARK_STEPS, StreamLoader, StreamState, how_it_is_read
from elaunch.workers.layers.samples import Samples
from elaunch.workers.state.codec import describe, restore
from tests.helpers import is_running, scaled, wait_until

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=7).filter(any)
SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=6)

Sample = tuple[int, int, int]


class Numbered:
    """Shards of known lengths, whose samples are (pass, shard, number); notes what is opened and read."""

    def __init__(self, lengths: Sequence[int], positions: bool = True) -> None:
        self.lengths, self.num_shards, self.positions = lengths, len(lengths), positions
        self.opened: list[tuple[int, int]] = []
        self.n_read = 0
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def open(self, shard: int, position: Any) -> Iterator[Sample]:
        self.opened.append((shard, position["at"] if position else 0))
        return NumberedShard(self, shard, self.opened[-1][1]) if self.positions else self._each(shard)

    def _each(self, shard: int) -> Iterator[Sample]:
        turn = self.epoch  # shards of the next pass may be opened before this one ends
        for at in range(self.lengths[shard]):
            self.n_read += 1
            yield turn, shard, at


class NumberedShard:
    def __init__(self, source: Numbered, shard: int, at: int) -> None:
        self.source, self.turn, self.shard, self.at = source, source.epoch, shard, at

    def __iter__(self) -> Iterator[Sample]:
        return self

    def __next__(self) -> Sample:
        if self.at >= self.source.lengths[self.shard]:
            raise StopIteration
        self.at += 1
        self.source.n_read += 1
        return self.turn, self.shard, self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}


def ends_of(lengths: Sequence[int], passes: int) -> dict[tuple[int, int], int]:
    return {(turn, shard): length for turn in range(passes) for shard, length in enumerate(lengths)}


def samples_in(runs: Sequence[SampleRun]) -> list[Sample]:
    return [(run.turn, run.shard, at) for run in runs for at in range(run.start, run.stop)]


def dealt_whole(lengths: Sequence[int], sizes: Sequence[int], passes: int) -> list[DealtStep]:
    """All steps of a stream whose lengths are known; the last one does not fill."""
    position: StreamPosition | None = StreamPosition.begin(len(lengths), len(sizes))
    steps = []
    while position is not None:
        steps.append(deal(position, ends_of(lengths, passes), len(lengths), sizes, passes))
        position = steps[-1].after
    return steps


# -- dealing ------------------------------------------------------------------------------------------------------


@given(LENGTHS, SIZES, st.integers(1, 3))
def test_each_sample_of_each_pass_is_dealt_exactly_once_and_in_order(
    lengths: list[int], sizes: list[int], passes: int
) -> None:
    steps = dealt_whole(lengths, sizes, passes)
    found = [sample for step in steps for sample in samples_in(step.runs)]
    ends = ends_of(lengths, passes)
    assert Counter(found) == Counter((*key, at) for key, end in ends.items() for at in range(end))
    assert all(step.n_samples == sum(sizes) for step in steps[:-1])
    assert steps[-1].n_samples < sum(sizes)
    assert [turn for turn, _, _ in found] == sorted(turn for turn, _, _ in found)
    for shard in range(len(lengths)):
        own = [sample for sample in found if sample[1] == shard]
        assert own == sorted(own)


@given(LENGTHS, SIZES, st.data())
def test_a_part_of_a_step_is_that_part_of_its_samples(
    lengths: list[int], sizes: list[int], data: st.DataObject
) -> None:
    step = dealt_whole(lengths, sizes, 1)[0]
    whole = samples_in(step.runs)
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    assert samples_in(step.of(range(start, stop))) == whole[start:stop]


def test_as_long_as_there_are_shards_no_two_units_read_the_same_one() -> None:
    steps = dealt_whole([8] * 12, [2, 2, 2], 1)
    for step in steps[:-1]:
        assert len({run.shard for run in step.runs}) == 3
    # Each unit finishes a shard, and takes the next one that nobody has begun.
    assert [[run.shard for run in step.runs] for step in steps[3:6]] == [[0, 1, 2], [3, 4, 5], [3, 4, 5]]


def test_units_share_shards_side_by_side_where_these_are_fewer() -> None:
    assert StreamPosition.begin(2, 6).shards == (0, 0, 0, 1, 1, 1)
    assert StreamPosition.begin(1, 3).shards == (0, 0, 0)


@pytest.mark.parametrize("lengths", [[0], [0, 0, 0]])
@pytest.mark.parametrize("passes", [2, None])
def test_a_stream_without_samples_is_an_error_and_no_endless_loop(lengths: list[int], passes: int | None) -> None:
    with pytest.raises(ValueError, match="the stream has no samples"):
        deal(StreamPosition.begin(len(lengths), 2), ends_of(lengths, 3), len(lengths), [1, 1], passes)


NEWS = st.builds(
    StreamNews,
    st.dictionaries(st.tuples(st.integers(0, 1), st.integers(0, 3)), st.integers(0, 9).map(lambda n: (n, n))),
    st.integers(0, 8),
    st.dictionaries(st.tuples(st.integers(0, 1), st.integers(0, 3)), st.integers(1, 9).map(lambda n: (n, {"at": n}))),
)


@given(st.lists(NEWS, min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_news_come_together_the_same_in_any_order_and_grouping(told: list[StreamNews], chance: random.Random) -> None:
    whole = StreamNews.of_all(told)
    chance.shuffle(told)
    cut = chance.randint(1, len(told))
    parts = [StreamNews.of_all(part) for part in (told[:cut], told[cut:]) if part]
    assert StreamNews.of_all([StreamNews.unpack(part.pack()) for part in parts]) == whole


# -- reading ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cut:
    """The crew is interrupted in a round of its agreement, and members `unheard` do not hear what it has brought."""

    round: int
    unheard: frozenset[int]


def crew_draws(
    loaders: Sequence[StreamLoader], step: int, shares: Sequence[list[range]], cut: Cut | None = None
) -> list[DealtStep | None]:
    """All members draw a step together; returns what each of them has been dealt; None: it was interrupted."""
    told: list[bytes] = [b""] * len(loaders)
    barrier = Barrier(len(loaders), timeout=10)

    def draw(member: int) -> DealtStep | None:
        rounds = count()

        def reduce(packed: bytes, combine: Callable[[Sequence[bytes]], bytes]) -> bytes:
            number = next(rounds)
            if cut is not None and number > cut.round:
                raise GenerationChanged(2)  # some of them are in it no more
            told[member] = packed
            barrier.wait()
            whole = combine(list(told))
            barrier.wait()
            if cut is not None and number == cut.round and member in cut.unheard:
                raise GenerationChanged(2)
            return whole

        try:
            # A worker without a part of the step computes what does not count.
            share = shares[member] or [range(1)]
            drawn = loaders[member].draw(reduce, step, share, bool(shares[member]))
            if not shares[member] and drawn.after is not None:
                loaders[member].take(step, share[0])
            return drawn
        except GenerationChanged:
            return None

    if len(loaders) == 1:
        return [draw(0)]  # processes end with the thread that has started them
    with ThreadPoolExecutor(len(loaders)) as pool:
        return list(pool.map(draw, range(len(loaders))))


def source_of(data: Any, passes: int | None = 1, seed: int = 3) -> DataSource:
    return DataSource.of(Stream(data, passes), seed=seed, collate_fn=list)


def deal_out(n_places: int, n_members: int, chance: random.Random) -> list[list[range]]:
    """Shares of a step, some of them empty, in micro-batches."""
    ends = [0, *sorted(chance.randint(0, n_places) for _ in range(n_members - 1)), n_places]
    parts = [range(first, end) for first, end in pairwise(ends)]
    middles = [(part, chance.randint(part.start, part.stop)) for part in parts]
    return [[one for one in (range(part.start, at), range(at, part.stop)) if one] for part, at in middles]


@settings(max_examples=scaled(40, 200), deadline=None)
@given(LENGTHS, SIZES, st.integers(1, 2), st.booleans(), st.randoms(use_true_random=False))
def test_steps_do_not_depend_on_who_reads_them_nor_on_who_dies(
    lengths: list[int], sizes: list[int], passes: int, positions: bool, chance: random.Random
) -> None:
    """Members come and go at any step, also while they draw it, and interrupted steps are drawn again by others."""
    expected = [samples_in(step.runs) for step in dealt_whole(lengths, sizes, passes)[:-1]]
    crew: list[tuple[StreamState, StreamLoader]] = []
    state: dict[str, Any] = {}
    found: list[list[Sample]] = []
    while True:
        if not crew or chance.random() < 0.4:
            # Some are lost, and those that come get the state from one that stays, or from a checkpoint.
            crew = chance.sample(crew, chance.randint(0, len(crew)))
            for _ in range(chance.randint(not crew, 2)):
                own = StreamState()
                restore({"stream": own}, *described(state))
                crew.append((own, StreamLoader(source_of(Numbered(lengths, positions), passes), sizes, own, CPU)))
        shares = deal_out(sum(sizes), len(crew), chance)
        step = len(found) * MARK_STEPS if chance.random() < 0.5 else len(found) * MARK_STEPS + 1
        cut = None
        if chance.random() < 0.4:
            cut = Cut(chance.randint(0, 2), frozenset(chance.sample(range(len(crew)), chance.randint(1, len(crew)))))
        drawn = crew_draws([loader for _, loader in crew], step, shares, cut)
        if None in drawn:
            continue  # some may know the step, or the end
        dealt = [one for one in drawn if one is not None]
        assert all(one == dealt[0] for one in dealt)
        assert all(own.is_over == (dealt[0].after is None) for own, _ in crew)
        if dealt[0].after is None:
            break
        got = [loader.take(step, part) for (_, loader), share in zip(crew, shares, strict=True) for part in share]
        assert [sample for part in got for sample in part] == expected[len(found)]
        if chance.random() < 0.3:
            continue  # it is interrupted
        found.append(expected[len(found)])
        for own, _ in crew:
            own.commit()
        state = crew[0][0].state_dict()
    assert found == expected


def described(state: dict[str, Any]) -> tuple[Any, list[torch.Tensor]]:
    whole = StreamState()
    whole.load_state_dict(state)
    return describe({"stream": whole})


def alone(data: Any, sizes: Sequence[int], n_steps: int, state: StreamState, begin: int = 0) -> list[Any]:
    """Steps of one member, in one micro-batch."""
    loader = StreamLoader(source_of(data, None), sizes, state, CPU)
    found = []
    for step in range(begin, begin + n_steps):
        crew_draws([loader], step, [[range(sum(sizes))]])
        found.append(loader.take(step, range(sum(sizes))))
        state.commit()
    return found


@pytest.mark.parametrize("positions", [True, False])
def test_a_new_member_goes_on_from_the_last_mark_and_without_positions_from_the_start(positions: bool) -> None:
    state = StreamState()
    alone(Numbered([1000], positions), [3], MARK_STEPS + 5, state)
    data = Numbered([1000], positions)
    (samples,) = alone(data, [3], 1, state, MARK_STEPS + 5)
    used = 3 * (MARK_STEPS + 5)
    assert samples == [(0, 0, at) for at in range(used, used + 3)]
    assert data.opened == [(0, 3 * MARK_STEPS if positions else 0)]
    assert data.n_read == (15 + 3 if positions else used + 3)


def test_a_step_that_is_done_again_reads_nothing_again() -> None:
    data = Numbered([30, 30])
    loader = StreamLoader(source_of(data), [4, 4], StreamState(), CPU)
    for _ in range(3):
        crew_draws([loader], 0, [[range(8)]])
    assert data.n_read == 8
    assert [start for _, start in data.opened] == [0, 0]


def test_a_shard_that_is_used_up_is_closed() -> None:
    closed = []

    class Files:
        num_shards = 3

        def open(self, shard: int, position: Any) -> Iterator[int]:
            try:
                yield from range(4)
            finally:
                closed.append(shard)

    state = StreamState()
    loader = StreamLoader(source_of(Files()), [2], state, CPU)
    for step in range(3):
        crew_draws([loader], step, [[range(2)]])
        state.commit()
    assert closed == [0]
    loader.close()
    assert closed == [0, 1]


@pytest.mark.parametrize(("mine", "theirs"), [([5, 9], [6, 9]), ([5, 9], [4, 9])])
def test_shards_that_end_elsewhere_on_another_worker_are_an_error_on_all(mine: list[int], theirs: list[int]) -> None:
    states = [StreamState(), StreamState()]
    crew = [
        StreamLoader(source_of(Numbered(lengths)), [4, 4], state, CPU)
        for lengths, state in zip((mine, theirs), states, strict=True)
    ]
    crew_draws(crew, 0, [[range(4)], [range(4, 8)]])
    for state in states:
        state.commit()
    with pytest.raises(
        StateError, match="shard 0 of the stream does not give the same samples each time: in pass 0, it"
    ):
        crew_draws(crew, 1, [[range(8)], [range(8)]])


def test_a_shard_that_has_shrunk_when_it_is_read_again_is_an_error() -> None:
    state = StreamState()
    alone(Numbered([50], positions=False), [4], 5, state)
    with pytest.raises(StateError, match="in pass 0, it ended after 11 samples when it was read again"):
        alone(Numbered([11], positions=False), [4], 1, state, 5)


def test_random_numbers_belong_to_the_sample_and_not_to_who_reads_it() -> None:
    def noisy() -> Iterator[tuple[float, float]]:
        for _ in range(40):
            yield random.random(), torch.rand(()).item()

    state = StreamState()
    whole = alone(noisy, [4], 6, StreamState())
    found = alone(noisy, [4], 4, state)
    torch.manual_seed(99)
    assert found + alone(noisy, [4], 2, state, 4) == whole
    assert len({sample for step in whole for sample in step}) == 24


def test_passes_differ_where_the_stream_heeds_its_epoch() -> None:
    found = alone(Numbered([3, 3]), [6], 3, StreamState())
    assert [{turn for turn, _, _ in step} for step in found] == [{0}, {1}, {2}]


def test_the_position_is_state_that_can_be_sent_and_saved() -> None:
    state, other = StreamState(), StreamState()
    alone(Numbered([1000, 20]), [3, 3], MARK_STEPS + 2, state)
    manifest, tensors = describe({"stream": state})
    restore({"stream": other}, manifest, tensors)
    assert other.state_dict() == state.state_dict()
    assert other.position == state.position
    assert other.marks == state.marks != {}
    restore({"stream": other}, *describe({"stream": StreamState()}))
    assert other.state_dict() == {}


def test_samples_have_the_same_numbers_in_each_pass_and_no_two_of_a_pass_have_one() -> None:
    state, ids = StreamState(), []
    for step in range(4):
        alone(Numbered([5, 3, 4]), [3, 3], 1, state, step)
        ids += state.sample_ids(3)
    assert len(set(ids[:12])) == 12
    assert sorted(ids[12:]) == sorted(ids[:12])


# -- at least once ------------------------------------------------------------------------------------------------


class Shuffled:
    """Shards that come in another order each time they are opened."""

    def __init__(self, lengths: Sequence[int], seed: int) -> None:
        self.lengths, self.num_shards, self.chance = lengths, len(lengths), random.Random(seed)

    def open(self, shard: int, position: Any) -> Iterator[tuple[int, int]]:
        assert position is None
        yield from ((shard, at) for at in self.chance.sample(range(self.lengths[shard]), self.lengths[shard]))


@settings(max_examples=scaled(40, 200), deadline=None)
@given(LENGTHS, SIZES, st.randoms(use_true_random=False))
def test_a_stream_that_does_not_repeat_itself_is_used_at_least_once_whoever_dies(
    lengths: list[int], sizes: list[int], chance: random.Random
) -> None:
    crew: list[tuple[StreamState, StreamLoader]] = []
    state: dict[str, Any] = {}
    used: Counter[tuple[int, int, int]] = Counter()
    for step in count():
        if not crew or (step < 40 and chance.random() < 0.3):
            crew = chance.sample(crew, chance.randint(0, len(crew)))
            for _ in range(chance.randint(not crew, 2)):
                own = StreamState()
                restore({"stream": own}, *described(state))
                stream = Stream(Shuffled(lengths, chance.getrandbits(32)), passes=3, repeatable=False)
                crew.append((own, StreamLoader(DataSource.of(stream, collate_fn=list), sizes, own, CPU)))
        shares = deal_out(sum(sizes), len(crew), chance)
        cut = Cut(chance.randint(0, 1), frozenset({0})) if step < 40 and chance.random() < 0.3 else None
        drawn = crew_draws([loader for _, loader in crew], step, shares, cut)
        if None in drawn:
            continue
        assert all(one == drawn[0] for one in drawn)
        dealt = drawn[0]
        assert dealt is not None
        if dealt.after is None:
            break
        got = [loader.take(step, part) for (_, loader), share in zip(crew, shares, strict=True) for part in share]
        if step < 40 and chance.random() < 0.2:
            continue  # it is interrupted
        places = samples_in(dealt.runs)
        samples = [sample for part in got for sample in part]
        assert [shard for _, shard, _ in places] == [shard for shard, _ in samples]
        used.update((turn, *sample) for (turn, _, _), sample in zip(places, samples, strict=True))
        for own, _ in crew:
            own.commit()
        state = crew[0][0].state_dict()
    # What is left at the end of the last pass does not fill a step.
    last = max((turn for turn, _, _ in used), default=0)
    assert {key for key in used if key[0] < last} == {
        (*key, at) for key, n in ends_of(lengths, last).items() for at in range(n)
    }


def test_without_a_change_of_members_one_reader_uses_each_sample_once_also_if_the_stream_does_not_repeat_itself() -> (
    None
):
    stream = Stream(Shuffled([5, 7], 2), passes=3, repeatable=False)
    state = StreamState()
    loader, found = StreamLoader(DataSource.of(stream, collate_fn=list), [2, 2], state, CPU), []
    for step in range(9):
        crew_draws([loader], step, [[range(4)]])
        if step == 4:
            crew_draws([loader], step, [[range(4)]])  # it is interrupted
        found += loader.take(step, range(4))
        state.commit()
    assert set(Counter(found).values()) == {3}


# -- read ahead ---------------------------------------------------------------------------------------------------


class Watched:
    """Numbered shards, read in other processes: each shard notes how far it has been read."""

    def __init__(self, lengths: Sequence[int], folder: Path) -> None:
        self.lengths, self.num_shards, self.folder = lengths, len(lengths), folder

    def open(self, shard: int, position: Any) -> Iterator[tuple[int, int, float]]:
        for at in range(self.lengths[shard]):
            with (self.folder / str(shard)).open("a") as log:
                log.write(f"{os.getpid()} {at}\n")
            if at == 40:
                raise ValueError(f"sample {at} is broken")
            yield shard, at, random.random() + torch.rand(()).item()

    def read(self, shard: int) -> list[int]:
        log = self.folder / str(shard)
        return [int(line.split()[1]) for line in log.read_text().splitlines()] if log.exists() else []

    def readers(self) -> set[int]:
        return {int(line.split()[0]) for log in self.folder.iterdir() for line in log.read_text().splitlines()}


def ahead_of(data: Any, sizes: Sequence[int], state: StreamState, **loading: Any) -> StreamLoader:
    given: Any = {"num_workers": 2, **loading}
    source = DataSource.of(Stream(data, None), seed=3, collate_fn=list, loading=given)
    return StreamLoader(source, sizes, state, CPU)


def draw_with(loader: StreamLoader, step: int, share: list[range]) -> list[Any]:
    crew_draws([loader], step, [share])
    return [sample for part in share for sample in loader.take(step, part)]


def test_processes_read_the_same_samples_ahead_of_their_steps(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data, state = Watched([9, 30, 20], tmp_path), StreamState()
    expected = list(
        chain.from_iterable(alone(Watched([9, 30, 20], tmp_path_factory.mktemp("alone")), [2, 2], 9, StreamState()))
    )
    loader, found = ahead_of(data, [2, 2], state), []
    shares = [[range(2), range(2, 4)], [range(4)], [range(4)]]
    for step in range(9):
        torch.manual_seed(step)
        random.seed(step)
        before = random.getstate(), torch.get_rng_state().tolist()
        crew_draws([loader], step, [shares[step % 3]])
        assert (random.getstate(), torch.get_rng_state().tolist()) == before
        found += [sample for part in shares[step % 3] for sample in loader.take(step, part)]
        if step % 4 == 3:
            assert draw_with(loader, step, shares[0]) == found[-4:]  # it is interrupted, and done again
        state.commit()
    assert found == expected
    assert os.getpid() not in data.readers()
    assert len(data.readers()) == 2
    # Four micro-batches of two samples each: two steps.
    crew_draws([loader], 9, [shares[0]])
    wait_until(lambda: max(data.read(1)) >= 22, 20, "nothing is read ahead")
    pids = data.readers()
    loader.close()
    assert not any(map(is_running, pids))


def test_what_is_read_ahead_ends_where_it_is_bounded(tmp_path: Path) -> None:
    data = Watched([39, 39], tmp_path)
    loader = ahead_of(data, [1, 1], StreamState(), prefetch_factor=3)
    crew_draws([loader], 0, [[range(1), range(1, 2)]])
    wait_until(lambda: data.read(0) == data.read(1) == [0, 1, 2, 3], 20, lambda: str(data.read(0)))
    crew_draws([loader], 0, [[range(1), range(1, 2)]])
    loader.close()
    assert data.read(0) == data.read(1) == [0, 1, 2, 3]


def test_what_goes_wrong_in_a_process_that_reads_is_told_when_its_turn_comes(tmp_path: Path) -> None:
    state = StreamState()
    loader = ahead_of(Watched([50], tmp_path), [4], state)
    for step in range(10):
        draw_with(loader, step, [range(4)])
        state.commit()
    with pytest.raises(ValueError, match="sample 40 is broken") as caught:
        draw_with(loader, 10, [range(4)])
    assert "Caught ValueError in the process that reads the stream" in str(caught.value)
    loader.close()


def test_a_process_that_is_killed_or_slow_ends_the_wait_with_its_reason(tmp_path: Path) -> None:
    def slow() -> Iterator[int]:
        threading.Event().wait(600)
        yield 1

    loader = ahead_of(slow, [1], StreamState(), timeout=1)
    with pytest.raises(RuntimeError, match="the stream has given no sample for 1 s, the timeout of the DataLoader"):
        draw_with(loader, 0, [range(1)])
    (reader,) = multiprocessing.active_children()
    reader.kill()
    with pytest.raises(
        RuntimeError, match=r"the process that reads the stream \(pid \d+\) has ended with exit code -9"
    ):
        draw_with(loader, 0, [range(1)])
    loader.close()


def test_marks_are_those_of_used_samples_though_more_has_been_read() -> None:
    state = StreamState()
    loader = ahead_of(Numbered([1000]), [3], state)
    for step in range(MARK_STEPS + 1):
        draw_with(loader, step, [range(3)])
        state.commit()
    assert state.marks == {(0, 0): (3 * MARK_STEPS, {"at": 3 * MARK_STEPS})}
    loader.close()


# -- what may be handed over --------------------------------------------------------------------------------------


class Plain(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class Cutting(IterableDataset[int]):
    """Cuts itself as torch's documentation shows it."""

    start = 0
    stop = 20

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        for at in range(self.start, self.stop):
            if info is None or at % info.num_workers == info.id:
                yield at


class Stateful(IterableDataset[int]):
    """Has its position in itself, as torchdata's StatefulDataLoader knows it."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 30:
            self.at += 1
            yield self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def counting(stop: int = 10) -> Iterator[int]:
    yield from range(stop)


def half(worker: int) -> None:
    """A `worker_init_fn` as torch's documentation shows it."""
    info: Any = get_worker_info()
    info.dataset.start, info.dataset.stop = 10 * worker, 10 * worker + 10


def all_of(shards: StreamShards) -> list[list[Any]]:
    return [list(shards.open(shard, None)) for shard in range(shards.num_shards)]


@pytest.mark.parametrize(
    ("data", "loading", "expected"),
    [
        (Plain(), {}, [list(range(10))]),
        (counting, {}, [list(range(10))]),
        (functools.partial(counting, 4), {}, [[0, 1, 2, 3]]),
        (Stream([5, 6]), {}, [[5, 6]]),
        (Cutting(), {}, [list(range(20))]),
        (Cutting(), {"num_workers": 3}, [list(range(start, 20, 3)) for start in range(3)]),
        (Stream(Cutting(), shards=2), {"num_workers": 3}, [list(range(0, 20, 2)), list(range(1, 20, 2))]),
        (DataLoader(Cutting(), num_workers=2), {}, [list(range(0, 20, 2)), list(range(1, 20, 2))]),
        (Numbered([1, 2]), {}, [[(0, 0, 0)], [(0, 1, 0), (0, 1, 1)]]),
    ],
)
def test_what_comes_in_order_is_taken_and_cut_as_it_cuts_itself(
    data: Any, loading: Loading, expected: list[list[Any]]
) -> None:
    source = DataSource.of(data, loading=loading)
    assert source.shards is not None
    assert all_of(source.shards) == expected
    assert get_worker_info() is None


def test_worker_init_fn_prepares_each_shard() -> None:
    class Whole(Cutting):
        def __iter__(self) -> Iterator[int]:
            return iter(range(self.start, self.stop))

    data = Whole()
    source = DataSource.of(DataLoader(data, num_workers=2, worker_init_fn=half, batch_size=4, collate_fn=list))
    assert source.shards is not None
    assert all_of(source.shards) == [list(range(10)), list(range(10, 20))]
    assert (source.batch_size, source.collate, data.start) == (4, list, 0)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (Stream(counting()), TypeError, "generator can be read only once, .* hand over the function that makes it"),
        (Stream(3), TypeError, "int is no stream: it needs `__iter__`"),
        (Stream(Numbered([1, 2]), shards=3), ValueError, "Numbered has 2 shards: leave out shards=3"),
        (counting(), TypeError, "generator is not a map-style data set: .* or `elaunch.Stream"),
        (DataLoader(Plain(), batch_size=None), ValueError, "a DataLoader with batch_size=None chooses its batches"),
    ],
)
def test_what_cannot_be_read_again_is_refused_with_what_to_do(data: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        DataSource.of(data)


@pytest.mark.parametrize("data", [Plain(), counting, Stream(Plain())])
def test_models_in_layers_refuse_a_stream_and_say_who_takes_it(data: Any) -> None:
    with pytest.raises(
        TypeError, match=r"is not a map-style data set: .* Jobs of `elaunch.init\(\)` also take what comes"
    ):
        Samples(DataSource.of(data), CPU)


def test_the_order_of_a_stream_is_its_own_and_its_numbers_are_checked() -> None:
    with pytest.raises(ValueError, match="shuffle=True: a stream has an order of its own"):
        DataSource.of(Plain(), shuffle=True)
    assert DataSource.of(Plain(), shuffle=False, seed=4).seed == 4
    for name in ("passes", "shards"):
        numbers: dict[str, Any] = {name: 0}
        with pytest.raises(ValueError, match=rf"Stream\({name}=0\): it must be 1 or more"):
            Stream(Plain(), **numbers)


def resumed(shards: StreamShards, at: int) -> tuple[Any, list[Any]]:
    """The position after `at` samples of the first shard, and what comes from there."""
    readers = ShardReaders(shards, 0, lambda: None)
    readers.fetch(Wanted(SampleRun(0, 0, 0, at), is_noted=True))
    readers.begin(StreamPosition(0, (0,), 1, {0: at}))
    marks = readers.noted
    return marks, list(shards.open(0, marks[0, 0][1])) if marks else []


def test_a_data_set_that_knows_its_position_goes_on_from_it() -> None:
    data = Stateful()
    marks, rest = resumed(shards_of(Stream(data)), 12)
    assert marks == {(0, 0): (12, {"at": 12})}
    assert rest == list(range(12, 30))
    assert data.at == 0


@pytest.mark.parametrize("state", [{"at": (1, 2)}, {1: 2}, {"at": torch.zeros(1)}])
def test_a_position_that_cannot_be_sent_is_none(state: Any) -> None:
    class Odd(Stateful):
        def state_dict(self) -> Any:
            return state

    assert resumed(shards_of(Stream(Odd())), 2) == ({}, [])


def hub(n_shards: int = 4, n: int = 40) -> Any:
    return HubDataset.from_dict({"a": list(range(n))}).to_iterable_dataset(num_shards=n_shards)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (hub(), range(40)),
        (hub().map(lambda row: {"a": row["a"] + 1}), range(1, 41)),
        (hub().filter(lambda row: row["a"] % 3 == 0), range(0, 40, 3)),
        (hub().with_format("torch"), range(40)),
    ],
    ids=["plain", "mapped", "filtered", "tensors"],
)
def test_files_of_a_hub_data_set_are_its_shards_and_know_their_positions(data: Any, expected: range) -> None:
    source = DataSource.of(data)
    assert source.shards is not None
    whole = [[int(row["a"]) for row in shard] for shard in all_of(source.shards)]
    assert len(whole) == 4
    assert sorted(chain.from_iterable(whole)) == list(expected)
    marks, rest = resumed(source.shards, 2)
    assert marks[0, 0][0] == 2
    assert [int(row["a"]) for row in rest] == whole[0][2:]


def test_a_hub_data_set_that_is_shuffled_in_a_buffer_has_no_positions_and_another_order_in_each_pass() -> None:
    shards = shards_of(Stream(hub().shuffle(seed=1, buffer_size=8)))
    assert shards.num_shards == 4
    orders = []
    for epoch in range(2):
        shards.set_epoch(epoch)  # type: ignore[attr-defined]
        whole = [[row["a"] for row in shard] for shard in all_of(shards)]
        assert whole == [[row["a"] for row in shard] for shard in all_of(shards)]
        assert sorted(chain.from_iterable(whole)) == list(range(40))
        orders.append(whole)
    assert orders[0] != orders[1]
    assert resumed(shards, 3) == ({}, [])


def test_a_hub_data_set_that_is_split_by_node_already_is_refused() -> None:
    with pytest.raises(ValueError, match="the data set was given to split_dataset_by_node"):
        DataSource.of(split_dataset_by_node(hub(), rank=0, world_size=2))


def test_the_line_says_how_often_a_sample_is_used_and_who_reads_it() -> None:
    assert how_it_is_read(8, 4, True, True) == "a stream of 8 shards: each sample is used exactly once in a pass"
    assert how_it_is_read(4, 4, False, False).startswith("a stream of 4 shards: each sample is used at least once in")
    text = how_it_is_read(1, 4, True, False)
    assert "1 shard: each sample is used exactly once in a pass, if a shard gives the same samples each time" in text
    assert "Of 4 workers several read the same shard, since there are fewer shards" in text
