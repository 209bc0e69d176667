"""Workers of whole jobs become slow: who it is stands in the event log, and what the user wants is done about it."""

from __future__ import annotations

import signal
from itertools import groupby
from pathlib import Path

import pytest

from elaunch.rendezvous.embedded import EmbeddedEtcd
from tests.faults.test_hybrid import SCRIPT, reference
from tests.helpers import Spawner
from tests.jobs.watch import SCRIPT as OBJECTS
from tests.jobs.watch import Event, Node, assert_same, elaunch, losses, wait_for, wait_for_step

FOUR = ("--standalone", "--nproc-per-node=4")
# Layers that sleep for so long that what a busy machine adds does not count.
ROWS = ("--steps", "100000", "--row-seconds", "0.004")
SPEEDS = "the speed of workers has changed"
FOUND_S = 240.0

pytestmark = pytest.mark.timeout(500)

# In every run: one that is replaced and then relieved, and a link. Each takes up to a minute; who is found and what is
# done about it, in all cases, is tested in tests/unit/test_slow*.py.


def stop(node: Node) -> None:
    node.agent.process.send_signal(signal.SIGTERM)
    node.agent.wait(60)


def slow_event(node: Node, worker: str, state: str = "slow") -> Event | None:
    return next(
        (event for event in node.events("slow") if event.get("worker") == worker and event["state"] == state), None
    )


def wait_for_slow(node: Node, worker: str, state: str = "slow") -> Event:
    found: Event = wait_for(node, lambda: slow_event(node, worker, state), FOUND_S, f"{worker} to be {state}")
    return found


@pytest.mark.soak
def test_a_slow_worker_and_its_recovery_are_told_of_once_and_nothing_is_done_if_the_user_wants_that(
    spawn: Spawner, tmp_path: Path
) -> None:
    script = (SCRIPT, "--dp=2", "--pp=2", *ROWS, "--slow", "1:30:4:90")
    node = elaunch(spawn, tmp_path, *FOUR, "--slow-policy=report", script=script)
    found = wait_for_slow(node, "node0/1#0")
    assert found["factor"] > 2
    assert (found["action"], found["basis"]) == ("report", "peers")
    # On a busy machine a step before may count against it by chance.
    assert found["since_step"] <= found["step"]
    assert 30 < found["step"] < 90
    assert found["own_s"] > 2 * found["usual_s"]
    recovered = wait_for_slow(node, "node0/1#0", "recovered")
    assert recovered["step"] >= 90
    states = [event["state"] for event in node.events("slow") if event["worker"] == "node0/1#0"]
    assert [state for state, _ in groupby(states)] == ["slow", "recovered"]
    assert not any(event["cause"] == SPEEDS for event in node.events("transition"))
    assert "worker node0/1#0 is as fast as before" in node.agent.text()
    stop(node)


@pytest.mark.soak
def test_a_slow_stage_whose_work_nobody_else_does_is_found_by_its_past_and_gets_less_to_do(
    spawn: Spawner, tmp_path: Path
) -> None:
    script = (SCRIPT, "--pp=4", *ROWS, "--slow", "2:30:4")
    node = elaunch(spawn, tmp_path, *FOUR, script=script)
    found = wait_for_slow(node, "node0/2#0")
    assert (found["action"], found["basis"]) == ("rebalance", "past")
    wait_for(node, lambda: any(one["cause"] == SPEEDS for one in node.events("transition")), FOUND_S, "another plan")
    stop(node)


@pytest.mark.soak
def test_a_slow_process_is_replaced_once_and_then_the_others_do_more(spawn: Spawner, tmp_path: Path) -> None:
    script = (SCRIPT, "--dp=2", "--pp=2", *ROWS, "--slow", "1:30:4", "--slow-again")
    node = elaunch(spawn, tmp_path, *FOUR, "--slow-policy=replace", script=script)
    assert wait_for_slow(node, "node0/1#0")["action"] == "replace"
    again = wait_for_slow(node, "node0/1#1")
    assert again["action"] == "rebalance"
    assert again["reason"] == "node0/1 had another process already"
    (ended,) = node.events("worker_exited")
    assert (ended["worker"], ended["exitcode"]) == ("node0/1#0", 0)
    # It left between two steps: none was interrupted, and none is missing.
    step = node.last_step()
    wait_for_step(node, step)
    found, _, _ = reference(spawn, tmp_path, "--steps", "100000", "--stop", str(step))
    assert_same({number: loss for number, loss in losses(node).items() if number < step}, found, 1e-9)
    stop(node)


