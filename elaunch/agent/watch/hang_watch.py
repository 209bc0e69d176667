"""The agent's watch over workers that run and do not go on: it looks at them, lets `detect.hang` judge, and says what
of.

Stopped processes are found by the state that the kernel gives them, whatever they run. Those that use elaunch show
their heartbeat besides.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from elaunch import threads
from elaunch.detect.hang import FIRST_STEPS_KEY, FIRST_STEPS_S, MIN_STEPS, Hang, HangDetector, HangTimeout, Sight
from elaunch.detect.heartbeat import HeartbeatReading, Reader
from elaunch.detect.host import family
from elaunch.detect.stacks import Stacks, collect, save
from elaunch.rendezvous.membership import Deadlock, Stalled
from elaunch.rendezvous.rules.holders import grace_s

LOOK_S = 0.25
"""Seconds from one look to the next at workers that show a heartbeat, or at one that is stopped."""

PLAIN_LOOK_S = 1.0
"""Seconds from one look to the next at workers of which only the kernel's state is seen."""

STILL_S = 0.5
"""Children are looked at for workers that have been still for so long."""

STOPPED = "T"
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Stopped:
    """A worker that the kernel has not run for too long. `state`: T: stopped by a signal; D: in the kernel's hands."""

    worker: str
    state: str
    stopped_s: float


@dataclass(frozen=True, slots=True)
class Found:
    """A worker that hangs, with its stacks, and their file; `moved`: it went on while they were taken."""

    hang: Hang
    stacks: Stacks
    path: str
    moved: bool


@dataclass(slots=True)
class _Watched:
    pid: int
    reader: Reader
    dump_fd: int
    children_s: float = 0.0
    busy: bool = False  # its stacks are being taken

    def close(self) -> None:
        self.reader.close()
        os.close(self.dump_fd)


class HangWatch:
    """Looks at the workers of one node. All methods are for the agent's loop; `found` is called from another thread.

    Args:
        setting: what the user wants.
        stop_limits_s: by state of a process, how long it may last.
        found: told of a worker that hangs, when its stacks have been taken.
        first_steps_s: how long a worker may show no progress in its first steps, in seconds.

    Attributes:
        due_s: when it is time for the next look.
        heartbeats: what workers showed at the last one.
    """

    def __init__(
        self,
        setting: HangTimeout,
        stop_limits_s: Mapping[str, float],
        found: Callable[[Found], None],
        first_steps_s: float = FIRST_STEPS_S,
    ) -> None:
        self._detector = HangDetector(setting, first_steps_s)
        self._stop_limits_s = stop_limits_s
        self._found = found
        self._watched: dict[str, _Watched] = {}
        self._stopped_since: dict[str, float] = {}
        self.due_s = 0.0
        self.heartbeats: dict[str, HeartbeatReading] = {}

    def attached(self, worker: str, pid: int, fds: Sequence[int]) -> str:
        """Takes the descriptors of a worker's heartbeat and stacks, if it has sent any; they belong to the watch now.

        Returns:
            Why it is not watched although it has sent some; empty where all is well.
        """
        self.forget(worker)
        if len(fds) == 2 and all(map(_in_memory, fds)):
            self._watched[worker] = _Watched(pid, Reader(fds[0]), fds[1])
            self.due_s = min(self.due_s, time.monotonic() + LOOK_S)
            return ""
        for fd in fds:
            os.close(fd)
        return f"{len(fds)} descriptors came, expected two of files in memory" if fds else ""

    def forget(self, worker: str) -> None:
        """Forgets a worker that has ended."""
        watched = self._watched.get(worker)
        self._stopped_since.pop(worker, None)
        if watched is not None and not watched.busy:
            del self._watched[worker]
            watched.close()

    def close(self) -> None:
        """Forgets all workers; the files of those whose stacks are being taken stay open."""
        for worker in list(self._watched):
            self.forget(worker)

    def look(
        self,
        running: Iterable[tuple[str, int]],
        generation: int,
        members: Sequence[str],
        holders: Sequence[str],
        path_of: Callable[[str], str],
    ) -> list[Stopped]:
        """Looks at all workers, and begins to take the stacks of one that hangs.

        Args:
            running: workers of this node, with their pids (0: not known yet).
            generation: of the newest generation.
            members: of that, in their order.
            holders: those of them that hold the state, where that is to be saved.
            path_of: where the stacks of a worker go.

        Returns:
            Those that have been stopped for too long. They are told of once, and are to be killed.
        """
        now_s = time.monotonic()
        sights: dict[str, Sight] = {}
        stopped: list[Stopped] = []
        states = {worker: (pid, thread_state(pid) if pid else "") for worker, pid in running}
        sound = {worker for worker, (_, state) in states.items() if state not in (*self._stop_limits_s, "", "Z")}
        for worker, (pid, state) in states.items():
            if state in self._stop_limits_s:
                since_s = self._stopped_since.setdefault(worker, now_s)
                left = [holder for holder in holders if holder not in {one.worker for one in stopped}]
                if now_s - since_s >= self._stop_limits_s[state] + grace_s(worker, left, sound):
                    del self._stopped_since[worker]
                    stopped.append(Stopped(worker, state, now_s - since_s))
            else:
                self._stopped_since.pop(worker, None)
            watched = self._watched.get(worker)
            if watched is not None and pid and state not in ("", STOPPED, "Z") and not watched.busy:
                sight = self._sight(watched, now_s)
                if sight is not None:
                    sights[worker] = sight
        self.due_s = now_s + (LOOK_S if self._watched or self._stopped_since else PLAIN_LOOK_S)
        self.heartbeats = {worker: sight.heartbeat for worker, sight in sights.items()}
        left = [holder for holder in holders if holder not in {one.worker for one in stopped}]
        hang = self._detector.look(now_s, sights, generation, members, left)
        if hang is not None:
            self._blame(hang, path_of(hang.worker))
        return stopped

    @property
    def stalled(self) -> tuple[Stalled, ...]:
        """Returns the members on this node, once all have exceeded the wait limit and there are others elsewhere."""
        return self._detector.stalled

    @property
    def early_s(self) -> float | None:
        """Returns the limit of first steps, in seconds, while it holds; else None."""
        return self._detector.early_s

    def take_out(self, found: Deadlock, path_of: Callable[[str], str]) -> None:
        """Begins to take the stacks of the one to go, of members that all wait for each other, if it still waits."""
        hang = self._detector.take_out(time.monotonic(), found)
        if hang is not None:
            self._blame(hang, path_of(hang.worker))

    def _blame(self, hang: Hang, path: str) -> None:
        watched = self._watched[hang.worker]
        watched.busy = True

        def without_stacks(error: BaseException) -> None:
            """The worker hangs, even if nobody can say where."""
            self._found(Found(hang, Stacks("", f"they cannot be taken: {threads.describe(error)}"), "", moved=False))

        try:
            threads.start("elaunch-stacks", lambda: self._take(hang, watched, path), without_stacks)
        except RuntimeError as error:  # the system gives this process no more threads
            without_stacks(error)

    def done(self, worker: str) -> None:
        """Notes that the agent has heard of a worker that hangs and has acted on it."""
        if worker in self._watched:
            self._watched[worker].busy = False

    def _sight(self, watched: _Watched, now_s: float) -> Sight | None:
        heartbeat = watched.reader.read()
        if heartbeat is None:
            return None
        sight = Sight(
            heartbeat,
            thread_state(watched.pid, heartbeat.training_tid),
            thread_state(watched.pid, heartbeat.beating_tid),
        )
        if not heartbeat.still or heartbeat.waits or now_s - heartbeat.still_since_s < STILL_S:
            return sight
        before_s, watched.children_s = watched.children_s, children_cpu_s(watched.pid)
        return replace(sight, children_work=watched.children_s > before_s)

    def _take(self, hang: Hang, watched: _Watched, path: str) -> None:
        """In a thread: the stacks of a worker, and whether it has gone on meanwhile."""
        heartbeat = watched.reader.read()
        assert heartbeat is not None, f"{hang.worker} was judged without a heartbeat"
        stacks = collect(watched.pid, heartbeat.training_tid, heartbeat.thread, watched.dump_fd)
        waits = "".join(f"\n    {line}" for line in hang.waits)
        heading = (
            f"{hang.worker}, pid {watched.pid}, {hang.doing}: {hang.since_s:.2f} s, limit {hang.limit_s:.2f} s{waits}"
        )
        if not path:
            folder = tempfile.mkdtemp(prefix="elaunch-stacks-")
            path = os.path.join(folder, "stacks.txt")
        saved = save(stacks, path, heading)
        now = watched.reader.read()
        self._found(Found(hang, stacks, saved, moved=now is not None and now.since_s > hang.moment_s))


