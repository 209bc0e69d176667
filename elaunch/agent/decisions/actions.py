"""What the agent's decisions ask its loop to do, and what it reports of workers that failed."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from elaunch.rendezvous.membership import Generation
from elaunch.wire import Report


@dataclass(frozen=True, slots=True)
class Start:
    """Starts a worker. `warm`: a fork of the preloaded process will do."""

    local_rank: int
    worker: str
    generation: Generation
    warm: bool


@dataclass(frozen=True, slots=True)
class Signal:
    """Sends a signal to a worker's process group."""

    worker: str
    number: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Sends a generation to an attached worker."""

    worker: str
    generation: Generation


@dataclass(frozen=True, slots=True)
class Say:
    """Prints a line for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Log:
    """Writes an event about nodes into the event log."""

    kind: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """Writes a worker's line on a step, unless another node's log has it, and tells the worker that a log has it."""

    worker: str
    report: Report
    is_elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class AskEnd:
    """Finds out when a worker of another node has ended, as its node reports; empty: that is asked no longer."""

    worker: str


@dataclass(frozen=True, slots=True)
class Warm:
    """Keeps a preloaded process, from which workers start quickly: replacements, or with --warm-start all."""


@dataclass(frozen=True, slots=True)
class Exit:
    """Ends the agent."""

    code: int
    text: str = ""


Action = Start | Signal | Tell | Say | Log | Record | AskEnd | Warm | Exit


@dataclass(frozen=True, slots=True)
class Ended:
    """Describes a worker that failed; `own` is false where it had been told to end.

    `exitcode` is negative for a signal, `t` is Unix time in seconds.
    """

    worker: str
    local_rank: int
    pid: int
    exitcode: int
    t: float
    own: bool


@dataclass(frozen=True, slots=True)
class Account:
    """What workers have written down of a failure.

    Attributes:
        reason: why the worker failed that has ended; empty where it says nothing.
        before: the earlier failure of another worker of its node, whose end may not have been seen yet; empty: none.
    """

    reason: str = ""
    before: str = ""

    def tell(self, end: str) -> str:
        """Returns the failures in the order in which they came; `end` says which worker has ended, and how."""
        last = f"{end}: {self.reason}" if self.reason else end
        return f"{self.before}, then {last}" if self.before else last


NO_ACCOUNT = Account()


def signal_name(number: int) -> str:
    """Returns the name of a signal, or its number where it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
