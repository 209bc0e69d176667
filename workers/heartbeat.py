"""A worker's heartbeat: what its agent needs to know to tell a worker that hangs from one that works or waits.

One per process. Code that trains says here what it is about, and marks its waits for peers:

    heartbeat.enter(Phase.STEP, step=4)
    with heartbeat.waiting(("a/1#0",)):
        ...

The script's own code in a step is `Phase.SCRIPT`. It ends with the first wait for peers: whatever follows is the step.

Without an agent (`open_heartbeat` was not called) all of it does nothing. A call costs a microsecond or two: it
stores into memory that the agent sees (`elaunch.detect.heartbeat`).

Where a device computes, the training thread does not wait for peers: the stream does, and the thread goes on until it
asks for a value. So `on_device` takes a mark of the stream before such a wait and one after it, and the thread that
beats looks at these.

A thread beats besides. It can only do so when it gets the interpreter's lock, so a call that keeps the lock stops it.
It also looks at the training thread: whether the process uses processor time, and whether that goes into one and the
same loop. A thread gives up the lock by itself in a call; where it has it taken away is at the end of a loop, where
the interpreter looks for such requests. So who is found at the end of the same loop every time, and the loop has no
call in it, goes round there and does nothing else.
"""

from __future__ import annotations

import contextlib
import dis
import faulthandler
import functools
import mmap
import os
import sys
import threading
import time
from collections.abc import Collection
from types import CodeType, FrameType, TracebackType
from typing import NamedTuple, Protocol

from elaunch import threads
from elaunch.detect import heartbeat as form
from elaunch.detect.heartbeat import BEAT_S, FILE_BYTES, TEXT_AT, TEXT_BYTES, VERSION, OnDevice, Phase, Still
from elaunch.detect.stacks import DUMP_SIGNAL
from elaunch.workers.fatal import end_process

SHOWN_PEERS = 8
ASLEEP_NS = 1_000_000
"""Of processor time between two beats: who has used less slept. A wait that wakes up every few seconds uses less."""

ASLEEP_PROCESS_NS = 10_000_000
"""The same for all threads: of an accelerator's backward, say, which runs in threads of its own."""

DEEPEST = 64
"""Calls that are compared, from the innermost."""

MOST_MARKS = 64
"""Waits of a device that are looked at; of more at a time the later ones come after these anyway."""

CALLS = ("CALL", "PRECALL", "FOR_ITER", "SEND", "YIELD", "IMPORT", "BEFORE_", "LOAD_BUILD_CLASS")
"""How instructions begin that hand over to other code."""


class Mark(Protocol):
    """A place in the work of a device."""

    def query(self) -> bool:
        """Returns whether the device has come to it."""


class DeviceWait(NamedTuple):
    """A wait of a device for peers, by the places before it and after it."""

    before: Mark
    after: Mark

    def look(self) -> OnDevice:
        """Returns how far the device is."""
        try:
            if self.after.query():
                return OnDevice.NOTHING
            return OnDevice.PEERS if self.before.query() else OnDevice.COMPUTES
        except RuntimeError:  # the device has failed: nobody waits for it any more
            return OnDevice.NOTHING


