"""The documents of a job: nodes, generations, the job's fixed settings, what is asked of it, and its result.

Each is a frozen value with a JSON form that carries a version. Keys, under ``/elaunch/<job>/``:

    config                    created once by the first node        JobConfig
    nodes/<node>              leased; written by its own node only  NodeDoc
    leader                    leased; name of the leading node      text
    waiting                   leased; what the leader waits for     text
    profile                   leased; what the job has measured     elaunch.policy.profile.Profile
    generation                compare-and-swap by the leader        Generation
    size                      leased; written by the leader         JobSize
    checks/<node>             leased; figures of its --node-check   elaunch.agent.watch.node_check.Figures
    requests/plan             leased; written by who asks for it    PlanRequest
    requests/size             the same                              JobSize
    requests/drain/<node>     the same; `node` is to leave          DrainRequest
    requests/deadlock/<node>  leased; written by the leader         Deadlock
    result                    written once, when the job is over    Result

Any other key is a stranger's. `intake` says what is made of those, and of documents that cannot be read.
"""

from __future__ import annotations

import enum
import functools
import json
import math
import reprlib
import types
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from typing import Any, TypeVar, get_args, get_origin, get_type_hints
from urllib.parse import quote

from elaunch.errors import ProtocolError

VERSION = 3
NAMES_SHOWN = 8  # in a message
MOST_BYTES = 4 << 20  # of a document that is read; etcd by default takes 1.5 MiB
MOST = 2**53  # of a number
LIMITS = {
    "slots": (1, 4096),
    "local_rank": (0, 4095),
    "port": (0, 65535),
    "master_port": (0, 65535),
    "attempt": (0, 2**48),
    "generation": (0, 2**48),
    "number": (0, 2**48),
    "reset_generation": (0, 2**48),
    "settled": (0, 2**48),
    "aborts_step_before": (0, 2**48),
}
"""Fields whose numbers have narrower bounds, in whichever document."""

Document = TypeVar("Document")


def job_prefix(job: str) -> str:
    """Return the beginning of the keys under which the documents of a job stand in the store."""
    return f"/elaunch/{quote(job, safe='')}/"


class Stage(enum.StrEnum):
    """What the workers of a generation do."""

    ASSEMBLE = "assemble"  # nodes stop the workers of the former attempt and meet again
    START = "start"  # workers are started; none of them trains as a member yet
    TRAIN = "train"  # the workers listed train together


class WorkerState(enum.StrEnum):
    """What its node says of a worker. A worker that died is not listed at all."""

    STARTING = "starting"  # the process exists
    READY = "ready"  # it can be reached and has registered what it will hold
    MEMBER = "member"  # it holds the state of the job
    DONE = "done"  # it has finished all its steps


@dataclass(frozen=True, slots=True)
class Worker:
    """A place in a generation: one incarnation of a training process."""

    id: str
    node: str
    local_rank: int
    address: str = ""


def worker_id(node: str, local_rank: int, incarnation: int) -> str:
    """Return the identity of one incarnation of a worker; it is never used again."""
    return f"{node}/{local_rank}#{incarnation}"


def incarnation(worker: str) -> int:
    """Return the last part of a worker's identity; -1 for a slot (`node/local_rank`) that has no worker yet."""
    number = worker.rpartition("#")[2]
    return int(number) if number != worker else -1


def slot_of(worker: str) -> str:
    """Return the slot (`node/local_rank`) of a worker's identity."""
    return worker.partition("#")[0]


def node_of(worker: str) -> str:
    """Return the node of a worker's identity."""
    return worker.partition("/")[0]


def by_node(workers: Iterable[str]) -> dict[str, list[str]]:
    """Group workers by their nodes, both in the order in which they are given."""
    nodes: dict[str, list[str]] = {}
    for worker in workers:
        nodes.setdefault(node_of(worker), []).append(worker)
    return nodes


