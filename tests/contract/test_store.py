"""What every store must do; and what the one over etcd does when its server goes away, wants a password or TLS."""

from __future__ import annotations

import math
import os
import queue
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from elaunch.agent.launch import FIRST_CONTACT_S, REFUSED_S, _open_store
from elaunch.cli.run import parse
from elaunch.errors import LaunchError, StoreUnavailable
from elaunch.rendezvous.cluster import http2
from elaunch.rendezvous.cluster.calls import HUNG_UP, NO_ANSWER, RpcError
from elaunch.rendezvous.embedded import EmbeddedEtcd, find_etcd
from elaunch.rendezvous.etcd import EtcdStore
from elaunch.rendezvous.etcd_trouble import Trouble, advice_on, classify, tls_hint
from elaunch.rendezvous.memory import MemoryStore
from elaunch.rendezvous.security.identity import NodeIdentity
from elaunch.rendezvous.store import Entry, LeaseGone, Prefixes, Store, Watch, WatchEvent
from tests.helpers import Spawner, find_free_port, make_certificates, wait_until
from tests.jobs.plain_etcd import etcdctl

LIMIT_S = 20.0
SHORT_S = 0.5
"""A time-out for calls that are meant to run into it."""


class Inbox:
    """Collects what a watch delivers."""

    def __init__(self) -> None:
        self._batches: queue.Queue[list[WatchEvent]] = queue.Queue()
        self.errors: list[StoreUnavailable] = []
        self.events: list[WatchEvent] = []

    def watch(self, store: Store, prefix: Prefixes, from_revision: int) -> Watch:
        return store.watch(prefix, from_revision, self._batches.put, self.errors.append)

    def batch(self) -> list[WatchEvent]:
        """The next batch; waits for it."""
        return self._batches.get(timeout=LIMIT_S)

    def take(self, count: int, between: Callable[[], object] = lambda: None) -> list[WatchEvent]:
        """All events so far, at least `count`; calls `between` while it waits."""

        def enough() -> bool:
            between()
            while not self._batches.empty():
                self.events += self._batches.get()
            return len(self.events) >= count

        wait_until(enough, LIMIT_S, lambda: f"{count} events; got {self.events} and {self.errors}")
        return self.events


def revision_of(store: Store) -> int:
    return store.range("")[1]


def apply_expiry(store: Store) -> None:
    """A real server does this by itself."""
    if isinstance(store, MemoryStore):
        store.expire()


class TestKeys:
    def test_an_absent_key_has_no_entry(self, store: Store, prefix: str) -> None:
        assert store.get(prefix + "a") is None

    def test_put_writes_and_reports_its_revision(self, store: Store, prefix: str) -> None:
        first = store.put(prefix + "a", b"1")
        second = store.put(prefix + "a", b"\x00\xff2")
        assert second > first
        assert store.get(prefix + "a") == Entry(prefix + "a", b"\x00\xff2", second, first)

    def test_an_empty_value_is_not_an_absent_key(self, store: Store, prefix: str) -> None:
        revision = store.put(prefix + "a", b"")
        assert store.get(prefix + "a") == Entry(prefix + "a", b"", revision, revision)

    def test_a_value_of_several_megabytes_fits(self, store: Store, prefix: str) -> None:
        value = bytes(range(256)) * 20_000
        store.put(prefix + "big", value)
        entry = store.get(prefix + "big")
        assert entry is not None
        assert entry.value == value

    def test_delete_tells_whether_the_key_was_there(self, store: Store, prefix: str) -> None:
        store.put(prefix + "a", b"1")
        assert store.delete(prefix + "a")
        assert not store.delete(prefix + "a")
        assert store.get(prefix + "a") is None

    def test_a_key_written_again_after_deletion_has_a_new_creation_revision(self, store: Store, prefix: str) -> None:
        store.put(prefix + "a", b"1")
        store.delete(prefix + "a")
        revision = store.put(prefix + "a", b"2")
        assert store.get(prefix + "a") == Entry(prefix + "a", b"2", revision, revision)

    def test_range_returns_what_has_the_prefix_sorted_by_key(self, store: Store, prefix: str) -> None:
        for name in ("nodes/b", "nodes/a", "nodes", "nodes0", "nodes/ä", "nodes/a/x", "leader"):
            store.put(prefix + name, name.encode())
        entries, _ = store.range(prefix + "nodes/")
        assert [entry.key for entry in entries] == [prefix + "nodes/" + name for name in ("a", "a/x", "b", "ä")]
        assert [entry.value.decode() for entry in entries] == ["nodes/a", "nodes/a/x", "nodes/b", "nodes/ä"]

    def test_a_range_of_several_prefixes_is_of_one_revision(self, store: Store, prefix: str) -> None:
        for name in ("nodes/b", "nodes/a", "leader", "size"):
            last = store.put(prefix + name, name.encode())
        entries, revision = store.range((prefix + "size", prefix + "none", prefix + "nodes/"))
        assert [entry.value for entry in entries] == [b"size", b"nodes/a", b"nodes/b"]
        assert revision == last

    def test_range_of_nothing_is_empty_and_still_has_a_revision(self, store: Store, prefix: str) -> None:
        written = store.put(prefix + "a", b"1")
        assert store.range(prefix + "none/") == ([], written)

    def test_the_empty_prefix_means_every_key(self, store: Store, prefix: str) -> None:
        store.put(prefix + "a", b"1")
        assert prefix + "a" in [entry.key for entry in store.range("")[0]]

    def test_the_next_key_is_the_first_that_does_not_sort_before_a_place(self, store: Store, prefix: str) -> None:
        for name in ("b", "a/2", "a/1"):
            store.put(prefix + name, b"v" * 100)
        store.put(prefix[:-1] + "0", b"outside")
        found = [store.next_key(prefix, start) for start in ("", prefix + "a/1", prefix + "a/1\0", prefix + "a0")]
        assert found == [prefix + name for name in ("a/1", "a/1", "a/2", "b")]
        assert store.next_key(prefix, prefix + "b0") is None
        assert store.next_key(prefix + "none/", "") is None

    def test_the_revision_of_a_range_is_that_of_the_last_change_of_any_key(self, store: Store, prefix: str) -> None:
        store.put(prefix + "a", b"1")
        other = store.put(prefix + "elsewhere", b"1")
        assert store.range(prefix + "a")[1] == other


