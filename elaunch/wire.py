"""Messages between an agent and its workers: typed, versioned, one JSON object a line.

    worker -> agent   Attach, Ready, Settled, Progress, Saved, Profiled, Report, Unreachable, Finished,
                      Excused, Leaving
    agent -> worker   Welcome, Announce

A line that is too long, is no JSON or has another version ends the connection with a ProtocolError.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any, get_args

from elaunch.errors import ProtocolError

VERSION = 1
MAX_LINE_BYTES = 16 << 20

LINK_TIMEOUT = "ELAUNCH_LINK_TIMEOUT"
"""The variable in which an agent tells its workers how long a link may be silent, in seconds."""


@dataclass(frozen=True, slots=True)
class Attach:
    """The script called `elaunch.init()`.

    With it come two descriptors, unless hangs are not looked for: of the worker's pulse (`elaunch.detect.pulse`), and
    of the file into which its stacks go when it is asked for them (`elaunch.detect.stacks`).
    """

    worker: str
    pid: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """What a worker needs to know of its job."""

    token: str
    host: str
    node: str
    slot: int
    min_nodes: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker has registered its state and can be reached by its peers; `takes_plans`: it works by any plan."""

    address: str
    takes_plans: bool = False


@dataclass(frozen=True, slots=True)
class Settled:
    """The worker is a member of this generation and holds the state of the job."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Progress:
    """The worker has seen its first step commit; `step` is the number of those committed in the job."""

    step: int


@dataclass(frozen=True, slots=True)
class Saved:
    """There is a complete checkpoint of the job's state after so many steps."""

    step: int


@dataclass(frozen=True, slots=True)
class Profiled:
    """What the job's layers, workers and links cost, in the JSON form of a profile, as the first member knows it."""

    profile: str


@dataclass(frozen=True, slots=True)
class Report:
    """A line for the event log."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Unreachable:
    """A link broke.

    Attributes:
        gone: nothing listens at the peer's address any more, so its process is dead.
        silent: its machine does not answer at all.
    """

    epoch: int
    peer: str
    gone: bool
    silent: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """All steps are committed, everywhere."""


@dataclass(frozen=True, slots=True)
class Excused:
    """The members want this worker to leave; `again`: another process is to take its slot, else nobody."""

    again: bool
    why: str


@dataclass(frozen=True, slots=True)
class Leaving:
    """The worker leaves at this step boundary, as its node asked for."""

    step: int


@dataclass(frozen=True, slots=True)
class Announce:
    """A generation, in the JSON form of `elaunch.rendezvous.membership.Generation`."""

    generation: str


Message = (
    Attach
    | Welcome
    | Ready
    | Settled
    | Progress
    | Saved
    | Profiled
    | Report
    | Unreachable
    | Finished
    | Excused
    | Leaving
    | Announce
)

_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Message)}
_TYPES: dict[str, type] = {"str": str, "int": int, "bool": bool, "dict[str, Any]": dict}


def encode(message: Message) -> bytes:
    """Write one message as a line."""
    body = {"v": VERSION, "kind": type(message).__name__, "body": asdict(message)}
    return json.dumps(body, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Read one line.

    Raises:
        ProtocolError: it is no message of this version.
    """
    try:
        data = json.loads(line)
        version, kind, body = data["v"], data["kind"], data["body"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ProtocolError(f"not a message: {line[:80]!r} ({error})") from error
    if version != VERSION:
        raise ProtocolError(f"message version {version}, expected {VERSION}: worker and agent run different elaunch")
    cls = _KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None or not isinstance(body, dict):
        raise ProtocolError(f"unknown message {kind!r}")
    expected = {f.name: _TYPES[str(f.type)] for f in fields(cls)}
    if set(body) != set(expected) or not all(type(body[name]) is expected[name] for name in expected):
        raise ProtocolError(f"damaged message {kind}: {line[:200]!r}")
    message: Message = cls(**body)
    return message


class LineBuffer:
    """Cuts a byte stream into lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that are complete now.

        Raises:
            ProtocolError: a line is longer than MAX_LINE_BYTES.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if any(len(line) > MAX_LINE_BYTES for line in (*lines, self._rest)):
            raise ProtocolError(f"a line of more than {MAX_LINE_BYTES} bytes")
        return lines
