"""Stock torchrun with elaunch's etcd v3 rendezvous: `--rdzv-backend=etcd-v3`, as the entry point registers it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import re
import textwrap
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import DistStoreError, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState, create_handler

from elaunch.errors import StoreUnavailable
from elaunch.rendezvous.embedded import EmbeddedEtcd
from elaunch.rendezvous.etcd import EtcdStore
from elaunch.rendezvous.memory import MemoryStore
from elaunch.rendezvous.store import Store
from elaunch.rendezvous.torchrun import (
    AgentStore,
    EtcdBackend,
    EtcdHandler,
    Lease,
    create,
    read_document,
    write_document,
)
from tests.helpers import LOG_TAIL_LINES, ROOT, Spawned, Spawner, find_free_port, wait_until
from tests.jobs.plain_etcd import serving

LIMIT_S = 90.0
"""torchrun and each of its workers import torch first, which takes seconds on a busy machine."""

STORE_S = 20.0
TTL_S = 60.0


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedEtcd]:
    with serving(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture(params=["memory", "etcd"])
def store(request: pytest.FixtureRequest, etcd: EmbeddedEtcd) -> Iterator[Store]:
    made: Store = MemoryStore() if request.param == "memory" else EtcdStore(etcd.endpoint, timeout_s=STORE_S)
    yield made
    made.close()


@pytest.fixture
def run_id() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def python_path() -> dict[str, str | None]:
    """An environment in which elaunch can be imported; torch finds the entry point of the installed package."""
    return {"PYTHONPATH": str(ROOT)}


@pytest.fixture
def second_installation(tmp_path: Path) -> Path:
    """A folder for the path which has the entry point once more, as where two versions are installed."""
    metadata = tmp_path / "site" / "elaunch_torchrun-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: elaunch-torchrun\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[torchrun.handlers]\netcd-v3 = elaunch.agent.plugins:etcd_v3_handler\n")
    return metadata.parent


def torchs_state(round_number: int = 0, *, nodes: int = 0, closed: bool = False) -> bytes:
    """A state as torch's handler hands it over."""
    state = _RendezvousState()
    state.round = round_number
    state.closed = closed
    now = datetime.now(UTC)
    for pid in range(nodes):
        state.participants[_NodeDesc("10.0.0.1", pid, 0)] = pid
        state.last_heartbeats[_NodeDesc("10.0.0.1", pid, 0)] = now
    return pickle.dumps(state)


def round_of(found: tuple[bytes, int] | tuple[bytes, int, bool] | None) -> int:
    assert found is not None
    state = pickle.loads(found[0])
    assert isinstance(state, _RendezvousState)
    return state.round


# --- the backend: compare and swap ---


def test_there_is_no_state_before_the_first_node(store: Store, run_id: str) -> None:
    assert EtcdBackend(store, run_id, TTL_S).get_state() is None


def test_a_state_is_read_back_by_another_node_with_the_same_token(store: Store, run_id: str) -> None:
    wrote = EtcdBackend(store, run_id, TTL_S).set_state(torchs_state(7, nodes=3))
    read = EtcdBackend(store, run_id, TTL_S).get_state()
    assert wrote is not None
    assert wrote[2]
    assert read == wrote[:2]
    assert len(pickle.loads(wrote[0]).participants) == 3


def test_without_a_token_only_the_first_state_is_written(store: Store, run_id: str) -> None:
    backend = EtcdBackend(store, run_id, TTL_S)
    first = backend.set_state(torchs_state(1))
    second = backend.set_state(torchs_state(2))
    assert first is not None
    assert second == (*first[:2], False)


def test_a_stale_token_writes_nothing_and_returns_the_present_state(store: Store, run_id: str) -> None:
    backend = EtcdBackend(store, run_id, TTL_S)
    first = backend.set_state(torchs_state(1))
    assert first is not None
    second = backend.set_state(torchs_state(2), first[1])
    assert second is not None
    assert second[2]
    assert second[1] != first[1]
    assert backend.set_state(torchs_state(3), first[1]) == (*second[:2], False)


@pytest.mark.parametrize("token", ["1", b"1", 2.0])
def test_what_is_no_token_writes_nothing(token: object, run_id: str) -> None:
    backend = EtcdBackend(MemoryStore(), run_id, TTL_S)
    first = backend.set_state(torchs_state(1))
    assert first is not None
    assert backend.set_state(torchs_state(2), token) == (*first[:2], False)