class TestCompareAndSwap:
    def test_create_writes_only_an_absent_key(self, store: Store, prefix: str) -> None:
        assert store.create(prefix + "a", b"first")
        assert not store.create(prefix + "a", b"second")
        entry = store.get(prefix + "a")
        assert entry is not None
        assert entry.value == b"first"

    def test_replace_needs_the_revision_of_the_last_change(self, store: Store, prefix: str) -> None:
        old = store.put(prefix + "a", b"1")
        store.put(prefix + "a", b"2")
        assert not store.replace(prefix + "a", b"late", old)
        entry = store.get(prefix + "a")
        assert entry is not None
        assert store.replace(prefix + "a", b"3", entry.revision)
        after = store.get(prefix + "a")
        assert after is not None
        assert (after.value, after.created) == (b"3", old)
        assert after.revision > entry.revision

    def test_replace_writes_another_key_beside_in_the_same_revision_or_neither(self, store: Store, prefix: str) -> None:
        first = store.put(prefix + "a", b"1")
        assert store.replace(prefix + "a", b"2", first, (prefix + "b", b"beside"))
        a, b = store.get(prefix + "a"), store.get(prefix + "b")
        assert a is not None
        assert b is not None
        assert (a.value, b.value, a.revision) == (b"2", b"beside", b.revision)
        assert not store.replace(prefix + "a", b"3", first, (prefix + "b", b"late"))
        assert store.get(prefix + "b") == b

    def test_replace_of_revision_zero_means_absent(self, store: Store, prefix: str) -> None:
        assert store.replace(prefix + "a", b"1", 0)
        assert not store.replace(prefix + "a", b"2", 0)

    def test_replace_of_a_deleted_key_fails(self, store: Store, prefix: str) -> None:
        revision = store.put(prefix + "a", b"1")
        store.delete(prefix + "a")
        assert not store.replace(prefix + "a", b"2", revision)
        assert store.get(prefix + "a") is None

    def test_of_many_that_create_exactly_one_wins(self, store: Store, prefix: str) -> None:
        wins = in_threads(8, lambda i: store.create(prefix + "leader", str(i).encode()))
        assert sum(wins) == 1
        entry = store.get(prefix + "leader")
        assert entry is not None
        assert wins[int(entry.value)]

    def test_of_many_that_replace_the_same_revision_exactly_one_wins(self, store: Store, prefix: str) -> None:
        revision = store.put(prefix + "generation", b"start")
        wins = in_threads(8, lambda i: store.replace(prefix + "generation", str(i).encode(), revision))
        assert sum(wins) == 1

    def test_counters_lose_no_increment(self, store: Store, prefix: str) -> None:
        store.put(prefix + "count", b"0")

        def increment(_: int) -> bool:
            for _ in range(10):
                done = False
                while not done:
                    entry = store.get(prefix + "count")
                    assert entry is not None
                    done = store.replace(prefix + "count", str(int(entry.value) + 1).encode(), entry.revision)
            return True

        assert all(in_threads(4, increment))
        entry = store.get(prefix + "count")
        assert entry is not None
        assert entry.value == b"40"


class TestLeases:
    def test_what_is_bound_to_a_lease_goes_when_it_ends(self, store: Store, prefix: str) -> None:
        inbox = Inbox()
        lease = store.grant(1.0)
        revision = store.put(prefix + "node", b"1", lease)
        inbox.watch(store, prefix, revision + 1)
        event = inbox.take(1, lambda: apply_expiry(store))[0]
        assert (event.key, event.value, event.created) == (prefix + "node", None, 0)
        assert event.revision > revision
        assert store.get(prefix + "node") is None
        assert not store.keep_alive(lease)

    def test_a_lease_that_is_kept_alive_outlives_its_time(self, store: Store, prefix: str) -> None:
        kept, dropped = store.grant(2.0), store.grant(2.0)
        store.put(prefix + "kept", b"1", kept)
        store.put(prefix + "dropped", b"1", dropped)

        def dropped_is_gone() -> bool:
            apply_expiry(store)
            assert store.keep_alive(kept)
            return store.get(prefix + "dropped") is None

        wait_until(dropped_is_gone, LIMIT_S, "the other lease to end")
        assert store.get(prefix + "kept") is not None

    def test_revoke_deletes_everything_bound_in_one_revision(self, store: Store, prefix: str) -> None:
        lease = store.grant(60.0)
        store.put(prefix + "a", b"1", lease)
        store.put(prefix + "b", b"1", lease)
        last = store.put(prefix + "c", b"1")
        inbox = Inbox()
        inbox.watch(store, prefix, last + 1)
        store.revoke(lease)
        assert [entry.key for entry in store.range(prefix)[0]] == [prefix + "c"]
        assert sorted((e.key, e.value, e.revision) for e in inbox.batch()) == [
            (prefix + "a", None, last + 1),
            (prefix + "b", None, last + 1),
        ]

    def test_revoking_a_lease_twice_is_no_error(self, store: Store) -> None:
        lease = store.grant(60.0)
        store.revoke(lease)
        store.revoke(lease)
        assert not store.keep_alive(lease)

    def test_writing_with_a_lease_that_is_gone_says_so(self, store: Store, prefix: str) -> None:
        lease = store.grant(60.0)
        store.revoke(lease)
        with pytest.raises(LeaseGone):
            store.put(prefix + "a", b"1", lease)
        with pytest.raises(LeaseGone):
            store.create(prefix + "a", b"1", lease)
        assert store.get(prefix + "a") is None

    def test_replace_leaves_the_key_bound_to_its_lease(self, store: Store, prefix: str) -> None:
        lease = store.grant(60.0)
        revision = store.put(prefix + "a", b"1", lease)
        assert store.replace(prefix + "a", b"2", revision)
        store.revoke(lease)
        assert store.get(prefix + "a") is None

    def test_put_without_a_lease_unbinds_the_key(self, store: Store, prefix: str) -> None:
        lease = store.grant(60.0)
        store.put(prefix + "a", b"1", lease)
        store.put(prefix + "a", b"2")
        store.revoke(lease)
        assert store.get(prefix + "a") is not None


