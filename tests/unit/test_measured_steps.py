"""What a step that is measured counts as a worker's own time, on a device that takes its time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elaunch.workers.comm.group import Group
from elaunch.workers.data_parallel.in_flight import StepInFlight
from elaunch.workers.data_parallel.job import Job
from elaunch.workers.data_parallel.reducer import Reducer
from elaunch.workers.moments import OwnTime, timing_of
from tests.unit.comm_crew import crew

OWN_S, PEERS_S, UPDATED_S = 2.0, 5.0, 9.0
"""When the device is done with its own work, when the others have brought theirs, and when the update is done."""


class Stream:
    """What a device has been given to do, by its own clock; the host is ahead of it until somebody waits."""

    def __init__(self) -> None:
        self.now_s, self.given_until_s = 0.0, 0.0

    def now(self) -> float:
        return self.given_until_s

    def are_over(self, moments: Iterable[float]) -> bool:
        return all(moment <= self.now_s for moment in moments)

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def waits_for_peers(self) -> bool:
        self.given_until_s = PEERS_S
        return True

    def here(self, device: torch.device) -> Any:
        at_s = self.given_until_s

        def query() -> bool:
            self.now_s += 0.5 if self.now_s < at_s else 0.0
            return self.now_s >= at_s

        return SimpleNamespace(query=query)


class Sums:
    """A native group of a device: a sum is there once the others have brought their part."""

    backend = "device"

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        return SimpleNamespace(wait=self.stream.waits_for_peers)

    def poison(self) -> None:
        raise AssertionError("nothing has gone wrong")

    def errored(self) -> str | None:
        return None


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    made = Stream()
    monkeypatch.setattr("elaunch.workers.comm.native.ended.here", made.here)
    monkeypatch.setattr("elaunch.workers.comm.native.ended.POLL_S", 0.0)
    return made


def job_of(stream: Stream, told: list[tuple[float, int]]) -> Any:
    """A job on a device, with a step of two micro-batches in flight that is measured."""
    job: Any = Job.__new__(Job)
    policy = SimpleNamespace(measured=lambda seconds, rows: told.append((seconds, rows)))
    job._member = SimpleNamespace(policy=policy, interrupted=False, generation=SimpleNamespace(number=1))
    job._in_flight = StepInFlight(own=OwnTime(stream))
    job._measured = job._in_flight.own, 2, 8
    job._reducer, job._model_buffers, job._buckets, job._stops = Reducer(), None, None, False
    job._state = SimpleNamespace(commit=lambda: None, watch=SimpleNamespace(committed=lambda *_: None))
    return job


def test_the_host_waits_for_no_moment_and_reads_them_when_the_device_has_come_to_them(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[float, int]] = []

    def pass_barrier(job: Job, step: StepInFlight) -> Any:
        job._reducer.wait()  # as in any step
        stream.given_until_s += 100.0  # what others do meanwhile
        return SimpleNamespace(stops=0)

    monkeypatch.setattr(Job, "_pass_barrier", pass_barrier)
    with crew(2) as transports:
        job = job_of(stream, told)
        job._reducer.begin(Group(transports[0], 1, ["a/0#0", "a/1#0"]), 0.5, Sums(stream))
        job._in_flight.works(True)
        job._reducer.launch(torch.ones(3, device="meta"))
        stream.given_until_s = OWN_S
        job._wait_for_sums()
        stream.given_until_s += 0.5  # such as to clip the gradients, of what the others have brought
        assert stream.now_s == 0.0, "to join the sums waits for nothing on the host"
        job._read_own_time()
        assert told == []
        assert job._resolve()
        assert stream.now_s == PEERS_S + 0.5, "the barrier waits for the device, in any step"
        stream.given_until_s = UPDATED_S
        job._in_flight.works(False)
        job._read_own_time()
        assert told == [((OWN_S + 0.5) / 2, 8)]
        job._read_own_time()
        assert len(told) == 1
        job._reducer.close()


def test_what_is_not_over_at_the_commit_is_read_later_and_not_once_the_members_change(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[float, int]] = []
    monkeypatch.setattr(Job, "_pass_barrier", lambda job, step: SimpleNamespace(stops=0))
    for changes in (False, True):
        job = job_of(stream, told)  # alone: nothing waits for the device in the barrier
        job._in_flight.works(True)
        stream.given_until_s += OWN_S
        assert job._resolve()
        job._in_flight.works(False)
        job._read_own_time()
        assert told == [(OWN_S / 2, 8)] * changes
        if changes:
            job.pause()
        stream.now_s = stream.given_until_s
        job._read_own_time()
        assert told == [(OWN_S / 2, 8)]


def test_own_time_stands_while_the_worker_waits_and_after_its_end(stream: Stream) -> None:
    own = OwnTime(stream)
    with own.waiting():
        stream.given_until_s = 1.0
    own.start()
    stream.given_until_s = 3.0
    with own.waiting():
        stream.given_until_s = 10.0
    stream.given_until_s = 11.0
    own.stop()
    stream.given_until_s = 20.0
    own.start()
    stream.given_until_s = 20.5
    own.end()
    stream.given_until_s = 30.0
    own.start()
    stream.given_until_s = 40.0
    own.stop()
    assert own.read_s() is None
    stream.now_s = 20.5
    assert own.read_s() == 2.0 + 1.0 + 0.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
def test_the_moments_of_a_device_are_those_of_its_work() -> None:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    device = torch.device(accelerator.type, torch.accelerator.current_device_index())
    square = torch.ones(4096, 4096, device=device)
    side = torch.Stream(device)

    def compute(times: int = 1) -> None:
        for _ in range(20 * times):
            torch.mm(square, square)

    def now() -> torch.Event:
        moment = torch.Event(device, enable_timing=True)
        moment.record()
        return moment

    compute()
    torch.accelerator.synchronize()
    own = OwnTime(timing_of(device))
    moments = [now()]
    own.start()
    compute()
    moments.append(now())
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        compute(3)  # as sums that others have a part in, on a stream of their own
    with own.waiting():
        torch.accelerator.current_stream().wait_stream(side)
    moments.append(now())
    compute()
    moments.append(now())
    own.stop()
    assert own.read_s() is None, "the host is ahead of the device, and has waited for nothing"
    torch.accelerator.synchronize()
    parts_s = [one.elapsed_time(other) / 1e3 for one, other in itertools.pairwise(moments)]
    # Whoever else uses the device meanwhile takes part of the times that are compared alike.
    assert own.read_s() == pytest.approx(parts_s[0] + parts_s[2], rel=0.2)
    assert parts_s[1] > 0.2 * sum(parts_s), "the wait was long enough to be seen"
