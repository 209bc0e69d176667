"""Gradients for the copies of others' states leave while the step goes on, and are right when they come."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest

from elaunch.plan import symmetric
from elaunch.workers.layers import executor, parts, snapshots
from elaunch.workers.state.staging import begun_to_host
from tests.unit.engine_crew import train
from tests.unit.late_copies import LateCopies
from tests.unit.test_engine_change import W, check_same, train_through, undisturbed

pytestmark = pytest.mark.job


def test_a_gradient_leaves_before_backward_has_come_to_the_first_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    order: dict[int, list[str]] = {}

    def noting(what: str, original: Any) -> Any:
        def call(self: Any, *args: Any) -> Any:
            order.setdefault(threading.get_ident(), []).append(what)
            return original(self, *args)

        return call

    monkeypatch.setattr(snapshots, "BUNDLE_BYTES", 1)
    monkeypatch.setattr(snapshots.Snapshots, "_send", noting("sent", snapshots.Snapshots._send))
    monkeypatch.setattr(executor._Step, "_send_gradient", noting("backward", executor._Step._send_gradient))
    train(symmetric(W[:2], 4, 12, 2, pp=2), 1, snapshots=1)
    # Each worker has two layers. Nobody waits for what the first stage computes, so it sends in between.
    assert sorted(order.values())[0][:2] == ["backward", "backward"]
    assert sorted(order.values())[1][:2] == ["backward", "sent"]
    assert all(one.count("sent") >= 2 for one in order.values())


def test_copies_to_host_memory_begin_during_backward_and_are_waited_for_at_the_end_of_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[int] = []
    engines: dict[int, LateCopies] = {}

    def late(whole: Any) -> Any:
        return begun_to_host(whole, engines.setdefault(threading.get_ident(), LateCopies()))

    ship = snapshots.Snapshots.ship

    def noting(self: Any, *args: Any) -> None:
        begun.append(len(self._leaving))
        ship(self, *args)
        assert not self._leaving

    monkeypatch.setattr(snapshots, "BUNDLE_BYTES", 1)
    monkeypatch.setattr(snapshots, "begun_to_host", late)
    monkeypatch.setattr(snapshots, "_is_on_host", lambda _: False)
    monkeypatch.setattr(snapshots.Snapshots, "ship", noting)
    plan = symmetric(W[:2], 4, 12, 2, pp=2)
    # The survivor goes on from its copy of the other's state.
    reports, weights, _ = train_through([(plan, 3), (symmetric(W[1:2], 4, 12, 2), 2)], lost={1: W[:1]})
    expected, values = undisturbed(12, 2, 5)
    assert reports == expected
    check_same(weights, values)
    assert min(begun[:6]) >= 2
    assert not any(copies.begun for copies in engines.values())


def test_what_a_dropped_step_had_begun_to_send_is_forgotten() -> None:
    plan = symmetric(W[:2], 4, 12, 2, pp=2)
    found = []

    def noted(engine: Any) -> None:
        found.append(engine)

    train(plan, 2, snapshots=1, script=noted)
    for engine in found:
        copies = engine._here.snapshots
        copies._leaving.append((0, partial(pytest.fail, "sent")))
        copies._unsent = {shard: (shard,) for shard in copies._own.shards}
        copies._given = dict.fromkeys(copies._own.shards)
        engine.drop()
        assert (copies._unsent, copies._given, copies._leaving) == ({}, {}, [])


def test_copies_that_are_made_in_several_steps_are_behind_until_they_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[int, list[int]] = {}
    copied = parts.WorkerPart.copied

    def noting(self: Any, step: int) -> Any:
        span = copied(self, step)
        told.setdefault(threading.get_ident(), []).append(step + 1 - span[0])
        return span

    monkeypatch.setattr(snapshots, "BATCH_BYTES", 20_000)
    monkeypatch.setattr(parts.WorkerPart, "copied", noting)
    train(symmetric(W[:2], 4, 12, 2, pp=2), 5, snapshots=1)
    for lags in told.values():
        whole = lags.index(0)
        assert lags == [*range(1, whole + 1), *[0] * (5 - whole)]
        assert 1 <= whole < 5, "a copy takes some steps, and then follows"
