"""torchrun's rendezvous over etcd v3: `torchrun --rdzv-backend=etcd-v3 --rdzv-endpoint=HOST:PORT`.

torch's own state machine, `DynamicRendezvousHandler`, decides. This module gives it what it needs: a backend that holds
its state, and the store over which the agents of one round tell each other their ranks. Both lie in etcd, so no node of
the job hosts anything that the others cannot do without.

torch hands its state over as a pickle and takes it back as one. In etcd it is a JSON document, and the pickle that
torch gets is made here, from a document that was checked: nothing that came over the network is unpickled.

Keys, under ``/elaunch/torchrun:<job>/``, all bound to one lease:

    state                the document
    <lease>/<key>        the agents' store; torch puts the round into <key>

torch loads this module, an entry point of the group `torchrun.handlers`, in every program that imports its rendezvous.
So it loads the etcd client only when a job asks for `etcd-v3`.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import pickle
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeVar
from urllib.parse import quote

from torch.distributed import DistStoreError
from torch.distributed import Store as TorchStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    _NodeDesc,
    _RendezvousState,
    create_handler,
)

from elaunch import threads
from elaunch.errors import LaunchError, StoreUnavailable, UsageError
from elaunch.rendezvous.conf import CONNECT_S, RendezvousConf, join_endpoint, parse_conf, parse_endpoints, route_to
from elaunch.rendezvous.store import Store, WatchEvent

BACKEND = "etcd-v3"

_VERSION = 1
_FIELDS = frozenset(
    ("round", "complete", "deadline", "closed", "participants", "wait_list", "redundancy_list", "last_heartbeats")
)
_LEAST_TTL_S = 60.0
_CALL_S = 5.0

_logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Lease:
    """What the keys of a job are bound to: `number` is etcd's; without renewal it ends after `ttl_s` seconds."""

    number: int
    ttl_s: float


def create(params: RendezvousParameters) -> RendezvousHandler:
    """Makes the handler of this node, once etcd has answered.

    The keys of `--rdzv-conf` are torch's own (join_timeout, last_call_timeout, close_timeout, heartbeat_timeout,
    keep_alive_interval, keep_alive_max_attempt; whole seconds, torch's defaults) and of elaunch's: user, password,
    cacert, cert, key (also ELAUNCH_ETCD_USER and so on), connect_timeout (10 s), and lease_ttl: how long after the last
    word of its last node etcd forgets the job (60 s, or four times the silence after which torch takes a node for dead,
    if that is longer). A job that has ended turns nodes away for that long.

    Raises:
        ValueError: the endpoint or a key of --rdzv-conf cannot be used.
        RendezvousConnectionError: no etcd answers at the endpoint, or it refuses the user or the certificate.
    """
    from elaunch.rendezvous.etcd import EtcdStore

    try:
        conf = parse_conf(",".join(f"{name}={value}" for name, value in params.config.items()))
        addresses = parse_endpoints(params.endpoint, BACKEND)
    except UsageError as error:
        raise ValueError(str(error)) from None
    with _in_torchs_terms():
        params = copy.copy(params)
        params.local_addr = params.local_addr or route_to(addresses)
        etcd = EtcdStore(
            ",".join(join_endpoint(host, port) for host, port in addresses),
            timeout_s=conf.connect_timeout or CONNECT_S,
            **conf.etcd.arguments(),
        )
    try:
        backend = EtcdBackend(etcd, params.run_id, _choose_ttl_s(conf, "lease_ttl" in params.config))
        backend.get_state()
        etcd.timeout_s = _CALL_S
        return EtcdHandler(create_handler(AgentStore(etcd, backend), backend, params), backend, etcd)
    except BaseException:
        etcd.close()
        raise