class TestWatches:
    def test_events_come_in_order_with_their_revisions(self, store: Store, prefix: str) -> None:
        inbox = Inbox()
        inbox.watch(store, prefix, revision_of(store) + 1)
        first = store.put(prefix + "a", b"1")
        second = store.put(prefix + "a", b"2")
        store.put("/elsewhere" + prefix, b"not ours")
        store.delete(prefix + "a")
        assert inbox.take(3) == [
            WatchEvent(prefix + "a", b"1", first, first),
            WatchEvent(prefix + "a", b"2", second, first),
            WatchEvent(prefix + "a", None, second + 2, 0),
        ]

    def test_a_watch_from_an_old_revision_replays_what_happened_since(self, store: Store, prefix: str) -> None:
        store.put(prefix + "a", b"before")
        revisions = [store.put(prefix + "a", str(i).encode()) for i in range(5)]
        inbox = Inbox()
        inbox.watch(store, prefix, revisions[1])
        assert [(e.value, e.revision) for e in inbox.take(4)] == [(b"%d" % i, revisions[i]) for i in range(1, 5)]

    def test_range_and_then_watch_misses_nothing_and_repeats_nothing(self, store: Store, prefix: str) -> None:
        writer = threading.Thread(target=lambda: [store.put(prefix + "n", str(i).encode()) for i in range(200)])
        writer.start()
        try:
            wait_until(lambda: store.get(prefix + "n"), LIMIT_S, "the first write")
            entries, revision = store.range(prefix)
            inbox = Inbox()
            inbox.watch(store, prefix, revision + 1)
        finally:
            writer.join(LIMIT_S)
        seen = int(entries[0].value)
        values = [int(event.value or b"-1") for event in inbox.take(199 - seen)]
        assert values == list(range(seen + 1, 200))

    def test_watches_of_several_prefixes_do_not_mix(self, store: Store, prefix: str) -> None:
        a, b = Inbox(), Inbox()
        start = revision_of(store) + 1
        a.watch(store, prefix + "a/", start)
        b.watch(store, prefix + "b/", start)
        store.put(prefix + "a/1", b"1")
        store.put(prefix + "b/1", b"1")
        assert [event.key for event in a.take(1)] == [prefix + "a/1"]
        assert [event.key for event in b.take(1)] == [prefix + "b/1"]

    def test_one_watch_of_several_prefixes_delivers_each_from_its_revision_on(self, store: Store, prefix: str) -> None:
        inbox = Inbox()
        store.put(prefix + "a", b"old")
        store.put(prefix + "c", b"old")
        inbox.watch(store, (prefix + "a", prefix + "b/"), revision_of(store))
        written = [store.put(prefix + name, b"new") for name in ("b/1", "c", "a", "b/2")]
        events = inbox.take(3)
        assert sorted((event.revision, event.key.removeprefix(prefix)) for event in events) == [
            (written[0], "b/1"),
            (written[2], "a"),
            (written[3], "b/2"),
        ]

    def test_all_watchers_see_the_same_order_of_several_writers(self, store: Store, prefix: str) -> None:
        inboxes = [Inbox() for _ in range(3)]
        start = revision_of(store) + 1
        for inbox in inboxes:
            inbox.watch(store, prefix, start)
        in_threads(4, lambda i: [store.put(f"{prefix}{i}", str(n).encode()) for n in range(25)] != [])
        orders = [[(event.revision, event.key) for event in inbox.take(100)] for inbox in inboxes]
        assert orders[0] == sorted(orders[0])
        assert orders[1:] == orders[:1] * 2

    def test_a_callback_may_use_the_store(self, store: Store, prefix: str) -> None:
        answered: queue.Queue[int] = queue.Queue()
        answers = Inbox()
        start = revision_of(store) + 1
        answers.watch(store, prefix + "answer", start)
        store.watch(
            prefix + "question",
            start,
            lambda events: answered.put(store.put(prefix + "answer", events[0].value or b"")),
            lambda error: None,
        )
        store.put(prefix + "question", b"why")
        assert [event.value for event in answers.take(1)] == [b"why"]
        assert answered.get(timeout=LIMIT_S) == answers.events[0].revision

    def test_a_cancelled_watch_delivers_nothing_more_and_reports_no_error(self, store: Store, prefix: str) -> None:
        cancelled, running = Inbox(), Inbox()
        start = revision_of(store) + 1
        watch = cancelled.watch(store, prefix, start)
        running.watch(store, prefix, start)
        store.put(prefix + "a", b"1")
        cancelled.take(1)
        watch.cancel()
        watch.cancel()
        store.put(prefix + "a", b"2")
        running.take(2)
        assert len(cancelled.take(1)) == 1
        assert cancelled.errors == []

    def test_a_watch_may_cancel_itself(self, store: Store, prefix: str) -> None:
        seen: list[WatchEvent] = []
        ready = threading.Event()
        watches: list[Watch] = []

        def once(events: list[WatchEvent]) -> None:
            assert ready.wait(LIMIT_S)
            seen.extend(events)
            watches[0].cancel()

        everything = Inbox()
        start = revision_of(store) + 1
        watches.append(store.watch(prefix, start, once, lambda error: None))
        ready.set()
        store.put(prefix + "a", b"1")
        wait_until(lambda: seen, LIMIT_S, "the first event")
        store.put(prefix + "a", b"2")
        everything.watch(store, prefix, start)
        everything.take(2)
        assert [event.value for event in seen] == [b"1"]

    def test_there_is_no_revision_before_the_first(self, store: Store, prefix: str) -> None:
        with pytest.raises(ValueError, match="from_revision is 0"):
            Inbox().watch(store, prefix, 0)


