"""Metrics of an agent: what is counted, what they are called, and who answers Prometheus."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from elaunch.agent.config import ALL_INTERFACES, parse_address
from elaunch.agent.output.events import EventLog
from elaunch.errors import LaunchError, StoreUnavailable, UsageError
from elaunch.rendezvous.membership import (
    Generation,
    GenerationStage,
    NodeDoc,
    NodeProgress,
    NodeWorker,
    Worker,
    WorkerState,
)
from elaunch.rendezvous.memory import MemoryStore
from elaunch.telemetry.bounded import MOST_CONNECTIONS
from elaunch.telemetry.exporter import MetricsExporter
from elaunch.telemetry.metrics import metrics_of
from elaunch.telemetry.node_view import NodeView, view_of
from elaunch.telemetry.tally import MOST_NAMES, Tally
from elaunch.telemetry.timed_store import StoreTimes, TimedStore

LOG = Path(__file__).parent.parent / "data" / "kill.jsonl"
"""The event log of a job of four workers in two stages, one of which was killed and replaced."""

OWN = {"rdzv_id": "run-17", "node": "node0"}
SLOW = json.dumps({"workers": {"node0/1": {"speed": 0.5}, "node0/2": {"speed": 1.0}}})


def logged() -> list[dict[str, Any]]:
    return [json.loads(line) for line in LOG.read_text().splitlines()]


def tallied(*events: dict[str, Any]) -> Tally:
    tally = Tally()
    for event in events or logged():
        tally.take(event)
    return tally


def samples(tally: Tally, view: NodeView | None = None, times: StoreTimes | None = None) -> dict[str, float]:
    """Values by name and labels, without those that all have."""
    found = {}
    for family in metrics_of("run-17", "node0", tally, view or NodeView(), times or StoreTimes()):
        for one in family.samples:
            assert one.labels.items() >= OWN.items()
            own = ",".join(f"{name}={value}" for name, value in one.labels.items() if name not in OWN)
            found[one.name + (f"{{{own}}}" if own else "")] = one.value
    return found


def step(number: int, took_s: object, generation: int = 2) -> dict[str, Any]:
    return {
        "t": 1e9 + number,
        "kind": "step",
        "generation": generation,
        "step": number,
        "samples": 24,
        "seconds": took_s,
    }


def test_the_log_of_a_job_with_a_kill_is_counted_as_it_stands_there() -> None:
    events = logged()
    found = samples(tallied())
    steps = [event for event in events if event["kind"] == "step"]
    (recovery,) = [event for event in events if event["kind"] == "transition" and event["interrupted"]]
    planned = [event for event in events if event["kind"] == "transition" and not event["interrupted"]]
    assert found["elaunch_steps_total"] == found["elaunch_step_duration_seconds_count"] == len(steps)
    assert found["elaunch_samples_total"] == sum(event["samples"] for event in steps)
    assert found["elaunch_step_duration_seconds_sum"] == pytest.approx(sum(event["seconds"] for event in steps))
    assert (found["elaunch_step"], found["elaunch_loss"]) == (steps[-1]["step"], steps[-1]["loss"])
    assert found["elaunch_step_commit_timestamp_seconds"] == steps[-1]["t"]
    assert found["elaunch_recovery_duration_seconds_count{interrupted=true}"] == 1
    assert found["elaunch_recovery_duration_seconds_sum{interrupted=true}"] == recovery["total_s"]
    assert found["elaunch_recovery_duration_seconds_count{interrupted=false}"] == len(planned) > 0
    for phase in ("detect", "agree", "connect", "plan", "transfer", "resume"):
        name = f"elaunch_recovery_phase_duration_seconds_sum{{phase={phase},interrupted=true}}"
        assert found[name] == recovery["phases"][f"{phase}_s"]
    moved = sum(event["bytes_moved"] for event in events if event["kind"] == "transition")
    assert found["elaunch_state_moved_bytes_total{path=links}"] == moved > 0
    assert found["elaunch_worker_exits_total{end=SIGKILL}"] == sum(event.get("signal") == 9 for event in events) > 0
    assert found["elaunch_worker_exits_total{end=0}"] == sum(event.get("exitcode") == 0 for event in events)
    assert found["elaunch_events_total{kind=step}"] == len(steps)
    # All but the last step, and of the interrupted one no more than its repetition.
    most = sum(event["seconds"] for event in steps[:-1])
    (redone,) = [event for event in steps if event["generation"] == recovery["generation"]][:1]
    lost = redone["seconds"] - recovery["phases"]["resume_s"]
    changing = sum(event["total_s"] for event in planned)
    assert most - lost - changing < found["elaunch_training_seconds_total"] < most - lost


def test_of_an_interrupted_step_only_its_repetition_is_training_and_of_others_all_but_the_change() -> None:
    phases = {"detect_s": 0.25, "agree_s": 0.5, "connect_s": 0.25, "plan_s": 0.5, "transfer_s": 0.25, "resume_s": 1.0}
    change = {"kind": "transition", "generation": 3, "phases": phases, "total_s": 2.75, "bytes_moved": 10}
    before, after, last = step(1, 1.0), step(2, 4.0, 3), step(3, 1.0, 3)
    assert tallied(before, after, change | {"interrupted": True}, last).steps.training_s == 1.0 + 1.0
    assert tallied(before, after, change | {"interrupted": False}, last).steps.training_s == 1.0 + 3.0
    # One after which no step has followed takes nothing from the step before it.
    assert tallied(before, change | {"interrupted": True}).steps.training_s == 1.0


def test_counts_never_fall_whatever_workers_report() -> None:
    tally, before = Tally(), 0.0
    odd = {"kind": "transition", "generation": 2, "interrupted": True, "phases": {"resume_s": -5.0, "plan_s": "x"}}
    for event in (step(1, -1.0), odd, step(2, float("nan")), odd | {"phases": 7}, step(3, None), {"kind": 5}, {}):
        tally.take(event)
        assert tally.steps.training_s >= before
        before = tally.steps.training_s
    for number in range(1000):
        tally.take({"kind": f"made-up-{number}"})
    assert len(tally.kinds) == MOST_NAMES + 1
    samples(tally)


def test_the_state_of_a_node_is_shown_with_its_slow_workers_and_what_no_checkpoint_has() -> None:
    workers = tuple(Worker(f"node0/{rank}#0", "node0", rank) for rank in range(3))
    generation = Generation(5, GenerationStage.TRAIN, workers=workers)
    member = NodeWorker("node0/0#0", 0, WorkerState.MEMBER)
    doc = NodeDoc("node0", "127.0.0.1", 3, (member,), progress=NodeProgress(saved=4))
    found = samples(tallied(step(9, 0.5)), view_of(doc, generation, SLOW))
    assert (found["elaunch_generation"], found["elaunch_members"], found["elaunch_nodes"]) == (5, 3, 1)
    assert (found["elaunch_training"], found["elaunch_node_slots"]) == (1, 3)
    assert found["elaunch_node_workers{state=member}"] == 1
    assert found["elaunch_node_workers{state=ready}"] == 0
    assert (found["elaunch_slow_workers"], found["elaunch_slow_worker_ratio{slot=node0/1}"]) == (1, 2.0)
    assert found["elaunch_checkpoint_lag_steps"] == 6
    # Only the node of the first member knows it: what another one was told once may be old.
    assert view_of(NodeDoc("b", "127.0.0.1", 3), generation, SLOW).profile == ""


def test_how_far_copies_in_memory_are_behind_is_that_of_the_newest_step() -> None:
    assert "elaunch_copy_lag_steps" not in samples(tallied(step(1, 0.5)))
    events = [step(number, 0.5) | {"copy_lag": lag} for number, lag in enumerate((1, 2, 0))]
    assert [samples(tallied(*events[:n]))["elaunch_copy_lag_steps"] for n in (1, 2, 3)] == [1, 2, 0]
    assert samples(tallied(step(1, 0.5) | {"copy_lag": "x"}))["elaunch_copy_lag_steps"] == 0


def test_a_node_that_is_held_ready_says_so_and_all_know_how_many_are() -> None:
    generation = Generation(5, GenerationStage.TRAIN, workers=(Worker("a/0#0", "a", 0),))
    views = [view_of(NodeDoc(name, "127.0.0.1", 1), generation, "", ("d", "e")) for name in "ad"]
    found = [samples(Tally(), view) for view in views]
    assert [one["elaunch_spare_nodes"] for one in found] == [2, 2]
    assert [one["elaunch_node_spare"] for one in found] == [0, 1]


def test_requests_to_the_store_are_timed_and_failures_are_counted_apart() -> None:
    times, memory = StoreTimes(), MemoryStore()
    store = TimedStore(memory, times)
    store.put("/elaunch/a", b"1")
    assert store.get("/elaunch/a") is not None
    found = samples(Tally(), times=times)
    assert found["elaunch_etcd_request_duration_seconds_count{operation=put}"] == 1
    assert found["elaunch_etcd_request_duration_seconds_bucket{operation=get,le=300.0}"] == 1
    assert found["elaunch_etcd_up"] == 1
    store.close()
    with pytest.raises(StoreUnavailable):
        store.get("/elaunch/a")
    found = samples(Tally(), times=times)
    assert (found["elaunch_etcd_request_failures_total{operation=get}"], found["elaunch_etcd_up"]) == (1, 0)


class _Once(Collector):
    def collect(self) -> Iterator[Metric]:
        yield from metrics_of("run-17", "node0", tallied(), NodeView(saved=1), StoreTimes())


def test_names_follow_the_rules_of_prometheus() -> None:
    CollectorRegistry().register(_Once())  # no name twice
    for family in _Once().collect():
        assert re.fullmatch(r"elaunch(_[a-z]+)*", family.name)
        assert family.documentation.endswith(".")
        assert not family.name.endswith(("_total", "_count", "_sum", "_bucket", "_ms", "_milliseconds", "_percent"))
        if family.type == "histogram":
            assert family.name.endswith("_seconds")
        for one in family.samples:
            assert (family.type == "counter") == one.name.endswith("_total")


def test_prometheus_reads_what_is_served_until_it_is_closed() -> None:
    exporter = MetricsExporter("run-17", "node0", "127.0.0.1", 0)
    try:
        log = EventLog(None, "node0", listeners=[exporter.take])
        log.write("step", 2, step=7, samples=24, seconds=0.5, loss=1.5)
        with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=10) as reply:
            text = reply.read().decode()
        families = {one.name: one for one in text_string_to_metric_families(text)}
        assert [one.value for one in families["elaunch_steps"].samples if one.name == "elaunch_steps_total"] == [1.0]
        assert "process_resident_memory_bytes" in families
        with pytest.raises(LaunchError, match=f"--metrics-port: cannot listen at port {exporter.port} of 127.0.0.1: "):
            MetricsExporter("run-17", "node0", "127.0.0.1", exporter.port)
    finally:
        exporter.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=10)


def test_strangers_who_send_nothing_or_too_much_keep_nobody_from_the_metrics(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("elaunch.telemetry.exporter.MetricsRequest.timeout", 1.0)
    exporter = MetricsExporter("run-17", "node0", "127.0.0.1", 0)
    with contextlib.ExitStack() as stack:
        stack.callback(exporter.close)
        address = ("127.0.0.1", exporter.port)
        for junk in (b"GET /metrics HTTP/1.1\r\n" + b"x" * 70_000, b"\0\xff\r\n\r\n", b"POST / HTTP/1.1\r\n\r\n"):
            with socket.create_connection(address, timeout=10) as link:
                link.sendall(junk)
        silent = [stack.enter_context(socket.create_connection(address, timeout=10)) for _ in range(MOST_CONNECTIONS)]
        with socket.create_connection(address, timeout=10) as beyond, contextlib.suppress(ConnectionResetError):
            assert beyond.recv(1) == b"", "the others have all places"
        assert all(link.recv(1) == b"" for link in silent), "and lose them when they are silent for long"
        with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=10) as reply:
            assert b"elaunch_info" in reply.read()
    assert capfd.readouterr().err == ""


def test_a_listener_that_fails_is_given_no_more_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heard: list[str] = []

    def fails(event: object) -> None:
        heard.append("fails")
        raise ValueError("a defect")

    log = EventLog(str(tmp_path / "events"), "a", listeners=[fails, lambda event: heard.append(event["kind"])])
    log.write("step", 1)
    log.write("slow", 1)
    log.close()
    assert heard == ["fails", "step", "slow"]
    assert len((tmp_path / "events").read_text().splitlines()) == 2
    assert "[elaunch a] monitoring ends here: ValueError: a defect" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, address",
    [
        ("9400", ("0.0.0.0", 9400)),
        (":0", ("0.0.0.0", 0)),
        ("127.0.0.1:9400", ("127.0.0.1", 9400)),
        ("[::]:9400", ("::", 9400)),
        ("", None),
        (None, None),
    ],
)
def test_a_port_may_have_an_address(text: str | None, address: tuple[str, int] | None) -> None:
    assert parse_address(text, "--metrics-port", ALL_INTERFACES) == address


@pytest.mark.parametrize("text", ["x", "-1", "70000", "::1:9400", "127.0.0.1:"])
def test_what_is_no_port_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected a port, 0 for a free one, or ADDRESS:PORT"):
        parse_address(text, "--metrics-port", ALL_INTERFACES)