class EtcdBackend(RendezvousBackend):
    """The state of one job's rendezvous in etcd, changed by compare-and-swap; the token is etcd's revision of the key.

    The job's lease is granted with the first state and renewed, every third of its time, by whoever reads or writes the
    state, which torch's agents do every few seconds. With the last agent it ends, and all keys of the job with it.

    Args:
        etcd: the store.
        run_id: names the job.
        ttl_s: how long the lease lasts if this node grants it.
    """

    def __init__(self, etcd: Store, run_id: str, ttl_s: float) -> None:
        if not run_id:
            raise ValueError("--rdzv-id: expected a name for the job")
        self.prefix = f"/elaunch/torchrun:{quote(run_id, safe='')}/"
        self._etcd = etcd
        self._key = self.prefix + "state"
        self._ttl_s = ttl_s
        self._lease: Lease | None = None
        self._renew_at_s = 0.0

    @property
    def name(self) -> str:
        """Returns what `--rdzv-backend` says."""
        return BACKEND

    @property
    def lease(self) -> Lease | None:
        """Returns the lease of the state that was seen last; None if there was none."""
        return self._lease

    def get_state(self) -> tuple[bytes, int] | None:
        """Returns the state, pickled here for torch, and its token, or None if there is none.

        Raises:
            RendezvousConnectionError: no answer from etcd.
            RendezvousStateError: what lies there is no document of this module.
        """
        with _in_torchs_terms():
            entry = self._etcd.get(self._key)
            if entry is None:
                self._lease = None
                return None
            lease, state = read_document(entry.value, f"etcd at {self._etcd.endpoint}: {self._key!r}")
            self._keep_alive(lease)
        return pickle.dumps(state), entry.revision

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, int, bool] | None:
        """Writes the state if `token` is that of the present one, or if there is none and `token` is None.

        Returns:
            The state that is there now, its token, and whether this call has written; None if there is no state. After
            a write, another node may have written the next state already: then it is that one.

        Raises:
            RendezvousConnectionError: no answer from etcd.
            RendezvousStateError: what lies there is no document of this module, or this torch keeps another state.
        """
        # torch has made these bytes in this process, a moment ago; what comes from etcd is never unpickled.
        content = pickle.loads(state)  # noqa: S301
        with _in_torchs_terms():
            if token is None:
                wrote = self._create(content)
            else:
                wrote = isinstance(token, int) and self._replace(content, token)
        found = self.get_state()
        return None if found is None else (*found, wrote)

    def _create(self, content: object) -> bool:
        lease = Lease(self._etcd.grant(self._ttl_s), self._ttl_s)
        value = write_document(content, lease)
        wrote = self._attempt(value, self._etcd.create, self._key, value, lease.number)
        if not wrote:
            self._etcd.revoke(lease.number)
        return wrote

    def _replace(self, content: object, token: int) -> bool:
        if self._lease is None:
            self.get_state()
        if self._lease is None:
            return False
        value = write_document(content, self._lease)
        return self._attempt(value, self._etcd.replace, self._key, value, token)

    def _attempt(self, value: bytes, write: Any, *arguments: Any) -> bool:
        """Writes, and looks whether that was done where no answer came."""
        try:
            return bool(write(*arguments))
        except StoreUnavailable:
            entry = self._etcd.get(self._key)
            return entry is not None and entry.value == value

    def _keep_alive(self, lease: Lease) -> None:
        now_s = time.monotonic()
        if lease != self._lease or now_s >= self._renew_at_s:
            # Where it has ended in this moment the state is gone too, which the next look will tell.
            self._etcd.keep_alive(lease.number)
            self._lease, self._renew_at_s = lease, now_s + lease.ttl_s / 3


