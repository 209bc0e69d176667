"""The stream of a job: its position, which is state of the job, and how members draw a step from it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from elaunch.errors import StateError
from elaunch.workers.data.batches import collated
from elaunch.workers.data.dealing import DealtStep, Mark, ShardInPass, StreamNews, StreamPosition, deal
from elaunch.workers.data.reading import Readers, ShardReaders, Wanted
from elaunch.workers.data.reading_ahead import AheadReaders
from elaunch.workers.data.source import DataSource
from elaunch.workers.data.unrepeatable import UnrepeatableReaders
from elaunch.workers.random.rng import seed_micro_batch

Reduce = Callable[[bytes, Callable[[Sequence[bytes]], bytes]], bytes]
"""Combines what all members give; returns the same to all of them."""

STREAM = "elaunch.stream"
"""The name of the position among the objects of the job."""

MARK_STEPS = 100
"""So often members tell each other the `state_dict` of their shards, from where another one can go on."""


class StreamState:
    """How far the stream of a job has been used: the same on all members, but for the marks.

    Attributes:
        position: at the last commit; None: no stream has been used.
        ends: how many samples shards have that are in use.
        marks: of shards. Any one will do to go on from.
        dealt: the step in flight, and `found` what its members have found of shards that are in no `ends` yet.
        last: the step that committed last.
        is_over: whether the members have found that the stream ends before the next step is full.
    """

    def __init__(self) -> None:
        self.position: StreamPosition | None = None
        self.ends: dict[ShardInPass, int] = {}
        self.marks: dict[ShardInPass, Mark] = {}
        self.dealt: DealtStep | None = None
        self.found: dict[ShardInPass, int] = {}
        self.last: DealtStep | None = None
        self.is_over = False

    def commit(self) -> None:
        """Takes note that the step in flight has committed."""
        if self.dealt is not None:
            position = self.dealt.after
            assert position is not None
            self.position, self.last, self.dealt = position, self.dealt, None
            ends = self.ends | self.found
            self.ends = {key: end for key, end in ends.items() if position.used_of(*key) is not None}
            self.marks = {key: mark for key, mark in self.marks.items() if position.used_of(*key) is not None}

    def state_dict(self) -> dict[str, Any]:
        """Returns the position."""
        at = self.position
        if at is None:
            return {}
        return {
            "turn": at.turn,
            "shards": list(at.shards),
            "begun": at.begun,
            "used": dict(at.used),
            "ends": dict(self.ends),
            "marks": {key: list(mark) for key, mark in self.marks.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to a position."""
        self.dealt = self.last = None
        if not state:
            self.position, self.ends, self.marks = None, {}, {}
            return
        self.position = StreamPosition(state["turn"], tuple(state["shards"]), state["begun"], state["used"])
        self.ends = dict(state["ends"])
        self.marks = {key: (count, mark) for key, (count, mark) in state["marks"].items()}

    def sample_ids(self, n_shards: int) -> list[int]:
        """Returns numbers of the samples of the step that committed last; the same in each pass."""
        runs = self.last.runs if self.last is not None else ()
        return [at * n_shards + run.shard for run in runs for at in range(run.start, run.stop)]


