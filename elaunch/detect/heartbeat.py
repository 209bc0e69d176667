"""What a worker shows of itself, in a small anonymous file that it shares with its agent.

The worker has it in its memory and writes it by plain stores (`elaunch.workers.heartbeat`); the agent, which got the
descriptor with the worker's first message, reads it, also when the worker hangs or is dead. It is no file of a disk,
whose mapped pages can keep a writer waiting while they are written out. Times are those of CLOCK_MONOTONIC in
nanoseconds, which all processes of a machine share.

    8 bytes each: version, pid, training thread (as faulthandler names it), the kernel's number of it, and of the thread
                  that beats
                  beat, still, still since                        written by the thread that beats
                  sequence, step, step since, steps here, phase,  written by the threads that train; the sequence is odd
                  since, waits, generation, operation, others, length  while it is being done
                  moved                                           written by the threads that receive
                  device                                          written by threads that train, and the one that beats
    then          the first peers that are waited for, as text

Each number is stored by one aligned store of 8 bytes. What belongs together is told by the sequence: a reader that
finds it odd, or changed, looks again.
"""

from __future__ import annotations

import enum
import os
import struct
from dataclasses import dataclass

VERSION = 4
FILE_BYTES = 1024
TEXT_AT = 256
TEXT_BYTES = FILE_BYTES - TEXT_AT
TRIES = 64
"""Of a reader that finds the file being written to; a worker that is stopped in the middle of it will not go on."""

BEAT_S = 0.25
LATE_BEAT_S = 4 * BEAT_S

# Places of the 8-byte numbers.
AT_VERSION, AT_PID, AT_THREAD, AT_TRAINING_TID, AT_BEATING_TID = range(5)
AT_BEAT, AT_STILL, AT_STILL_SINCE = range(5, 8)
AT_SEQUENCE = 8
AT_STEP, AT_STEP_SINCE, AT_STEPS_HERE, AT_PHASE, AT_SINCE, AT_WAITS = range(9, 15)
AT_GENERATION, AT_OPERATION, AT_OTHERS, AT_LENGTH = range(15, 19)
AT_MOVED = 19
AT_DEVICE = 20
COUNT = 21
_NUMBERS = struct.Struct(f"={COUNT}Q")


class Phase(enum.IntEnum):
    """What the training thread is about."""

    LOADING = 0  # until it is a member for the first time
    STEP = 1
    BETWEEN = 2  # two steps: the script's own code there, from the commit of one on
    CHANGING = 3  # to another plan, or other members
    SAVING = 4  # a checkpoint
    AGREEING = 5  # waits for its agent to announce a generation
    ENDED = 6  # with its steps, or with the job
    SCRIPT = 7  # the script's own code in a step, outside its model: it loads samples, logs, uploads
    FUNCTION = 8  # an elastic function: it waits in process groups of its own, so nobody sees for whom
    LEAVING = 9  # the same, when its groups have been freed: the members have changed, and it is to be left


class Still(enum.IntEnum):
    """What the beating thread sees of the training thread."""

    MOVES = 0
    ASLEEP = 1  # the process uses no processor time
    SPINS = 2  # it goes round in one function, which calls nothing


class OnDevice(enum.IntEnum):
    """How far a device is with operations among members: its stream waits, and the training thread goes on."""

    NOTHING = 0  # none is under way
    ISSUED = 1  # one is, and the beating thread has not looked since
    COMPUTES = 2  # it has work of its own before it
    PEERS = 3  # all that was before it is done


@dataclass(frozen=True, slots=True)
class Awaited:
    """Whom a worker that waits waits for, and in what.

    Attributes:
        peers: the first of them.
        others: how many more there are.
        generation, operation: what is waited for, where it has a number.
    """

    peers: tuple[str, ...] = ()
    others: int = 0
    generation: int = 0
    operation: int = 0


