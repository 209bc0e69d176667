"""What the agent's decisions ask its loop to do, and what it reports of workers that failed."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from elaunch.rendezvous.membership import Generation


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
class Warm:
    """Keeps a preloaded process, from which workers start quickly: replacements, or with --warm-start all."""


@dataclass(frozen=True, slots=True)
class Exit:
    """Ends the agent."""

    code: int
    text: str = ""


Action = Start | Signal | Tell | Say | Warm | Exit


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


def signal_name(number: int) -> str:
    """Returns the name of a signal, or its number where it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