class Heartbeat:
    """Writes the heartbeat of this process.

    Attributes:
        fd: the anonymous file, for the agent.
        stacks_fd: another one, into which the stacks of all threads go when `DUMP_SIGNAL` comes. The handler is in C
            and needs no interpreter, so it also works in a call that keeps its lock.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("elaunch-heartbeat", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, FILE_BYTES)
        self.stacks_fd = os.memfd_create("elaunch-stacks", os.MFD_CLOEXEC)
        self._map = mmap.mmap(self.fd, FILE_BYTES)
        self._numbers = memoryview(self._map).cast("Q")
        self._training = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._training)
        # Threads that train: this one, and those of autograd. Reentrant for the sake of signal handlers in Python.
        self._lock = threading.RLock()
        self._n_waiting = 0
        self._news_ns: int | None = None  # that waits are still to end by
        self._freed_ns: int | None = None
        self._on_device: list[DeviceWait] = []
        self._closing = threading.Event()
        numbers, now = self._numbers, time.monotonic_ns()
        numbers[form.AT_PID] = os.getpid()
        numbers[form.AT_THREAD] = self._training
        numbers[form.AT_TRAINING_TID] = threading.get_native_id()
        for place in (form.AT_BEAT, form.AT_STEP_SINCE, form.AT_SINCE):
            numbers[place] = now
        numbers[form.AT_VERSION] = VERSION
        with contextlib.suppress(RuntimeError, ValueError, OSError):  # the script may have a handler of its own
            faulthandler.register(DUMP_SIGNAL, file=self.stacks_fd, all_threads=True, chain=False)
        self._looks_for_loops = True
        self._thread = threads.start("elaunch-heartbeat", self._run, self._died)

    def enter(self, phase: Phase, step: int | None = None, steps_here: int | None = None) -> None:
        """Notes that the training thread is about something else now, or goes on with it: a sign of progress."""
        now = time.monotonic_ns()
        numbers = self._numbers
        with self._lock:
            numbers[form.AT_SEQUENCE] += 1
            if step is not None and (step != numbers[form.AT_STEP] or numbers[form.AT_PHASE] == Phase.LOADING):
                numbers[form.AT_STEP] = step
                numbers[form.AT_STEP_SINCE] = now
            if steps_here is not None:
                numbers[form.AT_STEPS_HERE] = steps_here
                if not steps_here:
                    numbers[form.AT_STEP_SINCE] = now
            numbers[form.AT_PHASE] = phase
            numbers[form.AT_SINCE] = now
            numbers[form.AT_SEQUENCE] += 1

    def committed(self, step: int) -> None:
        """Notes that a step has committed; `step` is the next one. The same step counts once."""
        numbers = self._numbers
        with self._lock:
            self._on_device.clear()
            self._show_device(OnDevice.NOTHING)
        self.enter(Phase.BETWEEN, step, numbers[form.AT_STEPS_HERE] + int(step != numbers[form.AT_STEP]))

    def begin_script_code(self) -> bool:
        """Notes that the step under way runs code of the script; returns whether there is one, outside such code."""
        is_step = self._numbers[form.AT_PHASE] == Phase.STEP
        if is_step:
            self.enter(Phase.SCRIPT)
        return is_step

    def begin_leaving(self) -> None:
        """Notes that the function that runs, if one does, is to be left. For any thread."""
        with self._lock:
            if self._numbers[form.AT_PHASE] == Phase.FUNCTION:
                self.enter(Phase.LEAVING)

    def begin_wait(self, peers: Collection[str], generation: int, operation: int) -> None:
        """Notes that a thread waits for `peers` in an operation of a generation; each call has its `end_wait`.

        Of waits at the same time, the last one that names its peers is shown: SHOWN_PEERS of them, and how many others.
        """
        now = time.monotonic_ns()
        numbers = self._numbers
        with self._lock:
            self._n_waiting += 1
            if self._n_waiting > 1 and not peers:
                return  # what is known is more exact
            shown = list(peers)[:SHOWN_PEERS]
            text = "\n".join(shown).encode()
            if len(text) > TEXT_BYTES:
                shown, text = [], b""
            numbers[form.AT_SEQUENCE] += 1
            if self._n_waiting == 1:
                numbers[form.AT_SINCE] = now
            if numbers[form.AT_PHASE] == Phase.SCRIPT:
                numbers[form.AT_PHASE] = Phase.STEP
            numbers[form.AT_WAITS] = 1
            numbers[form.AT_GENERATION], numbers[form.AT_OPERATION] = generation, operation
            numbers[form.AT_OTHERS], numbers[form.AT_LENGTH] = len(peers) - len(shown), len(text)
            self._map[TEXT_AT : TEXT_AT + len(text)] = text
            numbers[form.AT_SEQUENCE] += 1

    def end_wait(self) -> None:
        """Notes that one of the waits is over: a sign of progress."""
        now = time.monotonic_ns()
        numbers = self._numbers
        with self._lock:
            self._n_waiting -= 1
            numbers[form.AT_SEQUENCE] += 1
            numbers[form.AT_SINCE] = now
            numbers[form.AT_WAITS] = 1 if self._n_waiting else 0
            numbers[form.AT_SEQUENCE] += 1
            if self._news_ns is not None and not self._n_waiting:
                self._freed_ns, self._news_ns = max(self._freed_ns or 0, now - self._news_ns), None

    def news(self) -> None:
        """Notes that news has come which ends all waits that are under way. For any thread."""
        now = time.monotonic_ns()
        with self._lock:
            if not self._n_waiting:
                self._freed_ns = self._freed_ns or 0
            elif self._news_ns is None:
                self._news_ns = now

    def take_freed_s(self) -> float | None:
        """Returns the longest seconds from news until no wait was under way any more, and forgets them.

        0: there was none when the news came; None: no news has come.
        """
        with self._lock:
            freed_ns, self._freed_ns = self._freed_ns, None
        return None if freed_ns is None else freed_ns / 1e9

    def begin_on_device(self, wait: DeviceWait) -> None:
        """Notes that a device has been told to wait for peers. It stands until a beat has seen the end of it."""
        with self._lock:
            if len(self._on_device) < MOST_MARKS:
                self._on_device.append(wait)
            if self._numbers[form.AT_DEVICE] == OnDevice.NOTHING:
                self._show_device(OnDevice.ISSUED)

    def look_at_device(self) -> None:
        """Shows how far the device is with what it waits for."""
        waits = list(self._on_device)
        if not waits:
            return
        seen = [wait.look() for wait in waits]
        with self._lock:
            over = {id(wait) for wait, one in zip(waits, seen, strict=True) if one is OnDevice.NOTHING}
            self._on_device = [wait for wait in self._on_device if id(wait) not in over]
            if self._on_device:
                # Of streams beside each other one that waits for peers may be what the others wait for.
                self._show_device(max(max(seen), OnDevice.ISSUED))
            else:
                self._show_device(OnDevice.NOTHING)

    def _show_device(self, new: OnDevice) -> None:
        numbers = self._numbers
        numbers[form.AT_SEQUENCE] += 1
        if (numbers[form.AT_DEVICE] == OnDevice.PEERS) != (new is OnDevice.PEERS):
            numbers[form.AT_SINCE] = time.monotonic_ns()  # a wait that begins or ends is a sign of progress
        numbers[form.AT_DEVICE] = new
        numbers[form.AT_SEQUENCE] += 1

    def moved(self) -> None:
        """Notes that bytes have come from a peer: whoever waits does not do so in vain."""
        self._numbers[form.AT_MOVED] = time.monotonic_ns()

    def close(self) -> None:
        """Ends the heartbeat: the job is over for this worker; what its process does from now on is its own matter."""
        self.enter(Phase.ENDED)
        self._closing.set()

    # -- the thread that beats ----------------------------------------------------------------------------------

    def _died(self, error: BaseException) -> None:
        # Without beats the agent would take a worker that is well for one that hangs.
        if not self._closing.is_set():
            end_process("heartbeat", error)

    def _run(self) -> None:
        numbers = self._numbers
        numbers[form.AT_BEATING_TID] = threading.get_native_id()
        used_ns, process_ns, before_ns = self._used_ns(), time.process_time_ns(), time.monotonic_ns()
        place: object = None
        while not self._closing.is_set():
            now_ns, now_used_ns, now_process_ns = time.monotonic_ns(), self._used_ns(), time.process_time_ns()
            still = Still.MOVES
            loop = None
            if now_used_ns - used_ns < ASLEEP_NS:
                if now_process_ns - process_ns < ASLEEP_PROCESS_NS:
                    still = Still.ASLEEP
            elif not numbers[form.AT_WAITS]:
                loop = self._loop()
                if loop is not None and loop == place:
                    still = Still.SPINS
            # In this order: who reads in between takes it for one that has moved just now.
            if numbers[form.AT_STILL] != still:
                numbers[form.AT_STILL] = Still.MOVES
                numbers[form.AT_STILL_SINCE] = before_ns  # what was seen is that of the time since then
                numbers[form.AT_STILL] = still
            numbers[form.AT_BEAT] = now_ns
            used_ns, process_ns, before_ns, place = now_used_ns, now_process_ns, now_ns, loop
            self.look_at_device()
            self._closing.wait(BEAT_S)

    def _loop(self) -> object:
        """As `_loop_of` for the training thread. Code that cannot be read, once met, ends the search for loops."""
        if self._looks_for_loops:
            try:
                return _loop_of(sys._current_frames().get(self._training))
            except Exception as error:  # `dis` meets the code of others, which may have been rewritten
                self._looks_for_loops = False
                threads.tell(f"loops that hang are no longer looked for: {threads.describe(error)}", error)
        return None

    def _used_ns(self) -> int:
        try:
            return time.clock_gettime_ns(self._clock)
        except OSError:  # the thread has ended, and the process is about to
            return 0


def _loop_of(frame: FrameType | None) -> object:
    """The loop in which a thread had the interpreter's lock taken away, and the calls around it.

    None where it is not at the end of a loop, or calls something in it.
    """
    if frame is None or frame.f_lasti not in _idle_jumps(frame.f_code):
        return None
    calls: list[tuple[CodeType, int]] = []
    around: FrameType | None = frame
    while around is not None and len(calls) < DEEPEST:
        calls.append((around.f_code, around.f_lasti))
        around = around.f_back
    return calls


@functools.lru_cache(maxsize=64)
def _idle_jumps(code: CodeType) -> frozenset[int]:
    """Offsets of the jumps backwards over nothing that calls or iterates, and so runs code that is not to be seen."""
    found = list(dis.get_instructions(code))
    busy = [one.offset for one in found if one.opname.startswith(CALLS)]
    return frozenset(
        one.offset
        for one in found
        if "JUMP_BACKWARD" in one.opname and not any(one.argval <= offset < one.offset for offset in busy)
    )


_current: Heartbeat | None = None
_of_thread = threading.local()


class _Waiting:
    """A wait of a thread that trains for some peers; of the runtime's own threads, nothing."""

    __slots__ = ("_generation", "_heartbeat", "_operation", "_peers")

    def __init__(self, peers: Collection[str], generation: int, operation: int) -> None:
        self._peers, self._generation, self._operation = peers, generation, operation
        self._heartbeat: Heartbeat | None = None

    def __enter__(self) -> None:
        heartbeat = _current
        if heartbeat is not None and not getattr(_of_thread, "in_background", False):
            heartbeat.begin_wait(self._peers, self._generation, self._operation)
            self._heartbeat = heartbeat

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._heartbeat is not None:
            self._heartbeat.end_wait()


