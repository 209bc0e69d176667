"""Messages between an agent and its workers: typed, versioned, one JSON object a line.

    worker -> agent   Attach, Ready, Joined, Progress, Saved, Profiled, Report, Unreachable, Finished,
                      Evict, Leaving, Abandoned
    agent -> worker   Welcome, Announce, AnnounceEdit, Logged

A line that is too long, is no JSON or has another version ends the connection with a ProtocolError, and so do numbers
and texts that no worker has: negative ones, those beyond 63 bits, and halves of a character.
"""

from __future__ import annotations

import json
import reprlib
from dataclasses import dataclass, field, fields
from typing import Any, get_args

from elaunch.errors import ProtocolError

VERSION = 6
MAX_LINE_BYTES = 16 << 20
MOST = 1 << 63
"""Integers are below it, and none is negative."""

AGAIN = "again"
"""Marks the report of a step that other workers may have reported, too.

It lists those of them that are no members any more, while their agents may have the line.
"""

THROUGH = "through"
"""With `AGAIN`, of a step before the last: so many steps have committed, and the other log may have them, too."""

MOST_NAMES = 64
"""So many workers are listed at most."""

LINK_TIMEOUT = "ELAUNCH_LINK_TIMEOUT"
"""The variable in which an agent tells its workers how long a link may be silent, in seconds."""


@dataclass(frozen=True, slots=True)
class Attach:
    """The script called `elaunch.init()`.

    With it come two descriptors, unless hangs are not looked for: of the worker's heartbeat
    (`elaunch.detect.heartbeat`), and of the file into which its stacks go when it is asked for them
    (`elaunch.detect.stacks`).
    """

    worker: str
    pid: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """What a worker needs to know of its job.

    Attributes:
        token: by which its workers know each other.
        host: the address at which other nodes reach this one.
        node: its name.
        local_rank: of the worker.
        min_nodes: of the job.
        tls: the folder of the files by which links to other machines are encrypted; empty: they are not.
        always_tls: TCP links within this machine are, too.
    """

    token: str
    host: str
    node: str
    local_rank: int
    min_nodes: int
    tls: str = ""
    always_tls: bool = False


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker has registered its state and can be reached by its peers; `takes_plans`: it works by any plan."""

    address: str
    takes_plans: bool = False


@dataclass(frozen=True, slots=True)
class Joined:
    """The worker is a member of this generation and holds the state of the job."""

    generation: int


@dataclass(frozen=True, slots=True)
class Progress:
    """The worker has seen a step commit in this generation; it says so once in each."""

    generation: int


@dataclass(frozen=True, slots=True)
class Saved:
    """The newest complete checkpoint has the job's state after so many steps; 0: there is none that can be read."""

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
        refused: nothing listens at the peer's address any more, so its process is dead.
        silent: its machine does not answer at all.
    """

    generation: int
    peer: str
    refused: bool
    silent: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """All steps are committed, everywhere."""


@dataclass(frozen=True, slots=True)
class Evict:
    """The members want this worker to leave; `replace`: another process is to take its slot, else nobody."""

    replace: bool
    why: str


@dataclass(frozen=True, slots=True)
class Leaving:
    """The worker leaves at this step boundary, as its node asked for."""

    step: int


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The job cannot go on, whoever is left of it: starting it again would end in the same place."""

    why: str


@dataclass(frozen=True, slots=True)
class Announce:
    """A generation, in the JSON form of `elaunch.rendezvous.membership.Generation`."""

    generation: str


@dataclass(frozen=True, slots=True)
class AnnounceEdit:
    """A generation as a `GenerationEdit` (`elaunch.rendezvous.rules.edit`) of the one that was announced before."""

    edit: str


@dataclass(frozen=True, slots=True)
class Logged:
    """The event log has this step, which the worker reported in this generation, and all that it reported before."""

    generation: int
    step: int


Message = (
    Attach
    | Welcome
    | Ready
    | Joined
    | Progress
    | Saved
    | Profiled
    | Report
    | Unreachable
    | Finished
    | Evict
    | Leaving
    | Abandoned
    | Announce
    | AnnounceEdit
    | Logged
)

_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Message)}
_TYPES: dict[str, type] = {"str": str, "int": int, "bool": bool, "dict[str, Any]": dict}
_FIELDS = {cls: {one.name: _TYPES[str(one.type)] for one in fields(cls)} for cls in _KINDS.values()}
_TO_JSON = json.JSONEncoder(separators=(",", ":")).encode


def encode(message: Message) -> bytes:
    """Writes one message as a line."""
    body = {name: getattr(message, name) for name in _FIELDS[type(message)]}
    return _TO_JSON({"v": VERSION, "kind": type(message).__name__, "body": body}).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Reads one line.

    Raises:
        ProtocolError: it is no message of this version.
    """
    try:
        data = json.loads(line)
        version, kind, body = data["v"], data["kind"], data["body"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ProtocolError(f"not a message: {line[:80]!r} ({error})") from error
    if version != VERSION:
        raise ProtocolError(
            f"message version {reprlib.repr(version)}, expected {VERSION}: worker and agent run different elaunch"
        )
    cls = _KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None or not isinstance(body, dict):
        raise ProtocolError(f"unknown message {reprlib.repr(kind)}")
    expected = _FIELDS[cls]
    if body.keys() != expected.keys() or not all(_fits(body[name], expected[name]) for name in expected):
        raise ProtocolError(f"damaged message {kind}: {line[:200]!r}")
    message: Message = cls(**body)
    return message


def _fits(value: object, kind: type) -> bool:
    if type(value) is not kind:
        return False
    if isinstance(value, int):
        return 0 <= value < MOST
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return False
    return True


class LineBuffer:
    """Cuts a byte stream into lines. The cost of a line is that of its bytes, in however many parts it comes.

    Attributes:
        limit_bytes: how long a line may be; None: MAX_LINE_BYTES.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the lines that are complete now.

        Raises:
            ProtocolError: a line is longer than it may be.
        """
        first, newline, more = data.partition(b"\n")
        self._rest += first
        lines: list[bytes] = []
        if newline:
            *lines, rest = (bytes(self._rest), *more.split(b"\n"))
            self._rest = bytearray(rest)
        limit_bytes = MAX_LINE_BYTES if self.limit_bytes is None else self.limit_bytes
        if len(self._rest) > limit_bytes or any(len(line) > limit_bytes for line in lines):
            raise ProtocolError(f"a line of more than {limit_bytes} bytes")
        return lines
