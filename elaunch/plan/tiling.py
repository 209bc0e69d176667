"""The execution plan: a tiling of the rectangle layers × samples.

Layers run 0..n_layers-1, samples (positions in the global batch of a step) 0..global_batch_size-1. A *unit* is a
logical micro-batch: the samples [u*b, (u+1)*b) for micro-batch size b; the last one may be shorter. It does not
depend on the plan; a plan may cut units or join them.

The text form is one line each for the sizes, the costs, the tiles and the members without a tile:

    plan layers 8 batch 16 micro-batch 2 zero interleaved order forward deferred 4
    costs 0 6*8 3
    layers 0:4 samples 0:8/2 workers n0/0#0,n0/1#0
    layers 0:4 samples 8:10+14:15 10:12+15:16 12:14 workers n0/2#0
    layers 4:8 samples 0:16/2 workers n1/0#0
    idle n1/1#0

A blank separates micro-batches, '+' the runs of one, and 0:8/2 stands for 0:2 2:4 4:6 6:8. 6*8 stands for six layers
of cost 8. What is as usual is left unsaid: the order, if it is auto, the costs, if there are none, and how many weight
gradients are deferred, if that is 0.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, groupby
from typing import Literal, get_args

from elaunch.plan.coverage import bands
from elaunch.plan.picture import draw, to_svg

OptimizerLayout = Literal["interleaved", "contiguous"]
"""How the optimizer state of a layer is shared out over the replicas that hold it (ElasWave 6.3)."""

Order = Literal["auto", "backward", "forward"]
"""What a worker starts first of what is ready; auto: that with which a part of the plan ends earlier on the clocks."""

ORDERS: tuple[Order, ...] = get_args(Order)

MicroBatch = tuple[range, ...]
"""The rows of one micro-batch: disjoint, non-empty runs of samples, in row order. Usually one run."""

_MOST_FINDINGS = 12
_HEADER = re.compile(
    r"plan layers (\d+) batch (\d+) micro-batch (\d+) zero (interleaved|contiguous)(?: order (backward|forward))?"
    r"(?: deferred ([1-9]\d{0,8}))?"
)
_COSTS = re.compile(r"costs((?: (?:[1-9]\d*\*)?\d+)+)")
_TILE = re.compile(r"layers (\d+):(\d+) samples((?: \S+)*) workers (\S+)")
_IDLE = re.compile(r"idle (\S+)")
_STEPS = re.compile(r"(\d+):(\d+)/(\d+)")
_MOST_DIGITS = 6  # of a number of layers or micro-batches: what stands for more would fill the memory
_RUNS = re.compile(r"\d+:\d+(?:\+\d+:\d+)*")


class PlanError(ValueError):
    """A plan cannot be made, read or carried out."""


@dataclass(frozen=True)
class Tile:
    """Layers × micro-batches, done by one tensor-parallel group of workers.

    Attributes:
        layers: [lo, hi), not empty.
        micro_batches: in the order in which they are to be done.
        workers: in tensor-parallel rank order; a single one means no tensor parallelism.
    """

    layers: range
    micro_batches: tuple[MicroBatch, ...]
    workers: tuple[str, ...]

    def __str__(self) -> str:
        fields = ["layers", _span(self.layers), "samples", *_samples_text(self.micro_batches)]
        return " ".join([*fields, "workers", ",".join(self.workers)])


@dataclass(frozen=True)
class Plan:
    """Who does what in a step; `str()` and `parse()` are inverse to each other.

    Attributes:
        n_layers: layers of the model.
        global_batch_size: samples of a step.
        micro_batch_size: samples of a unit; the last one has what is left.
        tiles: cover every (layer, sample) exactly once. A worker may own several.
        zero: the layout of the optimizer state.
        idle: members of the job without a tile.
        order: of what each worker does; see `elaunch.plan.schedule`.
        costs: of a row in each layer, relative to each other, for the clocks that make the order; none: all are alike.
        deferred: how many micro-batches of a tile may have their weight gradients left for later, each of which keeps
            its activations until then; 0: no backward is split into input and weight gradients.
    """

    n_layers: int
    global_batch_size: int
    micro_batch_size: int
    tiles: tuple[Tile, ...]
    zero: OptimizerLayout = "interleaved"
    idle: tuple[str, ...] = ()
    order: Order = "auto"
    costs: tuple[int, ...] = ()
    deferred: int = 0

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Reads the text form. Only the form is checked here; `validate` checks the meaning.

        Raises:
            PlanError: names the line and what was expected there.
        """
        lines = [(number, " ".join(line.split())) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        number, first = lines[0] if lines else (1, "")
        header = _HEADER.fullmatch(first)
        if header is None:
            optional = "[order backward|forward] [deferred N]"
            expected = f"'plan layers L batch B micro-batch b zero interleaved|contiguous {optional}'"
            raise _unreadable(number, first, expected)
        tiles: list[Tile] = []
        idle: list[str] = []
        costs: list[int] = []
        known: dict[str, tuple[MicroBatch, ...]] = {}
        for number, line in lines[1:]:
            if match := _TILE.fullmatch(line):
                if match[3] not in known:
                    known[match[3]] = tuple(
                        chain.from_iterable(_read_samples(word, number) for word in match[3].split())
                    )
                layers = range(int(match[1]), int(match[2]))
                tiles.append(Tile(layers, known[match[3]], tuple(match[4].split(","))))
            elif match := _IDLE.fullmatch(line):
                idle.extend(match[1].split(","))
            elif match := _COSTS.fullmatch(line):
                costs.extend(_read_costs(match[1]))
            else:
                expected = (
                    "'layers LO:HI samples START:STOP ... workers ID,ID', 'costs COST N*COST ...' or 'idle ID,ID'"
                )
                raise _unreadable(number, line, expected)
        zero: OptimizerLayout = "interleaved" if header[4] == "interleaved" else "contiguous"
        order = next(one for one in ORDERS if one == (header[5] or "auto"))
        sizes = int(header[1]), int(header[2]), int(header[3])
        return cls(*sizes, tuple(tiles), zero, tuple(idle), order, tuple(costs), int(header[6] or 0))

    def __str__(self) -> str:
        header = (
            f"plan layers {self.n_layers} batch {self.global_batch_size} micro-batch {self.micro_batch_size} "
            f"zero {self.zero}{'' if self.order == 'auto' else f' order {self.order}'}"
            f"{f' deferred {self.deferred}' if self.deferred else ''}"
        )
        costs = [f"costs {_costs_text(self.costs)}"] if self.costs else []
        idle = [f"idle {','.join(self.idle)}"] if self.idle else []
        return "\n".join([header, *costs, *map(str, self.tiles), *idle])

    @property
    def n_units(self) -> int:
        """Returns the number of logical micro-batches of a step."""
        return count_units(self.global_batch_size, self.micro_batch_size)

    def unit(self, number: int) -> range:
        """Returns the samples of a logical micro-batch."""
        return unit_samples(number, self.global_batch_size, self.micro_batch_size)

    @cached_property
    def workers(self) -> tuple[str, ...]:
        """Returns each worker once, in the order of the tiles, then the idle ones."""
        return tuple(dict.fromkeys(chain(*(tile.workers for tile in self.tiles), self.idle)))

    def tiles_of(self, worker: str) -> tuple[int, ...]:
        """Returns the indices of the tiles of `worker`, ascending; none for one that is idle or unknown."""
        return self._tiles_by_worker.get(worker, ())

    @cached_property
    def _tiles_by_worker(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, list[int]] = {}
        for index, tile in enumerate(self.tiles):
            for worker in dict.fromkeys(tile.workers):
                found.setdefault(worker, []).append(index)
        return {worker: tuple(indices) for worker, indices in found.items()}

    def validate(self, members: Collection[str] | None = None) -> None:
        """Checks that every layer is done for every sample exactly once, by workers that cannot wait for each other.

        Args:
            members: the workers of the generation. If given, they must be exactly those of the plan.

        Raises:
            PlanError: says all that is wrong and shows the rectangle.
        """
        wrong = size_findings(self.n_layers, self.global_batch_size, self.micro_batch_size)
        if self.zero not in get_args(OptimizerLayout):
            wrong.append(f"zero must be {_either(get_args(OptimizerLayout))}, got {self.zero!r}")
        wrong += self._bad_order()
        wrong += [*self._bad_tiles(), *self._bad_workers(), *self._bad_membership(members), *self._bad_coverage()]
        if wrong:
            more = [f"and {len(wrong) - _MOST_FINDINGS} more"] if len(wrong) > _MOST_FINDINGS else []
            raise PlanError(f"not a plan: {'; '.join([*wrong[:_MOST_FINDINGS], *more])}\n{draw(self)}")

    def renamed(self, names: Mapping[str, str]) -> Plan:
        """Returns the same plan for other workers; those that `names` does not have keep their name."""

        def new(workers: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(names.get(worker, worker) for worker in workers)

        tiles = tuple(replace(tile, workers=new(tile.workers)) for tile in self.tiles)
        return replace(self, tiles=tiles, idle=new(self.idle))

    def to_svg(self) -> str:
        """Returns a self-contained picture of the rectangle, as text of an SVG file."""
        return to_svg(self)

    def _name(self, index: int) -> str:
        return f"tile {index} ({','.join(self.tiles[index].workers)})"

    def _bad_order(self) -> Iterator[str]:
        if self.order not in ORDERS:
            yield f"order must be {_either(ORDERS)}, got {self.order!r}"
        if self.deferred < 0:
            yield f"deferred must be 0 or more, got {self.deferred}"
        if self.costs and (len(self.costs) != self.n_layers or min(self.costs) < 0):
            yield f"costs must be {self.n_layers} numbers of 0 or more, one per layer, got {_costs_text(self.costs)}"

    def _bad_tiles(self) -> Iterator[str]:
        sound: set[int] = set()
        for index, tile in enumerate(self.tiles):
            if not _is_run(tile.layers, self.n_layers):
                yield f"{self._name(index)} has {tile.layers}, which is no run of the layers 0:{self.n_layers}"
            if not tile.micro_batches or not all(tile.micro_batches):
                yield f"{self._name(index)} has {'an empty' if tile.micro_batches else 'no'} micro-batch"
            if id(tile.micro_batches) in sound:
                continue
            bad = [run for run in chain.from_iterable(tile.micro_batches) if not _is_run(run, self.global_batch_size)]
            if not bad:
                # The stages of a pipeline mostly have the very same micro-batches.
                sound.add(id(tile.micro_batches))
            for run in bad:
                yield f"{self._name(index)} has {run}, which is no run of the samples 0:{self.global_batch_size}"

    def _bad_workers(self) -> Iterator[str]:
        if not _are_names(self.workers):
            for worker in self.workers:
                if not re.fullmatch(r"[^\s,]+", worker):
                    yield f"{worker!r} is no worker id: neither blanks nor commas may be in it"
        for worker in _repeated(self.idle):
            yield f"idle worker {worker} is named twice"
        for worker in dict.fromkeys(self.idle):
            if tiles := self.tiles_of(worker):
                yield f"idle worker {worker} has {self._name(tiles[0])}"
        groups = {tile.workers for tile in self.tiles}
        if all(groups) and sum(map(len, groups)) == len(set(chain.from_iterable(groups))):
            return  # no two of them share a worker
        partners: dict[str, int] = {}
        mixed: set[tuple[tuple[str, ...], ...]] = set()
        for index, tile in enumerate(self.tiles):
            if not tile.workers:
                yield f"tile {index} has no workers"
            for worker in _repeated(tile.workers):
                yield f"{self._name(index)} has worker {worker} twice"
            for worker in tile.workers if len(tile.workers) > 1 else ():
                # Groups that share some workers, or order them differently, could each wait for the other's collective.
                other = partners.setdefault(worker, index)
                pair = self.tiles[other].workers, tile.workers
                if pair[0] != pair[1] and pair not in mixed:
                    mixed.add(pair)
                    yield (
                        f"{self._name(other)} and {self._name(index)} share workers: two tensor-parallel groups must "
                        "be the same, in the same order, or have no worker in common"
                    )

    def _bad_membership(self, members: Collection[str] | None) -> Iterator[str]:
        if members is None:
            return
        if unknown := sorted(set(self.workers) - set(members)):
            yield f"{', '.join(unknown)} must be left out: no members of the job"
        if missing := sorted(set(members) - set(self.workers)):
            yield f"{', '.join(missing)} must have a tile or be idle: members of the job"

    def _bad_coverage(self) -> list[str]:
        """Returns what is not done exactly once; neighbouring bands of layers with the same finding are merged."""
        found: dict[tuple[int, int, tuple[int, ...]], list[range]] = {}
        for layers, patches in bands(self):
            for patch in patches:
                if len(patch.tiles) != 1:
                    rows = found.setdefault(patch, [])
                    above = rows.pop() if rows and rows[-1].stop == layers.start else layers
                    rows.append(range(above.start, layers.stop))
        return [
            f"layers {_span(layers)} samples {start}:{stop} are done by {self._by_whom(tiles)}"
            for (start, stop, tiles), rows in found.items()
            for layers in rows
        ]

    def _by_whom(self, tiles: tuple[int, ...]) -> str:
        if not tiles:
            return "nobody"
        names = " and ".join(map(self._name, dict.fromkeys(tiles)))
        return f"{'both ' if len(tiles) == 2 else ''}{names}" if len(set(tiles)) > 1 else f"{names} more than once"


def n_rows(micro_batch: MicroBatch) -> int:
    """Returns the number of samples of a micro-batch."""
    return sum(map(len, micro_batch))


def count_units(global_batch_size: int, micro_batch_size: int) -> int:
    """Returns the number of logical micro-batches of a batch of this size."""
    return -(-global_batch_size // micro_batch_size)


def unit_samples(unit: int, global_batch_size: int, micro_batch_size: int) -> range:
    """Returns the samples of a logical micro-batch of a batch of this size."""
    return range(unit * micro_batch_size, min((unit + 1) * micro_batch_size, global_batch_size))


def size_findings(n_layers: int, global_batch_size: int, micro_batch_size: int) -> list[str]:
    """Returns what is wrong with the sizes of a plan."""
    wrong = [f"n_layers must be 1 or more, got {n_layers}"] if n_layers < 1 else []
    if global_batch_size < 1 or micro_batch_size < 1:
        sizes = f"global_batch_size {global_batch_size} and micro_batch_size {micro_batch_size}"
        wrong.append(f"batch sizes must be 1 or more, got {sizes}")
    return wrong


def _are_names(workers: tuple[str, ...]) -> bool:
    """Returns whether all can be worker ids, in one look at all of them."""
    text = ",".join(workers)
    return not workers or (all(workers) and text.count(",") == len(workers) - 1 and not re.search(r"\s", text))


def _either(sizes: Iterable[object]) -> str:
    return " or ".join(map(str, sizes))


def _repeated(names: tuple[str, ...]) -> list[str]:
    return sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []


def _is_run(run: range, size: int) -> bool:
    return run.step == 1 and 0 <= run.start < run.stop <= size


def _span(run: range) -> str:
    return f"{run.start}:{run.stop}"


def _samples_text(micro_batches: tuple[MicroBatch, ...]) -> Iterator[str]:
    """Returns one word per micro-batch, or per sequence of equal adjacent ones."""
    sequence: list[range] = []
    for micro_batch in micro_batches:
        if sequence and len(micro_batch) == 1:
            last, run = sequence[-1], micro_batch[0]
            if run.start == last.stop and len(run) == len(last) > 0:
                sequence.append(run)
                continue
        yield from _sequence_text(sequence)
        sequence = list(micro_batch) if len(micro_batch) == 1 else []
        if not sequence:
            yield "+".join(map(_span, micro_batch))
    yield from _sequence_text(sequence)


def _sequence_text(runs: list[range]) -> Iterator[str]:
    if len(runs) == 1:
        yield _span(runs[0])
    elif runs:
        yield f"{runs[0].start}:{runs[-1].stop}/{len(runs[0])}"


def _read_samples(word: str, number: int) -> Iterator[MicroBatch]:
    """Reads the micro-batches of one word of a tile's line."""
    if steps := _STEPS.fullmatch(word):
        start, stop, size = map(int, steps.groups())
        if not size or start >= stop or (stop - start) % size:
            raise _unreadable(number, word, "START:STOP/SIZE with whole steps of SIZE from START to STOP")
        if len(str((stop - start) // size)) > _MOST_DIGITS:
            raise _unreadable(number, word, f"fewer than 10^{_MOST_DIGITS} micro-batches")
        for first in range(start, stop, size):
            yield (range(first, first + size),)
    elif _RUNS.fullmatch(word):
        yield tuple(range(*map(int, run.split(":"))) for run in word.split("+"))
    else:
        raise _unreadable(number, word, "START:STOP, START:STOP+START:STOP or START:STOP/SIZE")


def _costs_text(costs: tuple[int, ...]) -> str:
    runs = [(cost, len(list(equal))) for cost, equal in groupby(costs)]
    return " ".join(f"{n}*{cost}" if n > 1 else f"{cost}" for cost, n in runs)


def _read_costs(words: str) -> Iterator[int]:
    for word in words.split():
        n, _, cost = word.rpartition("*")
        if len(n) > _MOST_DIGITS:
            raise PlanError(f"costs of the plan: {n} layers are more than any model has")
        yield from (int(cost),) * int(n or 1)


def _unreadable(number: int, got: str, expected: str) -> PlanError:
    return PlanError(f"line {number} of the plan: expected {expected}, got {got!r}")