@pytest.mark.soak
def test_who_is_so_slow_that_the_others_are_faster_alone_is_left_out(spawn: Spawner, tmp_path: Path) -> None:
    script = (SCRIPT, "--dp=2", "--pp=2", *ROWS, "--slow", "1:30:20")
    node = elaunch(spawn, tmp_path, *FOUR, "--slow-policy=exclude", script=script)
    found = wait_for_slow(node, "node0/1#0")
    assert found["action"] == "exclude", found
    wait_for(node, lambda: node.events("worker_exited"), FOUND_S, "its end")
    wait_for_step(node, node.last_step() + 20, FOUND_S)
    assert node.members() == ["node0/0#0", "node0/2#0", "node0/3#0"]
    assert [event["worker"] for event in node.events("worker_started") if "node0/1" in event["worker"]] == ["node0/1#0"]
    assert "its slot is not used again" in node.agent.text()
    stop(node)


@pytest.mark.soak
def test_a_node_whose_workers_are_all_slow_is_left_out_as_a_whole(
    etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path
) -> None:
    script = (SCRIPT, "--dp=2", "--pp=2", *ROWS, "--slow", "b/0:30:20", "--slow", "b/1:30:20")
    # Both are there before the first step.
    conf = "--rdzv-conf=last_call_timeout=120"
    job = ("--nnodes=1:2", "--nproc-per-node=2", f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-id=job", conf)
    flags = (*job, "--slow-policy=exclude")
    nodes = [elaunch(spawn, tmp_path, *flags, f"--node-name={name}", script=script, name=name) for name in "ab"]

    def left_out() -> list[Event]:
        slow = [event for node in nodes for event in node.events("slow")]
        return [event for event in slow if event["action"] == "exclude"]

    (found,) = wait_for(nodes, left_out, FOUND_S, "the slow node")
    assert found["slow_node"] == "b"
    assert sorted(found["workers"]) == ["b/0#0", "b/1#0"]
    fast, slow = nodes
    wait_for(nodes, lambda: len(slow.events("worker_exited")) == 2, FOUND_S, "their end")
    assert [event["exitcode"] for event in slow.events("worker_exited")] == [0, 0]
    wait_for_step(fast, fast.last_step() + 20, FOUND_S)
    assert fast.members() == ["a/0#0", "a/1#0"]
    assert "no slot of this node is used any more; its agent stays until the job ends" in slow.agent.text()
    assert len(slow.events("worker_started")) == 2
    for node in (slow, fast):
        stop(node)


@pytest.mark.soak
def test_who_is_not_so_slow_stays_and_has_less_to_do(spawn: Spawner, tmp_path: Path) -> None:
    script = (SCRIPT, "--dp=2", "--pp=2", *ROWS, "--slow", "1:30:1.4")
    node = elaunch(spawn, tmp_path, *FOUR, "--slow-policy=exclude", script=script)
    found = wait_for_slow(node, "node0/1#0")
    assert found["action"] == "rebalance"
    assert "it is not worth it" in found["reason"]
    assert node.events("worker_exited") == []
    stop(node)


@pytest.mark.soak
def test_a_data_parallel_job_replaces_a_slow_process_too(spawn: Spawner, tmp_path: Path) -> None:
    script = (OBJECTS, "--steps", "100000", "--global-batch-size", "48", "--sleep", "0.02", "--slow", "2:30:0.1")
    node = elaunch(spawn, tmp_path, *FOUR, "--slow-policy=replace", script=script)
    assert wait_for_slow(node, "node0/2#0")["action"] == "replace"
    wait_for(node, lambda: "node0/2#1" in node.members(), FOUND_S, "its replacement")
    stop(node)


@pytest.mark.soak
def test_a_slow_link_is_told_from_slow_workers(spawn: Spawner, tmp_path: Path) -> None:
    wide = ("--width", "600", "--sleep", "0.05", "--throttle", "1:30:4000000")
    script = (OBJECTS, "--steps", "100000", "--global-batch-size", "16", *wide)
    node = elaunch(spawn, tmp_path, "--standalone", "--nproc-per-node=2", "--slow-policy=report", script=script)

    def found() -> Event | None:
        return next((event for event in node.events("slow") if "link" in event), None)

    event = wait_for(node, found, FOUND_S, "the slow link")
    assert event["link"] == ["node0/1#0", "node0/0#0"]
    assert (event["state"], event["action"], event["basis"]) == ("slow", "report", "past")
    assert event["bytes_per_s"] < 8e6 < event["usual_bytes_per_s"]
    assert not any("worker" in one for one in node.events("slow"))
    stop(node)