class TestClose:
    def test_a_closed_store_answers_nothing(self, store: Store, prefix: str) -> None:
        store.put(prefix + "a", b"1")
        store.close()
        store.close()
        with pytest.raises(StoreUnavailable, match="closed"):
            store.get(prefix + "a")
        with pytest.raises(StoreUnavailable, match="closed"):
            Inbox().watch(store, prefix, 1)

    def test_closing_ends_watches_without_an_error(self, store: Store, prefix: str) -> None:
        inbox = Inbox()
        inbox.watch(store, prefix, revision_of(store) + 1)
        store.put(prefix + "a", b"1")
        inbox.take(1)
        store.close()
        assert inbox.errors == []
        assert watch_threads() == []


class TestMemory:
    def test_leases_end_by_the_clock_of_the_test(self, prefix: str) -> None:
        now_s = 100.0
        store = MemoryStore(clock=lambda: now_s)
        inbox = Inbox()
        inbox.watch(store, prefix, 1)
        lease = store.grant(1.2)
        store.put(prefix + "a", b"1", lease)
        now_s = 101.9
        assert store.keep_alive(lease)
        now_s = 103.8
        store.expire()
        assert len(inbox.take(1)) == 1
        now_s = 103.9
        store.expire()
        assert [event.value for event in inbox.take(2)] == [b"1", None]
        assert not store.keep_alive(lease)

    def test_a_store_that_is_down_answers_nothing_and_ends_its_watches(self, prefix: str) -> None:
        store = MemoryStore()
        store.put(prefix + "a", b"1")
        inbox = Inbox()
        inbox.watch(store, prefix, revision_of(store) + 1)
        store.down = True
        assert len(inbox.errors) == 1
        with pytest.raises(StoreUnavailable, match="down"):
            store.get(prefix + "a")
        store.down = False
        assert store.get(prefix + "a") is not None
        store.put(prefix + "a", b"2")
        assert inbox.take(0) == []

    def test_sessions_share_the_data_and_fail_alone(self, prefix: str) -> None:
        one = MemoryStore()
        other = one.session()
        inboxes = [Inbox(), Inbox()]
        inboxes[0].watch(one, prefix, 1)
        inboxes[1].watch(other, prefix, 1)
        other.down = True
        one.put(prefix + "a", b"1")
        assert [len(inbox.errors) for inbox in inboxes] == [0, 1]
        assert len(inboxes[0].take(1)) == 1
        other.down = False
        assert other.get(prefix + "a") == one.get(prefix + "a")

    def test_a_watch_from_before_a_compaction_fails(self, prefix: str) -> None:
        store = MemoryStore()
        store.put(prefix + "a", b"1")
        last = store.put(prefix + "a", b"2")
        store.compact(last)
        late, current = Inbox(), Inbox()
        late.watch(store, prefix, last - 1)
        assert "compacted" in str(late.errors[0])
        current.watch(store, prefix, last)
        assert [event.value for event in current.take(1)] == [b"2"]


