"""The Python stacks of all threads of a worker that hangs: by py-spy where there is one, else by the worker's
faulthandler.

A worker that uses elaunch has registered faulthandler for `DUMP_SIGNAL` (`elaunch.workers.heartbeat`): its handler is
in C and writes without the interpreter's lock into a file that the agent can read.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

DUMP_SIGNAL = signal.SIGRTMAX - 3
"""Real-time signals have no meaning of their own; those near the ends of their range are what others take first."""

PY_SPY_LIMIT_S = 5.0
DUMP_LIMIT_S = 1.0
QUIET_S = 0.1
"""A dump to which nothing was added for so long is complete."""

LOOK_S = 0.01
LONGEST_BYTES = 1 << 22
NAMED_FRAMES = 3

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
_PY_SPY_FRAME = re.compile(r"^\s+(?P<function>.*) \((?P<file>.*):(?P<line>\d+)\)$")
_THREAD = re.compile(r"^(?:Current thread|Thread) (0x)?([0-9A-Fa-f]+)\b")


@dataclass(frozen=True, slots=True)
class Frame:
    """A call: where it is."""

    file: str
    line: str
    function: str

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line} in {self.function}"


@dataclass(frozen=True, slots=True)
class Stacks:
    """What was found.

    Attributes:
        text: of the dump; empty: none came.
        by: what made it, `py-spy` or `faulthandler`; if none came, why.
        frames: of the training thread, the innermost first.
    """

    text: str
    by: str
    frames: tuple[Frame, ...] = ()

    def place(self) -> str:
        """Returns the innermost calls of the training thread; empty where they are not known."""
        return " < ".join(map(str, self.frames[:NAMED_FRAMES]))


def collect(pid: int, tid: int, thread: int, dump_fd: int) -> Stacks:
    """Takes the stacks of a process that runs. It takes up to `PY_SPY_LIMIT_S` + `DUMP_LIMIT_S`.

    Args:
        pid: of the worker.
        tid: the kernel's number of its training thread, by which py-spy names it on Linux.
        thread: the same thread as faulthandler names it.
        dump_fd: the file into which the worker's faulthandler writes.
    """
    text = _by_py_spy(pid)
    if text:
        return Stacks(text, "py-spy", frames_of(text, tid, thread))
    text = _by_faulthandler(pid, dump_fd)
    if text:
        return Stacks(text, "faulthandler", frames_of(text, tid, thread))
    return Stacks("", f"no dump came within {DUMP_LIMIT_S:g} s")


def py_spy() -> str | None:
    """Returns the path of the program, in PATH or beside this interpreter."""
    return shutil.which("py-spy") or shutil.which("py-spy", path=os.path.dirname(sys.executable))


def _by_py_spy(pid: int) -> str:
    program = py_spy()
    if program is None:
        return ""
    command = [program, "dump", "--pid", str(pid)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PY_SPY_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else ""


def _by_faulthandler(pid: int, dump_fd: int) -> str:
    before = os.fstat(dump_fd).st_size
    try:
        os.kill(pid, DUMP_SIGNAL)
    except OSError:
        return ""
    end_s = time.monotonic() + DUMP_LIMIT_S
    size, since_s = before, time.monotonic()
    while (now_s := time.monotonic()) < end_s and (size == before or now_s - since_s < QUIET_S):
        time.sleep(LOOK_S)
        found = os.fstat(dump_fd).st_size
        if found != size:
            size, since_s = found, time.monotonic()
    return os.pread(dump_fd, min(size - before, LONGEST_BYTES), before).decode("utf-8", "replace")


def frames_of(text: str, tid: int, thread: int) -> tuple[Frame, ...]:
    """Returns the calls of one thread in a dump of faulthandler's or py-spy's, the innermost first.

    Args:
        text: of the dump.
        tid, thread: the numbers of the thread, as for `collect`; a dump gives either one, the latter as 0x….
    """
    frames: list[Frame] = []
    inside = False
    for line in text.splitlines():
        if header := _THREAD.match(line):
            inside = int(header[2], 16) == thread if header[1] else header[2] == str(tid)
        elif inside and (match := _FRAME.match(line) or _PY_SPY_FRAME.match(line)):
            frames.append(Frame(match["file"], match["line"], match["function"]))
    return tuple(frames)


def save(stacks: Stacks, path: str, heading: str) -> str:
    """Writes the dump into a file.

    Returns:
        The path; empty if there is no dump, or the file cannot be written.
    """
    if not stacks.text:
        return ""
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"{heading}\n\n{stacks.text}")
    except OSError:
        return ""
    return path