def split_address(address: str) -> tuple[str, int]:
    """Split the address of a worker, `host:port` or `[v6]:port`; raises `ValueError` when it is neither."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdigit()):
        raise ValueError(f"{address!r} is not an address: expected host:port")
    return host.strip("[]"), int(port)


def names_text(names: Sequence[str]) -> str:
    """Join names for a message; of many, name the first and say how many more there are."""
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{', '.join(names[:NAMES_SHOWN])}{more}"


@dataclass(frozen=True, slots=True)
class NodeWorker:
    """A live worker as its own node reports it."""

    id: str
    local_rank: int
    state: WorkerState
    address: str = ""


@dataclass(frozen=True, slots=True)
class JobConfig:
    """What all nodes of a job must agree on, and the secret its workers know each other by."""

    min_nodes: int
    max_nodes: int
    max_restarts: int | None
    token: str = ""
    checkpoint_every: int = 0


@dataclass(frozen=True, slots=True)
class Cut:
    """A node that cannot be reached, at the address `host`: another node of that name elsewhere is not meant."""

    node: str
    host: str


@dataclass(frozen=True, slots=True)
class Stalled:
    """A member that waits for peers, like all members of its node, for longer than it may.

    `doing` says what it is about in `step`. It waits in `operation` of `generation` for `peers` and `others` more.
    """

    worker: str
    step: int
    doing: str
    generation: int
    operation: int
    peers: tuple[str, ...] = ()
    others: int = 0


@dataclass(frozen=True, slots=True)
class BrokenLink:
    """The link between a worker and its live peer failed, as that worker reports."""

    worker: str
    peer: str


@dataclass(frozen=True, slots=True)
class Streak:
    """Urgent generations in a row without a committed step in between.

    Attributes:
        urgent: how many there were, whatever the cause.
        resets: how many of them lost nobody: they came because links between live workers failed.
        members: how many workers the largest of them had, or the generation before.
        broken: these links, each report once.
        replaced: the workers that were replaced because of them.
    """

    urgent: int = 0
    resets: int = 0
    members: int = 0
    broken: tuple[BrokenLink, ...] = ()
    replaced: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeDoc:
    """One node's report. `order` is the store's revision at which it joined; it is not written.

    At `liveness_address` (host:port) the agent listens for nothing but this: where nobody listens any more, it is
    dead. `rank` is what the user has fixed (--node-rank), 0 for all where nothing is. `took_part` says that a worker
    of this agent has been a member in the present attempt, `takes_plans` that its workers can go over to any plan
    (`elaunch.hybrid()`). `saved` is the number of steps in the newest checkpoint that it knows of. `settled` is the
    newest generation that all its members have entered; only a node some of whose workers are to leave tells it.
    `excused` are workers that are to leave although the node stays. `cut` are nodes which it cannot reach although
    they may be well. `stalled` are its members, as long as all of them wait for longer than they may. `broken` are
    links to live peers that failed its members in the present generation.
    `committed` is the newest generation in which a step has committed; only the first member's node tells it, and only
    during a streak of generations without one.
    """

    node: str
    host: str
    slots: int
    workers: tuple[NodeWorker, ...] = ()
    attempt: int = 0
    elastic: bool = False
    draining: bool = False
    finished: bool = False
    failed: str = ""
    cause: str = ""
    cause_t: float = 0.0
    unreachable_peers: tuple[str, ...] = ()
    reset_generation: int = 0
    port: int = 0
    liveness_address: str = ""
    generation: int = 0
    took_part: bool = False
    takes_plans: bool = False
    plan_request: str = ""
    saved: int | None = None
    settled: int = 0
    excused: tuple[str, ...] = ()
    cut: tuple[Cut, ...] = ()
    stalled: tuple[Stalled, ...] = ()
    broken: tuple[BrokenLink, ...] = ()
    committed: int = 0
    role: str = "default"
    rank: int = 0
    order: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Generation:
    """An agreed, numbered, ordered list of workers. A rank is a position in it.

    `aborts_step_before` is the newest generation, up to this one, at which a member was lost or a link had to be made
    anew: a worker whose own generation is older interrupts its step; otherwise it changes over between two steps.
    `begun` says that some worker has held state before: without a holder of state, the job cannot go on.
    `roles` are those of its nodes, by name, where they are not all the same.
    `hold` tells the members to keep their state and wait: the job has fewer nodes than its minimum.
    `plan` is the text of the plan that was asked for last in this attempt, and `plan_request` the id of that request,
    both empty while there was none. A member that has not acted on this request yet does so when it changes over.
    `saved` is the number of steps in the checkpoint from which this attempt began, and `resumes` how often the job has
    gone back to that one. `streak` counts the urgent generations up to this one between which no step is known to have
    committed.
    """

    number: int
    stage: Stage
    workers: tuple[Worker, ...] = ()
    attempt: int = 0
    restarts: int = 0
    cause: str = ""
    cause_t: float = 0.0
    aborts_step_before: int = 0
    begun: bool = False
    hold: bool = False
    leaving: tuple[str, ...] = ()
    master_addr: str = ""
    master_port: int = 0
    roles: tuple[tuple[str, str], ...] = ()
    plan: str = ""
    plan_request: str = ""
    saved: int | None = None
    resumes: int = 0
    streak: Streak = Streak()

    @property
    def ids(self) -> tuple[str, ...]:
        """Return the identities of its workers, by rank."""
        return tuple(worker.id for worker in self.workers)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return the names of the nodes that hold its workers, in order of first appearance."""
        return tuple(dict.fromkeys(worker.node for worker in self.workers))

    def rank(self, worker: str) -> int:
        """Return the rank of a worker; raises `ValueError` where it is no member."""
        return self.ids.index(worker)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Somebody asks the members of one generation, `generation`, to go on by another plan.

    `plan` is its text, in which the workers are these members; so it counts for no other generation. `t` is the Unix
    time at which it was asked for.
    """

    id: str
    generation: int
    plan: str
    t: float


@dataclass(frozen=True, slots=True)
class JobSize:
    """How many nodes the job has from now on, whatever --nnodes said; `id` is that of the request, made at Unix `t`."""

    id: str
    min_nodes: int
    max_nodes: int
    t: float


@dataclass(frozen=True, slots=True)
class DrainRequest:
    """A node is to leave the job at a step boundary; `reason` is for people, `t` the Unix time of the request."""

    reason: str
    t: float


@dataclass(frozen=True, slots=True)
class Deadlock:
    """All `members` of the job wait for each other, as `waits` says; `worker`, of the node asked, is to go."""

    worker: str
    members: int
    waits: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """How the job ended."""

    succeeded: bool
    message: str = ""


def to_json(document: Any) -> bytes:
    """Write a document with its kind and version. Half of a surrogate pair, as in names of odd files, becomes `?`."""
    body = asdict(document)
    body.pop("order", None)
    text = json.dumps(
        {"kind": type(document).__name__, "v": VERSION, **body}, separators=(",", ":"), ensure_ascii=False
    )
    return text.encode(errors="replace")


def from_json(kind: type[Document], data: bytes) -> Document:
    """Read a document of the given kind.

    Raises:
        ProtocolError: it is damaged, of another kind or of another version. No bytes raise anything else.
    """
    try:
        body = read_json(data)
        found, version = body.pop("kind"), body.pop("v")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(f"expected a {kind.__name__} document, found {data[:80]!r} ({_plain(error)})") from error
    if found != kind.__name__ or version != VERSION:
        raise ProtocolError(
            f"expected {kind.__name__} version {VERSION}, found {_shown(found)} version {_shown(version)}: "
            "all nodes of a job must run the same version of elaunch"
        )
    try:
        document: Document = _build(kind, body)
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise ProtocolError(f"damaged {kind.__name__} document: {_plain(error)}") from error
    return document


def read_json(data: str | bytes) -> Any:
    """Read JSON of unknown origin; raises `ValueError` for whatever is none, is too large, nested or no UTF-8."""
    if len(data) > MOST_BYTES:
        raise ValueError(f"{len(data)} bytes; at most {MOST_BYTES} are expected")
    try:
        return json.loads(data if isinstance(data, str) else data.decode(), parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _shown(value: Any) -> str:
    """Show the beginning of a value of unknown origin, in ASCII: it is for people, and may hold anything."""
    return ascii(value) if value is None or isinstance(value, bool) else _plain(reprlib.repr(value)).strip("'")


def _plain(value: object) -> str:
    return str(value).encode("ascii", "backslashreplace").decode()[:200]


@functools.cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    """Return the types of a document's fields. Finding them for each of thousands of workers would take seconds."""
    return get_type_hints(kind)


