"""Timers that workers set on themselves: the agent's end of torch.distributed.elastic.timer.FileTimerClient.

A worker writes a JSON line per timer into the FIFO that TORCHELASTIC_TIMER_FILE names; a negative expiry releases it:

    {"version": 1, "pid": 4711, "scope_id": "step", "expiration_time": 1700000000.5, "signal": 9}

A worker with an expired timer is to get that timer's signal. This module only says so: torchrun's FileTimerServer sends
the signal to the launcher as well, which leaves the other workers without a parent.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import reprlib
import signal
import stat
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from elaunch.errors import LaunchError

ENABLE = "TORCHELASTIC_ENABLE_FILE_TIMER"
TIMER_FILE = "TORCHELASTIC_TIMER_FILE"

READ_BYTES = 1 << 16
PIPE_BYTES = 1 << 20  # a client does not wait: with a full pipe its request is lost to it
LONGEST_BYTES = 1 << 13  # a request is at most PIPE_BUF, 4096; more without a line break is none
MAX_PID = 1 << 31
MAX_TIMERS = 10_000
MAX_LINES = 10  # about requests that cannot be used, each time that some have come


@dataclass(frozen=True, slots=True)
class Request:
    """One line: set the timer (pid, scope), or release it where `expiry_s` is negative.

    `expiry_s` is in Unix seconds; a `signal` of 0 or less sends nothing.
    """

    pid: int
    scope: str
    expiry_s: float
    signal: int


class Expired(NamedTuple):
    """A process whose time is over, the timer that says so, and the signal to send; 0 for none."""

    pid: int
    scope: str
    signal: int


def is_enabled(env: Mapping[str, str]) -> bool:
    """Returns whether the launcher's environment asks for the watchdog."""
    return env.get(ENABLE) == "1"


def fifo_path(env: Mapping[str, str], folder: str) -> str:
    """Returns the path that the launcher's environment names, else a fresh one in `folder`."""
    return env.get(TIMER_FILE) or os.path.join(folder, f"watchdog_timer_{uuid.uuid4()}")


def parse(line: bytes) -> Request:
    """Reads one line.

    Raises:
        ValueError: it is no request; the message says why.
    """
    try:
        found = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"expected an object, found {type(found).__name__}")
    pid, scope = found.get("pid"), found.get("scope_id")
    number = found.get("signal")
    try:
        expiry_s = float(found["expiration_time"])
    except (KeyError, TypeError, ValueError, OverflowError):
        expiry_s = math.nan
    if type(pid) is not int or not 0 < pid < MAX_PID:
        raise ValueError(f"pid={reprlib.repr(pid)}: expected the number of a process")
    if not isinstance(scope, str):
        raise ValueError(f"scope_id={reprlib.repr(scope)}: expected text")
    if math.isnan(expiry_s):
        raise ValueError(f"expiration_time={reprlib.repr(found.get('expiration_time'))}: expected Unix seconds")
    if type(number) is not int or (number > 0 and number not in signal.valid_signals()):
        raise ValueError(f"signal={reprlib.repr(number)}: expected the number of a signal")
    return Request(pid, scope, expiry_s, number)