def test_a_token_of_a_state_that_is_gone_writes_nothing(store: Store, run_id: str) -> None:
    backend = EtcdBackend(store, run_id, TTL_S)
    first = backend.set_state(torchs_state(1))
    assert first is not None
    store.delete(backend.prefix + "state")
    assert backend.set_state(torchs_state(2), first[1]) is None
    assert backend.get_state() is None


@pytest.mark.parametrize("is_new", [True, False])
def test_of_writers_with_the_same_token_exactly_one_wins(store: Store, run_id: str, is_new: bool) -> None:
    token = None
    if not is_new:
        first = EtcdBackend(store, run_id, TTL_S).set_state(torchs_state(100))
        assert first is not None
        token = first[1]
    start = threading.Barrier(4)

    def write(number: int) -> tuple[bytes, int, bool] | None:
        start.wait(STORE_S)
        return EtcdBackend(store, run_id, TTL_S).set_state(torchs_state(number), token)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(write, range(4)))
    winners = [number for number, result in enumerate(results) if result is not None and result[2]]
    assert len(winners) == 1
    assert {round_of(result) for result in results} == {winners[0]}
    assert round_of(EtcdBackend(store, run_id, TTL_S).get_state()) == winners[0]


class Deaf(MemoryStore):
    """Carries writes out, or not, and loses the answers."""

    carries_out = True

    def create(self, key: str, value: bytes, lease: int | None = None) -> bool:
        if self.carries_out:
            super().create(key, value, lease)
        raise StoreUnavailable("no answer")

    def replace(self, key: str, value: bytes, expected_revision: int, beside: tuple[str, bytes] | None = None) -> bool:
        if self.carries_out:
            super().replace(key, value, expected_revision, beside)
        raise StoreUnavailable("no answer")


def test_where_the_answer_to_a_write_is_lost_what_lies_in_etcd_decides() -> None:
    store = Deaf()
    backend = EtcdBackend(store, "job", TTL_S)
    first = backend.set_state(torchs_state(1))
    assert first is not None
    assert first[2]
    second = backend.set_state(torchs_state(2), first[1])
    assert second is not None
    assert second[2]
    store.carries_out = False
    assert backend.set_state(torchs_state(3), second[1]) == (*second[:2], False)


def test_an_etcd_that_does_not_answer_is_a_connection_error_of_torch() -> None:
    store = MemoryStore()
    backend = EtcdBackend(store, "job", TTL_S)
    store.down = True
    for call in (backend.get_state, lambda: backend.set_state(torchs_state())):
        with pytest.raises(RendezvousConnectionError, match=r"memory: .*failed because the store is down"):
            call()


# --- what lies in etcd ---


class Evil:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.path,)


def test_a_pickle_in_etcd_is_refused_unread(store: Store, run_id: str, tmp_path: Path) -> None:
    trace = tmp_path / "unpickled"
    evil = pickle.dumps(Evil(trace))
    backend = EtcdBackend(store, run_id, TTL_S)
    first = backend.set_state(torchs_state())
    assert first is not None
    for value in (evil, base64.b64encode(evil), torchs_state()):
        token = store.put(backend.prefix + "state", value)
        with pytest.raises(RendezvousStateError, match=f"{run_id}/state.* is not a rendezvous state of elaunch"):
            backend.get_state()
        with pytest.raises(RendezvousStateError, match="is not a rendezvous state of elaunch"):
            backend.set_state(torchs_state(1), first[1])
        assert backend_entry(store, backend) == (value, token)
    assert not trace.exists()


def backend_entry(store: Store, backend: EtcdBackend) -> tuple[bytes, int]:
    entry = store.get(backend.prefix + "state")
    assert entry is not None
    return entry.value, entry.revision


NODE = ["10.0.0.1", 1, 0]


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"round": "1"},
        {"round": True},
        {"complete": 1},
        {"closed": None},
        {"deadline": "tomorrow"},
        {"deadline": "2030-01-01T00:00:00"},
        {"participants": [NODE]},
        {"participants": [[*NODE, "0"]]},
        {"participants": {"a": 0}},
        {"wait_list": [["10.0.0.1", 1]]},
        {"redundancy_list": [[["10.0.0.1"], 1, 0]]},
        {"last_heartbeats": [[*NODE, 0]]},
        {"lease": "1"},
        {"ttl_s": []},
    ],
    ids=str,
)
def test_a_damaged_document_is_refused(change: dict[str, object]) -> None:
    document = json.loads(write_document(pickle.loads(torchs_state(nodes=1)), Lease(1, TTL_S)))
    read_document(json.dumps(document).encode(), "key")
    with pytest.raises(RendezvousStateError, match="key is not a rendezvous state of elaunch"):
        read_document(json.dumps(document | change).encode(), "key")


