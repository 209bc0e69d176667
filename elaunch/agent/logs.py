"""What becomes of the workers' output: log files, and a copy of their lines on the launcher's own streams.

    worker ──stdout, stderr──> the launcher's streams                 (neither redirected nor teed)
                          └──> stdout.log, stderr.log ──Tee──> the launcher's streams, each line with its prefix
                                                         └───> filtered_stdout.log, filtered_stderr.log

    <log_dir>/<run_id>_<random>/attempt_<N>/filtered_{stdout,stderr}.log
    <log_dir>/<run_id>_<random>/attempt_<N>/<local rank>/{stdout.log,stderr.log,error.json,error.<k>.json}

Files are appended to and never deleted: a worker that replaces another within an attempt goes on in the same files,
and has an error file of its own. With `--log-dir /dev/null` there are no files, and nothing is redirected to any.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import select
import sys
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from string import Template
from typing import TextIO

from elaunch import threads
from elaunch.errors import LaunchError, UsageError

OUT, ERR = 1, 2  # the bits of a mask
Masks = int | Mapping[int, int]

POLL_S = 0.05
CHUNK_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 18

# ANSI foreground colours; red is left to errors, and black, white and grey to backgrounds.
COLORS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)


@dataclass(frozen=True, slots=True)
class LogSettings:
    """What the flags say about logs.

    Attributes:
        log_dir: the base of the log folders; None for a fresh one under the temporary directory, /dev/null for none.
        redirects: the streams (`OUT`, `ERR`) that go to a file, for all workers or by local rank.
        tee: the streams that go to a file and, with a prefix on each line, to the launcher's own as well.
        local_ranks_filter: the only local ranks whose output appears on the launcher's streams; None or empty for all.
        duplicate_stdout_filters: a teed line of stdout that contains one of them goes to filtered_stdout.log too.
        duplicate_stderr_filters: likewise for stderr and filtered_stderr.log.
        role: begins the prefix.
        run_id: begins the name of the run's folder.
        prefix_template: of the prefix, with ${role_name}, ${rank}, ${local_rank} and ${node}; None or empty for
            `[<role><local rank>]:`.
        color: whether prefixes are coloured by local rank, on streams that are a terminal.
    """

    log_dir: str | None = None
    redirects: Masks = 0
    tee: Masks = 0
    local_ranks_filter: frozenset[int] | None = None
    duplicate_stdout_filters: tuple[str, ...] = ()
    duplicate_stderr_filters: tuple[str, ...] = ()
    role: str = "default"
    run_id: str = "none"
    prefix_template: str | None = None
    color: bool = False

    def redirects_something(self) -> bool:
        """Whether the output of any worker goes elsewhere than to the launcher's streams."""
        return bool(self.local_ranks_filter) or (
            self.log_dir != os.devnull and (_any(self.redirects) or self.tees_something())
        )

    def tees_something(self) -> bool:
        """Whether any worker's file may have to be followed; without that, a `Tee` starts no thread."""
        return self.log_dir != os.devnull and _any(self.tee)


@dataclass(frozen=True, slots=True)
class WorkerLogs:
    """Where one worker's output goes. Whoever opens a file opens it with O_APPEND | O_CREAT and never truncates it.

    Attributes:
        stdout, stderr: the file (or /dev/null) that the stream is redirected to; None: it is the launcher's.
        error_file: for TORCHELASTIC_ERROR_FILE; None where there are no files: the variable is then empty.
        tee_stdout, tee_stderr: whether the launcher shows the lines of the file.
        filtered_stdout, filtered_stderr: the file for teed lines that match a filter; None where there is no filter.
        variables: what is to be set in the worker's environment besides.
    """

    stdout: str | None
    stderr: str | None
    error_file: str | None
    tee_stdout: bool = False
    tee_stderr: bool = False
    filtered_stdout: str | None = None
    filtered_stderr: str | None = None
    variables: tuple[tuple[str, str], ...] = ()


# -- flags ------------------------------------------------------------------------------------------------------------


