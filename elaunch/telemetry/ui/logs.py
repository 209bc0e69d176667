"""Event logs that are read on as they grow."""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from elaunch.errors import UsageError
from elaunch.telemetry.log import parse_event

LONGEST_LINE = 64 << 20
"""Bytes. A plan of thousands of workers takes a few of these MB; what is longer is no line of ours."""


@dataclass
class GrowingLog:
    """A file, how far it has been read, and which file it was then."""

    path: str
    offset: int = 0
    inode: int = 0
    n_wrong: int = 0

    def new_events(self) -> Iterator[dict[str, Any]]:
        """Yields what has been written since; a last line that is not whole is left for later.

        Raises:
            OSError: it cannot be read.
        """
        with open(self.path, "rb") as file:
            found = os.fstat(file.fileno())
            if found.st_ino != self.inode or found.st_size < self.offset:  # another file, or it was emptied
                self.inode, self.offset = found.st_ino, 0
            file.seek(self.offset)
            while (line := file.readline(LONGEST_LINE)).endswith(b"\n") or len(line) == LONGEST_LINE:
                self.offset += len(line)
                event = parse_event(line)
                if event is not None:
                    yield event
                elif line.strip():
                    self.n_wrong += 1


class LogFollower:
    """The logs of a job's nodes together.

    Raises:
        UsageError: a file cannot be read.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._logs = [GrowingLog(path) for path in dict.fromkeys(paths)]
        for log in self._logs:
            try:
                with open(log.path, "rb"):
                    pass
            except OSError as error:
                raise UsageError(f"{log.path}: {error.strerror}") from error

    @property
    def n_wrong(self) -> int:
        """Returns how many lines were no events."""
        return sum(log.n_wrong for log in self._logs)

    def new_events(self) -> Iterator[dict[str, Any]]:
        """Yields what has been written since, in the order of the times; of a log that has gone, nothing."""
        return heapq.merge(*map(_readable, self._logs), key=lambda event: float(event["t"]))


def _readable(log: GrowingLog) -> Iterator[dict[str, Any]]:
    try:
        yield from log.new_events()
    except OSError:
        return