class StreamLoader:
    """Loads this worker's micro-batches from a stream: in the training thread, or ahead in `num_workers` processes.

    All samples of a step are read before it begins. Then the members tell each other which shards have ended, and deal
    the step anew until nobody finds another end. So a step that begins has all its samples, on whatever members.

    Ahead are read the samples of the next steps as they would be dealt if no shard ended that is not known to.

    Args:
        source: the stream, and how batches are made.
        unit_sizes: samples of each unit of a step.
        state: of the job.
        device: where the batches go.
        progress: called before each sample is read in the training thread.
    """

    def __init__(
        self,
        source: DataSource,
        unit_sizes: Sequence[int],
        state: StreamState,
        device: torch.device,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        assert source.shards is not None
        self._passes, self._n_shards = source.dataset.passes, source.shards.num_shards
        self._source, self._sizes, self._state = source, unit_sizes, state
        self._pinned = source.pin_memory and device.type != "cpu"
        self._repeats = source.dataset.repeatable
        self._readers: Readers
        if not self._repeats:
            self._readers = UnrepeatableReaders(source.shards, progress)
        elif source.num_workers:
            self._readers = AheadReaders(source)
        else:
            self._readers = ShardReaders(source.shards, source.seed, progress)
        self._micro_batches: Sequence[range] = ()
        self._counts = True
        self._found: dict[ShardInPass, int] = {}
        self._told = ""

    def begin(self, step: int, share: tuple[range, ...]) -> None:
        """Does nothing: `draw` has done it."""

    def take(self, step: int, samples: range) -> Any:
        """Returns a micro-batch of the step that was drawn."""
        assert self._state.dealt is not None, "draw() comes first"
        seed_micro_batch(self._source.seed, step, samples.start // self._sizes[0])
        batch = collated(self._readers.samples(self._state.dealt.of(samples)), self._source.collate)
        return pin_memory(batch) if self._pinned else batch

    def close(self) -> None:
        """Closes the shards."""
        self._readers.close()

    def draw(self, reduce: Reduce, step: int, micro_batches: Sequence[range], counts: bool = True) -> DealtStep:
        """Reads this member's part of a step; returns the step, as all members deal it. All call it.

        Args:
            reduce: among the members; what it raises comes out of here.
            step: the step.
            micro_batches: of this member, by their places in the step.
            counts: whether what it computes of them goes into the step.

        Raises:
            StateError: a shard has another number of samples on another member, or when it is read again.
            ValueError: the stream has no samples.
        """
        state = self._state
        if state.position is None:
            state.position = StreamPosition.begin(self._n_shards, len(self._sizes))
        if isinstance(self._readers, AheadReaders) and micro_batches != self._micro_batches:
            self._readers.drop()
        self._micro_batches, self._counts = micro_batches, counts
        # What others know from `state.ends` they are not told. An end that cannot be found again counts once committed.
        self._found = {key: end for key, end in self._found.items() if self._repeats and self._is_news(*key)}
        noted = self._readers.noted if step % MARK_STEPS == 0 else {}
        marks = {key: mark for key, mark in noted.items() if mark[0] <= self._used(*key)}
        while True:
            self._readers.begin(state.position)
            dealt, known = self._deal(state.position), dict(self._found)
            self._find_ends(dealt, step)
            told = StreamNews({key: (end, end) for key, end in self._found.items()}, len(known), marks)
            news = StreamNews.unpack(reduce(told.pack(), _combined))
            self._take_in(news)
            new = [key for key in self._found if key not in known]
            if new and not self._repeats:
                # Beyond the first end others may read the shards: there, only they find the end.
                first = min(new, key=lambda one: dealt.place_of(one, self._found[one]))
                self._found = {**known, first: self._found[first]}
            if news.settled:
                break
        state.is_over = dealt.after is None
        state.dealt, state.found = (None if state.is_over else dealt), dict(self._found)
        if isinstance(self._readers, AheadReaders):
            self._read_ahead(self._readers, step, dealt)
        return dealt

    def tell(self, n_members: int, step: int, dealt: DealtStep) -> None:
        """Says how the stream is read, unless it has said so; and where it ends."""
        text = how_it_is_read(self._n_shards, n_members, self._repeats, self._readers.have_positions is not False)
        if text != self._told:
            self._told = text
            _say(text)
        if dealt.after is None:
            rest = f"; its last {dealt.n_samples} samples do not fill another" if dealt.n_samples else ""
            _say(f"the stream has ended after {step} steps{rest}")

    def _deal(self, before: StreamPosition) -> DealtStep:
        return deal(before, self._state.ends | self._found, self._n_shards, self._sizes, self._passes)

    def _wanted(self, dealt: DealtStep, step: int) -> Iterator[Wanted]:
        """Yields what this member reads of a step."""
        if dealt.after is None:
            return
        own = list(chain.from_iterable(map(dealt.of, self._micro_batches)))
        firsts = {(run.turn, run.shard): run.start for run in reversed(dealt.runs)}
        ended_here = {(run.turn, run.shard) for run in own if run.start == firsts[run.turn, run.shard]}
        is_noted = (step + 1) % MARK_STEPS == 0
        for run in own:
            key = run.turn, run.shard
            yield Wanted(run, self._state.marks.get(key), is_noted, key in ended_here and self._counts, self._counts)

    def _read_ahead(self, readers: AheadReaders, step: int, dealt: DealtStep) -> None:
        """Has samples read that come after those of a step, as many micro-batches as DataLoader would load ahead."""
        n_micro_batches = self._source.num_workers * self._source.prefetch_factor
        for _ in range(-(-n_micro_batches // len(self._micro_batches))):
            if dealt.after is None:
                break
            dealt, step = self._deal(dealt.after), step + 1
            for wanted in self._wanted(dealt, step):
                readers.expect(wanted)

    def _find_ends(self, dealt: DealtStep, step: int) -> None:
        """Reads this member's samples of a step as it is dealt now, and finds where shards have fewer."""
        known = self._state.ends | self._found
        for wanted in self._wanted(dealt, step):
            run, key = wanted.run, (wanted.run.turn, wanted.run.shard)
            if run.stop > known.get(key, run.stop):
                continue  # its end was found just now
            end = self._readers.fetch(wanted)
            if end is not None:
                if key in known or not self._is_news(*key) or end < self._used(*key):
                    raise _not_alike(*key, f"it ended after {end} samples when it was read again")
                known[key] = self._found[key] = end

    def _used(self, turn: int, shard: int) -> int:
        position = self._state.position
        return (position.used_of(turn, shard) or 0) if position is not None else 0

    def _is_news(self, turn: int, shard: int) -> bool:
        position = self._state.position
        assert position is not None
        return (turn, shard) not in self._state.ends and position.used_of(turn, shard) is not None

    def _take_in(self, news: StreamNews) -> None:
        for key, (least, most) in news.ends.items():
            if least != most:
                raise _not_alike(*key, f"it had {least} samples on one worker, {most} on another")
            self._found[key] = least
        self._state.marks |= {
            key: mark for key, mark in news.marks.items() if mark[0] > self._state.marks.get(key, (0,))[0]
        }


def how_it_is_read(n_shards: int, n_members: int, repeatable: bool, have_positions: bool) -> str:
    """Returns the line that says how often a sample is used, and what a change of members costs."""
    text = f"a stream of {n_shards} shard{'s' * (n_shards != 1)}: each sample is used "
    if not repeatable:
        text += "at least once in a pass. A worker that takes over a shard begins it again"
    elif have_positions:
        text += "exactly once in a pass"
    else:
        text += (
            "exactly once in a pass, if a shard gives the same samples each time: if not, say "
            "Stream(..., repeatable=False). A worker that takes over a shard reads it from its start, and leaves out "
            "what has been used"
        )
    if n_shards < n_members:
        text += f". Of {n_members} workers several read the same shard, since there are fewer shards"
    return text


def _not_alike(turn: int, shard: int, what: str) -> StateError:
    return StateError(
        f"shard {shard} of the stream does not give the same samples each time: in pass {turn}, {what}. Whoever "
        "opens a shard must find the same samples in the same order: give what shuffles them a seed"
    )


def _say(text: str) -> None:
    print(f"[elaunch] {text}", file=sys.stderr, flush=True)


def _combined(packed: Sequence[bytes]) -> bytes:
    return StreamNews.of_all([StreamNews.unpack(one) for one in packed]).pack()