@pytest.mark.parametrize("value", [b"", b"[]", b"null", b"[" * 100_000, b"\xff", b"{}", b'{"version": 1}'], ids=repr)
def test_what_is_no_document_is_refused(value: bytes) -> None:
    with pytest.raises(RendezvousStateError, match="key is not a rendezvous state of elaunch"):
        read_document(value, "key")


def test_a_state_that_this_version_does_not_know_is_not_written() -> None:
    state = _RendezvousState()
    state.colour = "red"  # type: ignore[attr-defined]
    for content, what in ((state, "colour"), ({}, "dict")):
        with pytest.raises(RendezvousStateError, match=f"does not know this torch's rendezvous state: .*{what}"):
            write_document(content, Lease(1, TTL_S))


times = st.datetimes(timezones=st.just(UTC))
nodes = st.builds(_NodeDesc, st.text(max_size=5), st.integers(0, 5), st.integers(0, 5))


@given(
    flags=st.tuples(st.booleans(), st.booleans()),
    deadline=st.none() | times,
    participants=st.dictionaries(nodes, st.integers(0, 5)),
    wait_list=st.sets(nodes),
    redundancy_list=st.sets(nodes),
    last_heartbeats=st.dictionaries(nodes, times),
    lease=st.builds(Lease, st.integers(1, 2**63 - 1), st.floats(1, 1e6)),
)
def test_any_state_of_torch_comes_back_as_it_was(
    flags: tuple[bool, bool],
    deadline: datetime | None,
    participants: dict[_NodeDesc, int],
    wait_list: set[_NodeDesc],
    redundancy_list: set[_NodeDesc],
    last_heartbeats: dict[_NodeDesc, datetime],
    lease: Lease,
) -> None:
    state = _RendezvousState()
    state.complete, state.closed = flags
    state.deadline = deadline
    state.participants = participants
    state.wait_list = wait_list
    state.redundancy_list = redundancy_list
    state.last_heartbeats = last_heartbeats
    read_lease, read_state = read_document(write_document(state, lease), "key")
    assert read_lease == lease
    assert vars(read_state) == vars(state)


# --- how long it lies there ---


def test_the_keys_of_a_job_without_nodes_go_away(etcd: EmbeddedEtcd, run_id: str) -> None:
    with contextlib.closing(EtcdStore(etcd.endpoint, timeout_s=STORE_S)) as store:
        backend = EtcdBackend(store, run_id, ttl_s=1)
        agents = AgentStore(store, backend)
        backend.set_state(torchs_state())
        agents.set("key", b"value")
        assert len(store.range(backend.prefix)[0]) == 2
        wait_until(lambda: not store.range(backend.prefix)[0], STORE_S, "the lease to end")
        assert backend.get_state() is None
        with pytest.raises(RendezvousStateError, match=r"has expired.*lease_ttl"):
            agents.set("key", b"value")


def test_whoever_reads_the_state_keeps_it_alive() -> None:
    now_s = [0.0]
    store = MemoryStore(lambda: now_s[0])
    EtcdBackend(store, "job", ttl_s=10).set_state(torchs_state())
    for _ in range(5):
        now_s[0] += 9
        # Each is another node, which does not know how long the lease has left.
        assert EtcdBackend(store, "job", ttl_s=1000).get_state() is not None
    now_s[0] += 11
    assert EtcdBackend(store, "job", ttl_s=10).get_state() is None


def test_a_job_that_begins_again_shares_no_key_with_the_one_before(run_id: str) -> None:
    store = MemoryStore()
    backend = EtcdBackend(store, run_id, TTL_S)
    agents = AgentStore(store, backend)
    backend.set_state(torchs_state())
    agents.set("key", b"old")
    store.delete(backend.prefix + "state")
    backend.set_state(torchs_state())
    assert not agents.check(["key"])


# --- the store of the agents ---


@pytest.fixture
def agents(store: Store, run_id: str) -> AgentStore:
    backend = EtcdBackend(store, run_id, TTL_S)
    backend.set_state(torchs_state())
    return AgentStore(store, backend)