class AgentStore(TorchStore):
    """What torch's agents need of a store: how many workers each has, and the barrier at the end.

    Waiting is a watch, so it costs etcd nothing, and a signal interrupts it. Values are bound to the job's lease.

    Raises, in all methods:
        RendezvousConnectionError: no answer from etcd.
        RendezvousStateError: the job has no lease any more.
    """

    def __init__(self, etcd: Store, backend: EtcdBackend) -> None:
        super().__init__()
        self._etcd = etcd
        self._backend = backend

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # through PrefixStore come bytes
        """Writes the value."""
        lease = self._lease()
        with _in_torchs_terms():
            self._etcd.put(self._path(key), value, lease.number)

    def get(self, key: str) -> bytes:
        """Returns the value as soon as there is one. Raises `DistStoreError` after the store's time-out."""
        return self._await(key, self._deadline_s(None))

    def add(self, key: str, amount: int) -> int:
        """Adds to a decimal number, 0 where there is none, and returns the sum."""
        lease = self._lease()
        path = self._path(key)
        with _in_torchs_terms():
            while True:
                entry = self._etcd.get(path)
                total = amount + (int(entry.value) if entry is not None else 0)
                value = b"%d" % total
                if entry is None:
                    wrote = self._etcd.create(path, value, lease.number)
                else:
                    wrote = self._etcd.replace(path, value, entry.revision)
                if wrote:
                    return total

    def check(self, keys: Sequence[str]) -> bool:
        """Returns whether all keys are there."""
        with _in_torchs_terms():
            return all(self._etcd.get(self._path(key)) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Returns when all keys are there. Raises `DistStoreError` after `timeout`, or the store's own time-out."""
        deadline_s = self._deadline_s(timeout)
        for key in keys:
            self._await(key, deadline_s)

    def _deadline_s(self, timeout: timedelta | None) -> float:
        limit: timedelta = self.timeout if timeout is None else timeout  # type: ignore[attr-defined]
        return time.monotonic() + limit.total_seconds()

    def _lease(self) -> Lease:
        lease = self._backend.lease
        if lease is None:
            raise RendezvousStateError(
                f"etcd at {self._etcd.endpoint}: {self._backend.prefix!r} has expired: no node has renewed its lease; "
                "start the job again, with a longer --rdzv-conf=lease_ttl=SECONDS"
            )
        return lease

    def _path(self, key: str) -> str:
        return f"{self._backend.prefix}{self._lease().number}/{key}"

    def _await(self, key: str, deadline_s: float) -> bytes:
        path = self._path(key)
        with _in_torchs_terms():
            while True:
                entry = self._etcd.get(path)
                if entry is not None:
                    return entry.value
                if time.monotonic() >= deadline_s:
                    raise DistStoreError(f"etcd at {self._etcd.endpoint}: waited in vain for {path!r}")
                self._await_change(path, deadline_s)

    def _await_change(self, path: str, deadline_s: float) -> None:
        """Returns when the key is there, at the deadline, or when the watch breaks."""
        changed = threading.Event()

        def on_events(events: list[WatchEvent]) -> None:
            if any(event.key == path for event in events):
                changed.set()

        entries, revision = self._etcd.range(path)
        if any(entry.key == path for entry in entries):
            return
        watch = self._etcd.watch(path, revision + 1, on_events, lambda _: changed.set())
        try:
            left_s = max(0.0, deadline_s - time.monotonic())
            with threads.telling(_logger.warning, f"{path!r} to be written by another node", left_s):
                changed.wait(left_s)
        finally:
            watch.cancel()


class EtcdHandler(RendezvousHandler):
    """torch's handler, with a new store for the workers in each round, and without the need for etcd between rounds."""

    def __init__(self, inner: DynamicRendezvousHandler, backend: EtcdBackend, etcd: Store) -> None:
        self._inner = inner
        self._etcd = etcd
        self._job = f"--rdzv-id={inner.get_run_id()} (etcd at {etcd.endpoint})"
        self._backend = backend
        self._is_away = False

    def get_backend(self) -> str:
        """Returns what `--rdzv-backend` says."""
        return self._inner.get_backend()

    @property
    def use_agent_store(self) -> bool:
        """Returns whether the agent of rank 0 hosts the workers' store.

        TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 says that the worker of rank 0 does. That is needed with a torch that puts
        each node's own count of restarts before the keys of a hosted store: the counts differ between nodes.
        """
        return self._inner.use_agent_store

    def next_rendezvous(self) -> RendezvousInfo:
        """Meets the other nodes. Raises what torch's handler raises, with the name of the job and what to do."""
        inner = self._inner
        # torch would keep the store, and each node its address, for all rounds. In it, new workers find the addresses
        # of dead ones, and after a change of rank 0 the nodes would not agree on where it is.
        previous = inner._shared_tcp_store_server
        inner._shared_tcp_store_server = None
        inner._bootstrap_store_info = None
        settings = inner.settings
        what = f"{self._job}: the round of at least {settings.min_nodes} nodes to begin"
        try:
            with threads.telling(_logger.warning, what):
                return inner.next_rendezvous()
        except RendezvousClosedError:
            lease = self._backend.lease
            free_s = f"{lease.ttl_s:g} s" if lease else "a while"
            raise RendezvousClosedError(
                f"{self._job}: this job has ended and takes no more nodes; "
                f"start another with its own --rdzv-id, or with this one {free_s} after its last node has gone"
            ) from None
        except RendezvousTimeoutError:
            raise RendezvousTimeoutError(
                f"{self._job}: fewer than {settings.min_nodes} nodes came within "
                f"{settings.timeout.join.total_seconds():g} s; start the others, or give a longer "
                "--rdzv-conf=join_timeout=SECONDS"
            ) from None
        finally:
            # Until here, workers of other nodes that are not stopped yet can still reach it.
            del previous

    def is_closed(self) -> bool:
        """Returns whether the job has ended."""
        return self._inner.is_closed()

    def set_closed(self) -> None:
        """Ends the job for all nodes."""
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """Returns how many nodes wait for the next round; 0 while etcd is away, since training goes on without it."""
        try:
            waiting = self._inner.num_nodes_waiting()
        except RendezvousConnectionError as error:
            if not self._is_away:
                _logger.warning("the rendezvous is away, training goes on without it: %s", error)
            self._is_away = True
            return 0
        if self._is_away:
            _logger.warning("the rendezvous is back: %s", self._job)
        self._is_away = False
        return waiting

    def get_run_id(self) -> str:
        """Returns what `--rdzv-id` says."""
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        """Ends the job for all nodes and hangs up; returns whether that could be told to etcd."""
        try:
            return self._inner.shutdown()
        finally:
            self._etcd.close()


def write_document(content: object, lease: Lease) -> bytes:
    """Puts torch's state into the JSON that lies in etcd.

    Raises:
        RendezvousStateError: this version of torch keeps something else in its state than this module knows.
    """
    fields = frozenset(vars(content)) if isinstance(content, _RendezvousState) else frozenset()
    if not isinstance(content, _RendezvousState) or fields != _FIELDS:
        raise RendezvousStateError(
            f"--rdzv-backend={BACKEND} does not know this torch's rendezvous state: {type(content).__name__} differs "
            f"in {', '.join(sorted(fields ^ _FIELDS)) or 'its type'}; expected that of torch 2.13"
        )
    document = {
        "version": _VERSION,
        "lease": lease.number,
        "ttl_s": lease.ttl_s,
        "round": content.round,
        "complete": content.complete,
        "closed": content.closed,
        "deadline": content.deadline.isoformat() if content.deadline is not None else None,
        "participants": [[*_node_as_list(node), rank] for node, rank in content.participants.items()],
        "wait_list": [_node_as_list(node) for node in sorted(content.wait_list)],
        "redundancy_list": [_node_as_list(node) for node in sorted(content.redundancy_list)],
        "last_heartbeats": [[*_node_as_list(node), t.isoformat()] for node, t in content.last_heartbeats.items()],
    }
    return json.dumps(document).encode()


def read_document(value: bytes, where: str) -> tuple[Lease, _RendezvousState]:
    """Reads what `write_document` wrote. `where` is the key, for the message.

    Raises:
        RendezvousStateError: it is anything else.
    """
    try:
        document = _typed(json.loads(value), dict)
        if document["version"] != _VERSION:
            raise ValueError(f"version {document['version']}, expected {_VERSION}")
        state = _RendezvousState()
        state.round = _typed(document["round"], int)
        state.complete = _typed(document["complete"], bool)
        state.closed = _typed(document["closed"], bool)
        state.deadline = _read_time(document["deadline"]) if document["deadline"] is not None else None
        state.participants = {_read_node(item): _typed(rank, int) for *item, rank in document["participants"]}
        state.wait_list = {_read_node(item) for item in document["wait_list"]}
        state.redundancy_list = {_read_node(item) for item in document["redundancy_list"]}
        state.last_heartbeats = {_read_node(item): _read_time(t) for *item, t in document["last_heartbeats"]}
        return Lease(_typed(document["lease"], int), float(document["ttl_s"])), state
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise RendezvousStateError(
            f"{where} is not a rendezvous state of elaunch ({type(error).__name__}: {error}); use another --rdzv-id, "
            "or delete the key if no job uses it"
        ) from None


def _node_as_list(node: _NodeDesc) -> list[str | int]:
    return [node.addr, node.pid, node.local_id]


def _read_node(item: Sequence[object]) -> _NodeDesc:
    addr, pid, local_id = item
    return _NodeDesc(_typed(addr, str), _typed(pid, int), _typed(local_id, int))


def _read_time(text: object) -> datetime:
    time_read = datetime.fromisoformat(_typed(text, str))
    if time_read.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone")
    return time_read


def _typed(value: object, kind: type[T]) -> T:
    if type(value) is not kind:
        raise TypeError(f"{value!r:.80} where {kind.__name__} is expected")
    return value


@contextlib.contextmanager
def _in_torchs_terms() -> Iterator[None]:
    """Raises as torch's error what elaunch says about etcd; its message names the endpoint and what to look at."""
    try:
        yield
    except LaunchError as error:
        raise RendezvousConnectionError(str(error)) from None


def _choose_ttl_s(conf: RendezvousConf, is_given: bool) -> float:
    """Longer than what torch calls silence: whoever is alive renews the lease in time."""
    interval_s = conf.keep_alive.interval or 5.0
    if is_given:
        return max(conf.lease_ttl, 3 * interval_s)
    return max(_LEAST_TTL_S, 4 * interval_s * conf.keep_alive.max_attempt)
