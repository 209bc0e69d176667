"""The documents of a job: nodes, generations, the job's fixed settings, what is asked of it, and its result.

Each is a frozen value with a JSON form that carries a version. Keys, under ``/elaunch/<job>/``:

    config                    created once by the first node        JobConfig
    nodes/<node>              leased; written by its own node only  NodeDoc
    leader                    leased; name of the leading node
    generation                compare-and-swap by the leader        Generation
    size                      leased; written by the leader         JobSize
    checks/<node>             leased; figures of its --node-check   elaunch.nodecheck.Figures
    requests/plan             leased; written by who asks for it    PlanRequest
    requests/size             the same                              JobSize
    requests/drain/<node>     the same; `node` is to leave          DrainRequest
    requests/deadlock/<node>  leased; written by the leader         Deadlock
    result                    written once, when the job is over    Result
"""

from __future__ import annotations

import enum
import functools
import json
import types
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from typing import Any, TypeVar, get_args, get_origin, get_type_hints
from urllib.parse import quote

from elaunch.errors import ProtocolError

VERSION = 1
NAMES_SHOWN = 8  # in a message

Document = TypeVar("Document")


def job_prefix(job: str) -> str:
    """Where the documents of a job stand in the store."""
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
    slot: int
    address: str = ""


def worker_id(node: str, slot: int, incarnation: int) -> str:
    """Return the identity of one incarnation of a worker; it is never used again."""
    return f"{node}/{slot}#{incarnation}"


def incarnation(worker: str) -> int:
    """Return the last part of a worker's identity; -1 for a slot (`node/slot`) that has no worker yet."""
    number = worker.rpartition("#")[2]
    return int(number) if number != worker else -1


def slot_of(worker: str) -> str:
    """Return the slot (`node/slot`) of a worker's identity."""
    return worker.partition("#")[0]


def node_of(worker: str) -> str:
    """Return the node of a worker's identity."""
    return worker.partition("/")[0]


def by_node(workers: Iterable[str]) -> dict[str, list[str]]:
    """The workers of each node; nodes and workers in the order in which they are given."""
    nodes: dict[str, list[str]] = {}
    for worker in workers:
        nodes.setdefault(node_of(worker), []).append(worker)
    return nodes


def split_address(address: str) -> tuple[str, int]:
    """The address of a worker, `host:port` or `[v6]:port`, as a pair; raises `ValueError` when it is neither."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdigit()):
        raise ValueError(f"{address!r} is not an address: expected host:port")
    return host.strip("[]"), int(port)


def names_text(names: Sequence[str]) -> str:
    """The names, or the first of them and how many more there are."""
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{', '.join(names[:NAMES_SHOWN])}{more}"


@dataclass(frozen=True, slots=True)
class NodeWorker:
    """A live worker as its own node reports it."""

    id: str
    slot: int
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

    `doing` says what it is about in `step`. It waits in `operation` of `epoch` for `peers` and `others` more.
    """

    worker: str
    step: int
    doing: str
    epoch: int
    operation: int
    peers: tuple[str, ...] = ()
    others: int = 0