@dataclass(frozen=True, slots=True)
class HeartbeatReading:
    """What a worker showed when it was looked at. Times in seconds of `time.monotonic`.

    Attributes:
        pid: of the worker.
        thread: the training thread, as `threading.get_ident` and faulthandler name it.
        training_tid, beating_tid: the kernel's numbers of the training thread, and of the one that beats.
        beat_s: when that one last ran; it needs the interpreter's lock for it.
        still, still_since_s: what it saw then, and since when.
        step: in flight.
        step_since_s: when it began.
        steps_here: that have committed here since the members or the plan changed.
        phase: what the training thread is about.
        since_s: since when it has been at that, without a sign of progress (a wait that ended, the next micro-batch; in
            a wait, bytes that came from a peer).
        waits: whether a thread that trains waits for peers, or its device does.
        device: how far that is, as the last beat has seen it; while a thread waits for peers, `NOTHING`.
        awaited: those peers, or the last that it waited for.
    """

    pid: int
    thread: int
    training_tid: int
    beating_tid: int
    beat_s: float
    still: Still
    still_since_s: float
    step: int
    step_since_s: float
    steps_here: int
    phase: Phase
    since_s: float
    waits: bool = False
    awaited: Awaited = Awaited()
    device: OnDevice = OnDevice.NOTHING

    def is_doubtful(self, now_s: float) -> bool:
        """Returns whether the beats have stopped since a device was told to wait for peers: it may have gone on."""
        return self.device is not OnDevice.NOTHING and now_s - self.beat_s > LATE_BEAT_S


class Reader:
    """Looks at a worker's heartbeat, over and over.

    Args:
        fd: of the file; the reader closes it.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._last: HeartbeatReading | None = None

    def read(self) -> HeartbeatReading | None:
        """Returns the heartbeat, or the last one while it is being written. None: it has never been whole."""
        for _ in range(TRIES):
            data = os.pread(self._fd, FILE_BYTES, 0)
            found = parse(data, os.pread(self._fd, 8, 8 * AT_SEQUENCE))
            if found is not None:
                self._last = found
                break
        return self._last

    def close(self) -> None:
        """Closes the descriptor of the heartbeat; nothing can be read after that."""
        os.close(self._fd)


def parse(data: bytes, sequence: bytes) -> HeartbeatReading | None:
    """Reads what was copied from the file, and the sequence that was found there afterwards.

    None where it was being written (the sequence is odd, or was another one), or is of another version.
    """
    if len(data) != FILE_BYTES or len(sequence) != 8:
        return None
    numbers = _NUMBERS.unpack_from(data)
    (after,) = struct.unpack("=Q", sequence)
    torn = numbers[AT_SEQUENCE] != after or after % 2
    if torn or numbers[AT_VERSION] != VERSION or numbers[AT_LENGTH] > TEXT_BYTES:
        return None
    text = data[TEXT_AT : TEXT_AT + numbers[AT_LENGTH]].decode("utf-8", "replace")
    try:
        phase, still, device = Phase(numbers[AT_PHASE]), Still(numbers[AT_STILL]), OnDevice(numbers[AT_DEVICE])
    except ValueError:
        return None
    if numbers[AT_WAITS]:
        device = OnDevice.NOTHING
    waits, since = bool(numbers[AT_WAITS]) or device is OnDevice.PEERS, numbers[AT_SINCE]
    return HeartbeatReading(
        pid=numbers[AT_PID],
        thread=numbers[AT_THREAD],
        training_tid=numbers[AT_TRAINING_TID],
        beating_tid=numbers[AT_BEATING_TID],
        beat_s=numbers[AT_BEAT] / 1e9,
        still=still,
        still_since_s=numbers[AT_STILL_SINCE] / 1e9,
        step=numbers[AT_STEP],
        step_since_s=numbers[AT_STEP_SINCE] / 1e9,
        steps_here=numbers[AT_STEPS_HERE],
        phase=phase,
        since_s=(max(since, numbers[AT_MOVED]) if waits else since) / 1e9,
        waits=waits,
        awaited=Awaited(
            peers=tuple(text.split("\n")) if text else (),
            others=numbers[AT_OTHERS],
            generation=numbers[AT_GENERATION],
            operation=numbers[AT_OPERATION],
        ),
        device=device,
    )
