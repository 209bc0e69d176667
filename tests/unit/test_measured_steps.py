"""What a step that is measured counts as a worker's own time, on a device that takes its time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elaunch.workers.comm.group import Group
from elaunch.workers.data_parallel.in_flight import StepInFlight
from elaunch.workers.data_parallel.job import Job
from elaunch.workers.data_parallel.reducer import Reducer
from tests.unit.comm_crew import crew

OWN_S, PEERS_S = 2.0, 5.0
"""When the device is done with its own work, and when the others have brought theirs."""


class Stream:
    """What a device has to do, by a clock that runs only while somebody looks."""

    def __init__(self) -> None:
        self.now_s, self.busy_until_s, self.looks = 0.0, OWN_S, 0

    def here(self, device: torch.device) -> Any:
        at_s = self.busy_until_s

        def query() -> bool:
            self.looks += 1
            self.now_s += 0.5 if self.now_s < at_s else 0.0
            return self.now_s >= at_s

        return SimpleNamespace(query=query)

    def waits_for_peers(self) -> bool:
        self.busy_until_s = PEERS_S
        return True


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
    monkeypatch.setattr("elaunch.workers.data_parallel.job.time", SimpleNamespace(monotonic=lambda: made.now_s))
    return made


def job_of(measured: bool) -> Any:
    """A job on a device, with a step in flight."""
    job: Any = Job.__new__(Job)
    job._member = SimpleNamespace(device=torch.device("meta"), interrupted=False, generation=SimpleNamespace(number=1))
    job._in_flight = StepInFlight(measured=measured)
    job._reducer, job._model_buffers, job._buckets, job._stops = Reducer(), None, None, False
    job._state = SimpleNamespace(commit=lambda: None, watch=SimpleNamespace(committed=lambda *_: None))
    return job


@pytest.mark.parametrize("measured", [True, False])
def test_the_wait_for_native_sums_is_no_own_time(stream: Stream, measured: bool) -> None:
    with crew(2) as transports:
        job, bulk = job_of(measured), Sums(stream)
        job._reducer.begin(Group(transports[0], 1, ["a/0#0", "a/1#0"]), 0.5, bulk)
        job._reducer.launch(torch.ones(3, device="meta"))
        job._wait_for_sums()
        if measured:
            assert job._in_flight.waited_s == PEERS_S - OWN_S
            assert job._in_flight.own_s(job._now_s(True)) == OWN_S
        else:
            assert stream.looks == 0, "only steps that are measured wait for the device"
        job._reducer.close()


def test_the_barrier_counts_from_the_end_of_backward_on_the_device(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pass_barrier(job: Job, step: StepInFlight) -> Any:
        stream.now_s = PEERS_S
        return SimpleNamespace(stops=0)

    monkeypatch.setattr(Job, "_pass_barrier", pass_barrier)
    job = job_of(measured=True)
    assert job._resolve()
    assert job._in_flight.waited_s == PEERS_S - OWN_S
    assert job._in_flight.own_s(100.0) == OWN_S, "and stands still from then on"


def test_an_unmeasured_step_does_not_wait_for_the_device(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Job, "_pass_barrier", lambda job, step: SimpleNamespace(stops=0))
    assert job_of(measured=False)._resolve()
    assert stream.looks == 0