@dataclass(frozen=True, slots=True)
class NodeDoc:
    """One node's report. `order` is the store's revision at which it joined; it is not written.

    `door` is an address (host:port) at which the agent listens for nothing but this: where nobody listens any more, the
    agent is dead. `rank` is what the user has fixed (--node-rank), 0 for all where
    nothing is. `took_part` says that a worker of this agent has been a member in the present attempt, `takes_plans`
    that its workers can go over to any plan (`elaunch.hybrid()`). `saved` is the number of steps in the newest
    checkpoint that it knows of. `settled` is the newest epoch that all its members have entered; only a node some of
    whose workers are to leave tells it. `excused` are workers that are to leave although the node stays. `cut` are
    nodes which it cannot reach although they may be well. `stalled` are its members, as long as all of them wait for
    longer than they may.
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
    gone: tuple[str, ...] = ()
    reset_epoch: int = 0
    port: int = 0
    door: str = ""
    epoch: int = 0
    took_part: bool = False
    takes_plans: bool = False
    plan_request: str = ""
    saved: int | None = None
    settled: int = 0
    excused: tuple[str, ...] = ()
    cut: tuple[Cut, ...] = ()
    stalled: tuple[Stalled, ...] = ()
    role: str = "default"
    rank: int = 0
    order: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Generation:
    """An agreed, numbered, ordered list of workers. A rank is a position in it.

    `urgent` is the newest epoch, up to this one, at which a member was lost or a link had to be made anew:
    a worker whose own generation is older interrupts its step; otherwise it changes over between two steps.
    `begun` says that some worker has held state before: without a holder of state, the job cannot go on.
    `roles` are those of its nodes, by name, where they are not all the same.
    `hold` tells the members to keep their state and wait: the job has fewer nodes than its minimum.
    `plan` is the text of the plan that was asked for last in this attempt, and `plan_request` the id of that request,
    both empty while there was none. A member that has not acted on this request yet does so when it changes over.
    `saved` is the number of steps in the checkpoint from which this attempt began, and `resumes` how often the job has
    gone back to that one.
    """

    epoch: int
    stage: Stage
    workers: tuple[Worker, ...] = ()
    attempt: int = 0
    restarts: int = 0
    cause: str = ""
    cause_t: float = 0.0
    urgent: int = 0
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

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(worker.id for worker in self.workers)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes that hold its workers, in order of first appearance."""
        return tuple(dict.fromkeys(worker.node for worker in self.workers))

    def rank(self, worker: str) -> int:
        return self.ids.index(worker)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Somebody asks the members of one generation, `epoch`, to go on by another plan.

    `plan` is its text, in which the workers are these members; so it counts for no other generation. `t` is the Unix
    time at which it was asked for.
    """

    id: str
    epoch: int
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
    """Write a document with its kind and version."""
    body = asdict(document)
    body.pop("order", None)
    return json.dumps({"kind": type(document).__name__, "v": VERSION, **body}, separators=(",", ":")).encode()


def from_json(kind: type[Document], data: bytes) -> Document:
    """Read a document of the given kind.

    Raises:
        ProtocolError: it is damaged, of another kind or of another version.
    """
    try:
        body = json.loads(data)
        found, version = body.pop("kind"), body.pop("v")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"expected a {kind.__name__} document, found {data[:80]!r} ({error})") from error
    if found != kind.__name__ or version != VERSION:
        raise ProtocolError(
            f"expected {kind.__name__} version {VERSION}, found {found} version {version}: "
            "all nodes of a job must run the same version of elaunch"
        )
    try:
        document: Document = _build(kind, body)
    except (TypeError, ValueError, KeyError) as error:
        raise ProtocolError(f"damaged {kind.__name__} document: {error}") from error
    return document


@functools.cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    """Types of the fields of a document. Finding them anew for each of thousands of workers would take seconds."""
    return get_type_hints(kind)


def _build(kind: Any, value: Any) -> Any:
    """Check a JSON value against a type and build that type: dataclasses, enums, tuples, unions and plain scalars."""
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise TypeError(f"{kind.__name__} is {value!r}")
        hints = _hints(kind)
        unknown = set(value) - set(hints)
        if unknown:
            raise ValueError(f"unknown fields {sorted(unknown)}")
        return kind(**{name: _build(hints[name], item) for name, item in value.items()})
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(value)
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise TypeError(f"expected a list, found {value!r}")
        return tuple(_build(get_args(kind)[0], item) for item in value)
    if get_origin(kind) is types.UnionType:
        if value is None:
            return None
        return _build(next(arg for arg in get_args(kind) if arg is not type(None)), value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"expected {kind.__name__}, found {value!r}")
    return value


def with_order(doc: NodeDoc, created: int) -> NodeDoc:
    """Attach the revision at which the node joined, which orders nodes."""
    return replace(doc, order=created)