def test_values_are_shared_through_prefixes_as_torch_uses_them(agents: AgentStore) -> None:
    prefixed = PrefixStore("round", agents)
    prefixed.set("a", "text")
    prefixed.set("b", b"\x00bytes")  # type: ignore[arg-type]  # which torch's agent passes too
    assert prefixed.multi_get(["a", "b"]) == [b"text", b"\x00bytes"]
    assert agents.get("round/a") == b"text"
    assert prefixed.check(["a", "b"])
    assert not prefixed.check(["a", "c"])


def test_additions_of_many_nodes_are_all_counted(agents: AgentStore) -> None:
    with ThreadPoolExecutor(4) as pool:
        totals = list(pool.map(lambda _: PrefixStore("p", agents).add("n", 2), range(8)))
    assert sorted(totals) == [2, 4, 6, 8, 10, 12, 14, 16]
    assert agents.get("p/n") == b"16"


def test_waiting_ends_when_the_key_comes(agents: AgentStore) -> None:
    agents.set("key-and-more", b"")
    with ThreadPoolExecutor(2) as pool:
        got = pool.submit(agents.get, "key")
        waited = pool.submit(PrefixStore("a", agents).wait, ["x", "y"], timedelta(seconds=STORE_S))
        agents.set("a/y", b"1")
        agents.set("a/x", b"1")
        agents.set("key", b"value")
        assert got.result(STORE_S) == b"value"
        assert waited.result(STORE_S) is None


def test_waiting_in_vain_ends_with_the_name_of_the_key(agents: AgentStore) -> None:
    prefixed = PrefixStore("a", agents)
    with pytest.raises(DistStoreError, match=r"waited in vain for .*a/x"):
        prefixed.wait(["x"], timedelta(milliseconds=50))
    prefixed.set_timeout(timedelta(milliseconds=50))
    with pytest.raises(DistStoreError, match=r"waited in vain for .*a/x"):
        prefixed.get("x")


def test_waiting_outlives_a_short_absence_of_etcd(run_id: str) -> None:
    store = MemoryStore()
    backend = EtcdBackend(store, run_id, TTL_S)
    backend.set_state(torchs_state())
    agents = AgentStore(store, backend)
    watches = store._data.watches

    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(agents.get, "key")
        wait_until(lambda: bool(watches), STORE_S, "the watch")
        for watch in list(watches):
            watch.fail(StoreUnavailable("the watch broke"))
        other = AgentStore(store.session(), backend)
        other.set("key", b"value")
        assert got.result(STORE_S) == b"value"


# --- the handler ---


def make_handler(store: Store, job: str, nodes: tuple[int, int] = (1, 1), address: str = "127.0.0.1") -> EtcdHandler:
    params = RendezvousParameters(
        "etcd-v3", "memory", job, *nodes, address, join_timeout=20, last_call_timeout=1, close_timeout=5
    )
    backend = EtcdBackend(store, job, TTL_S)
    return EtcdHandler(create_handler(AgentStore(store, backend), backend, params), backend, store)


def workers_store(info: RendezvousInfo) -> TCPStore:
    """What the workers of the round would connect to."""
    place = info.bootstrap_store_info
    assert place is not None
    return TCPStore(place.master_addr, place.master_port, is_master=False, timeout=timedelta(seconds=STORE_S))


def test_the_workers_of_each_round_find_an_empty_store() -> None:
    store = MemoryStore()
    handler = make_handler(store, "job")
    assert handler.use_agent_store
    first = handler.next_rendezvous()
    workers_store(first).set("address", "of a worker that has died")
    second = handler.next_rendezvous()
    assert not workers_store(second).check(["address"])
    assert handler.shutdown()


def test_the_place_of_the_workers_store_is_new_too_where_the_worker_of_rank_0_hosts_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    handler = make_handler(MemoryStore(), "job")
    assert not handler.use_agent_store
    places = [handler.next_rendezvous().bootstrap_store_info for _ in range(2)]
    assert places[0] != places[1]
    assert handler.shutdown()