class _ScriptCode:
    """Code of the script, run by the training thread in a step."""

    __slots__ = ("_heartbeat",)

    def __init__(self) -> None:
        self._heartbeat: Heartbeat | None = None

    def __enter__(self) -> None:
        heartbeat = _current
        if heartbeat is not None and heartbeat.begin_script_code():
            self._heartbeat = heartbeat

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._heartbeat is not None:
            self._heartbeat.enter(Phase.STEP)


def open_heartbeat() -> Heartbeat:
    """Begins to show the heartbeat of this process; the calling thread is the one that trains."""
    global _current
    _current = Heartbeat()
    return _current


def in_background() -> None:
    """Notes that the calling thread works for one that trains, which marks its waits by itself."""
    _of_thread.in_background = True


def waiting(peers: Collection[str] = (), generation: int = 0, operation: int = 0) -> _Waiting:
    """Returns a context in which the calling thread waits for peers; none named: for any of the members."""
    return _Waiting(peers, generation, operation)


def script_code() -> _ScriptCode:
    """Returns a context in which the step under way runs code of the script; outside a step it changes nothing."""
    return _ScriptCode()


def enter(phase: Phase, step: int | None = None, steps_here: int | None = None) -> None:
    """Notes that the training thread is about something else now, or goes on with it.

    Args:
        phase: what it is about.
        step: the one in flight, where that has changed.
        steps_here: that have committed since the members or the plan changed, where that begins anew.
    """
    if _current is not None:
        _current.enter(phase, step, steps_here)