def _build(kind: Any, value: Any) -> Any:
    """Check a JSON value against a type and build that type: dataclasses, enums, tuples, unions and plain scalars."""
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise TypeError(f"{kind.__name__} is {_shown(value)}")
        hints = _hints(kind)
        unknown = set(value) - set(hints)
        if unknown:
            raise ValueError(f"unknown fields {_shown(sorted(unknown))}")
        return kind(**{name: _bounded(name, _build(hints[name], item)) for name, item in value.items()})
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        if not isinstance(value, str):
            raise TypeError(f"expected {kind.__name__}, found {_shown(value)}")
        return kind(value)
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise TypeError(f"expected a list, found {_shown(value)}")
        kinds = get_args(kind)
        if len(kinds) == 2 and kinds[1] is not ...:
            if len(value) != 2:
                raise ValueError(f"expected a pair, found {_shown(value)}")
            return _build(kinds[0], value[0]), _build(kinds[1], value[1])
        return tuple(_build(kinds[0], item) for item in value)
    if get_origin(kind) is types.UnionType:
        if value is None:
            return None
        return _build(next(arg for arg in get_args(kind) if arg is not type(None)), value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"expected {kind.__name__}, found {_shown(value)}")
    if kind is str:
        value.encode()  # half of a surrogate pair cannot be written again
    elif kind is float and not math.isfinite(value):
        raise ValueError(f"{value} is no time")
    return value


def _bounded(name: str, value: Any) -> Any:
    """Refuse a number that would hurt: one makes a list of so many, or counts on from it."""
    if isinstance(value, int) and not isinstance(value, bool):
        least, most = LIMITS.get(name, (-MOST, MOST))
        if not least <= value <= most:
            raise ValueError(f"{name} is {_shown(value)}, expected {least} to {most}")
    return value


def with_order(doc: NodeDoc, created: int) -> NodeDoc:
    """Attach the revision at which the node joined, which orders nodes."""
    return replace(doc, order=created)