def test_nodes_agree_on_the_workers_store_after_another_node_became_rank_0() -> None:
    store = MemoryStore()
    old = make_handler(store.session(), "job", (1, 2), "127.0.0.2")
    alone = old.next_rendezvous()
    assert (alone.rank, alone.world_size) == (0, 1)
    # Ranks go by address, so the newcomer is rank 0.
    new = make_handler(store.session(), "job", (1, 2), "127.0.0.1")
    with ThreadPoolExecutor(2) as pool:
        joined = pool.submit(new.next_rendezvous)
        wait_until(lambda: old.num_nodes_waiting() == 1, STORE_S, "the newcomer to wait")
        rejoined = pool.submit(old.next_rendezvous)
        infos = joined.result(STORE_S), rejoined.result(STORE_S)
    assert [(info.rank, info.world_size) for info in infos] == [(0, 2), (1, 2)]
    assert infos[0].bootstrap_store_info == infos[1].bootstrap_store_info
    workers_store(infos[1]).set("from", "rank 1")
    assert workers_store(infos[0]).get("from") == b"rank 1"
    assert old.shutdown()
    assert new.shutdown()


def test_a_node_that_comes_after_the_end_is_turned_away_with_the_name_of_the_job() -> None:
    store = MemoryStore()
    handler = make_handler(store.session(), "run7")
    handler.next_rendezvous()
    assert not handler.is_closed()
    assert handler.shutdown()
    with pytest.raises(RendezvousClosedError, match=r"--rdzv-id=run7 .*has ended .* 60 s after its last node"):
        make_handler(store.session(), "run7").next_rendezvous()


def test_too_few_nodes_are_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("elaunch.waits.WAITED_S", 0.01)
    monkeypatch.setattr("elaunch.waits.LOOK_S", 0.05)
    handler = make_handler(MemoryStore(), "run7", (2, 2))
    monkeypatch.setattr(handler._inner.settings.timeout, "_join", timedelta(milliseconds=500))
    with pytest.raises(RendezvousTimeoutError, match=r"--rdzv-id=run7 .*fewer than 2 nodes came within 0.5 s"):
        handler.next_rendezvous()
    told = r"waiting for 0 s: --rdzv-id=run7 \(etcd at .*\): the round of at least 2 nodes to begin"
    assert re.search(told, caplog.text)


def test_who_waits_for_what_another_node_is_to_write_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("elaunch.waits.WAITED_S", 0.01)
    monkeypatch.setattr("elaunch.waits.LOOK_S", 0.05)
    store = MemoryStore()
    handler = make_handler(store, "run7")
    handler.next_rendezvous()
    with pytest.raises(DistStoreError, match="waited in vain for"):
        AgentStore(store, handler._backend).wait(["place"], timedelta(milliseconds=500))
    assert re.search(r"waiting for 0 s, 0 s left: '/elaunch/\S*/place' to be written by another node", caplog.text)
    assert handler.shutdown()