def begin_leaving() -> None:
    """Notes that the elastic function that runs, if one does, is to be left. For any thread."""
    if _current is not None:
        _current.begin_leaving()


def committed(step: int) -> None:
    """Notes that a step has committed; `step` is the next one."""
    if _current is not None:
        _current.committed(step)


def news() -> None:
    """Notes that news has come which ends all waits that are under way. For any thread."""
    if _current is not None:
        _current.news()


def take_freed_s() -> float | None:
    """Returns the longest seconds from news until no wait was under way any more, and forgets them.

    0: there was none when the news came; None: no news has come, or this process shows no heartbeat.
    """
    return None if _current is None else _current.take_freed_s()


def is_shown() -> bool:
    """Returns whether anybody looks at this process, and the calling thread is one that trains."""
    return _current is not None and not getattr(_of_thread, "in_background", False)


def on_device(before: Mark, after: Mark) -> None:
    """Notes that a device has been told to wait for peers.

    Args:
        before: the place of its stream in front of that.
        after: the place behind it.
    """
    if _current is not None:
        _current.begin_on_device(DeviceWait(before, after))


def moved() -> None:
    """Notes that bytes have come from a peer. For any thread."""
    heartbeat = _current
    if heartbeat is not None:
        heartbeat.moved()


def close() -> None:
    """Ends the heartbeat: the job is over for this worker, and nothing that comes now is shown."""
    global _current
    if _current is not None:
        _current.close()
        _current = None


def _forget() -> None:
    """A child that was forked off (a data loader's worker, say) is not the worker."""
    global _current
    _current = None


os.register_at_fork(after_in_child=_forget)