class Watchdog:
    """The FIFO and the timers that came through it. For a selector: readable when there are requests.

    Args:
        path: of the FIFO to create, readable and writable for this user alone; one that is there already is replaced.

    Raises:
        LaunchError: the FIFO cannot be created, or something else has this path.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._timers: dict[tuple[int, str], Request] = {}
        self._rest = b""
        self._lines: list[str] = []
        self._n_ignored = 0
        self._fd = -1
        try:
            self._remove()
            os.mkfifo(path, 0o600)
            # Reading and writing, so that the end of the last client is not the end of the file.
            self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise LaunchError(
                f"{ENABLE}=1: cannot create the FIFO {path}: {error.strerror}; name another one with {TIMER_FILE}"
            ) from error
        with contextlib.suppress(OSError):  # a user's share of pipe memory is limited
            fcntl.fcntl(self._fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def fileno(self) -> int:
        """Returns the descriptor of the FIFO, by which a selector takes this object."""
        return self._fd

    def receive(self) -> list[str]:
        """Takes up the requests that have come, without waiting.

        Returns:
            For each of the first lines that are no requests, a line that says so, and one of how many more there are;
            such lines change nothing.
        """
        for _ in range(PIPE_BYTES // READ_BYTES):  # what comes meanwhile keeps the FIFO readable
            try:
                data = os.read(self._fd, READ_BYTES)
            except BlockingIOError:
                break
            *lines, self._rest = (self._rest + data).split(b"\n")
            if len(self._rest) > LONGEST_BYTES:
                lines.append(self._rest)
                self._rest = b""
            for line in filter(None, lines):
                self._take(line)
            if len(data) < READ_BYTES:
                break
        taken, self._lines = self._lines, []
        if self._n_ignored:
            taken.append(f"watchdog: ignored {self._n_ignored} more lines")
            self._n_ignored = 0
        return taken

    def _take(self, line: bytes) -> None:
        try:
            request = parse(line)
        except ValueError as error:
            self._complain(f"watchdog: ignored {line[:200]!r}: {str(error)[:200]}")
            return
        key = request.pid, request.scope
        if request.expiry_s < 0:
            self._timers.pop(key, None)
        elif key in self._timers or len(self._timers) < MAX_TIMERS:
            self._timers[key] = request
        else:
            self._complain(f"watchdog: ignored {line[:200]!r}: there are {MAX_TIMERS} timers already")

    def _complain(self, text: str) -> None:
        if len(self._lines) < MAX_LINES:
            self._lines.append(text)
        else:
            self._n_ignored += 1

    def due_s(self) -> float | None:
        """Returns when the next timer expires, in Unix seconds; None if none does."""
        due_s = min((timer.expiry_s for timer in self._timers.values()), default=math.inf)
        return due_s if math.isfinite(due_s) else None

    def expired(self, now_unix_s: float) -> list[Expired]:
        """Returns the processes with a timer that expired by now, each once, and forgets all timers of these.

        A process with several is told by the earliest that has a signal.
        """
        by_pid: dict[int, list[Request]] = {}
        for timer in sorted(self._timers.values(), key=lambda timer: timer.expiry_s):
            if timer.expiry_s <= now_unix_s:
                by_pid.setdefault(timer.pid, []).append(timer)
        found = []
        for pid, timers in by_pid.items():
            first = next((timer for timer in timers if timer.signal > 0), timers[0])
            found.append(Expired(pid, first.scope, max(first.signal, 0)))
            self._drop(pid)
        return found

    def forget(self, pid: int) -> list[str]:
        """Drops the timers of a process that is gone, also those that it asked for just before its end.

        Returns:
            As `receive`.
        """
        lines = self.receive()
        self._drop(pid)
        return lines

    def _drop(self, pid: int) -> None:
        self._timers = {key: timer for key, timer in self._timers.items() if key[0] != pid}

    def close(self) -> None:
        """Removes the FIFO. Clients then find nobody there, and say so."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            with contextlib.suppress(OSError):
                self._remove()

    def _remove(self) -> None:
        try:
            if not stat.S_ISFIFO(os.lstat(self.path).st_mode):
                raise OSError(errno.EEXIST, "it exists and is no FIFO")
            os.unlink(self.path)
        except FileNotFoundError:
            pass


def worker_of(pid: int, workers: Collection[int]) -> int | None:
    """Returns the worker, by its pid, that a process belongs to: itself, or the leader of its session. None for any
    other.

    Each worker leads a session of its own, so this finds the processes that it started too.
    """
    if pid in workers:
        return pid
    try:
        leader = os.getsid(pid)
    except OSError:
        return None
    return leader if leader in workers else None