def parse_mask(flag: str, text: str) -> Masks:
    """Read a mask (0 none, 1 stdout, 2 stderr, 3 both) or rank:mask pairs; ranks that are not listed have 0.

    Raises:
        UsageError: it is neither.
    """
    if re.fullmatch(r"[0-3]", text):
        return int(text)
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text, re.ASCII):
        raise UsageError(
            f"{flag}={text}: expected 0 (none), 1 (stdout), 2 (stderr) or 3 (both), "
            "or such numbers for local ranks, as in 0:1,1:2"
        )
    pairs = (pair.split(":") for pair in text.split(","))
    return {int(rank): int(mask) for rank, mask in pairs}


def parse_ranks(flag: str, text: str | None) -> frozenset[int] | None:
    """Read local ranks separated by commas; None for an empty text.

    Raises:
        UsageError: one of them is no integer.
    """
    if not text:
        return None
    try:
        return frozenset(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{flag}={text}: expected local ranks separated by commas, as in 0,1,2") from None


def parse_filters(text: str | None) -> tuple[str, ...]:
    """Read texts separated by commas; two commas stand for one that belongs to the text. Empty texts do not count."""
    parts = (text or "").replace(",,", "\0").split(",")
    return tuple(part.replace("\0", ",") for part in parts if part)


# -- folders ----------------------------------------------------------------------------------------------------------


class LogFolders:
    """Makes the log folders of one run on this node, when they are needed.

    Args:
        settings: what the flags say.
        local_world_size: workers of this node; local ranks are below it.
    """

    def __init__(self, settings: LogSettings, local_world_size: int) -> None:
        self._settings = settings
        self._local_world_size = local_world_size
        self._run_folder: str | None = None
        self._starts: Counter[tuple[int, int]] = Counter()

    def check(self) -> None:
        """Make the base folder where the user has named one, so that a mistake shows before anything is started.

        Raises:
            LaunchError: it cannot be made or written to.
        """
        base = self._settings.log_dir
        if not base or base == os.devnull:
            return
        try:
            os.makedirs(base, exist_ok=True)
            os.rmdir(tempfile.mkdtemp(dir=base))
        except OSError as error:
            raise LaunchError(f"--log-dir={base}: cannot make a folder there: {error.strerror}") from error

    def tidy(self) -> None:
        """Remove the folders that were made without being asked for, if there is no file in them."""
        if self._run_folder is not None and not self._settings.log_dir:
            base = os.path.dirname(self._run_folder)
            for folder, _, _ in os.walk(base, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)

    def worker(self, attempt: int, local_rank: int) -> WorkerLogs:
        """Prepare for the start of a worker; call it once for each start.

        The first start of a local rank in an attempt has `error.json`, the k-th replacement `error.<k>.json`: so no
        worker's report is taken for another's, however late it is written, and a path stays valid.

        Raises:
            LaunchError: a folder or file cannot be made.
        """
        assert 0 <= local_rank < self._local_world_size, f"local rank {local_rank} of {self._local_world_size}"
        settings = self._settings
        shown = not settings.local_ranks_filter or local_rank in settings.local_ranks_filter
        console = None if shown else os.devnull
        if settings.log_dir == os.devnull:
            return WorkerLogs(console, console, None)
        tee = _mask(settings.tee, local_rank)
        to_file = _mask(settings.redirects, local_rank) | tee
        try:
            folder, filtered_stdout, filtered_stderr = self._make(attempt, local_rank)
        except OSError as error:
            where = f"--log-dir={settings.log_dir}" if settings.log_dir else "the default --log-dir"
            what = f"{error.filename}: " if error.filename else ""
            raise LaunchError(f"{where}: cannot make the log folders: {what}{error.strerror}") from error
        former = self._starts[attempt, local_rank]
        self._starts[attempt, local_rank] += 1
        return WorkerLogs(
            stdout=os.path.join(folder, "stdout.log") if to_file & OUT else console,
            stderr=os.path.join(folder, "stderr.log") if to_file & ERR else console,
            error_file=os.path.join(folder, f"error.{former}.json" if former else "error.json"),
            tee_stdout=shown and bool(tee & OUT),
            tee_stderr=shown and bool(tee & ERR),
            filtered_stdout=filtered_stdout,
            filtered_stderr=filtered_stderr,
        )

    def _make(self, attempt: int, local_rank: int) -> tuple[str, str | None, str | None]:
        if self._run_folder is None:
            base = os.path.abspath(self._settings.log_dir or tempfile.mkdtemp(prefix="torchelastic_"))
            os.makedirs(base, exist_ok=True)
            name = self._settings.run_id.replace(os.sep, "_")
            self._run_folder = tempfile.mkdtemp(prefix=f"{name}_", dir=base)
        attempt_folder = os.path.join(self._run_folder, f"attempt_{attempt}")
        folder = os.path.join(attempt_folder, str(local_rank))
        os.makedirs(folder, exist_ok=True)
        filtered: list[str | None] = []
        for name, filters in (
            ("filtered_stdout.log", self._settings.duplicate_stdout_filters),
            ("filtered_stderr.log", self._settings.duplicate_stderr_filters),
        ):
            path = os.path.join(attempt_folder, name)
            if filters:
                os.close(_open_to_append(path))
            filtered.append(path if filters else None)
        return folder, filtered[0], filtered[1]


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
        """Return the lines, and pieces of too long a line, that this chunk completes."""
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
        """Return what stands after the last end of a line, if anything does; the next line begins afresh."""
        rest, self._rest, self._after_return = self._rest, b"", False
        return [rest] if rest else []

    def _cut(self, line: bytes) -> list[bytes]:
        return [line[i : i + self._limit_bytes] for i in range(0, max(1, len(line)), self._limit_bytes)]


def line_prefix(settings: LogSettings, local_rank: int, global_rank: int, node: str) -> str:
    """What stands before each teed line of a worker. Names that the template does not know stay as they are."""
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
        """Show the lines of a worker that is about to start; again, with another rank, for one that runs.

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
        """Show the rest of what the worker has written, and end an unfinished last line."""
        if self._thread is not None:
            self._ask(_Ended(worker))

    def close(self) -> None:
        """Show all that the files hold at this moment, also what came after the end of a worker, and stop."""
        if self._thread is None:
            return
        self._requests.put(None)
        self._thread.join()
        if not self._closed:  # it had died, or died now: another one goes on where it was
            if self._requests.empty():
                self._requests.put(None)
            threads.start("elaunch-tee", self._run, self._died).join()
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
        """Take all requests; wait for the first."""
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
        """Show at most one chunk; True if there is probably more.

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
        """Do one of the below; a defect in it ends the showing of this file, and of no other."""
        try:
            return bool(act())
        except Exception as error:
            self._broken = True
            threads.tell(f"cannot show {self._path} any more: {threads.describe(error)}", error)
            return False

    def rest(self) -> None:
        """End an unfinished line and close the file."""
        self._show(self._splitter.flush())
        for fd in (self._fd, self._filtered_fd):
            if fd >= 0:
                with contextlib.suppress(OSError):  # a network file system may report a full disk only here
                    os.close(fd)
        self._fd = self._filtered_fd = -1

    def drain(self) -> None:
        """Show all that the file holds now, then rest. What a running worker adds meanwhile does not prolong it."""
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
        """Write to the file of filtered lines; a full disk ends that copy, and nothing else."""
        assert self._filtered is not None
        try:
            if self._filtered_fd < 0:
                self._filtered_fd = _open_to_append(self._filtered)
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
        """Write in one call; once the reader is gone, do nothing."""
        try:
            if self._fd >= 0:
                _write_all(self._fd, line)
            elif self._stream is not None:
                self._stream.write(line.decode(errors="replace"))
                self._stream.flush()
        except (OSError, ValueError):
            self._fd, self._stream = -1, None


def _write_all(fd: int, data: bytes) -> None:
    """Write in one call where the system takes it all; also to a descriptor that somebody has made non-blocking."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            select.select([], [fd], [])


def _open_to_append(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _size_bytes(path: str) -> int:
    """Size of a file; 0 where there is none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _painted(prefix: str, color: int | None) -> bytes:
    plain = os.fsencode(prefix)
    return plain if color is None else b"\x1b[%dm%b\x1b[0m" % (color, plain)


def _mask(masks: Masks, local_rank: int) -> int:
    return masks if isinstance(masks, int) else masks.get(local_rank, 0)


def _any(masks: Masks) -> bool:
    return bool(masks) if isinstance(masks, int) else any(masks.values())