class TestEtcdAway:
    def test_a_killed_server_is_reported_and_used_again_after_its_restart(
        self, own_etcd: EmbeddedEtcd, prefix: str
    ) -> None:
        store = EtcdStore(own_etcd.endpoint, timeout_s=LIMIT_S)
        impatient = EtcdStore(own_etcd.endpoint, timeout_s=SHORT_S)
        try:
            written = store.put(prefix + "a", b"1")
            impatient.get(prefix + "a")
            inbox = Inbox()
            inbox.watch(store, prefix, written)
            inbox.take(1)
            kill(own_etcd, store)
            wait_until(lambda: inbox.errors, LIMIT_S, "the watch to report the loss")
            for call in (
                lambda: impatient.get(prefix + "a"),
                lambda: impatient.range(prefix),
                lambda: impatient.put(prefix + "a", b"lost"),
                lambda: impatient.create(prefix + "b", b"lost"),
                lambda: impatient.keep_alive(1),
            ):
                with pytest.raises(StoreUnavailable, match=rf"etcd at {own_etcd.endpoint}: .*time-out 0.5 s"):
                    call()

            restart(own_etcd)
            entries, revision = store.range(prefix)
            assert entries == [Entry(prefix + "a", b"1", written, written)]
            again = Inbox()
            again.watch(store, prefix, revision + 1)
            after = store.put(prefix + "a", b"2")
            assert again.take(1) == [WatchEvent(prefix + "a", b"2", after, written)]
            assert impatient.get(prefix + "a") == store.get(prefix + "a")
            assert len(inbox.errors) == 1
            assert inbox.take(1) == inbox.events[:1]
        finally:
            store.close()
            impatient.close()

    def test_a_call_waits_for_a_server_that_comes_back(self, own_etcd: EmbeddedEtcd, prefix: str) -> None:
        store = EtcdStore(own_etcd.endpoint, timeout_s=LIMIT_S)
        try:
            store.put(prefix + "a", b"1")
            kill(own_etcd, store)
            notices_that_it_is_gone(store)
            waiting = Background(lambda: store.put(prefix + "a", b"2"))
            restart(own_etcd)
            assert waiting.result() > 0
        finally:
            store.close()

    def test_leases_outlive_a_restart(self, own_etcd: EmbeddedEtcd, prefix: str) -> None:
        store = EtcdStore(own_etcd.endpoint, timeout_s=LIMIT_S)
        try:
            lease = store.grant(30.0)
            store.put(prefix + "a", b"1", lease)
            kill(own_etcd, store)
            restart(own_etcd)
            assert store.keep_alive(lease)
            store.revoke(lease)
            assert store.get(prefix + "a") is None
        finally:
            store.close()

    def test_a_silent_server_is_given_up_after_the_time_out(self, own_etcd: EmbeddedEtcd, prefix: str) -> None:
        store = EtcdStore(own_etcd.endpoint, timeout_s=SHORT_S)
        assert own_etcd.pid is not None
        try:
            wait_until(lambda: answers(store), LIMIT_S, "the first answer")
            freeze(own_etcd)
            with pytest.raises(StoreUnavailable, match="may have been carried out or not"):
                store.put(prefix + "a", b"1")
            with pytest.raises(StoreUnavailable, match="time-out"):
                store.get(prefix + "a")
            os.kill(own_etcd.pid, signal.SIGCONT)
            wait_until(lambda: answers(store), LIMIT_S, "the server to be used again")
        finally:
            os.kill(own_etcd.pid, signal.SIGCONT)
            store.close()

    def test_a_watch_notices_that_its_server_went_silent(
        self, own_etcd: EmbeddedEtcd, prefix: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(http2, "SILENCE_S", 0.5)
        monkeypatch.setattr(http2, "PONG_S", 0.2)
        store = EtcdStore(own_etcd.endpoint, timeout_s=LIMIT_S)
        assert own_etcd.pid is not None
        try:
            inbox = Inbox()
            inbox.watch(store, prefix, store.put(prefix + "a", b"1"))
            inbox.take(1)
            freeze(own_etcd)
            wait_until(lambda: inbox.errors, LIMIT_S, "the watch to report the silence")
        finally:
            os.kill(own_etcd.pid, signal.SIGCONT)
            store.close()

    def test_closing_does_not_wait_for_calls_that_get_no_answer(self, own_etcd: EmbeddedEtcd, prefix: str) -> None:
        store = EtcdStore(own_etcd.endpoint, timeout_s=1000.0)
        store.put(prefix + "a", b"1")
        inbox = Inbox()
        inbox.watch(store, prefix, 1)
        inbox.take(1)
        kill(own_etcd, store)
        waiting = Background(lambda: store.put(prefix + "a", b"2"))
        store.close()
        with pytest.raises(StoreUnavailable, match="closed"):
            waiting.result()
        wait_until(lambda: not watch_threads(), LIMIT_S, "the watch to end")

    def test_nothing_listens_at_the_endpoint(self, prefix: str) -> None:
        store = EtcdStore(f"127.0.0.1:{find_free_port()}", timeout_s=SHORT_S)
        try:
            with pytest.raises(StoreUnavailable, match=r"(?i)connection refused.*is etcd running there\?"):
                store.get(prefix + "a")
            inbox = Inbox()
            inbox.watch(store, prefix, 1)
            wait_until(lambda: inbox.errors, LIMIT_S, "the watch to fail")
        finally:
            store.close()

    def test_another_member_is_used_where_the_first_cannot_be_reached(self, etcd: EmbeddedEtcd, prefix: str) -> None:
        store = EtcdStore(f"127.0.0.1:{find_free_port()}, {etcd.endpoint}", timeout_s=LIMIT_S)
        try:
            revision = store.put(prefix + "a", b"1")
            inbox = Inbox()
            inbox.watch(store, prefix, revision)
            assert len(inbox.take(1)) == 1
        finally:
            store.close()

    def test_a_watch_from_before_a_compaction_fails(self, etcd: EmbeddedEtcd, prefix: str) -> None:
        store = EtcdStore(etcd.endpoint, timeout_s=LIMIT_S)
        try:
            old = store.put(prefix + "a", b"1")
            last = store.put(prefix + "a", b"2")
            etcdctl(etcd.endpoint, "compact", str(last))
            inbox = Inbox()
            inbox.watch(store, prefix, old)
            wait_until(lambda: inbox.errors, LIMIT_S, "the watch to fail")
            assert "compacted" in str(inbox.errors[0])
        finally:
            store.close()

    def test_a_callback_that_raises_ends_its_watch_with_an_error(
        self, etcd: EmbeddedEtcd, prefix: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        raised: queue.Queue[threading.ExceptHookArgs] = queue.Queue()
        monkeypatch.setattr(threading, "excepthook", raised.put)
        store = EtcdStore(etcd.endpoint, timeout_s=LIMIT_S)
        errors: queue.Queue[StoreUnavailable] = queue.Queue()

        def broken(events: list[WatchEvent]) -> None:
            raise KeyError("bug")

        try:
            revision = store.put(prefix + "a", b"1")
            store.watch(prefix, revision, broken, errors.put)
            assert "KeyError('bug')" in str(errors.get(timeout=LIMIT_S))
            assert raised.get(timeout=LIMIT_S).exc_type is KeyError
        finally:
            store.close()


class TestEtcdSettings:
    @pytest.mark.parametrize("endpoint", ["host", "host:", ":2379", "http://host:2379", "a:1,,b:2", ""])
    def test_an_endpoint_is_host_and_port(self, endpoint: str) -> None:
        with pytest.raises(LaunchError, match="is not host:port"):
            EtcdStore(endpoint)

    def test_user_and_password_go_together(self) -> None:
        with pytest.raises(LaunchError, match="give both or neither"):
            EtcdStore("127.0.0.1:2379", user="root")

    def test_certificate_and_key_go_together(self) -> None:
        with pytest.raises(LaunchError, match="give both or neither"):
            EtcdStore("127.0.0.1:2379", cert="client.pem")

    def test_a_certificate_that_cannot_be_read_is_named(self, tmp_path: Path) -> None:
        missing = str(tmp_path / "ca.pem")
        with pytest.raises(LaunchError, match=r"cannot read the CA certificate .*ca\.pem"):
            EtcdStore("127.0.0.1:2379", ca_cert=missing)
        Path(missing).write_text("not a certificate")
        with pytest.raises(LaunchError, match="is not a PEM file"):
            EtcdStore("127.0.0.1:2379", ca_cert=missing)

    @pytest.mark.parametrize(
        "error, trouble",
        [
            (RpcError("UNAVAILABLE", "Connection refused", is_sent=False), Trouble.UNREACHED),
            (RpcError("DEADLINE_EXCEEDED", NO_ANSWER, is_sent=False), Trouble.UNREACHED),
            (RpcError("UNAVAILABLE", "etcdserver: no leader"), Trouble.UNREACHED),
            (RpcError("UNAVAILABLE", HUNG_UP), Trouble.LOST),
            (RpcError("UNAVAILABLE", "etcdserver: request timed out"), Trouble.LOST),
            (RpcError("DEADLINE_EXCEEDED", NO_ANSWER), Trouble.LOST),
            (RpcError("UNAUTHENTICATED", "etcdserver: invalid auth token"), Trouble.TOKEN),
            (RpcError("INVALID_ARGUMENT", "etcdserver: user name is empty"), Trouble.TOKEN),
            (RpcError("INVALID_ARGUMENT", "etcdserver: revision of auth store is old"), Trouble.TOKEN),
            (RpcError("NOT_FOUND", "etcdserver: requested lease not found"), Trouble.LEASE_GONE),
            (RpcError("PERMISSION_DENIED", "etcdserver: permission denied"), Trouble.REFUSED),
            (RpcError("INVALID_ARGUMENT", "etcdserver: request is too large"), Trouble.REFUSED),
            (RpcError("UNAVAILABLE", "TLS handshake failed", is_sent=False, is_tls=True), Trouble.TLS),
        ],
    )
    def test_a_failure_is_told_apart(self, error: RpcError, trouble: Trouble) -> None:
        assert classify(error) is trouble

    @pytest.mark.parametrize(
        "reason",
        [
            NO_ANSWER,
            HUNG_UP,
            "Connection reset by peer",
            "what the server answers is no HTTP/2: Invalid HTTP/2 preamble.",
        ],
    )
    def test_tls_on_one_side_is_a_likely_cause_whatever_came_of_it(self, reason: str) -> None:
        assert tls_hint(reason, uses_tls=True) == " Does it use TLS? This side does."
        assert (
            tls_hint(reason, uses_tls=False)
            == " Does it want TLS? This side does not use it; one that a job of several machines has started does."
        )

    @pytest.mark.parametrize(
        "reason",
        [
            "Connection refused",
            "No route to host",
            "DNS resolution failed for etcd: Name or service not known",
            "etcdserver: request timed out",
        ],
    )
    def test_tls_is_no_cause_where_nothing_was_connected_or_etcd_has_answered(self, reason: str) -> None:
        assert (tls_hint(reason, uses_tls=True), tls_hint(reason, uses_tls=False)) == ("", "")

    @pytest.mark.parametrize(("has_answered", "limit"), [(False, "0.1"), (True, "0.3")])
    def test_a_server_that_has_never_answered_may_have_less_time_than_one_that_is_away(
        self, monkeypatch: pytest.MonkeyPatch, has_answered: bool, limit: str
    ) -> None:
        store = EtcdStore("127.0.0.1:1", timeout_s=0.3)
        store.first_contact_s = 0.1
        monkeypatch.setattr(store.server, "ask", refuse)
        store.server.has_answered = has_answered
        try:
            with pytest.raises(StoreUnavailable, match=rf"\(time-out {limit} s\): Connection refused; is etcd"):
                store.get("/a")
        finally:
            store.close()

    @pytest.mark.parametrize(
        ("refused_s", "others", "limit"), [(math.inf, "", "0.4"), (0.2, "", "0.3"), (0.2, ",127.0.0.1:2", "0.4")]
    )
    def test_who_looks_elsewhere_waits_less_for_a_single_server(
        self, monkeypatch: pytest.MonkeyPatch, refused_s: float, others: str, limit: str
    ) -> None:
        def be_silent(_: str, __: object, timeout_s: float, ___: object) -> None:
            time.sleep(timeout_s)
            raise RpcError("DEADLINE_EXCEEDED", NO_ANSWER)

        store = EtcdStore(f"127.0.0.1:1{others}", timeout_s=0.4)
        store.refused_s = refused_s
        for server in store._servers:
            monkeypatch.setattr(server, "ask", be_silent)
        try:
            with pytest.raises(StoreUnavailable, match=rf"was not answered \(time-out {limit} s\)"):
                store.get("/a")
        finally:
            store.close()

    @pytest.mark.parametrize(("others", "timeout_s", "limit"), [("", 30.0, "1"), (",127.0.0.1:2", 0.3, "0.3")])
    def test_who_looks_elsewhere_gives_a_single_server_up_that_cannot_be_reached_any_more(
        self, monkeypatch: pytest.MonkeyPatch, others: str, timeout_s: float, limit: str
    ) -> None:
        asked: list[float] = []

        def refuse_again(*_: object, **__: object) -> None:
            asked.append(time.monotonic())
            refuse()

        store = EtcdStore(f"127.0.0.1:1{others}", timeout_s=timeout_s)
        store.refused_s = 1.0
        for server in store._servers:
            server.has_answered = True
            monkeypatch.setattr(server, "ask", refuse_again)
        try:
            with pytest.raises(StoreUnavailable, match=rf"\(time-out {limit}[.\d]* s\): .* refused; is etcd"):
                store.get("/a")
        finally:
            store.close()
        assert len(asked) > 1, "it may have been started again meanwhile"

    @pytest.mark.parametrize(
        ("loss", "limits_s"), [("found", (REFUSED_S, REFUSED_S)), ("wait", (FIRST_CONTACT_S, math.inf))]
    )
    def test_whoever_may_found_another_does_not_knock_for_long_where_nobody_listens(
        self, loss: str, limits_s: tuple[float, float]
    ) -> None:
        endpoint = "127.0.0.1:1"
        flags = ["--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=a"]
        config = parse([*flags, f"--rdzv-conf=on_store_loss={loss}", "train.py"])
        identity = NodeIdentity(config.rendezvous.security, config.job, config.node, False)
        store = _open_store(EtcdStore, config, identity, endpoint, 1)
        store.close()
        assert (store.first_contact_s, store.refused_s) == limits_s

    def test_an_answer_that_is_not_tls_is_told_as_such(self) -> None:
        advice = advice_on("SSL_ERROR_SSL: error:100000f7:SSL routines:OPENSSL_internal:WRONG_VERSION_NUMBER", None)
        question = "Does it use TLS? This side does."
        assert advice == f"TLS failed: what the server answers is not TLS. {question}"

    @pytest.mark.parametrize("has_answered", [False, True])
    def test_an_attempt_that_ran_out_of_time_does_not_hide_why_the_one_before_failed(
        self, monkeypatch: pytest.MonkeyPatch, has_answered: bool
    ) -> None:
        errors = [RpcError("UNAVAILABLE", "Socket closed")]

        def fail(*_: object, **__: object) -> None:
            raise errors.pop() if errors else RpcError("DEADLINE_EXCEEDED", NO_ANSWER)

        store = EtcdStore("127.0.0.1:1", timeout_s=0.1)
        monkeypatch.setattr(store.server, "ask", fail)
        store.server.has_answered = has_answered
        hint = (
            ""
            if has_answered
            else " Does it want TLS? This side does not use it; one that a job of several machines has started does."
        )
        try:
            with pytest.raises(StoreUnavailable) as raised:
                store.get("/a")
        finally:
            store.close()
        assert str(raised.value).endswith(f": Socket closed; is etcd running there?{hint}")
        assert not errors


class TestAuthentication:
    @pytest.fixture
    def guarded(self, own_etcd: EmbeddedEtcd) -> EmbeddedEtcd:
        """An etcd that wants a login: root, and a user `job` who may use the keys under /job/ only."""
        for words in (
            "user add root:secret",
            "user grant-role root root",
            "role add job",
            "role grant-permission job --prefix=true readwrite /job/",
            "user add job:pass",
            "user grant-role job job",
            "auth enable",
        ):
            etcdctl(own_etcd.endpoint, *words.split())
        return own_etcd

    def test_the_right_password_opens_everything(self, guarded: EmbeddedEtcd) -> None:
        store = EtcdStore(guarded.endpoint, timeout_s=LIMIT_S, user="job", password="pass")
        try:
            lease = store.grant(30.0)
            revision = store.put("/job/a", b"1", lease)
            inbox = Inbox()
            inbox.watch(store, "/job/", revision)
            assert inbox.take(1) == [WatchEvent("/job/a", b"1", revision, revision)]
            assert store.keep_alive(lease)
            assert store.replace("/job/a", b"2", revision)
        finally:
            store.close()

    def test_a_wrong_password_is_said_to_be_wrong(self, guarded: EmbeddedEtcd) -> None:
        store = EtcdStore(guarded.endpoint, timeout_s=LIMIT_S, user="job", password="wrong")
        try:
            with pytest.raises(LaunchError, match=r"wrong user or password \(user 'job'\)") as raised:
                store.get("/job/a")
            assert not isinstance(raised.value, StoreUnavailable)
        finally:
            store.close()

    def test_no_password_is_said_to_be_missing(self, guarded: EmbeddedEtcd) -> None:
        store = EtcdStore(guarded.endpoint, timeout_s=LIMIT_S)
        try:
            with pytest.raises(LaunchError, match="wants a user and a password") as raised:
                store.get("/job/a")
            assert not isinstance(raised.value, StoreUnavailable)
        finally:
            store.close()

    def test_keys_that_the_user_may_not_touch_are_refused(self, guarded: EmbeddedEtcd) -> None:
        store = EtcdStore(guarded.endpoint, timeout_s=LIMIT_S, user="job", password="pass")
        try:
            with pytest.raises(LaunchError, match="user 'job' has no permission") as raised:
                store.put("/other", b"1")
            assert not isinstance(raised.value, StoreUnavailable)
            inbox = Inbox()
            inbox.watch(store, "/other", 1)
            wait_until(lambda: inbox.errors, LIMIT_S, "the watch to fail")
            assert "permission denied" in str(inbox.errors[0])
        finally:
            store.close()

    def test_a_login_that_has_ended_is_renewed(self, guarded: EmbeddedEtcd) -> None:
        store = EtcdStore(guarded.endpoint, timeout_s=LIMIT_S, user="job", password="pass")

        def end_login() -> None:
            store._login = (("token", "forgotten.1"),)

        try:
            revision = store.put("/job/a", b"1")
            end_login()
            assert all(in_threads(4, lambda i: store.put(f"/job/{i}", b"1") > revision))
            end_login()
            inbox = Inbox()
            inbox.watch(store, "/job/a", revision)
            assert inbox.take(1)[0].revision == revision
            assert inbox.errors == []
        finally:
            store.close()

    def test_a_restarted_server_is_used_again(self, guarded: EmbeddedEtcd) -> None:
        store = EtcdStore(guarded.endpoint, timeout_s=LIMIT_S, user="job", password="pass")
        try:
            revision = store.put("/job/a", b"1")
            kill(guarded, store, "/job/last")
            restart(guarded)
            assert store.get("/job/a") == Entry("/job/a", b"1", revision, revision)
            inbox = Inbox()
            inbox.watch(store, "/job/a", revision)
            assert len(inbox.take(1)) == 1
        finally:
            store.close()

    def test_a_login_is_not_needed_where_the_server_wants_none(self, etcd: EmbeddedEtcd, prefix: str) -> None:
        store = EtcdStore(etcd.endpoint, timeout_s=LIMIT_S, user="anyone", password="anything")
        try:
            assert store.put(prefix + "a", b"1") > 0
        finally:
            store.close()

    def test_a_server_that_begins_to_want_a_login_gets_it(self, own_etcd: EmbeddedEtcd) -> None:
        store = EtcdStore(own_etcd.endpoint, timeout_s=LIMIT_S, user="root", password="secret")
        try:
            store.put("/job/a", b"1")
            for words in ("user add root:secret", "user grant-role root root", "auth enable"):
                etcdctl(own_etcd.endpoint, *words.split())
            assert store.get("/job/a") is not None
        finally:
            store.close()


class TestTls:
    @pytest.fixture
    def secured(self, spawn: Spawner, tmp_path: Path) -> str:
        """The endpoint of an etcd that speaks TLS and wants a certificate of its clients."""
        openssl = shutil.which("openssl")
        if openssl is None:
            pytest.skip("needs the `openssl` program, to make certificates")
        make_certificates(openssl, tmp_path)
        port = find_free_port()
        url = f"https://127.0.0.1:{port}"
        spawn(
            [
                find_etcd(),
                f"--data-dir={tmp_path / 'data'}",
                f"--listen-client-urls={url}",
                f"--advertise-client-urls={url}",
                f"--listen-peer-urls=http://127.0.0.1:{find_free_port()}",
                f"--cert-file={tmp_path / 'server.pem'}",
                f"--key-file={tmp_path / 'server.key'}",
                f"--trusted-ca-file={tmp_path / 'ca.pem'}",
                "--client-cert-auth",
                "--unsafe-no-fsync",
            ]
        )
        return f"127.0.0.1:{port}"

    def test_a_client_with_the_right_certificates_is_served(self, secured: str, tmp_path: Path, prefix: str) -> None:
        store = EtcdStore(
            secured,
            timeout_s=LIMIT_S,
            ca_cert=str(tmp_path / "ca.pem"),
            cert=str(tmp_path / "client.pem"),
            key=str(tmp_path / "client.key"),
        )
        try:
            revision = store.put(prefix + "a", b"1")
            inbox = Inbox()
            inbox.watch(store, prefix, revision)
            assert len(inbox.take(1)) == 1
        finally:
            store.close()

    def test_a_server_of_another_authority_is_refused(self, secured: str, tmp_path: Path) -> None:
        store = EtcdStore(secured, timeout_s=LIMIT_S, ca_cert=str(tmp_path / "other.pem"))
        expect_tls_error(store)

    def test_a_client_without_a_certificate_is_told(self, secured: str, tmp_path: Path) -> None:
        store = EtcdStore(secured, timeout_s=LIMIT_S, ca_cert=str(tmp_path / "ca.pem"))
        expect_tls_error(store)

    def test_a_client_without_tls_is_given_the_likely_cause(self, secured: str, tmp_path: Path, prefix: str) -> None:
        good = EtcdStore(
            secured, LIMIT_S, None, None, *(str(tmp_path / name) for name in ("ca.pem", "client.pem", "client.key"))
        )
        plain = EtcdStore(secured, timeout_s=SHORT_S)
        try:
            good.put(prefix + "a", b"1")
            with pytest.raises(StoreUnavailable, match=r"is etcd running there\? Does it want TLS\?"):
                plain.get(prefix + "a")
        finally:
            good.close()
            plain.close()

    def test_a_server_without_tls_is_given_as_the_likely_cause(
        self, secured: str, etcd: EmbeddedEtcd, tmp_path: Path
    ) -> None:
        store = EtcdStore(etcd.endpoint, timeout_s=SHORT_S, ca_cert=str(tmp_path / "ca.pem"))
        try:
            with pytest.raises(StoreUnavailable, match=r"is etcd running there\? Does it use TLS\?"):
                store.get("/a")
        finally:
            store.close()

    @pytest.mark.parametrize(
        ("uses_tls", "question"),
        [(True, "Does it use TLS? This side does."), (False, "Does it want TLS?")],
    )
    def test_a_server_that_never_says_a_word_may_be_waiting_for_the_other_kind_of_connection(
        self, secured: str, tmp_path: Path, uses_tls: bool, question: str
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            ca_cert = str(tmp_path / "ca.pem") if uses_tls else None
            store = EtcdStore(f"127.0.0.1:{silent.getsockname()[1]}", timeout_s=SHORT_S, ca_cert=ca_cert)
            try:
                with pytest.raises(StoreUnavailable) as raised:
                    store.get("/a")
            finally:
                store.close()
        assert f"{NO_ANSWER}; is etcd running there? {question}" in str(raised.value)


def refuse(*_: object, **__: object) -> None:
    """What a call to a server does where nobody listens."""
    raise RpcError("UNAVAILABLE", "Connection refused", is_sent=False)


def expect_tls_error(store: EtcdStore) -> None:
    try:
        with pytest.raises(LaunchError, match="TLS failed") as raised:
            store.get("/a")
        assert not isinstance(raised.value, StoreUnavailable)
    finally:
        store.close()


def kill(server: EmbeddedEtcd, store: Store, last_key: str = "/last") -> None:
    """Kill the server after a write of `last_key`, which may be lost.

    An etcd of one member before 3.5.5 answers a write while it is writing it to its file (etcd issue 14370). What was
    written before is in the file by then.
    """
    store.put(last_key, b"")
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: server.pid is None, LIMIT_S, "the server to be gone")


def notices_that_it_is_gone(store: EtcdStore) -> None:
    """Wait until a write is not sent on the connection to the dead server any more: it might have been carried out."""
    wait_until(lambda: not store.server.channel.is_connected, LIMIT_S, "the lost connection")


def freeze(server: EmbeddedEtcd) -> None:
    """Stop the process; its threads go on until each has noticed the signal."""
    assert server.pid is not None
    process = psutil.Process(server.pid)
    process.suspend()
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED, LIMIT_S, "the server to stand still")


def restart(server: EmbeddedEtcd) -> None:
    server.start_again()
    server.wait_ready(LIMIT_S)


def answers(store: Store) -> bool:
    try:
        store.range("/none/")
    except StoreUnavailable:
        return False
    return True


def watch_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("elaunch-watch")]


class Background:
    """A call in another thread."""

    def __init__(self, call: Callable[[], int]) -> None:
        self._outcome: queue.Queue[int | BaseException] = queue.Queue()
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome.put(self._call())
        except BaseException as error:
            self._outcome.put(error)

    def result(self) -> int:
        outcome = self._outcome.get(timeout=LIMIT_S)
        self._thread.join(LIMIT_S)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


def in_threads(count: int, call: Callable[[int], bool]) -> list[bool]:
    """Call `call(i)` in `count` threads that begin together, and return what each one returned."""
    barrier = threading.Barrier(count)

    def one(index: int) -> int:
        barrier.wait(LIMIT_S)
        return int(call(index))

    calls = [Background(lambda i=i: one(i)) for i in range(count)]  # type: ignore[misc]
    return [bool(each.result()) for each in calls]
