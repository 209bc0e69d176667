"""The tiling of one stage: how the micro-batches of a step are shared out over the members.

A *slot* is a position 0..B-1 in the global batch. A *unit* is one logical micro-batch: a run of slots that does not
depend on the membership, so that neither the samples nor the random numbers of a unit do.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_MOST_COLUMNS = 96
_MOST_ROWS = 32
_HEADER = re.compile(r"batch (\d+) micro-batch (\d+)")
_TILE = re.compile(r"layers 0:1 slots (\d+):(\d+) worker (\S+)")


def micro_batches(global_batch_size: int, micro_batch_size: int) -> tuple[range, ...]:
    """Returns the slot range of each logical micro-batch, in order; the last one may be shorter."""
    _check_sizes(global_batch_size, micro_batch_size)
    starts = range(0, global_batch_size, micro_batch_size)
    return tuple(range(start, min(start + micro_batch_size, global_batch_size)) for start in starts)


def share(n_units: int, n_members: int, index: int) -> range:
    """Returns the contiguous run of `n_units` units that member `index` of `n_members` does.

    The shares of all members cover every unit exactly once, in member order, and their sizes differ by at most one.
    With more members than units the last members get an empty range.
    """
    if n_units < 0:
        raise ValueError(f"n_units must be 0 or more, got {n_units}")
    if not 0 <= index < n_members:
        raise ValueError(f"index must be in 0..n_members-1, got index {index} of {n_members} members")
    size, extra = divmod(n_units, n_members)
    start = index * size + min(index, extra)
    return range(start, start + size + (index < extra))


@dataclass(frozen=True)
class DataParallelPlan:
    """Which worker does which micro-batches of a step; `str()` and `parse()` are inverse to each other.

    `units` pairs each worker, in rank order, with a contiguous range of micro-batch indices (maybe an empty one).
    """

    global_batch_size: int
    micro_batch_size: int
    units: tuple[tuple[str, range], ...]

    @classmethod
    def even(cls, global_batch_size: int, micro_batch_size: int, workers: Sequence[str]) -> DataParallelPlan:
        """Returns the plan that gives every worker the same number of micro-batches, give or take one."""
        n_units = len(micro_batches(global_batch_size, micro_batch_size))
        shares = ((worker, share(n_units, len(workers), rank)) for rank, worker in enumerate(workers))
        return cls(global_batch_size, micro_batch_size, tuple(shares))

    @classmethod
    def parse(cls, text: str) -> DataParallelPlan:
        """Reads the text form. Only the form is checked here; `validate` checks the meaning.

        Raises:
            ValueError: a line is not of the form that `str()` writes, or cuts a micro-batch.
        """
        header, *lines = text.strip().splitlines() or [""]
        sizes = _HEADER.fullmatch(header.strip())
        if sizes is None:
            raise ValueError(f"a plan starts with 'batch B micro-batch b', got {header!r}")
        batch, micro = int(sizes[1]), int(sizes[2])
        _check_sizes(batch, micro)
        units = []
        for line in lines:
            tile = _TILE.fullmatch(line.strip())
            if tile is None:
                raise ValueError(f"expected 'layers 0:1 slots START:STOP worker NAME', got {line!r}")
            start, stop = int(tile[1]), int(tile[2])
            if any(edge % micro and edge != batch for edge in (start, stop)) or not start <= stop <= batch:
                raise ValueError(f"slots {start}:{stop} are not whole micro-batches of {micro} in a batch of {batch}")
            units.append((tile[3], range(-(-start // micro), -(-stop // micro))))
        return cls(batch, micro, tuple(units))

    def __str__(self) -> str:
        lines = [f"batch {self.global_batch_size} micro-batch {self.micro_batch_size}"]
        for worker, units in self.units:
            lines.append(f"layers 0:1 slots {self._edge(units.start)}:{self._edge(units.stop)} worker {worker}")
        return "\n".join(lines)

    @property
    def n_units(self) -> int:
        """Returns the number of micro-batches of a step."""
        return -(-self.global_batch_size // self.micro_batch_size)

    @property
    def workers(self) -> tuple[str, ...]:
        """Returns the workers in rank order."""
        return tuple(worker for worker, _ in self.units)

    def units_of(self, worker: str) -> range:
        """Returns the micro-batch indices of `worker`; raises ValueError if the plan does not know it."""
        for name, units in self.units:
            if name == worker:
                return units
        raise ValueError(f"worker {worker!r} is not in this plan of {', '.join(self.workers)}")

    def validate(self) -> None:
        """Checks that every slot of the step is done exactly once.

        Raises:
            ValueError: says what is wrong and shows the rectangle.
        """
        _check_sizes(self.global_batch_size, self.micro_batch_size)
        wrong = self._bad_rows() or self._bad_slots()
        if wrong:
            raise ValueError("\n".join([f"not a plan: {'; '.join(wrong)}", *self._rectangle()]))

    def _bad_rows(self) -> list[str]:
        wrong = []
        if not self.units:
            wrong.append("it has no workers")
        seen: set[str] = set()
        for worker, units in self.units:
            if not re.fullmatch(r"\S+", worker):
                wrong.append(f"{worker!r} is no worker id")
            if worker in seen:
                wrong.append(f"{worker} appears twice")
            seen.add(worker)
            if units.step != 1 or not 0 <= units.start <= units.stop <= self.n_units:
                wrong.append(f"{worker} has {units}, which is no run of the micro-batches 0..{self.n_units - 1}")
        return wrong

    def _bad_slots(self) -> list[str]:
        wrong = []
        edge, last = 0, ""
        for worker, units in sorted((row for row in self.units if row[1]), key=lambda row: row[1].start):
            if units.start > edge:
                wrong.append(f"slots {self._edge(edge)}:{self._edge(units.start)} are done by nobody")
            elif units.start < edge:
                stop = self._edge(min(edge, units.stop))
                wrong.append(f"slots {self._edge(units.start)}:{stop} are done by both {last} and {worker}")
            if units.stop > edge:
                edge, last = units.stop, worker
        if edge < self.n_units:
            wrong.append(f"slots {self._edge(edge)}:{self.global_batch_size} are done by nobody")
        return wrong

    def _rectangle(self) -> list[str]:
        """Returns one line per worker and one column per micro-batch (or per run of them, if there are many)."""
        per_column = -(-self.n_units // _MOST_COLUMNS)
        columns = range(0, self.n_units, per_column)
        rows = self.units[:_MOST_ROWS]
        width = max((len(worker) for worker, _ in rows), default=0)
        lines = [f"{'':{width}} slots 0:{self.global_batch_size}, {per_column * self.micro_batch_size} in a column"]
        for worker, units in rows:
            cells = (units.start < column + per_column and units.stop > column for column in columns)
            lines.append(f"{worker:{width}} " + "".join("#" if cell else "." for cell in cells))
        if len(self.units) > len(rows):
            lines.append(f"and {len(self.units) - len(rows)} more workers")
        return lines

    def _edge(self, unit: int) -> int:
        """Returns the first slot of a unit; for the unit after the last, the size of the batch."""
        return min(unit * self.micro_batch_size, self.global_batch_size)


def _check_sizes(global_batch_size: int, micro_batch_size: int) -> None:
    if global_batch_size < 1 or micro_batch_size < 1:
        raise ValueError(
            f"batch sizes must be 1 or more, got global_batch_size {global_batch_size} "
            f"and micro_batch_size {micro_batch_size}"
        )