def describe(found: Found, is_last: bool = False) -> str:
    """Describes a worker that hangs in a line for the user; `is_last`: nobody else holds the state."""
    hang, stacks = found.hang, found.stacks
    usual = f", a step takes {hang.typical_step_s:.3g} s" if hang.typical_step_s is not None else ""
    place = f"; at {stacks.place()}" if stacks.place() else ""
    where = f"; stacks in {found.path}" if found.path else f"; its stacks are not known: {stacks.by}"
    waits = f" ({'; '.join(hang.waits)})" if hang.waits else ""
    if found.moved:
        fate = "it went on while its stacks were taken, and is left alone"
    else:
        fate = "it is waited for, since nobody else holds the state of the job yet" if is_last else "it is killed"
    early = f" until {MIN_STEPS} steps have been seen ({FIRST_STEPS_KEY} gives it more)" if hang.is_early else ""
    return (
        f"worker {hang.worker} hangs: {hang.doing} for {hang.since_s:.1f} s{usual}, the limit is "
        f"{hang.limit_s:.1f} s{early}{waits}{place}{where}; {fate}"
    )


def thread_state(pid: int, tid: int | None = None) -> str:
    """Returns one letter, as in /proc/PID/stat, of a process or one thread of it; empty when it is gone."""
    found = _stat(f"/proc/{pid}/stat" if tid is None else f"/proc/{pid}/task/{tid}/stat")
    return found[0].decode() if found else ""


def children_cpu_s(pid: int) -> float:
    """Returns the processor seconds of all living descendants of a process."""
    stats = [_stat(f"/proc/{child}/stat") for child in family(pid)[1:]]
    return sum((int(found[11]) + int(found[12])) * _TICK_S for found in stats if found)


def _in_memory(fd: int) -> bool:
    """Whether a descriptor is of an anonymous file, of which no read waits."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:")
    except OSError:
        return False


def _stat(path: str) -> list[bytes]:
    """The fields of a stat file after the name; none when the process or thread is gone, or cannot be looked at."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(fd, 4096).rpartition(b")")[2].split()
        finally:
            os.close(fd)
    except OSError:
        return []