def test_a_round_goes_on_while_etcd_is_away(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    handler = make_handler(store, "job")
    handler.next_rendezvous()
    # torch answers from what it has read for a second.
    monkeypatch.setattr(handler._inner._state_holder, "_cache_duration", 0)
    store.down = True
    assert handler.num_nodes_waiting() == 0
    assert handler.num_nodes_waiting() == 0
    store.down = False
    assert handler.num_nodes_waiting() == 0
    told = [r.getMessage() for r in caplog.records if r.name == "elaunch.rendezvous.torchrun"]
    away, back = [line for line in told if not line.startswith("waiting for")]  # which a busy machine brings
    assert away.startswith("the rendezvous is away, training goes on without it: memory: ")
    assert back.startswith("the rendezvous is back: ")
    assert handler.shutdown()


def test_the_address_of_this_node_is_on_the_route_to_etcd_and_the_flag_wins(etcd: EmbeddedEtcd, run_id: str) -> None:
    for given_address, expected in ((None, "127.0.0.1"), ("127.0.0.3", "127.0.0.3")):
        params = RendezvousParameters("etcd-v3", etcd.endpoint, f"{run_id}-{expected}", 1, 1, given_address)
        handler = create(params)
        place = handler.next_rendezvous().bootstrap_store_info
        assert place is not None
        assert place.master_addr == expected
        assert handler.shutdown()


@pytest.mark.parametrize(
    "endpoint, conf, message",
    [
        ("", {}, "--rdzv-backend=etcd-v3 needs --rdzv-endpoint=HOST:PORT"),
        ("host:port", {}, "--rdzv-endpoint=host:port: expected HOST:PORT"),
        ("host", {"protocol": "http"}, "--rdzv-conf 'protocol=http': expected key=value with a key of .*cacert"),
        ("host", {"user": "me"}, "user and password go together"),
        ("host", {"cacert": "/no/such.pem"}, "cacert=/no/such.pem: no such file"),
    ],
)
def test_flags_that_cannot_be_used_are_named(endpoint: str, conf: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create(RendezvousParameters("etcd-v3", endpoint, "job", 1, 1, **conf))


def test_a_name_that_does_not_resolve_is_named() -> None:
    with pytest.raises(RendezvousConnectionError, match=r"--rdzv-endpoint no-such-host.invalid:2379: .*--local-addr"):
        create(RendezvousParameters("etcd-v3", "no-such-host.invalid", "job", 1, 1))


# --- stock torchrun ---

# RESTART_COUNT does not tell the attempts apart: torch counts restarts per node, and only those for failures.
WORKER = """
import os, pathlib, sys
import torch
import torch.distributed as dist

marker = pathlib.Path(sys.argv[1])
attempt = int(marker.exists())
dist.init_process_group("gloo")
total = torch.full((1,), dist.get_rank() + 1.0)
dist.all_reduce(total)
place = os.environ["MASTER_ADDR"] + ":" + os.environ["MASTER_PORT"]
sys.stdout.write(f"attempt {attempt} rank {dist.get_rank()} sum {total.item():g} store {place}\\n")
sys.stdout.flush()
if attempt == 0 and dist.get_rank() == 1:
    marker.touch()
    os._exit(3)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("installed", ["once", "twice"])
def test_the_entry_point_is_known_to_torch_and_loads_no_etcd_client(
    spawn: Spawner, python_path: dict[str, str | None], second_installation: Path, installed: str
) -> None:
    if installed == "twice":
        python_path["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(second_installation)))
    script = textwrap.dedent("""
        import sys
        from torch.distributed.elastic.rendezvous import rendezvous_handler_registry as registry
        loaded = [name for name in ("h2", "elaunch.rendezvous.etcd") if name in sys.modules]
        sys.stdout.write(f"{registry._registry['etcd-v3'].__module__} {loaded}\\n")
    """)
    process = spawn.python("-c", script, env=python_path)
    assert process.wait(LIMIT_S) == 0, process.tail()
    assert process.text().splitlines() == ["elaunch.agent.plugins []"]


def torchrun(spawn: Spawner, environment: dict[str, str | None], endpoint: str, *arguments: str | Path) -> Spawned:
    return spawn.python(
        *("-m", "torch.distributed.run", "--rdzv-backend=etcd-v3", f"--rdzv-endpoint={endpoint}"),
        *arguments,
        env=environment,
        name="torchrun",
    )


@pytest.mark.timeout(2 * LIMIT_S + 20)
@pytest.mark.soak
def test_two_nodes_of_stock_torchrun_come_back_after_a_worker_failed(
    spawn: Spawner, python_path: dict[str, str | None], etcd: EmbeddedEtcd, run_id: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(WORKER)
    flags = ("--nnodes=2", "--max-restarts=1", f"--rdzv-id={run_id}")
    nodes = [torchrun(spawn, python_path, etcd.endpoint, *flags, script, tmp_path / "failed") for _ in range(2)]
    codes = [node.wait(LIMIT_S) for node in nodes]
    written = "".join(node.text() for node in nodes)
    assert codes == [0, 0], "\n".join(node.tail(2 * LOG_TAIL_LINES) for node in nodes)
    found = re.findall(r"attempt (\d) rank (\d) sum (\d+) store (\S+):(\d+)", written)
    assert sorted(line[:3] for line in found) == [(attempt, rank, "3") for attempt in "01" for rank in "01"]
    ports = {attempt: {line[4] for line in found if line[0] == attempt} for attempt in "01"}
    assert [len(seen) for seen in ports.values()] == [1, 1]
    assert ports["0"] != ports["1"]
    assert {line[3] for line in found} == {"127.0.0.1"}


def test_an_endpoint_without_etcd_ends_torchrun_with_one_clear_line(
    spawn: Spawner, python_path: dict[str, str | None]
) -> None:
    endpoint = f"127.0.0.1:{find_free_port()}"
    process = torchrun(spawn, python_path, endpoint, "--rdzv-conf=connect_timeout=1", "--no-python", "true")
    assert process.wait(LIMIT_S) == 1
    (line,) = [line for line in process.text().splitlines() if "is etcd running there?" in line]
    assert re.search(rf"RendezvousConnectionError: etcd at {endpoint}: .*not answered \(time-out 1 s\)", line)
