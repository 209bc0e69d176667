"""A copy of the workers' lines on the launcher's own streams: follows their log files, whole lines with a prefix.

The file comes first and the launcher's stream second, so a launcher whose terminal is slow or gone holds up no worker.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from string import Template
from typing import TextIO

from elaunch import threads
from elaunch.agent.output.logs import LogSettings, WorkerLogs, open_to_append

POLL_S = 0.05
CLOSE_S = 300.0  # so long a console may take to show the rest: nobody may be reading the pipe that it is
CHUNK_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 18

# ANSI foreground colours; red is left to errors, and black, white and grey to backgrounds.
COLORS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)


# -- lines ------------------------------------------------------------------------------------------------------------


class LineSplitter:
    r"""Cuts a stream of bytes into lines, which come without their ends.

    A line ends with \n, \r\n or \r, so progress bars, which rewrite their line, are shown as they move. One longer
    than `limit_bytes` comes in pieces of that size.
    """

    def __init__(self, limit_bytes: int = MAX_LINE_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._rest = b""
        self._after_return = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """Returns the lines, and pieces of too long a line, that this chunk completes."""
        if not chunk:
            return []
        if self._after_return:
            chunk = chunk.removeprefix(b"\n")
        self._after_return = chunk.endswith(b"\r")
        text = self._rest + chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = text.split(b"\n")
        pieces = [piece for line in lines for piece in self._cut(line)]
        *more, self._rest = self._cut(rest)
        return pieces + more

    def flush(self) -> list[bytes]:
        """Returns what stands after the last end of a line, if anything does; the next line begins afresh."""
        rest, self._rest, self._after_return = self._rest, b"", False
        return [rest] if rest else []

    def _cut(self, line: bytes) -> list[bytes]:
        return [line[i : i + self._limit_bytes] for i in range(0, max(1, len(line)), self._limit_bytes)]


def line_prefix(settings: LogSettings, local_rank: int, global_rank: int, node: str) -> str:
    """Returns what stands before each teed line of a worker. Names that the template does not know stay as they are."""
    if not settings.prefix_template:
        return f"[{settings.role}{local_rank}]:"
    return Template(settings.prefix_template).safe_substitute(
        role_name=settings.role, rank=global_rank, local_rank=local_rank, node=node
    )


# -- the tee ----------------------------------------------------------------------------------------------------------


class Tee:
    """Follows the files of workers and writes their lines, whole and with a prefix, to the launcher's streams.

    One thread does it, which begins with the first file to follow. All methods are for one thread, the agent's; none
    but `close` waits for a stream.

    Args:
        settings: what the flags say.
        node: name of this node, for the prefix.
        stdout, stderr: the launcher's streams; by default those of `sys` at this moment.
    """

    def __init__(
        self, settings: LogSettings, node: str = "", stdout: TextIO | None = None, stderr: TextIO | None = None
    ) -> None:
        self._settings = settings
        self._node = node
        self._stdout = _Console(stdout if stdout is not None else sys.stdout)
        self._stderr = _Console(stderr if stderr is not None else sys.stderr)
        self._thread: threading.Thread | None = None
        self._requests: queue.SimpleQueue[_Follow | _Ended | None] = queue.SimpleQueue()
        # What follows belongs to the thread.
        self._tails: dict[str, _Tail] = {}
        self._followed: list[_Tail] = []
        self._taken = 0
        self._closing = False
        self._closed = False  # all that the files held when it was closed has been shown

    def follow(self, worker: str, local_rank: int, global_rank: int, logs: WorkerLogs) -> None:
        """Shows the lines of a worker that is about to start; again, with another rank, for one that runs.

        Call it before the start: what a file holds already belongs to the worker before.
        """
        prefix = line_prefix(self._settings, local_rank, global_rank, self._node)
        for path, teed, console, filtered, needles in (
            (logs.stdout, logs.tee_stdout, self._stdout, logs.filtered_stdout, self._settings.duplicate_stdout_filters),
            (logs.stderr, logs.tee_stderr, self._stderr, logs.filtered_stderr, self._settings.duplicate_stderr_filters),
        ):
            if path is None or not teed:
                continue
            color = COLORS[local_rank % len(COLORS)] if self._settings.color and console.is_terminal else None
            owner = _Owner(worker, _size_bytes(path), os.fsencode(prefix), _painted(prefix, color))
            self._ask(_Follow(path, console, filtered, tuple(map(os.fsencode, needles)), owner))

    def ended(self, worker: str) -> None:
        """Shows the rest of what the worker has written, and ends an unfinished last line."""
        if self._thread is not None:
            self._ask(_Ended(worker))

    def close(self) -> None:
        """Shows all that the files hold at this moment, also what came after the end of a worker, and stops."""
        if self._thread is None:
            return
        self._requests.put(None)
        self._thread.join(CLOSE_S)
        if not self._closed and not self._thread.is_alive():  # it died: another one goes on where it was
            if self._requests.empty():
                self._requests.put(None)
            threads.start("elaunch-tee", self._run, self._died).join(CLOSE_S)
        self._thread = None

    def _ask(self, request: _Follow | _Ended) -> None:
        self._requests.put(request)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threads.start("elaunch-tee", self._run, self._died)

    def _run(self) -> None:
        self._closing = self._closed = False
        wait_s: float | None = None
        while True:
            self._serve(wait_s)
            if self._closing:
                break
            more = False
            for tail in tuple(self._followed):
                taken = self._taken
                if tail.attempt(partial(tail.pump, self._serve)):
                    more = True
                elif not tail.live:
                    if taken == self._taken:
                        tail.attempt(tail.rest)
                        self._followed.remove(tail)
                    else:  # it may have been written to between the look at the file and the news of the end
                        more = True
            wait_s = 0.0 if more else POLL_S if self._followed else None
        for tail in self._tails.values():
            tail.attempt(tail.drain)
        self._followed.clear()
        self._closed = True

    def _died(self, error: BaseException) -> None:
        """The next request, that of the end too, starts another thread, which goes on where this one was."""

    def _serve(self, wait_s: float | None = 0.0) -> None:
        """Takes all requests; waits for the first."""
        with contextlib.suppress(queue.Empty):
            while not self._closing:
                request = self._requests.get(timeout=wait_s)
                self._taken += 1
                self._take(request)
                wait_s = 0.0

    def _take(self, request: _Follow | _Ended | None) -> None:
        if request is None:
            self._closing = True
        elif isinstance(request, _Ended):
            for tail in self._followed:
                tail.ended(request.worker)
        else:
            if request.path not in self._tails:
                self._tails[request.path] = _Tail(request, self._stderr)
            tail = self._tails[request.path]
            tail.belongs_to(request.owner)
            if tail not in self._followed:
                self._followed.append(tail)


@dataclass(frozen=True, slots=True)
class _Owner:
    """The worker that writes a file from byte `start` on."""

    worker: str
    start: int
    prefix: bytes
    painted_prefix: bytes


@dataclass(frozen=True, slots=True)
class _Follow:
    path: str
    console: _Console
    filtered: str | None
    needles: tuple[bytes, ...]
    owner: _Owner


@dataclass(frozen=True, slots=True)
class _Ended:
    worker: str


class _Tail:
    """One file: how far it has been shown, and whose it is from which byte on. It is open only while it is followed."""

    def __init__(self, request: _Follow, complaints: _Console) -> None:
        self.live = True
        self._path = request.path
        self._console = request.console
        self._filtered = request.filtered
        self._needles = request.needles
        self._complaints = complaints
        self._owners: deque[_Owner] = deque()
        self._splitter = LineSplitter()
        self._position = 0
        self._fd = self._filtered_fd = -1
        self._broken = False

    def belongs_to(self, owner: _Owner) -> None:
        if not self._owners:
            owner = replace(owner, start=0)
        elif self._owners[-1].worker == owner.worker:
            owner = replace(owner, start=self._owners.pop().start)
        self._owners.append(owner)
        self.live = True

    def ended(self, worker: str) -> None:
        if self._owners[-1].worker == worker:
            self.live = False

    def pump(self, learn: Callable[[], None] = lambda: None) -> bool:
        """Shows at most one chunk; True if there is probably more.

        `learn` is called between reading and showing: whoever wrote the chunk was announced before writing.
        """
        if self._broken:
            return False
        try:
            if self._fd < 0:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            chunk = os.pread(self._fd, CHUNK_BYTES, self._position)
        except FileNotFoundError:  # the worker has not opened it yet
            return False
        except OSError as error:
            self._broken = True
            self._complaints.write(f"[elaunch] cannot show {self._path} any more: {error.strerror}\n".encode())
            return False
        learn()
        full, end = len(chunk) == CHUNK_BYTES, self._position + len(chunk)
        while len(self._owners) > 1 and self._owners[1].start <= end:
            own = max(0, self._owners[1].start - self._position)  # negative: something else wrote meanwhile
            self._show(self._splitter.feed(chunk[:own]) + self._splitter.flush())
            chunk = chunk[own:]
            self._position += own
            self._owners.popleft()
        self._position = end
        self._show(self._splitter.feed(chunk))
        return full

    def attempt(self, act: Callable[[], bool | None]) -> bool:
        """Does one of the below; a defect in it ends the showing of this file, and of no other."""
        try:
            return bool(act())
        except Exception as error:
            self._broken = True
            threads.tell(f"cannot show {self._path} any more: {threads.describe(error)}", error)
            return False

    def rest(self) -> None:
        """Ends an unfinished line and closes the file."""
        self._show(self._splitter.flush())
        for fd in (self._fd, self._filtered_fd):
            if fd >= 0:
                with contextlib.suppress(OSError):  # a network file system may report a full disk only here
                    os.close(fd)
        self._fd = self._filtered_fd = -1

    def drain(self) -> None:
        """Shows all that the file holds now, then rests. What a running worker adds meanwhile does not prolong it."""
        end = _size_bytes(self._path)
        while self._position < end and not self._broken:
            before = self._position
            self.pump()
            if self._position == before:
                break
        self.rest()

    def _show(self, lines: list[bytes]) -> None:
        for line in lines:
            self._console.write(self._owners[0].painted_prefix + line + b"\n")
            if self._filtered is not None and any(needle in line for needle in self._needles):
                self._copy(self._owners[0].prefix + line + b"\n")

    def _copy(self, line: bytes) -> None:
        """Writes to the file of filtered lines; a full disk ends that copy, and nothing else."""
        assert self._filtered is not None
        try:
            if self._filtered_fd < 0:
                self._filtered_fd = open_to_append(self._filtered)
            _write_all(self._filtered_fd, line)
        except OSError as error:
            self._complaints.write(f"[elaunch] {self._filtered} ends here: {error.strerror}\n".encode())
            self._filtered = None


class _Console:
    """One of the launcher's streams: its descriptor, or the stream itself where it has none (a notebook's)."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._fd = -1
        if stream is not None:
            with contextlib.suppress(OSError, ValueError, AttributeError):
                self._fd = stream.fileno()
        self.is_terminal = self._fd >= 0 and os.isatty(self._fd)

    def write(self, line: bytes) -> None:
        """Writes in one call; once the reader is gone, does nothing."""
        try:
            if self._fd >= 0:
                _write_all(self._fd, line)
            elif self._stream is not None:
                self._stream.write(line.decode(errors="replace"))
                self._stream.flush()
        except (OSError, ValueError):
            self._fd, self._stream = -1, None


def _write_all(fd: int, data: bytes) -> None:
    """Writes in one call where the system takes it all; also to a descriptor that somebody has made non-blocking."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            select.select([], [fd], [])


def _size_bytes(path: str) -> int:
    """Size of a file; 0 where there is none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _painted(prefix: str, color: int | None) -> bytes:
    plain = os.fsencode(prefix)
    return plain if color is None else b"\x1b[%dm%b\x1b[0m" % (color, plain)
